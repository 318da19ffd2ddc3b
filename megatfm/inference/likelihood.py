"""log p(continuation | context) of many texts, the same on any number of ranks and at any batch size.

A row's padded length depends on its length alone, and a batch has rows of one padded length. So neither the other rows
nor the number of ranks changes the shapes in which a row is computed, except the number of rows. Logits are computed
row by row, and log-probabilities are summed in float64.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from megatfm import object_collectives
from megatfm.errors import MegatfmError, UsageError
from megatfm.inference.decoding import PADDING, has_encoder, view_without_head
from megatfm.inference.prompts import PromptOptions, build_prompts
from megatfm.inference.text import TextModel
from megatfm.layers.moe.experts import without_capacity
from megatfm.tasks.question_scores import Likelihood
from megatfm.tasks.questions import TextPair, split_pair
from megatfm.terminal import ProgressLog

log = logging.getLogger("megatfm")
T = TypeVar("T")
R = TypeVar("R")

BATCH_SIZE = 16
"""Default number of rows in a batch."""
LENGTH_STEP = 16
"""Rows are padded to a multiple of this many tokens. Matrix multiplications on CPUs then round a row alike in batches
of any size (docs/LOG.md, 2026-11-26)."""

# B rows, T tokens, M tokens of a continuation, D model width, V vocabulary


@dataclass(frozen=True)
class Continuation:
    """Target tokens after a context.

    context: the decoder's tokens before the targets, at least one. encoder: the tokens of an encoder-decoder's encoder.
    prefix: all tokens of the context see one another.
    """

    context: Sequence[int]
    targets: Sequence[int]
    encoder: Sequence[int] | None = None
    prefix: bool = False

    @property
    def tokens(self) -> list[int]:
        """The decoder's tokens; the last target is only predicted."""
        return [*self.context, *self.targets[:-1]]


def encode_continuation(loaded: TextModel, context: str, continuation: str) -> Continuation:
    """Tokenize a continuation after its context (`split_pair`), with the model's prefix before the context.

    Raises UsageError if the continuation has no token.
    """
    if has_encoder(loaded.model):
        targets = loaded.tokenizer.encode(continuation).tolist()
    else:
        context, targets = split_pair(loaded.tokenizer, TextPair(context, continuation))
    prompts = build_prompts(loaded, context, PromptOptions(sentinel="never"))
    if not targets:
        raise UsageError(f"the answer {continuation!r:.60} makes no token: give one with text")
    encoder = None if prompts.encoder is None else prompts.encoder[0].tolist()
    return Continuation(prompts.tokens[0].tolist(), targets, encoder, prompts.prefix)


@torch.no_grad()
def score(model: nn.Module, continuations: Sequence[Continuation], *, batch_size: int = BATCH_SIZE) -> list[Likelihood]:
    """Return the likelihood of each continuation, in their order. Collective if there is a process group.

    All ranks pass the same continuations and hold the same weights; each computes a share. Raises UsageError for a row
    longer than the model's positions, MegatfmError for logits that are not finite.
    """
    if batch_size < 1:
        raise UsageError(f"batch = {batch_size}: choose 1 or more rows at a time, e.g. {BATCH_SIZE}")
    for number, continuation in enumerate(continuations, start=1):
        check_fits(model, continuation, f"text {number}")
    scorer = _Scorer(model, cast(Any, model).config.position.limit)
    return map_blocks(continuations, scorer.padded_lengths, scorer.score_block, batch_size)


def check_fits(model: nn.Module, continuation: Continuation, name: str) -> None:
    """Raise UsageError for a row longer than the model's positions. name: the row's, for the error."""
    limit = cast(Any, model).config.position.limit
    n_tokens = max(len(continuation.tokens), len(continuation.encoder or ()))
    if limit is not None and n_tokens > limit:
        raise UsageError(
            f"{name} has {n_tokens} tokens, but model.position.max_positions = {limit}: use shorter texts or "
            "fewer shots"
        )


def map_blocks(
    items: Sequence[T], shape_of: Callable[[T], Any], compute: Callable[[Sequence[T]], Sequence[R]], batch_size: int
) -> list[R]:
    """Compute batches of up to `batch_size` items of one shape, each on one rank; return results in the items' order.

    Batches depend on the items and the batch size alone. Collective: an error on one rank is raised on all.
    """
    blocks = list(group_by_shape([shape_of(item) for item in items], batch_size))
    rank, world_size = object_collectives.rank(), object_collectives.world_size()

    def compute_share() -> dict[int, R]:
        results: dict[int, R] = {}
        share = blocks[rank::world_size]
        progress = ProgressLog("evaluation", sum(map(len, share)), "text")
        for block in share:
            results |= zip(block, compute([items[index] for index in block]), strict=True)
            progress.advance(len(block))
        return results

    shares = object_collectives.all_gather_object(_catch_errors(compute_share))
    for share in shares:
        if isinstance(share, Exception):
            raise share
    by_index = {index: result for share in shares for index, result in cast(dict[int, R], share).items()}
    return [by_index[index] for index in range(len(items))]


