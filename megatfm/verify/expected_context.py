"""Expected traffic of context parallelism: attention, mixtures of experts and heads that read across rows.

Ring attention over c ranks with x bytes of keys and values each sends (c − 1)·x forward and twice that backward (Liu et
al. 2023). Where queries see only runs of keys, or need less than half of the other ranks' keys, ranks fetch the keys
that they need, once forward, and send their gradients back once. Experts with a capacity send their choices to all; a
router that balances each row sums its counts. Soft mixtures reduce-scatter slots and all-gather the experts' outputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from megatfm.config import Config
from megatfm.config.section import Section
from megatfm.engines.interface import PRECISIONS
from megatfm.verify.axes import CONTEXT
from megatfm.verify.expected_keys import (
    MicroBatchRows,
    assign_tokens,
    compute_fetched_share,
    count_elements_per_token,
    count_global_queries,
    count_local_heads,
    find_image_tokens,
    find_needed_keys,
    find_span_boundaries,
    find_visible_tokens,
    get_block_config,
    get_pattern_config,
    has_causal_mask,
    is_cross_attention,
    is_imbalanced,
    is_ulysses,
    keep_lookups_inside,
    sees_key_runs,
)
from megatfm.verify.module_calls import Call, Shape, get_latent_shapes, require_shapes
from megatfm.verify.module_cuts import is_a
from megatfm.verify.shrink import Arrays
from megatfm.verify.traffic import ExpectedTraffic

Positions = NDArray[Any]

SIDES = ("", "encoder_")
"""Prefixes of field names, one for each side of an encoder-decoder."""

ALL_KEYS = ("DisentangledCore", "ShawCore")  # their biases need all keys at once


@dataclass(frozen=True)
class RankTraffic:
    """Ledger of the rank at an index, and the micro-batch whose traffic it records."""

    ledger: ExpectedTraffic
    microbatch: int
    index: int


class ContextShards:
    """Global batch sliced over context-parallel ranks. batches: fields by rank."""

    def __init__(self, config: Config, model: nn.Module, batch: Arrays) -> None:
        parallel = config.parallel
        self._config, self._model, self._batch = config, model, batch
        unit_size = parallel.tp if parallel.sequence_parallel else 1
        self._positions_by_rank = {
            side: assign_tokens(length, parallel.cp, unit_size, is_zigzag=self._is_zigzag(length))
            for side in SIDES
            if f"{side}positions" in batch
            for length in batch[f"{side}positions"].shape[1:]
        }
        self.batches: list[Arrays] = [self._slice(batch, rank) for rank in range(parallel.cp)]
        self._needed_cache: dict[tuple[Section, str, int, bool], list[Positions]] = {}

    def _is_zigzag(self, length: int) -> bool:
        """Return whether rows of a length are assigned in zigzag order, as later tokens see more keys."""
        return any(
            is_imbalanced(get_pattern_config(self._config, path), length, causal=has_causal_mask(self._config, path))
            for path, module in self._model.named_modules()
            if hasattr(module, "pattern") and not is_cross_attention(path)
        )

    def _slice(self, batch: Arrays, rank: int) -> Arrays:
        def get_positions(name: str) -> Positions:
            return self._positions_by_rank["encoder_" if name.startswith("encoder_") else ""][rank]

        shard = {name: field[:, get_positions(name)] if field.ndim > 1 else field for name, field in batch.items()}
        keep_lookups_inside(shard, self._config.model)
        return shard

    def slice_choices(self, path: str, chosen_BTK: Tensor, rank: int) -> Tensor:
        """Slice the expert choices of full rows to a rank's tokens, or to its share of a soft mixture's slots."""
        owner = self._model.get_submodule(path.rpartition(".")[0])
        if not is_a(owner, "SoftMoE"):
            is_encoder = path.startswith("encoder.") and "encoder_" in self._positions_by_rank
            positions = self._positions_by_rank["encoder_" if is_encoder else ""][rank]
            return chosen_BTK[:, torch.from_numpy(positions)]
        ranks, slots = self._config.parallel.cp, chosen_BTK.shape[1]
        share = -(-slots // ranks)
        no_expert: int = owner.experts.n_experts  # type: ignore[assignment, union-attr]
        padded = F.pad(chosen_BTK, (0, 0, 0, share * ranks - slots), value=no_expert)
        return padded[:, rank * share :][:, :share]

    def add_context_traffic(self, ledger: ExpectedTraffic, microbatch: int, rank: int, calls: Sequence[Call]) -> None:
        """Add the bytes that a rank sends for one micro-batch."""
        traffic = RankTraffic(ledger, microbatch, rank)
        for call in calls:
            module = self._model.get_submodule(call.path)
            for name, method in self._METHODS.items():
                if is_a(module, name):
                    method(self, traffic, call, module)
                    break
            if call.path.endswith(".counted"):
                recompute = self._config.train.recompute
                times = 1 + (recompute == "full" and call.in_layer and call.saves_tensors_after)
                ledger.all_reduce(CONTEXT, call.output_numel * self._reduction_bytes, times=times)

    def _add_attention(self, traffic: RankTraffic, call: Call, module: nn.Module) -> None:
        """Add keys and values, or the latents that they are projected from."""
        is_latent = is_a(module, "LatentCore")
        qkv = get_latent_shapes(call) if is_latent else require_shapes(call.inputs[:3])
        sent_shapes = require_shapes(call.inputs[1:2]) if is_latent else qkv[1:]
        side, numel_per_token = self._get_side(call), count_elements_per_token(self._config, sent_shapes)
        by_rank = self._positions_by_rank[side]
        pattern = get_pattern_config(self._config, call.path)
        causal = has_causal_mask(self._config, call.path)
        has_pair_bias = any(len(bias or ()) > 2 for bias in call.inputs[4:5])
        if is_cross_attention(call.path) or has_pair_bias or any(is_a(module, name) for name in ALL_KEYS):
            self._add_all_keys(traffic, call, by_rank, numel_per_token)
            return
        fetched = self._find_needed_keys(traffic.microbatch, call, module)
        if sees_key_runs(pattern, sum(map(len, by_rank)), causal=causal):
            if not is_a(module, "LocalAttention"):  # its global queries run in a module of their own
                self._add_global_queries(traffic, call, qkv)
            self._add_point_to_point(traffic, call, by_rank, fetched, numel_per_token)
            return
        share = compute_fetched_share(by_rank, fetched)
        is_ring = 2 * share >= 1
        if is_ulysses(self._config, qkv, numel_per_token, None if is_ring else share):
            self._add_ulysses(traffic, call, qkv, by_rank)
        elif is_ring:
            self._add_ring(traffic, call, [len(positions) for positions in by_rank], numel_per_token)
        else:
            self._add_point_to_point(traffic, call, by_rank, fetched, numel_per_token)

    def _add_ring(self, traffic: RankTraffic, call: Call, tokens: Sequence[int], numel_per_token: int) -> None:
        """Add a ring: at step s a rank sends the shard that rank − s started with, and gradients one step behind.

        Gradients are in float32 or wider. numel_per_token: elements per position, over all rows.
        """
        size, c = self._compute_bytes, len(tokens)
        for step in range(c - 1):
            for _ in range(self._count_forwards(call) + call.has_gradient):
                traffic.ledger.send(CONTEXT, tokens[(traffic.index - step) % c] * numel_per_token * size)
            if call.has_gradient:
                n_tokens = tokens[(traffic.index - step - 1) % c]
                traffic.ledger.send(CONTEXT, n_tokens * numel_per_token * max(4, size))

    def _add_point_to_point(
        self,
        traffic: RankTraffic,
        call: Call,
        by_rank: list[Positions],
        fetched: Sequence[Positions],
        numel_per_token: int,
    ) -> None:
        """Add one message to each rank that fetches tokens from here, and one with gradients back to each owner."""
        for peer, peer_positions in enumerate(by_rank):
            if peer == traffic.index:
                continue
            n_sent = len(np.intersect1d(by_rank[traffic.index], fetched[peer]))
            n_received = len(np.intersect1d(peer_positions, fetched[traffic.index]))
            for _ in range(self._count_forwards(call) if n_sent else 0):
                traffic.ledger.send(CONTEXT, n_sent * numel_per_token * self._compute_bytes)
            if n_received and call.has_gradient:
                traffic.ledger.send(CONTEXT, n_received * numel_per_token * self._compute_bytes)

    def _add_all_keys(self, traffic: RankTraffic, call: Call, by_rank: list[Positions], numel_per_token: int) -> None:
        """Add a fetch of all keys by each rank."""
        all_positions = [np.sort(np.concatenate(by_rank))] * len(by_rank)
        self._add_point_to_point(traffic, call, by_rank, all_positions, numel_per_token)

    def _find_needed_keys(self, microbatch: int, call: Call, module: nn.Module) -> list[Positions]:
        """Return the keys that each rank's queries need; cached for layers with the same pattern and mask."""
        pattern = get_pattern_config(self._config, call.path)
        causal = has_causal_mask(self._config, call.path)
        side = self._get_side(call)
        rows, key = self._get_rows(microbatch, side), (pattern, side, microbatch, causal)
        if getattr(module.pattern, "differs_by_head", False) or key not in self._needed_cache:
            self._needed_cache[key] = [
                np.flatnonzero(find_needed_keys(pattern, module, rows, positions, causal=causal))
                for positions in self._positions_by_rank[side]
            ]
        return self._needed_cache[key]

    def _add_ulysses(
        self, traffic: RankTraffic, call: Call, qkv: Sequence[Shape], by_rank: list[Positions]
    ) -> None:  # fmt: skip
        """Add Ulysses' all-to-alls of queries, keys with values, and outputs, and of their gradients."""
        c, (n, k) = len(by_rank), count_local_heads(self._config, *qkv[:2])
        (rows, *_, h), (*_, v) = qkv[0], qkv[2]
        local_rows = rows * len(by_rank[traffic.index]) * (c - 1)
        remote_rows = rows * sum(len(positions) for i, positions in enumerate(by_rank) if i != traffic.index)
        for width, to_heads in ((n // c * h, True), (max(k, c) // c * (h + v), True), (n // c * v, False)):
            forward, backward = (local_rows, remote_rows) if to_heads else (remote_rows, local_rows)
            for _ in range(self._count_forwards(call)):
                traffic.ledger.all_to_all(CONTEXT, forward * width * self._compute_bytes)
            if call.has_gradient:
                traffic.ledger.all_to_all(CONTEXT, backward * width * self._compute_bytes)

    def _add_global_attention(self, traffic: RankTraffic, call: Call, module: nn.Module) -> None:
        self._add_global_queries(traffic, call, require_shapes(call.inputs[1:4]))

    def _add_global_queries(self, traffic: RankTraffic, call: Call, qkv: Sequence[Shape]) -> None:
        """Add global queries: all-reduced (other ranks add zeros); their outputs and log-sum-exps are all-gathered in
        float32 or wider; the backward pass reduces both gradients."""
        (rows, n, _, h), (*_, v) = qkv[0], qkv[2]
        side, size = self._get_side(call), self._compute_bytes
        by_rank = self._positions_by_rank[side]
        rank_of = np.zeros(sum(map(len, by_rank)), np.int64)
        for owner, positions in enumerate(by_rank):
            rank_of[positions] = owner
        pattern = get_pattern_config(self._config, call.path)
        causal = has_causal_mask(self._config, call.path)
        count = count_global_queries(pattern, self._get_rows(traffic.microbatch, side), rank_of, causal=causal)
        if not count:
            return
        queries = rows * n // self._config.parallel.tp * count
        sums = self._count_forward_sums(call) + call.has_gradient
        traffic.ledger.all_reduce(CONTEXT, queries * h * size, times=sums)
        traffic.ledger.all_reduce(CONTEXT, queries * v * size, times=call.has_gradient)
        traffic.ledger.all_gather(CONTEXT, queries * (v + 1) * max(4, size), times=self._count_forwards(call))

    def _add_linformer(self, traffic: RankTraffic, call: Call, module: nn.Module) -> None:
        """Add sums of each document's projected keys and values over its tokens on all ranks."""
        options: Any = get_block_config(self._config, call.path).attention
        documents = sum(1 for _ in self._get_rows(traffic.microbatch, self._get_side(call)).iter_documents())
        self._add_key_sums(traffic, call, documents * 2 * options.projected_length)

    def _add_compressed(self, traffic: RankTraffic, call: Call, module: nn.Module) -> None:
        """Add sums of compressed keys and values, one for each block of `factor` tokens of a document; rows are padded
        to the most blocks."""
        options: Any = get_block_config(self._config, call.path).attention
        rows = self._get_rows(traffic.microbatch, self._get_side(call))
        n_blocks = [0] * rows.count
        for row, begin, end in rows.iter_documents():
            n_blocks[row] += -(-(end - begin) // options.factor)
        self._add_key_sums(traffic, call, rows.count * max(n_blocks) * 2)

    def _add_key_sums(self, traffic: RankTraffic, call: Call, numel_per_head: int) -> None:
        """Add all-reduces of keys and values that summarise tokens of several ranks, forward and backward."""
        model = self._config.model
        elements = numel_per_head * model.head_width * model.attention.n_heads // self._config.parallel.tp
        times = self._count_forward_sums(call) + call.has_gradient
        traffic.ledger.all_reduce(CONTEXT, elements * self._compute_bytes, times=times)

    def _add_soft_moe(self, traffic: RankTraffic, call: Call, module: nn.Module) -> None:
        """Add a soft mixture: log-sum-exps are all-gathered, slots reduce-scattered, expert outputs all-gathered."""
        ranks, mixture = self._config.parallel.cp, self._model.get_submodule(call.path)
        (rows, _, d), (slots, _) = call.inputs[0] or (0, 0, 0), mixture.weight.shape  # type: ignore[misc]
        documents = self._get_rows(traffic.microbatch, self._get_side(call)).documents
        slots *= 1 if documents is None else int(documents.max()) + 1
        rank_bytes = rows * -(-slots // ranks) * d * self._compute_bytes
        for shard_bytes in (rows * slots * self._reduction_bytes, rank_bytes):
            traffic.ledger.all_gather(CONTEXT, shard_bytes, times=self._count_forwards(call))
            traffic.ledger.reduce_scatter(CONTEXT, shard_bytes * ranks, times=call.has_gradient)
        traffic.ledger.reduce_scatter(CONTEXT, rank_bytes * ranks, times=self._count_forward_sums(call))
        traffic.ledger.all_gather(CONTEXT, rank_bytes, times=call.has_gradient)

    def _add_gathered_keys(self, traffic: RankTraffic, call: Call, module: nn.Module) -> None:
        """Add the keys and values of full rows, which two-stream attention fetches."""
        numel_per_token = count_elements_per_token(self._config, require_shapes(call.inputs[:2]))
        self._add_all_keys(traffic, call, self._positions_by_rank[""], numel_per_token)

    def _add_span_boundaries(self, traffic: RankTraffic, call: Call, module: nn.Module) -> None:
        """Add hidden states at the boundaries of masked spans that reach into another rank."""
        fields, by_rank = self._take_fields(traffic.microbatch), self._positions_by_rank[""]
        fetched = find_span_boundaries(fields["span_left"], fields["span_right"], by_rank)
        (hidden,) = require_shapes(call.inputs[:1])
        self._add_point_to_point(traffic, call, by_rank, fetched, hidden[0] * hidden[2])

    def _add_token_gather(self, traffic: RankTraffic, call: Call, module: nn.Module) -> None:
        """Add vectors of the encoder's row that tokens of another rank look up."""
        fields, by_rank = self._take_fields(traffic.microbatch), self._positions_by_rank[""]
        connector, tower = self._config.model.connector, self._config.model.vision_tower
        if connector is None or tower is None:
            fetched = find_visible_tokens(fields, by_rank)
        else:
            n_special = tower.embedding.n_special_tokens
            fetched = find_image_tokens(fields, by_rank, connector.image_token_id, n_special)
        (x,) = require_shapes(call.inputs[:1])
        self._add_point_to_point(traffic, call, self._positions_by_rank["encoder_"], fetched, x[0] * x[2])

    def _add_row_sums(self, traffic: RankTraffic, call: Call, module: nn.Module) -> None:
        """Add all-reduces of token scores, or of sums over each image; rows are padded to the most images."""
        (rows, _, width), n_bytes = call.inputs[0] or (0, 0, 0), self._reduction_bytes
        documents = self._get_rows(traffic.microbatch, self._get_side(call)).documents
        sums = 1 if documents is None else max(int(documents.max()) + 1, 1)
        if is_a(module, "BoundaryVector"):
            n_bytes = self._compute_bytes
        elif is_a(module, "RowScores"):
            sums, n_bytes = sum(map(len, self._positions_by_rank[""])), self._compute_bytes
        traffic.ledger.all_reduce(CONTEXT, rows * sums * width * n_bytes, times=1 + call.has_gradient)

    def _add_pooling(self, traffic: RankTraffic, call: Call, module: nn.Module) -> None:
        """Add attention pooling: for each image and head the largest score, then sums of values and of weights."""
        (heads, width), (rows, *_) = require_shapes(call.inputs[:2])
        documents = self._get_rows(traffic.microbatch, self._get_side(call)).documents
        images = 1 if documents is None else max(int(documents.max()) + 1, 1)
        n_bytes = rows * images * heads * self._reduction_bytes
        traffic.ledger.all_reduce(CONTEXT, n_bytes)
        traffic.ledger.all_reduce(CONTEXT, n_bytes * (width + 1), times=1 + call.has_gradient)

    def _add_expert_capacity(self, traffic: RankTraffic, call: Call, module: nn.Module) -> None:
        """Add messages of a rank's choices to all others, if experts have a capacity per row."""
        if module.capacity_factor is not None or module.fixed_capacity is not None:
            self._send_to_others(traffic, call, prod(call.inputs[2] or ()) * 8)

    def _add_expert_choice(self, traffic: RankTraffic, call: Call, module: nn.Module) -> None:
        """Add messages of a rank's scores to all others, since experts choose among the tokens of full rows."""
        tokens, n_experts = prod((call.inputs[0] or ())[:-1]), int(module.n_experts)  # type: ignore[arg-type]
        self._send_to_others(traffic, call, tokens * n_experts * self._reduction_bytes)

    def _send_to_others(self, traffic: RankTraffic, call: Call, n_bytes: int) -> None:
        for _ in range(self._count_forwards(call) * (self._config.parallel.cp - 1)):
            traffic.ledger.send(CONTEXT, n_bytes)

    @property
    def _compute_bytes(self) -> int:
        """Bytes of an element in the compute dtype."""
        return PRECISIONS[self._config.train.precision].compute_dtype.itemsize

    @property
    def _reduction_bytes(self) -> int:
        """Bytes of an element in float32 or wider, as routers and sums use."""
        return max(4, self._compute_bytes)

    def _count_forwards(self, call: Call) -> int:
        """Return the number of forward passes, recomputation included."""
        return 1 + (call.in_layer and self._config.train.recompute in ("full", "selective"))

    def _count_forward_sums(self, call: Call) -> int:
        """Return the number of forward sums over ranks: "selective" recomputation saves their results."""
        return 1 if self._config.train.recompute == "selective" else self._count_forwards(call)

    def _get_side(self, call: Call) -> str:
        """Return the field prefix of the side that supplies the keys."""
        is_in_encoder = call.path.startswith(("encoder.", "image_features.")) or is_cross_attention(call.path)
        return "encoder_" if is_in_encoder and "encoder_" in self._positions_by_rank else ""

    def _take_fields(self, microbatch: int) -> Arrays:
        """Return the fields of a micro-batch's full rows."""
        count = self._config.train.micro_batch
        return {name: field[microbatch * count :][:count] for name, field in self._batch.items()}

    def _get_rows(self, microbatch: int, side: str) -> MicroBatchRows:
        count = self._config.train.micro_batch
        return MicroBatchRows.take(self._batch, side, microbatch * count, count)

    _METHODS: dict[str, Callable[["ContextShards", RankTraffic, Call, nn.Module], None]] = {  # noqa: RUF012
        "GlobalAttention": _add_global_attention,
        "CompressedAttentionCore": lambda *_: None,  # its keys are on all ranks
        "DotProductAttention": _add_attention,
        "DisentangledCore": _add_attention,
        "ShawCore": _add_attention,
        "KVGather": _add_gathered_keys,
        "SpanBoundaryGather": _add_span_boundaries,
        "TokenGather": _add_token_gather,
        "ImageMean": _add_row_sums,
        "BoundaryVector": _add_row_sums,
        "PoolingAttention": _add_pooling,
        "RowScores": _add_row_sums,
        "LinformerAttention": _add_linformer,
        "CompressedAttention": _add_compressed,
        "SoftMoE": _add_soft_moe,
        "Experts": _add_expert_capacity,
        "ExpertChoiceRouter": _add_expert_choice,
    }
    """Class name → method that adds the traffic of its calls; subclasses before their base classes."""
