"""Autoregressive decoding of prompts of different lengths, by decoders and encoder-decoders, with or without a cache.

`generate` and `stream` are the loop; `Sampling` chooses tokens; `DecodingState` holds the rows and the cache.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from megatfm import rng
from megatfm.config import ModelConfig
from megatfm.errors import MegatfmError, UsageError
from megatfm.layers.attention.kv_cache import KVCache
from megatfm.layers.moe.experts import Experts, without_capacity

log = logging.getLogger("megatfm")

# B rows, T tokens so far with padding before the prompts, S tokens of the encoder with padding after them, V vocabulary

PADDING = -1
"""Document id of padding."""


@dataclass(frozen=True)
class Prompts:
    """Prompts to continue: int64 tokens [n] for each row.

    encoder: the encoder's tokens [n] for each row of an encoder-decoder; its decoder continues `tokens`, at least a
    start token. prefix: all tokens of a prompt see one another, as in a prefix language model. images: fields [B, S, …]
    of a vision-language model's images; their image tokens are in `tokens`.
    """

    tokens: Sequence[Tensor]
    encoder: Sequence[Tensor] | None = None
    prefix: bool = False
    images: Mapping[str, Tensor] | None = None

    def to(self, device: torch.device) -> "Prompts":
        """Return the prompts on another device."""
        encoder = None if self.encoder is None else [row.to(device) for row in self.encoder]
        images = self.images and {name: field.to(device) for name, field in self.images.items()}
        return Prompts([row.to(device) for row in self.tokens], encoder, self.prefix, images)

    @classmethod
    def join(cls, parts: Sequence["Prompts"]) -> "Prompts":
        """Return the rows of all parts, which have the same kinds of fields."""
        first = parts[0]
        encoder = None if first.encoder is None else [row for part in parts for row in part.encoder or ()]
        images = first.images and {
            name: torch.cat([(part.images or {})[name] for part in parts]) for name in first.images
        }
        return cls([row for part in parts for row in part.tokens], encoder, first.prefix, images)


@dataclass(frozen=True)
class Sampling:
    """Choice of the next token: greedy at temperature 0, else a draw from softmax(logits / temperature).

    top_k: draw from this many likeliest tokens (0: all). top_p: from the fewest that hold this share of the probability
    left by top_k (Holtzman et al. 2020). vocab_size: only ids below it; a model may have more rows than its tokenizer
    has ids. A draw depends only on (seed, row, position). row_numbers: of the rows of a batch;
    left out, they count from 0. Raises UsageError for values out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    vocab_size: int | None = None
    row_numbers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"temperature = {self.temperature}: choose 0 (the likeliest token) or more, e.g. 0.8")
        if self.top_k < 0:
            raise UsageError(f"top_k = {self.top_k}: choose 0 (no limit) or more, e.g. 50")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p = {self.top_p}: choose more than 0 and at most 1 (no limit), e.g. 0.95")

    def sample(self, logits_BV: Tensor, position: int | Sequence[int]) -> Tensor:
        """Return the next token [B] of each row, at its `position` in the sequence. Raises as `check_logits` does."""
        logits_BV = logits_BV[:, : self.vocab_size]
        positions = [position] * len(logits_BV) if isinstance(position, int) else position
        if self.temperature == 0:
            highest_B, token_B = logits_BV.max(-1)
            check_highest(highest_B, positions)
            return token_B
        check_logits(logits_BV, positions)
        sorted_BV, ids_BV = logits_BV.double().sort(dim=-1, descending=True, stable=True)
        # Relative to the largest, so that a low temperature can't overflow.
        scaled_BV = (sorted_BV - sorted_BV[:, :1]) / self.temperature
        probabilities_BV = scaled_BV[:, : self.top_k or None].softmax(-1)
        mass_BV = probabilities_BV.cumsum(-1)
        kept_B1 = (mass_BV - probabilities_BV < self.top_p).sum(-1, keepdim=True)
        numbers = range(len(positions)) if self.row_numbers is None else self.row_numbers
        uniform_B = [
            float(rng.uniform(1, self.seed, "sample", number, position)[0])
            for number, position in zip(numbers, positions, strict=True)
        ]
        point_B1 = mass_BV.gather(1, kept_B1 - 1) * mass_BV.new_tensor(uniform_B)[:, None]
        chosen_B1 = torch.searchsorted(mass_BV, point_B1, right=True).minimum(kept_B1 - 1)
        return ids_BV.gather(1, chosen_B1)[:, 0]