def _catch_errors(work: Callable[[], T]) -> T | Exception:
    try:
        return work()
    except MegatfmError as error:  # raised on all ranks after the gather
        return error


def group_by_shape(shapes: Sequence[Any], batch_size: int) -> Iterator[list[int]]:
    """Yield the indices of up to `batch_size` items of one shape at a time, the largest shapes first."""
    by_shape: dict[Any, list[int]] = {}
    for index, shape in enumerate(shapes):
        by_shape.setdefault(shape, []).append(index)
    for shape in sorted(by_shape, reverse=True):
        indices = by_shape[shape]
        for start in range(0, len(indices), batch_size):
            yield indices[start : start + batch_size]


def round_up_length(n_tokens: int, limit: int | None = None) -> int:
    """Return the padded length of a row of `n_tokens`. limit: the model's number of positions; None: unlimited."""
    length = -(-n_tokens // LENGTH_STEP) * LENGTH_STEP
    return length if limit is None else max(n_tokens, min(length, limit))


@dataclass(frozen=True)
class _Scorer:
    """A model and its number of positions; None: unlimited."""

    model: nn.Module
    limit: int | None

    def padded_lengths(self, continuation: Continuation) -> tuple[int, int, bool]:
        """Return a row's shape: padded encoder tokens, padded decoder tokens, and whether it has a prefix."""
        n_encoder = 0 if continuation.encoder is None else round_up_length(len(continuation.encoder), self.limit)
        return n_encoder, round_up_length(len(continuation.tokens), self.limit), continuation.prefix

    def score_block(self, block: Sequence[Continuation]) -> list[Likelihood]:
        """Return the likelihoods of rows of one shape."""
        n_encoder, length, has_prefix = self.padded_lengths(block[0])
        device = next(self.model.parameters()).device
        tokens_BT, documents_BT = pad_right([row.tokens for row in block], length)
        inputs: dict[str, Tensor] = {}
        if has_prefix:
            # Needed for a prefix only: causal tokens don't see the padding after them.
            inputs["documents"] = documents_BT
            starts = torch.tensor([len(row.context) for row in block])
            inputs["prefix"] = torch.arange(length) < starts[:, None]
        if n_encoder:
            encoder_BS, encoder_documents_BS = pad_right([row.encoder or () for row in block], n_encoder)
            inputs |= {"encoder_tokens": encoder_BS, "encoder_documents": encoder_documents_BS}
            inputs["documents"] = documents_BT
        inputs = {name: field.to(device) for name, field in inputs.items()}
        with without_capacity(self.model):
            logits_by_row = self._iter_logits(tokens_BT.to(device), inputs, block)
            return [
                _compute_likelihood(logits_MV, row.targets) for logits_MV, row in zip(logits_by_row, block, strict=True)
            ]

    def _iter_logits(
        self, tokens_BT: Tensor, inputs: dict[str, Tensor], block: Sequence[Continuation]
    ) -> Iterator[Tensor]:
        """Yield the logits [M, V] of each row's targets; one row at a time if the head can be split off."""
        spans = [slice(len(row.context) - 1, len(row.tokens)) for row in block]
        body = view_without_head(self.model)
        if body is None:
            logits_BTV = self.model(tokens_BT, **inputs).logits
            yield from (logits_BTV[row, span] for row, span in enumerate(spans))
            return
        hidden_BTD = body.forward(tokens_BT, **inputs).hidden
        for row, span in enumerate(spans):
            yield cast(Any, self.model).head(hidden_BTD[row : row + 1, span].contiguous())[0]


def pad_right(rows: Sequence[Sequence[int]], length: int) -> tuple[Tensor, Tensor]:
    """Return tokens [B, length], padded with 0, and document ids [B, length]: 0, or −1 in padding."""
    tokens = torch.zeros(len(rows), length, dtype=torch.int64)
    documents = torch.full((len(rows), length), PADDING)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = torch.tensor(row, dtype=torch.int64)
        documents[index, : len(row)] = 0
    return tokens, documents


def _compute_likelihood(logits_MV: Tensor, targets: Sequence[int]) -> Likelihood:
    targets_M = torch.tensor(targets, device=logits_MV.device)
    log_probabilities_M = logits_MV.double().log_softmax(-1).gather(1, targets_M[:, None])[:, 0]
    total = float(log_probabilities_M.sum())
    if total != total:
        raise MegatfmError(
            "logits are not finite: the weights are, or the training was, broken; use an earlier checkpoint"
        )
    return Likelihood(total, len(targets), bool((logits_MV.argmax(-1) == targets_M).all()))
