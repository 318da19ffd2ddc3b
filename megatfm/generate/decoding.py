"""A batch of texts that grow token by token: prompts of any lengths, decoders and encoder-decoders, cached or not."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.errors import UsageError
from megatfm.layers.attention import KVCache
from megatfm.layers.moe import without_capacity

log = logging.getLogger("megatfm")

# B rows, T tokens so far with padding before the prompts, S tokens of the encoder with padding after them

PADDING = -1
"""The document of padding."""


@dataclass(frozen=True)
class Prompts:
    """What is to be continued: int64 tokens [n] for each row.

    encoder: what an encoder-decoder's encoder reads, for each row; the decoder goes on from `tokens`, at least its
    start token. prefix: all tokens of a prompt see one another, as in a prefix language model.
    """

    tokens: Sequence[Tensor]
    encoder: Sequence[Tensor] | None = None
    prefix: bool = False

    def to(self, device: torch.device) -> "Prompts":
        """The same on another device."""
        encoder = None if self.encoder is None else [row.to(device) for row in self.encoder]
        return Prompts([row.to(device) for row in self.tokens], encoder, self.prefix)


def stop_tokens(given: int | Sequence[int] | None) -> list[int]:
    """The ids that end a text: none, one or several."""
    if given is None:
        return []
    return [given] if isinstance(given, int) else list(given)


def is_causal(model: nn.Module) -> bool:
    """Whether the logits at a token predict the next one, as the model's class says in `is_causal`."""
    return bool(getattr(model, "is_causal", False))


def has_encoder(model: nn.Module) -> bool:
    """Whether a part of the model reads a text of its own, as its class says in `has_encoder`."""
    return bool(getattr(model, "has_encoder", False))


def check_makes_text(model: nn.Module) -> None:
    """Raise a UsageError for a model whose logits don't predict a next token."""
    if not is_causal(model):
        family = cast(ModelConfig, model.config).family
        raise UsageError(
            f"model.family = {family!r} makes no text: give a decoder or an encoder-decoder (a plugin's family says "
            "is_causal = True)"
        )