def generate(
    model: nn.Module,
    tokens: Tensor | Prompts,
    *,
    max_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_token: int | Sequence[int] | None = None,
    cache: bool = True,
) -> Tensor:
    """Continue int64 tokens [B, T] by up to `max_tokens`; return prompts and continuations [B, T + n].

    tokens: or `Prompts`, for prompts of different lengths (padded with 0 on the left) or an encoder-decoder, whose
    start token is returned as well. `Sampling` documents the options. A row that reaches a stop token repeats it until
    all rows have. cache: false computes the whole prefix again for each token. Raises UsageError for prompts that don't
    fit the model, MegatfmError for logits that are not finite.
    """
    sampling = Sampling(temperature, top_k, top_p, seed)
    prompts = tokens if isinstance(tokens, Prompts) else Prompts(list(tokens))
    decoding = DecodingState(model, prompts, max_tokens, cache=cache)
    new_tokens = _iter_steps(decoding, sampling, max_tokens, stop_token)
    return torch.cat([decoding.tokens_BT, *(token_B[:, None] for token_B in new_tokens)], dim=1)


def stream(
    model: nn.Module,
    tokens: Tensor | Prompts,
    sampling: Sampling,
    *,
    max_tokens: int,
    stop_token: int | Sequence[int] | None = None,
    cache: bool = True,
) -> Iterator[Tensor]:
    """Yield the tokens [B] of `generate`, one position at a time."""
    prompts = tokens if isinstance(tokens, Prompts) else Prompts(list(tokens))
    return _iter_steps(DecodingState(model, prompts, max_tokens, cache=cache), sampling, max_tokens, stop_token)


def _iter_steps(
    decoding: "DecodingState", sampling: Sampling, max_tokens: int, stop_token: int | Sequence[int] | None
) -> Iterator[Tensor]:
    token_B = torch.zeros_like(decoding.tokens_BT[:, 0])
    ended_B = torch.zeros_like(token_B, dtype=torch.bool)
    stops = ended_B.new_tensor(list_stop_ids(stop_token), dtype=torch.int64)
    for _ in range(max_tokens):
        positions = (decoding.tokens_BT.shape[1] - decoding.left_padding_B1[:, 0]).tolist()
        next_B = sampling.sample(decoding.logits(), positions)
        if not len(stops):
            token_B = next_B
        else:
            token_B = torch.where(ended_B, token_B, next_B)
            ended_B = torch.isin(token_B, stops)
        decoding.append(token_B)
        yield token_B
        if len(stops) and ended_B.all():
            return


def list_stop_ids(ids: int | Sequence[int] | None) -> list[int]:
    """Return the ids that end a text: none, one or several."""
    if ids is None:
        return []
    return [ids] if isinstance(ids, int) else list(ids)


def is_causal(model: nn.Module) -> bool:
    """Return whether the logits at a token predict the next one (class attribute `is_causal` of the model)."""
    return bool(getattr(model, "is_causal", False))


def has_encoder(model: nn.Module) -> bool:
    """Return whether an encoder reads a separate text (class attribute `has_encoder` of the model)."""
    return bool(getattr(model, "has_encoder", False))


def check_makes_text(model: nn.Module) -> None:
    """Raise UsageError for a model whose logits don't predict the next token."""
    if not is_causal(model):
        family = cast(ModelConfig, model.config).family
        raise UsageError(
            f"model.family = {family!r} makes no text: give a decoder or an encoder-decoder (a plugin's family says "
            "is_causal = True)"
        )


