"""Sentence embeddings: the pooled hidden vectors of a text's tokens."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.errors import UsageError
from megatfm.inference.decoding import has_encoder, is_causal
from megatfm.inference.likelihood import group_by_shape, round_up_length
from megatfm.tokenizers import Tokenizer

log = logging.getLogger("megatfm")

Pooling = Literal["mean", "first", "last", "masked"]
POOLINGS: tuple[Pooling, ...] = ("mean", "first", "last", "masked")

# B sentences, T tokens, D model width


@dataclass(frozen=True)
class SentenceEmbedder:
    """A model and its tokenizer as an encoder of sentences.

    pooling, normalize: defaults of `encode`. max_tokens: longer texts are cut, with a warning. prefix_ids: ids before
    texts in a decoder's training; None: `bos`.
    """

    model: nn.Module
    tokenizer: Tokenizer
    pooling: Pooling = "mean"
    normalize: bool = False
    max_tokens: int | None = None
    prefix_ids: tuple[int, ...] | None = None

    def encode(
        self,
        sentences: str | Sequence[str],
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        batch_size: int = 32,
    ) -> Tensor:
        """Return a vector for each sentence, float32 [B, D], on the CPU, in which padding never counts.

        pooling: "mean" of all tokens, the "first" or "last" token's, or "masked", the mean without special tokens.
        normalize: to length 1. A sentence's padded length depends on its length alone, so other sentences don't change
        the shape in which it is computed. Raises UsageError for inputs that are no texts, and unknown options.
        """
        texts = [sentences] if isinstance(sentences, str) else list(sentences)
        if not_texts := [text for text in texts if not isinstance(text, str)]:
            raise UsageError(f"sentences: {not_texts[0]!r:.80} is no text: give one text or a list of them")
        if batch_size < 1:
            raise UsageError(f"batch = {batch_size}: choose 1 or more sentences at a time, e.g. 32")
        chosen_pooling = pooling or self.pooling
        if chosen_pooling not in POOLINGS:
            raise UsageError(f"pooling = {chosen_pooling!r}: choose one of {', '.join(POOLINGS)}")
        if not texts:
            raise UsageError("no sentences to encode: give at least one")
        before, after = self._make_frame()
        if self.max_tokens is not None and self.max_tokens <= len(before) + len(after):
            raise UsageError(
                f"max_tokens = {self.max_tokens}: {len(before) + len(after)} tokens stand around a text already: "
                f"choose {len(before) + len(after) + 1} or more"
            )
        encoded = [
            self.add_special_tokens(text, before, after) for text in self.tokenizer.encode_batch(texts, threads=1)
        ]
        if n_cut := sum(len(truncated) < len(text) for truncated, text in encoded):
            log.warning("%d of %d texts are cut at %d tokens", n_cut, len(texts), self.max_tokens)
        limit = cast(ModelConfig, self.model.config).position.limit
        lengths = [round_up_length(max(1, len(framed)), limit) for framed, _ in encoded]
        vectors: dict[int, Tensor] = {}
        with torch.no_grad():
            for rows in group_by_shape(lengths, batch_size):
                block = [encoded[i][0] for i in rows]
                vectors |= zip(rows, self.pool(block, lengths[rows[0]], chosen_pooling), strict=True)
        pooled_BD = torch.stack([vectors[i] for i in range(len(encoded))])
        if self.normalize if normalize is None else normalize:
            pooled_BD = nn.functional.normalize(pooled_BD, dim=-1)
        return pooled_BD

    def _make_frame(self) -> tuple[list[int], list[int]]:
        """Return the ids before and after a text in the training of the model's family. Raises UsageError."""
        family, special = cast(ModelConfig, self.model.config).family, self.tokenizer.special
        if has_encoder(self.model):
            raise UsageError(
                f"model.family = {family!r} makes no vectors of texts: give an encoder or a decoder (its encoder "
                "alone: model.module.encode)"
            )
        if is_causal(self.model):
            return [self.tokenizer.bos] if self.prefix_ids is None else list(self.prefix_ids), []
        cls, sep = ([] if token is None else [token] for token in (special.cls, special.sep))
        return ([], [*sep, *cls]) if family == "xlnet" else (cls, sep)

    def add_special_tokens(
        self, text: Iterable[int], before: list[int], after: list[int]
    ) -> tuple[list[int], list[int]]:
        """Return the ids cut to `max_tokens`, and all ids, both with special tokens."""
        ids = [int(token) for token in text]
        framed = [*before, *ids, *after]
        if self.max_tokens is None or len(framed) <= self.max_tokens:
            return framed, framed
        return [*before, *ids[: self.max_tokens - len(before) - len(after)], *after], framed

    def pool(self, ids: Sequence[list[int]], length: int, chosen_pooling: Pooling) -> list[Tensor]:
        """Encode rows of ids, padded to `length`, and pool each to one vector [D] on the CPU."""
        device = next(self.model.parameters()).device
        tokens_BT = torch.full((len(ids), length), self.tokenizer.pad)
        documents_BT = torch.full((len(ids), length), -1)
        for row, tokens in enumerate(ids):
            tokens_BT[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.long)
            documents_BT[row, : max(1, len(tokens))] = 0
        fields = {"documents": documents_BT.to(device)}
        # XLNet's [CLS], at the end, has segment 1 here.
        if cast(ModelConfig, self.model.config).family == "xlnet":
            is_cls_BT = (tokens_BT == self.tokenizer.special.cls) & (documents_BT == 0)
            fields["segments"] = is_cls_BT.long().to(device)
        hidden_BTD = self.model(tokens_BT.to(device), **fields).hidden.cpu().float()
        counted_BT = documents_BT == 0
        if chosen_pooling == "first":
            return list(hidden_BTD[:, 0])
        if chosen_pooling == "last":
            return list(hidden_BTD[torch.arange(len(ids)), counted_BT.sum(1) - 1])
        if chosen_pooling == "masked":
            reserved = torch.tensor(sorted(self.tokenizer.special.reserved))
            text_BT = counted_BT & ~torch.isin(tokens_BT, reserved)
            counted_BT = torch.where(text_BT.any(1, keepdim=True), text_BT, counted_BT)
        summed_BD = (hidden_BTD * counted_BT[..., None]).sum(1)
        return list(summed_BD / counted_BT.sum(1, keepdim=True))


def warn_unmarked_padding(model: nn.Module, pad: int) -> None:
    """Make a bidirectional model warn once if rows end in padding that no `documents` mark."""

    def check(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        tokens = args[0] if args else kwargs.get("tokens")
        if not isinstance(tokens, Tensor) or tokens.dim() != 2 or kwargs.get("documents") is not None:
            return
        if len(tokens) > 1 and bool((tokens[:, -1] == pad).any()) and not bool((tokens[:, -1] == pad).all()):
            log.warning(
                "rows end in the padding token %d, and no `documents` say so: it is read as text (mark it by -1 in "
                "documents, or use encode)",
                pad,
            )
            hook.remove()

    if not is_causal(model):
        hook = model.register_forward_pre_hook(check, with_kwargs=True)