class DecodingState:
    """The model's view of the batch. Without `cache` everything is computed again for each token: the reference.

    Experts with a capacity take all tokens, either way.
    """

    def __init__(self, model: nn.Module, prompts: Prompts, max_tokens: int, *, cache: bool = True) -> None:
        """Raises UsageError for prompts that can't be continued, or not by `max_tokens`."""
        config = cast(ModelConfig, model.config)
        if not prompts.tokens or min(len(prompt) for prompt in prompts.tokens) == 0:
            raise UsageError("nothing to continue: the prompt needs a token, e.g. the tokenizer's bos")
        check_makes_text(model)
        if has_encoder(model) != (prompts.encoder is not None):
            needs = (
                "needs tokens for its encoder"
                if has_encoder(model)
                else "has no encoder: give no tokens for one"
            )
            raise UsageError(f"model.family = {config.family!r} {needs}")
        if cache and not getattr(model, "takes_cache", False):
            log.warning("family %r takes no cache: all is computed again for each token", config.family)
            cache = False
        self.model, self.config = model, config
        self.tokens_BT, self.documents_BT = _padded(prompts.tokens, left=True)
        self.prefix = self.tokens_BT.shape[1] if prompts.prefix else 0
        self.left_padding_B1 = (self.documents_BT == PADDING).sum(1, keepdim=True)
        self.has_padding = bool(self.left_padding_B1.any())
        longest = self.tokens_BT.shape[1] + max_tokens
        if config.position.limit is not None and longest - 1 > config.position.limit:
            given, left = longest - max_tokens, config.position.limit + 1 - longest + max_tokens
            way = f"ask for at most {left}" if left > 0 else f"shorten it by {given - config.position.limit}"
            raise UsageError(
                f"a prompt of {given} tokens and {max_tokens} more, but model.position.max_positions = "
                f"{config.position.limit}: {way}"
            )
        windows = [
            d for d in range(config.n_layers) if config.layer_config(d).attention.pattern.name != "full"
        ]
        if prompts.prefix and cache and windows:
            raise UsageError(
                f"model.attention.pattern = {config.layer_config(windows[0]).attention.pattern.name!r} and a "
                "prompt as a prefix, "
                "all of which is seen by what follows: a cache does not keep it: generate without cache"
            )
        self.cache = KVCache(config.n_layers, longest) if cache else None
        self.n_cached = 0
        self.memory: dict[str, Any] = {}
        if prompts.encoder is not None:
            self.memory = self.encode(prompts.encoder)

    @torch.no_grad()
    def logits(self) -> Tensor:
        """Of the next token of each row, [B, V]."""
        fed = self.n_cached if self.cache is not None else 0
        inputs: dict[str, Any] = dict(self.memory)
        if self.has_padding:
            places_T = torch.arange(fed, self.tokens_BT.shape[1], device=self.tokens_BT.device)
            inputs["positions"] = (places_T - self.left_padding_B1).clamp(min=0)
            inputs["documents"] = self.documents_BT[:, fed:]
        if self.prefix and fed == 0:
            places_T = torch.arange(self.tokens_BT.shape[1], device=self.tokens_BT.device)
            inputs["prefix"] = (places_T < self.prefix) & (self.documents_BT != PADDING)
        if self.cache is not None:
            inputs["cache"] = self.cache
        self.n_cached = self.tokens_BT.shape[1]
        with without_capacity(self.model):
            return cast(Tensor, self.model(self.tokens_BT[:, fed:], **inputs).logits[:, -1])

    def append(self, tokens_B: Tensor) -> None:
        """The rows' next tokens."""
        self.tokens_BT = torch.cat([self.tokens_BT, tokens_B[:, None]], dim=1)
        self.documents_BT = torch.cat([self.documents_BT, torch.zeros_like(tokens_B)[:, None]], dim=1)

    def reorder(self, rows: Tensor) -> None:
        """Go on with these rows, int64 [rows], each as often as it is named."""
        self.tokens_BT, self.documents_BT = self.tokens_BT[rows], self.documents_BT[rows]
        self.left_padding_B1 = self.left_padding_B1[rows]
        self.memory = {key: value[rows] for key, value in self.memory.items()}
        if self.cache is not None:
            self.cache.select(rows)

    @torch.no_grad()
    def encode(self, tokens: Sequence[Tensor]) -> dict[str, Tensor]:
        """Run the encoder on a row of tokens for each prompt, and return the fields that the decoder needs of it."""
        if len(tokens) != len(self.tokens_BT) or min(len(row) for row in tokens) == 0:
            raise UsageError("the encoder needs at least one token for each prompt")
        if self.config.position.limit is not None and max(map(len, tokens)) > self.config.position.limit:
            raise UsageError(
                f"{max(map(len, tokens))} tokens for the encoder, but model.position.max_positions = "
                f"{self.config.position.limit}: give it fewer"
            )
        tokens_BS, documents_BS = _padded(tokens, left=False)
        where = {"documents": documents_BS} if (documents_BS == PADDING).any() else {}
        with without_capacity(self.model):
            memory = cast(Any, self.model).encode(tokens_BS, **where)
        return {"memory": memory, **{f"encoder_{key}": value for key, value in where.items()}}


def _padded(rows: Sequence[Tensor], *, left: bool) -> tuple[Tensor, Tensor]:
    """Rows as one tensor, and their documents: 0, and −1 for padding."""
    longest = max(len(row) for row in rows)

    def fill(row: Tensor, value: int) -> Tensor:
        empty = row.new_full((longest - len(row),), value)
        return torch.cat([empty, row] if left else [row, empty])

    return (
        torch.stack([fill(row, 0) for row in rows]),
        torch.stack([fill(torch.zeros_like(row), PADDING) for row in rows]),
    )