def view_without_head(model: nn.Module) -> Any:
    """Return a view of a model without its head, so that the head can run on a few hidden vectors.

    Returns None for a family whose head can't be split off, and for a model with hooks, such as FSDP's, which a view
    would skip.
    """
    if model._forward_pre_hooks or model._forward_hooks:
        return None
    names = [point.name for point in getattr(model, "split_points", ())]
    if "head" not in names or not hasattr(model, "head"):
        return None
    return cast(Any, model).stage([name for name in names if name != "head"])


def check_room(config: ModelConfig, prompt_tokens: int, max_tokens: int) -> None:
    """Raise UsageError for a prompt whose continuation by `max_tokens` exceeds the model's positions."""
    limit = config.position.limit
    if limit is not None and prompt_tokens + max_tokens - 1 > limit:
        n_more = limit + 1 - prompt_tokens
        remedy = f"ask for at most {n_more}" if n_more > 0 else f"shorten it by {prompt_tokens - limit}"
        raise UsageError(
            f"a prompt of {prompt_tokens} tokens and {max_tokens} more, but model.position.max_positions = "
            f"{limit}: {remedy}"
        )


class DecodingState:
    """The growing rows of a batch, and the model's cache. Without `cache`, each token recomputes its prefix.

    Experts with a capacity take all tokens, either way.
    """

    def __init__(self, model: nn.Module, prompts: Prompts, max_tokens: int, *, cache: bool = True) -> None:
        """Raise UsageError for prompts that can't be continued by `max_tokens`."""
        config = cast(ModelConfig, model.config)
        if not prompts.tokens or min(len(prompt) for prompt in prompts.tokens) == 0:
            raise UsageError("nothing to continue: the prompt needs a token, e.g. the tokenizer's bos")
        check_makes_text(model)
        if has_encoder(model) != (prompts.encoder is not None):
            problem = "needs tokens for its encoder" if has_encoder(model) else "has no encoder: give no tokens for one"
            raise UsageError(f"model.family = {config.family!r} {problem}")
        if cache and not getattr(model, "takes_cache", False):
            log.warning("family %r takes no cache: each token recomputes its prefix", config.family)
            cache = False
        self.model, self.config = model, config
        self.tokens_BT, self.documents_BT = _pad_rows(prompts.tokens, left=True)
        self.prefix = self.tokens_BT.shape[1] if prompts.prefix else 0
        self.left_padding_B1 = (self.documents_BT == PADDING).sum(1, keepdim=True)
        self.has_padding = bool(self.left_padding_B1.any())
        max_length = self.tokens_BT.shape[1] + max_tokens
        check_room(config, self.tokens_BT.shape[1], max_tokens)
        windows = [
            depth for depth in range(config.n_layers) if config.layer_config(depth).attention.pattern.name != "full"
        ]
        if prompts.prefix and cache and windows:
            raise UsageError(
                f"model.attention.pattern = {config.layer_config(windows[0]).attention.pattern.name!r} and a prompt as "
                "a prefix, all of which is seen by what follows: a cache does not keep it: generate without cache"
            )
        self._body = view_without_head(model)
        self._has_capacity = any(isinstance(module, Experts) and module.has_capacity for module in model.modules())
        self.cache = KVCache(config.n_layers, max_length) if cache else None
        self.n_cached = 0
        self.images = dict(prompts.images or {})
        self.memory: dict[str, Any] = {}
        if prompts.encoder is not None:
            self.memory = self.encode(prompts.encoder)

    @torch.no_grad()
    def logits(self) -> Tensor:
        """Return the logits of the next token of each row, [B, V]."""
        n_fed = self.n_cached if self.cache is not None else 0
        inputs: dict[str, Any] = dict(self.memory)
        if n_fed == 0:
            inputs |= self.images
        if self.has_padding:
            positions_T = torch.arange(n_fed, self.tokens_BT.shape[1], device=self.tokens_BT.device)
            inputs["positions"] = (positions_T - self.left_padding_B1).clamp(min=0)
            inputs["documents"] = self.documents_BT[:, n_fed:]
        if self.prefix and n_fed == 0:
            positions_T = torch.arange(self.tokens_BT.shape[1], device=self.tokens_BT.device)
            inputs["prefix"] = (positions_T < self.prefix) & (self.documents_BT != PADDING)
        if self.cache is not None:
            inputs["cache"] = self.cache
        self.n_cached = self.tokens_BT.shape[1]
        with self._disable_capacity():
            if self._body is None:
                return cast(Tensor, self.model(self.tokens_BT[:, n_fed:], **inputs).logits[:, -1])
            hidden_BTD = self._body.forward(self.tokens_BT[:, n_fed:], **inputs).hidden
            return cast(Tensor, cast(Any, self.model).head(hidden_BTD[:, -1:])[:, 0])

    def _disable_capacity(self) -> AbstractContextManager[None]:
        return without_capacity(self.model) if self._has_capacity else nullcontext()

    def append(self, tokens_B: Tensor) -> None:
        """Append the rows' next tokens."""
        self.tokens_BT = torch.cat([self.tokens_BT, tokens_B[:, None]], dim=1)
        self.documents_BT = torch.cat([self.documents_BT, torch.zeros_like(tokens_B)[:, None]], dim=1)

    def reorder(self, rows: Tensor) -> None:
        """Replace the rows by the rows at these indices, int64 [n]; repeats are allowed."""
        self.tokens_BT, self.documents_BT = self.tokens_BT[rows], self.documents_BT[rows]
        self.left_padding_B1 = self.left_padding_B1[rows]
        self.memory = {key: value[rows] for key, value in self.memory.items()}
        self.images = {key: value[rows] for key, value in self.images.items()}
        if self.cache is not None:
            self.cache.select(rows)

    @torch.no_grad()
    def encode(self, tokens: Sequence[Tensor]) -> dict[str, Tensor]:
        """Run the encoder on a row of tokens for each prompt; return the fields that the decoder reads."""
        if len(tokens) != len(self.tokens_BT) or min(len(row) for row in tokens) == 0:
            raise UsageError("the encoder needs at least one token for each prompt")
        if self.config.position.limit is not None and max(map(len, tokens)) > self.config.position.limit:
            raise UsageError(
                f"{max(map(len, tokens))} tokens for the encoder, but model.position.max_positions = "
                f"{self.config.position.limit}: give it fewer"
            )
        tokens_BS, documents_BS = _pad_rows(tokens, left=False)
        metadata = {"documents": documents_BS} if (documents_BS == PADDING).any() else {}
        with self._disable_capacity():
            memory = cast(Any, self.model).encode(tokens_BS, **metadata)
        return {"memory": memory, **{f"encoder_{key}": value for key, value in metadata.items()}}


