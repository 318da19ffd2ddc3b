"""Traffic of context parallelism: what attention, mixtures and heads over spans send where rows are cut.

Of a ring of c ranks whose parts of a row are equally long, for x bytes of keys and values on each: (c − 1)·x forward,
and twice that backward (Liu et al. 2023). Where queries see runs of keys alone, or documents leave no rank half of
what the others have: the keys of other ranks that they need, once forward, and their gradients once backward.
Experts' choices go to all other ranks where a capacity limits them, and where each row is balanced its counts are
summed. Slots of soft mixtures are summed, each rank keeping its share, and what is made of them is gathered.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
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
    block_of,
    count_wide,
    deal,
    is_causal,
    is_cross_attention,
    needed,
    pattern_of,
    sees_more_later,
    sees_runs_alone,
)
from megatfm.verify.module_calls import Call, Shape, known_shapes, qkv_of_latents
from megatfm.verify.module_cuts import is_a
from megatfm.verify.shrink import Arrays
from megatfm.verify.traffic import ExpectedTraffic

Places = NDArray[Any]

SIDES = ("", "encoder_")
"""Prefixes of the fields of a row."""

ALL_KEYS = ("DisentangledCore", "ShawCore")  # their biases need all keys at once


class ContextShards:
    """A global batch, cut as the layout cuts it. batches: the fields of each rank of a context."""

    def __init__(self, config: Config, model: nn.Module, batch: Arrays) -> None:
        parallel = config.parallel
        self._config, self._model, self._batch = config, model, batch
        multiple_of = parallel.tp if parallel.sequence_parallel else 1
        self._positions_by_rank = {
            side: deal(length, parallel.cp, multiple_of, folded=self._is_folded(length))
            for side in SIDES
            if f"{side}positions" in batch
            for length in batch[f"{side}positions"].shape[1:]
        }
        self.batches: list[Arrays] = [self._part(batch, rank) for rank in range(parallel.cp)]
        self._needs: dict[tuple[Section, str, int, bool], list[Places]] = {}

    def _is_folded(self, length: int) -> bool:
        """Whether later tokens of rows of a length have more to see than earlier ones."""
        return any(
            sees_more_later(pattern_of(self._config, path), length, causal=is_causal(self._config, path))
            for path, module in self._model.named_modules()
            if hasattr(module, "pattern") and not is_cross_attention(path)
        )

    def _part(self, batch: Arrays, rank: int) -> Arrays:
        def at(name: str) -> Places:
            return self._positions_by_rank["encoder_" if name.startswith("encoder_") else ""][rank]

        part = {name: field[:, at(name)] if field.ndim > 1 else field for name, field in batch.items()}
        if "span_left" in part:  # only shapes count here, and the plain model has no tokens outside the part
            tokens = part["span_left"].shape[1]
            part["span_left"] = np.minimum(part["span_left"], tokens)
            part["span_right"] = np.minimum(part["span_right"], np.arange(tokens)[::-1])
        return part

    def rank_choices(self, path: str, chosen_BTK: Tensor, rank: int) -> Tensor:
        """Choices of whole rows → those that a rank has: of its tokens, or of its share of the slots."""
        owner = self._model.get_submodule(path.rpartition(".")[0])
        if not is_a(owner, "SoftMoE"):
            is_encoder = path.startswith("encoder.") and "encoder_" in self._positions_by_rank
            return chosen_BTK[
                :, torch.from_numpy(self._positions_by_rank["encoder_" if is_encoder else ""][rank])
            ]
        ranks, slots = self._config.parallel.cp, chosen_BTK.shape[1]
        share = -(-slots // ranks)
        no_expert: int = owner.experts.n_experts  # type: ignore[assignment, union-attr]
        padded = F.pad(chosen_BTK, (0, 0, 0, share * ranks - slots), value=no_expert)
        return padded[:, rank * share :][:, :share]

    def add_context_traffic(
        self, ledger: ExpectedTraffic, microbatch: int, rank: int, calls: Sequence[Call]
    ) -> None:
        """Add what a rank sends for one micro-batch."""
        for call in calls:
            module = self._model.get_submodule(call.path)
            for name, add in self._WAYS.items():
                if is_a(module, name):
                    add(self, ledger, microbatch, rank, call, module)
                    break
            if call.path.endswith(".counted"):
                recompute = self._config.train.recompute
                times = 1 + (recompute == "full" and call.in_layer and call.saves_tensors_after)
                ledger.all_reduce(CONTEXT, call.output_numel * self._at_least_float32, times=times)

    def _core(
        self, ledger: ExpectedTraffic, microbatch: int, rank: int, call: Call, module: nn.Module
    ) -> None:
        """Keys and values, or the latents that they are made of."""
        latents = is_a(module, "LatentCore")
        qkv = qkv_of_latents(call) if latents else known_shapes(call.inputs[:3])
        sent_shapes = known_shapes(call.inputs[1:2]) if latents else qkv[1:]
        side, numel_per_token = self._side(call), self._numel_per_token(sent_shapes)
        by_rank = self._positions_by_rank[side]
        pattern, causal = pattern_of(self._config, call.path), is_causal(self._config, call.path)
        has_pair_bias = any(len(bias or ()) > 2 for bias in call.inputs[4:5])
        if is_cross_attention(call.path) or has_pair_bias or any(is_a(module, name) for name in ALL_KEYS):
            everywhere = [np.sort(np.concatenate(by_rank))] * len(by_rank)
            self._point_to_point(ledger, rank, call, by_rank, everywhere, numel_per_token)
            return
        needed = self._needs_of(microbatch, call, module)
        if sees_runs_alone(pattern, sum(map(len, by_rank)), causal=causal):
            if not is_a(module, "LocalAttention"):  # what sees all is computed apart there
                self._wide_queries(ledger, microbatch, call, qkv)
            self._point_to_point(ledger, rank, call, by_rank, needed, numel_per_token)
            return
        share = self._fetched_share(by_rank, needed)
        is_ring = 2 * share >= 1
        if self._by_heads(qkv, numel_per_token, None if is_ring else share):
            self._exchange(ledger, rank, call, qkv, by_rank)
        elif is_ring:
            self._ring(ledger, rank, call, [len(places) for places in by_rank], numel_per_token)
        else:
            self._point_to_point(ledger, rank, call, by_rank, needed, numel_per_token)

    @staticmethod
    def _fetched_share(by_rank: Sequence[Places], needed: Sequence[Places]) -> Fraction:
        """Most keys that a rank needs of others, as a share of what a ring brings it."""
        c, length = len(by_rank), sum(map(len, by_rank))
        max_fetched = max(
            len(np.setdiff1d(need, local_positions))
            for need, local_positions in zip(needed, by_rank, strict=True)
        )
        return Fraction(max_fetched * c, (c - 1) * length)

    def _ring(
        self, ledger: ExpectedTraffic, rank: int, call: Call, tokens: Sequence[int], numel_per_token: int
    ) -> None:
        """Parts of a row go round: after step s a rank hands on what rank − s had at first. Gradients are in float32 or
        wider, and one step behind. numel_per_token: numbers of a token in all rows."""
        size, c = self._computed, len(tokens)
        for step in range(c - 1):
            for _ in range(self._forwards(call) + call.has_gradient):
                ledger.send(CONTEXT, tokens[(rank - step) % c] * numel_per_token * size)
            if call.has_gradient:
                ledger.send(CONTEXT, tokens[(rank - step - 1) % c] * numel_per_token * max(4, size))

    def _point_to_point(
        self,
        ledger: ExpectedTraffic,
        rank: int,
        call: Call,
        by_rank: list[Places],
        needed: Sequence[Places],
        numel_per_token: int,
    ) -> None:
        """One message to each rank that needs tokens held here, and one back with gradients of what was needed here."""
        for peer, held in enumerate(by_rank):
            if peer == rank:
                continue
            n_sent, n_received = (
                len(np.intersect1d(*pair)) for pair in ((by_rank[rank], needed[peer]), (held, needed[rank]))
            )
            for _ in range(self._forwards(call) if n_sent else 0):
                ledger.send(CONTEXT, n_sent * numel_per_token * self._computed)
            if n_received and call.has_gradient:
                ledger.send(CONTEXT, n_received * numel_per_token * self._computed)

    def _needs_of(self, microbatch: int, call: Call, module: nn.Module) -> list[Places]:
        """Places that each rank's queries need. Layers of one pattern and dense mask share them."""
        pattern, causal = pattern_of(self._config, call.path), is_causal(self._config, call.path)
        side = self._side(call)
        rows, key = self._rows(microbatch, side), (pattern, side, microbatch, causal)
        if getattr(module.pattern, "differs_by_head", False) or key not in self._needs:
            self._needs[key] = [
                np.flatnonzero(needed(pattern, module, rows, positions, causal=causal))
                for positions in self._positions_by_rank[side]
            ]
        return self._needs[key]

    def _exchange(
        self, ledger: ExpectedTraffic, rank: int, call: Call, qkv: Sequence[Shape], by_rank: list[Places]
    ) -> None:  # fmt: skip
        """Queries, keys with values, and what was made: to heads (c − 1)/c of tokens here, back 1/c of the others."""
        c, (n, k) = len(by_rank), self._heads(*qkv[:2])
        (rows, *_, h), (*_, v) = qkv[0], qkv[2]
        local_rows = rows * len(by_rank[rank]) * (c - 1)
        remote_rows = rows * sum(len(places) for i, places in enumerate(by_rank) if i != rank)
        for width, to_heads in ((n // c * h, True), (max(k, c) // c * (h + v), True), (n // c * v, False)):
            for _ in range(self._forwards(call)):
                ledger.all_to_all(CONTEXT, (local_rows if to_heads else remote_rows) * width * self._computed)
            if call.has_gradient:
                ledger.all_to_all(CONTEXT, (remote_rows if to_heads else local_rows) * width * self._computed)

    def _by_heads(self, qkv: Sequence[Shape], numel_per_token: int, share: Fraction | None) -> bool:
        """Whether tokens are exchanged for heads: where it is asked for, or can be and sends less (of a ring three
        times what goes round, of a fetch twice a share of that, by heads twice queries, keys, values and what is made,
        1/c of it). share: of a fetch; None: a ring."""
        parallel, (q, k, v) = self._config.parallel, qkv
        if parallel.cp_method != "auto":
            return parallel.cp_method == "ulysses"
        (heads, keys), c = self._heads(q, k), parallel.cp
        can = heads % c == 0 and (keys % c == 0 or c % keys == 0)
        times = 3 if share is None else 2 * share
        return can and 2 * (heads + max(keys, c)) * (q[3] + v[3]) * q[0] < times * c * numel_per_token

    def _wide(
        self, ledger: ExpectedTraffic, microbatch: int, rank: int, call: Call, module: nn.Module
    ) -> None:
        self._wide_queries(ledger, microbatch, call, known_shapes(call.inputs[1:4]))

    def _wide_queries(
        self, ledger: ExpectedTraffic, microbatch: int, call: Call, qkv: Sequence[Shape]
    ) -> None:
        """Queries that see all are summed with zeros from other ranks, what is made of them is gathered with the
        logarithms of the sums, in float32 or better, and back go gradients of both."""
        (rows, n, _, h), (*_, v) = qkv[0], qkv[2]
        side, size = self._side(call), self._computed
        by_rank = self._positions_by_rank[side]
        rank_of = np.zeros(sum(map(len, by_rank)), np.int64)
        for rank, places in enumerate(by_rank):
            rank_of[places] = rank
        pattern, causal = pattern_of(self._config, call.path), is_causal(self._config, call.path)
        count = count_wide(pattern, self._rows(microbatch, side), rank_of, causal=causal)
        queries = rows * n // self._config.parallel.tp * count
        sums = self._sums_forward(call) + call.has_gradient
        ledger.all_reduce(CONTEXT, queries * h * size, times=bool(count) * sums)
        ledger.all_reduce(CONTEXT, queries * v * size, times=bool(count) * call.has_gradient)
        ledger.all_gather(CONTEXT, queries * (v + 1) * max(4, size), times=bool(count) * self._forwards(call))

    def _of_linformer(
        self, ledger: ExpectedTraffic, microbatch: int, rank: int, call: Call, module: nn.Module
    ) -> None:
        """`rank` keys and values of each document, over its tokens on all ranks."""
        options: Any = block_of(self._config, call.path).attention
        documents = sum(1 for _ in self._rows(microbatch, self._side(call)).bounds())
        self._summed(ledger, call, documents * 2 * options.projected_length)

    def _of_compressed(
        self, ledger: ExpectedTraffic, microbatch: int, rank: int, call: Call, module: nn.Module
    ) -> None:
        """A key and a value of each stretch of `factor` tokens, and of a document's first token; rows of fewer
        stretches are filled up to the most."""
        options: Any = block_of(self._config, call.path).attention
        rows = self._rows(microbatch, self._side(call))
        stretches = [0] * rows.count
        for row, begin, end in rows.bounds():
            stretches[row] += -(-(end - begin) // options.factor)
        self._summed(ledger, call, rows.count * max(stretches) * 2)

    def _summed(self, ledger: ExpectedTraffic, call: Call, numel_per_head: int) -> None:
        """Keys and values that are made of several tokens, of all heads, forward and backward. numel_per_head: how
        many."""
        model = self._config.model
        elements = numel_per_head * model.head_width * model.attention.n_heads // self._config.parallel.tp
        times = self._sums_forward(call) + call.has_gradient
        ledger.all_reduce(CONTEXT, elements * self._computed, times=times)

    def _slots(
        self, ledger: ExpectedTraffic, microbatch: int, rank: int, call: Call, module: nn.Module
    ) -> None:
        """Logarithms of sums are gathered; means are summed and cut; what is made of these is gathered; and back."""
        ranks, mixture = self._config.parallel.cp, self._model.get_submodule(call.path)
        (rows, _, d), (slots, _) = call.inputs[0] or (0, 0, 0), mixture.weight.shape  # type: ignore[misc]
        documents = self._rows(microbatch, self._side(call)).documents
        slots *= 1 if documents is None else int(documents.max()) + 1
        rank_bytes = rows * -(-slots // ranks) * d * self._computed
        for gathered in (rows * slots * self._at_least_float32, rank_bytes):
            ledger.all_gather(CONTEXT, gathered, times=self._forwards(call))
            ledger.reduce_scatter(CONTEXT, gathered * ranks, times=call.has_gradient)
        ledger.reduce_scatter(CONTEXT, rank_bytes * ranks, times=self._sums_forward(call))
        ledger.all_gather(CONTEXT, rank_bytes, times=call.has_gradient)

    def _keys(
        self, ledger: ExpectedTraffic, microbatch: int, rank: int, call: Call, module: nn.Module
    ) -> None:
        """All keys and values of whole rows, for attention of two streams."""
        by_rank = self._positions_by_rank[""]
        everywhere = [np.sort(np.concatenate(by_rank))] * len(by_rank)
        self._point_to_point(
            ledger, rank, call, by_rank, everywhere, self._numel_per_token(known_shapes(call.inputs[:2]))
        )

    def _around(
        self, ledger: ExpectedTraffic, microbatch: int, rank: int, call: Call, module: nn.Module
    ) -> None:
        """Hidden states of the tokens around spans of which another rank has masked tokens; on each tensor-parallel
        rank."""
        count, by_rank = self._config.train.micro_batch, self._positions_by_rank[""]
        first = microbatch * count
        left, right = (self._batch[name][first : first + count] for name in ("span_left", "span_right"))
        needed = []
        for positions in by_rank:
            boundary_places: set[int] = set()
            for row in range(len(left)):
                for place in positions.tolist():
                    if left[row, place] > 0:
                        boundary_places |= {place - int(left[row, place]), place + int(right[row, place])}
            needed.append(np.array(sorted(boundary_places), np.int64))
        (hidden,) = known_shapes(call.inputs[:1])
        self._point_to_point(ledger, rank, call, by_rank, needed, hidden[0] * hidden[2])

    def _row_sums(
        self, ledger: ExpectedTraffic, microbatch: int, rank: int, call: Call, module: nn.Module
    ) -> None:
        """Scores of all tokens, or sums of each image's; rows of fewer images are filled up to the most."""
        (rows, _, width), n_bytes = call.inputs[0] or (0, 0, 0), self._at_least_float32
        documents = self._rows(microbatch, self._side(call)).documents
        sums = 1 if documents is None else max(int(documents.max()) + 1, 1)
        if is_a(module, "RowScores"):
            sums, n_bytes = sum(map(len, self._positions_by_rank[""])), self._computed
        ledger.all_reduce(CONTEXT, rows * sums * width * n_bytes, times=1 + call.has_gradient)

    def _experts(
        self, ledger: ExpectedTraffic, microbatch: int, rank: int, call: Call, module: nn.Module
    ) -> None:
        """Choices of a rank's tokens go to all others, where experts take so many tokens of a row."""
        if module.capacity is not None or module.places is not None:
            for _ in range(self._forwards(call) * (self._config.parallel.cp - 1)):
                ledger.send(CONTEXT, prod(call.inputs[2] or ()) * 8)

    def _expert_choice(
        self, ledger: ExpectedTraffic, microbatch: int, rank: int, call: Call, module: nn.Module
    ) -> None:
        """Scores of a rank's tokens go to all others: experts choose among the tokens of whole rows."""
        tokens, n_experts = prod((call.inputs[0] or ())[:-1]), int(module.n_experts)  # type: ignore[arg-type]
        for _ in range(self._forwards(call) * (self._config.parallel.cp - 1)):
            ledger.send(CONTEXT, tokens * n_experts * self._at_least_float32)

    @property
    def _computed(self) -> int:
        """Bytes of a number that models compute with."""
        return PRECISIONS[self._config.train.precision].compute_dtype.itemsize

    @property
    def _at_least_float32(self) -> int:
        """Bytes of a number that routers compute with."""
        return max(4, self._computed)

    def _forwards(self, call: Call) -> int:
        return 1 + (call.in_layer and self._config.train.recompute in ("full", "selective"))

    def _sums_forward(self, call: Call) -> int:
        """Number of forward sums over ranks: "selective" recomputation keeps them."""
        return 1 if self._config.train.recompute == "selective" else self._forwards(call)

    def _side(self, call: Call) -> str:
        """Prefix of the fields of the rows whose keys are looked at."""
        is_in_encoder = call.path.startswith("encoder.") or is_cross_attention(call.path)
        return "encoder_" if is_in_encoder and "encoder_" in self._positions_by_rank else ""

    def _rows(self, microbatch: int, side: str) -> MicroBatchRows:
        count = self._config.train.micro_batch
        return MicroBatchRows.of(self._batch, side, microbatch * count, count)

    def _heads(self, q: Shape, k: Shape) -> tuple[int, int]:
        """Query and key heads of a tensor-parallel rank."""
        tp = self._config.parallel.tp
        return q[1] // tp, max(1, k[1] // tp)

    def _numel_per_token(self, sent_shapes: Sequence[Shape]) -> int:
        """Numbers that are sent for a token, in all rows, on one tensor-parallel rank; a single head is on all."""
        tp = self._config.parallel.tp
        return sum(rows * max(1, heads // tp) * channels for rows, heads, _, channels in sent_shapes)

    _WAYS: dict[str, Callable[["ContextShards", ExpectedTraffic, int, int, Call, nn.Module], None]] = {  # noqa: RUF012
        "GlobalAttention": _wide,
        "CompressedAttentionCore": lambda *_: None,  # its keys are on all ranks
        "DotProductAttention": _core,
        "DisentangledCore": _core,
        "ShawCore": _core,
        "GatherKV": _keys,
        "SpanBoundaryGather": _around,
        "ImageMean": _row_sums,
        "RowScores": _row_sums,
        "LinformerAttention": _of_linformer,
        "CompressedAttention": _of_compressed,
        "SoftMoE": _slots,
        "Experts": _experts,
        "ExpertChoiceRouter": _expert_choice,
    }
    """Class → what its calls send; a derived class before the one that it is derived from."""
