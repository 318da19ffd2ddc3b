"""Global batch as context-parallel ranks slice it, and a module's call on one of these ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from megatfm.config import Config
from megatfm.config.section import Section
from megatfm.engines.interface import PRECISIONS
from megatfm.verify.expected_keys import (
    MicroBatchRows,
    assign_tokens,
    find_needed_keys,
    get_pattern_config,
    has_causal_mask,
    is_cross_attention,
    is_imbalanced,
    keep_lookups_inside,
)
from megatfm.verify.layouts import CONTEXT
from megatfm.verify.module_calls import Call, Shape
from megatfm.verify.module_shardings import is_a
from megatfm.verify.shrink import Arrays
from megatfm.verify.traffic import ExpectedTraffic

Positions = NDArray[Any]

SIDES = ("", "encoder_")
"""Prefixes of field names, one for each side of an encoder-decoder."""


class ContextShards:
    """Global batch sliced over context-parallel ranks. positions_by_rank: tokens of each rank, by side of the model;
    batches: fields by rank."""

    def __init__(self, config: Config, model: nn.Module, batch: Arrays) -> None:
        parallel = config.parallel
        self.config, self.model, self.batch = config, model, batch
        unit_size = parallel.tp if parallel.sequence_parallel else 1
        self.positions_by_rank = {
            side: assign_tokens(length, parallel.cp, unit_size, is_zigzag=self._is_zigzag(length))
            for side in SIDES
            if f"{side}positions" in batch
            for length in batch[f"{side}positions"].shape[1:]
        }
        self.batches: list[Arrays] = [self._slice(batch, rank) for rank in range(parallel.cp)]
        self.needed_keys: dict[tuple[Section, str, int, bool], list[Positions]] = {}

    def _is_zigzag(self, length: int) -> bool:
        """Return whether rows of a length are assigned in zigzag order, as later tokens see more keys."""
        return any(
            is_imbalanced(get_pattern_config(self.config, path), length, causal=has_causal_mask(self.config, path))
            for path, module in self.model.named_modules()
            if hasattr(module, "pattern") and not is_cross_attention(path)
        )

    def _slice(self, batch: Arrays, rank: int) -> Arrays:
        def get_positions(name: str) -> Positions:
            return self.positions_by_rank["encoder_" if name.startswith("encoder_") else ""][rank]

        shard = {name: field[:, get_positions(name)] if field.ndim > 1 else field for name, field in batch.items()}
        keep_lookups_inside(shard, self.config.model)
        return shard

    def slice_choices(self, path: str, chosen_BTK: Tensor, rank: int) -> Tensor:
        """Slice the expert choices of full rows to a rank's tokens, or to its share of a soft mixture's slots."""
        owner = self.model.get_submodule(path.rpartition(".")[0])
        if not is_a(owner, "SoftMoE"):
            is_encoder = path.startswith("encoder.") and "encoder_" in self.positions_by_rank
            positions = self.positions_by_rank["encoder_" if is_encoder else ""][rank]
            return chosen_BTK[:, torch.from_numpy(positions)]
        ranks, slots = self.config.parallel.cp, chosen_BTK.shape[1]
        share = -(-slots // ranks)
        no_expert: int = owner.experts.n_experts  # type: ignore[assignment, union-attr]
        padded = F.pad(chosen_BTK, (0, 0, 0, share * ranks - slots), value=no_expert)
        return padded[:, rank * share :][:, :share]


@dataclass(frozen=True)
class RankCall:
    """Call of a module in a micro-batch on one context-parallel rank.

    traffic: bytes that this rank sends. recorded: the call in the plain forward pass.
    """

    shards: ContextShards
    traffic: ExpectedTraffic
    microbatch: int
    rank: int
    recorded: Call

    @property
    def config(self) -> Config:
        """Config of the run."""
        return self.shards.config

    @property
    def path(self) -> str:
        """Path of the module."""
        return self.recorded.path

    @property
    def inputs(self) -> tuple[Shape | None, ...]:
        """Shapes of the arguments; None for those that are no tensors."""
        return self.recorded.inputs

    @property
    def has_gradient(self) -> bool:
        """Whether the output requires a gradient."""
        return self.recorded.has_gradient

    @cached_property
    def module(self) -> Any:
        """Module that is called."""
        return self.shards.model.get_submodule(self.path)

    @property
    def side(self) -> str:
        """Field prefix of the side that supplies the keys."""
        is_in_encoder = self.path.startswith(("encoder.", "image_features.")) or is_cross_attention(self.path)
        return "encoder_" if is_in_encoder and "encoder_" in self.shards.positions_by_rank else ""

    @property
    def positions_by_rank(self) -> list[Positions]:
        """Tokens of each rank, on the side that supplies the keys."""
        return self.shards.positions_by_rank[self.side]

    @property
    def rows(self) -> MicroBatchRows:
        """Full rows of the micro-batch, on the side that supplies the keys."""
        count = self.config.train.micro_batch
        return MicroBatchRows.take(self.shards.batch, self.side, self.microbatch * count, count)

    @property
    def fields(self) -> Arrays:
        """Fields of the micro-batch's full rows."""
        count = self.config.train.micro_batch
        return {name: field[self.microbatch * count :][:count] for name, field in self.shards.batch.items()}

    @property
    def pattern(self) -> Section:
        """Config of the attention pattern."""
        return get_pattern_config(self.config, self.path)

    @property
    def is_causal(self) -> bool:
        """Whether queries see no later keys."""
        return has_causal_mask(self.config, self.path)

    @property
    def compute_bytes(self) -> int:
        """Bytes of an element in the compute dtype."""
        return PRECISIONS[self.config.train.precision].compute_dtype.itemsize

    @property
    def reduction_bytes(self) -> int:
        """Bytes of an element in float32 or wider, as routers and sums use."""
        return max(4, self.compute_bytes)

    @property
    def n_forwards(self) -> int:
        """Number of forward passes, recomputation included."""
        return 1 + (self.recorded.in_layer and self.config.train.recompute in ("full", "selective"))

    @property
    def n_forward_sums(self) -> int:
        """Number of forward sums over ranks and all-to-alls: "selective" recomputation saves their results."""
        return 1 if self.config.train.recompute == "selective" else self.n_forwards

    @property
    def n_passes_with_sums(self) -> int:
        """Number of passes that sum over ranks, backward included."""
        return self.n_forward_sums + self.has_gradient

    def count_documents(self) -> int:
        """Return the largest number of documents of a row; packed rows are padded to it."""
        documents = self.rows.documents
        return 1 if documents is None else int(documents.max()) + 1

    def find_needed_keys(self) -> list[Positions]:
        """Return the keys that each rank's queries need; cached for layers with the same pattern and mask."""
        cache, key = self.shards.needed_keys, (self.pattern, self.side, self.microbatch, self.is_causal)
        if getattr(self.module.pattern, "differs_by_head", False) or key not in cache:
            cache[key] = [
                np.flatnonzero(find_needed_keys(self.pattern, self.module, self.rows, positions, causal=self.is_causal))
                for positions in self.positions_by_rank
            ]
        return cache[key]

    def send_tokens(self, by_rank: Sequence[Positions], fetched: Sequence[Positions], numel_per_token: int) -> None:
        """Add one message to each rank that fetches tokens from here, and one with gradients back to each owner.

        by_rank: tokens that each rank owns. numel_per_token: elements per position, over all rows.
        """
        for peer, peer_positions in enumerate(by_rank):
            if peer == self.rank:
                continue
            n_sent = len(np.intersect1d(by_rank[self.rank], fetched[peer]))
            n_received = len(np.intersect1d(peer_positions, fetched[self.rank]))
            for _ in range(self.n_forwards if n_sent else 0):
                self.traffic.send(CONTEXT, n_sent * numel_per_token * self.compute_bytes)
            if n_received and self.has_gradient:
                self.traffic.send(CONTEXT, n_received * numel_per_token * self.compute_bytes)

    def send_all_tokens(self, by_rank: Sequence[Positions], numel_per_token: int) -> None:
        """Add a fetch of all tokens by each rank."""
        all_positions = [np.sort(np.concatenate(by_rank))] * len(by_rank)
        self.send_tokens(by_rank, all_positions, numel_per_token)