def _pad_rows(rows: Sequence[Tensor], *, left: bool) -> tuple[Tensor, Tensor]:
    """Return rows as one tensor [B, T], and their document ids [B, T]: 0, or −1 for padding."""
    max_length = max(len(row) for row in rows)

    def fill(row: Tensor, value: int) -> Tensor:
        empty = row.new_full((max_length - len(row),), value)
        return torch.cat([empty, row] if left else [row, empty])

    return (
        torch.stack([fill(row, 0) for row in rows]),
        torch.stack([fill(torch.zeros_like(row), PADDING) for row in rows]),
    )


def check_logits(logits_BV: Tensor, positions: Sequence[int]) -> None:
    """Raise MegatfmError with row and position for logits [B, V] that are no distribution.

    A head masks ids by −∞, so −∞ is allowed, but not at every id.
    """
    check_highest(logits_BV.amax(-1), positions)  # amax propagates NaN


def check_highest(highest_B: Tensor, positions: Sequence[int]) -> None:
    """Raise MegatfmError with row and position where the largest logit [B] is not finite."""
    finite_B = torch.isfinite(highest_B)
    if not finite_B.all():
        row = int((~finite_B).nonzero()[0])
        raise MegatfmError(
            f"the logits of text {row + 1} at position {positions[row]} are not finite: the weights are, or the "
            "training was, broken; use an earlier checkpoint"
        )
