"""What attention should send where rows are cut: keys and values, and their gradients (Liu et al. 2023).

Of a ring of n ranks whose parts of a row are equally long, for x bytes of keys and values on each: (n − 1)·x forward,
and twice that backward. Where a pattern says what its queries may look at, or documents leave no rank half of what the
others have, what they may look at elsewhere, once each way. Experts' choices go to all other ranks where a capacity
limits them, and where each row is balanced its counts are summed. Slots of soft mixtures are summed, each rank keeping
its share, and what is made of them is gathered.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import prod
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import Config
from megatfm.engines.interface import PRECISIONS
from megatfm.layers.attention.patterns import reached
from megatfm.layers.moe import Experts, SoftMoE
from megatfm.layers.moe.expert_choice import ExpertChoiceRouter
from megatfm.layers.sequence import SequenceMetadata
from megatfm.parallel.context import SIDES, is_folded
from megatfm.parallel.context_exchange import places
from megatfm.parallel.context_slots import share
from megatfm.parallel.context_tokens import around_spans
from megatfm.parallel.mesh import CONTEXT
from megatfm.verify.batch import Arrays
from megatfm.verify.calls import Call
from megatfm.verify.ledger import Ledger

Shape = tuple[int, ...]


class RowsCut:
    """A global batch, cut as the layout cuts it. batches: the fields of each rank of a context."""

    def __init__(self, config: Config, model: nn.Module, batch: Arrays) -> None:
        parallel = config.parallel
        self._config, self._model, self._whole = config, model, batch
        unit = parallel.tp if parallel.sequence_parallel else 1
        self._dealt = {
            side: [*places(length, parallel.cp, is_folded(model, length), unit)]
            for side in SIDES
            if f"{side}positions" in batch
            for length in batch[f"{side}positions"].shape[1:]
        }
        self.batches: list[Arrays] = [self._part(batch, rank) for rank in range(parallel.cp)]

    def _part(self, batch: Arrays, rank: int) -> Arrays:
        def at(name: str) -> Tensor:
            return self._dealt["encoder_" if name.startswith("encoder_") else ""][rank]

        part = {
            name: field[:, at(name).numpy()] if field.ndim > 1 else field for name, field in batch.items()
        }
        if "span_left" in part:  # only shapes count here, and the plain model has no tokens outside the part
            tokens = part["span_left"].shape[1]
            part["span_left"] = np.minimum(part["span_left"], tokens)
            part["span_right"] = np.minimum(part["span_right"], np.arange(tokens)[::-1])
        return part

    def here(self, path: str, rank: int) -> Tensor:
        """The places in rows of the tokens that a module of a rank sees."""
        is_encoder = path.startswith("encoder.") and "encoder_" in self._dealt
        return self._dealt["encoder_" if is_encoder else ""][rank]

    def of_rank(self, path: str, chosen_BTK: Tensor, rank: int) -> Tensor:
        """Choices of whole rows → those that a rank has: of its tokens, or of its share of the slots."""
        owner = self._model.get_submodule(path.rpartition(".")[0])
        if not isinstance(owner, SoftMoE):
            return chosen_BTK[:, self.here(path, rank)]
        ranks, slots = self._config.parallel.cp, chosen_BTK.shape[1]
        each = share(slots, ranks)
        padded = F.pad(chosen_BTK, (0, 0, 0, each * ranks - slots), value=owner.experts.n_experts)
        return padded[:, rank * each :][:, :each]

    def keys_and_values(self, ledger: Ledger, microbatch: int, rank: int, calls: Sequence[Call]) -> None:
        """Add what a rank sends for one micro-batch."""
        for call in calls:
            module = self._model.get_submodule(call.path)
            context = getattr(module, "context", None)
            if context in ("core", "latents"):
                self._core(ledger, microbatch, rank, call, module, latents=context == "latents")
            elif context == "wide":
                self._wide(ledger, microbatch, call, module, call.inputs[1:4])
            elif context == "sums":
                self._sums(ledger, microbatch, call, module)
            elif context == "slots":
                self._slots(ledger, microbatch, call, module)
            elif context == "keys":
                dealt = self._dealt[""]
                everywhere = [torch.cat(dealt) for _ in dealt]
                self._fetched(
                    ledger, rank, call, dealt, everywhere, self._numbers_of_a_token(call.inputs[:2])
                )
            elif context == "around":
                self._around(ledger, microbatch, rank, call)
            elif isinstance(module, Experts) and module.is_limited:
                for _ in range(self._forwards(call) * (self._config.parallel.cp - 1)):
                    ledger.send(CONTEXT, prod(call.inputs[2] or ()) * 8)
            elif isinstance(module, ExpertChoiceRouter):
                tokens = prod((call.inputs[0] or ())[:-1])
                for _ in range(self._forwards(call) * (self._config.parallel.cp - 1)):
                    ledger.send(CONTEXT, tokens * module.n_experts * self._at_least_float32)
            elif call.path.endswith(".counted"):
                again = self._config.train.recompute == "full" and call.in_block and call.keeps_more
                ledger.all_reduce(CONTEXT, call.made * self._at_least_float32, times=1 + again)

    @property
    def _at_least_float32(self) -> int:
        """Bytes of what routers compute with."""
        return max(4, PRECISIONS[self._config.train.precision].computed.itemsize)

    def _sums(self, ledger: Ledger, microbatch: int, call: Call, module: nn.Module) -> None:
        """Keys and values that are made of several tokens, of all heads, forward and backward."""
        computed = PRECISIONS[self._config.train.precision].computed.itemsize
        of_head = module.sums_of(self._row(microbatch, self._side(call, module)))  # type: ignore[operator]
        elements = of_head * self._config.model.attention.n_heads // self._config.parallel.tp
        ledger.all_reduce(CONTEXT, elements * computed, times=self._sums_forward(call) + call.has_gradient)

    def _slots(self, ledger: Ledger, microbatch: int, call: Call, module: Any) -> None:
        """Logarithms of sums are gathered; means are summed and cut; what is made of these is gathered; and back."""
        computed = PRECISIONS[self._config.train.precision].computed.itemsize
        forwards, ranks = self._forwards(call), self._config.parallel.cp
        (rows, _, d), (slots, _) = call.inputs[0] or (0, 0, 0), module.weight.shape
        slots *= self._row(microbatch, self._side(call, module)).most_documents
        of_rank = rows * share(slots, ranks) * d * computed
        for gathered in (rows * slots * self._at_least_float32, of_rank):
            ledger.all_gather(CONTEXT, gathered, times=forwards)
            ledger.reduce_scatter(CONTEXT, gathered * ranks, times=call.has_gradient)
        ledger.reduce_scatter(CONTEXT, of_rank * ranks, times=self._sums_forward(call))
        ledger.all_gather(CONTEXT, of_rank, times=call.has_gradient)

    def _core(
        self, ledger: Ledger, microbatch: int, rank: int, call: Call, module: nn.Module, *, latents: bool
    ) -> None:
        computed = PRECISIONS[self._config.train.precision].computed.itemsize
        forwards, side = self._forwards(call), self._side(call, module)
        dealt, ranks = self._dealt[side], range(self._config.parallel.cp)
        q, k, v = self._made(call) if latents else call.inputs[:3]
        sent = call.inputs[1:2] if latents else (k, v)
        a_token = self._numbers_of_a_token(sent) * computed
        everywhere = [torch.cat(dealt) for _ in ranks]
        length, most = sum(map(len, dealt)), 0
        of_pairs = any(len(bias or ()) > 2 for bias in call.inputs[4:5])
        if of_pairs or not hasattr(module, "reached") or module.pattern.of_memory:  # type: ignore[union-attr]
            needs, is_local = everywhere, True
        else:
            needs, is_local = self._needs(microbatch, module, side)
            most = max(len(need) - len(at) for need, at in zip(needs, dealt, strict=True))
            if is_local:
                self._wide(ledger, microbatch, call, module, (q, k, v))
        is_ring = not is_local and 2 * most * len(dealt) >= (len(dealt) - 1) * length
        share = None if is_ring else Fraction(most * len(dealt), (len(dealt) - 1) * length)
        if not is_local and self._by_heads(q, k, v, sent, share):  # type: ignore[arg-type]
            self._exchange(ledger, rank, call, (q, k, v), dealt, computed, forwards)  # type: ignore[arg-type]
            return
        if is_ring:  # a ring: what rank − s had at first goes on after step s
            for step in ranks[:-1]:
                for _ in range(forwards + call.has_gradient):
                    ledger.send(CONTEXT, len(dealt[rank - step]) * a_token)
                if call.has_gradient:  # in float32 or better, one step behind
                    ledger.send(CONTEXT, len(dealt[rank - step - 1]) * a_token * max(4, computed) // computed)
            return
        self._fetched(ledger, rank, call, dealt, needs, a_token // computed)

    def _fetched(
        self,
        ledger: Ledger,
        rank: int,
        call: Call,
        dealt: list[Tensor],
        needs: Sequence[Tensor],
        a_token: int,
    ) -> None:
        """What ranks need of others, and its gradients. a_token: numbers of a token in all rows."""
        size = PRECISIONS[self._config.train.precision].computed.itemsize
        for other in range(len(dealt)):
            given, taken = _common(dealt[rank], needs[other]), _common(dealt[other], needs[rank])
            for _ in range(self._forwards(call) if given and other != rank else 0):
                ledger.send(CONTEXT, given * a_token * size)
            if taken and other != rank and call.has_gradient:
                ledger.send(CONTEXT, taken * a_token * size)

    def _around(self, ledger: Ledger, microbatch: int, rank: int, call: Call) -> None:
        """Hidden states of the tokens around spans of which another rank has masked tokens; on each tensor-parallel
        rank."""
        rows, dealt = self._config.train.micro_batch, self._dealt[""]
        left, right = (
            torch.from_numpy(self._whole[name][microbatch * rows :][:rows])
            for name in ("span_left", "span_right")
        )
        assert call.inputs[0] is not None
        needs = [around_spans(left, right, here) for here in dealt]
        self._fetched(ledger, rank, call, dealt, needs, call.inputs[0][0] * call.inputs[0][2])

    def _forwards(self, call: Call) -> int:
        return 1 + (call.in_block and self._config.train.recompute in ("full", "selective"))

    def _sums_forward(self, call: Call) -> int:
        """How often a sum over ranks is made in the forward direction: "selective" keeps it."""
        return 1 if self._config.train.recompute == "selective" else self._forwards(call)

    def _side(self, call: Call, module: nn.Module) -> str:
        """Whose keys are looked at, as the prefix of its fields."""
        of_encoder = getattr(getattr(module, "pattern", None), "of_memory", False)
        of_encoder = of_encoder or call.path.startswith("encoder.")
        return "encoder_" if of_encoder and "encoder_" in self._dealt else ""

    @staticmethod
    def _made(call: Call) -> Sequence[Shape]:
        """Shapes of queries, and of keys and values that are made of latents by matrices of all heads."""
        q, _, _, of_values, *_ = call.inputs
        assert q is not None
        assert of_values is not None
        return q, q, (*q[:3], of_values[0] // q[1])

    def _wide(
        self, ledger: Ledger, microbatch: int, call: Call, module: nn.Module, qkv: Sequence[Shape | None]
    ) -> None:
        """Queries that see all are summed with zeros from other ranks, what is made of them is gathered with the
        logarithms of the sums, in float32 or better, and back go gradients of both."""
        (rows, n, _, h), (*_, v) = qkv[0], qkv[2]  # type: ignore[misc]
        side, forwards = self._side(call, module), self._forwards(call)
        count = len(module.wide(self._row(microbatch, side), self._dealt[side]))  # type: ignore[operator]
        size = PRECISIONS[self._config.train.precision].computed.itemsize
        queries = rows * n // self._config.parallel.tp * count
        summed = self._sums_forward(call) + call.has_gradient
        ledger.all_reduce(CONTEXT, queries * h * size, times=bool(count) * summed)
        ledger.all_reduce(CONTEXT, queries * v * size, times=bool(count) * call.has_gradient)
        ledger.all_gather(CONTEXT, queries * (v + 1) * max(4, size), times=bool(count) * forwards)

    def _by_heads(
        self, q: Shape, k: Shape, v: Shape, sent: Sequence[Shape | None], share: Fraction | None
    ) -> bool:
        """Whether tokens are exchanged for heads: where it is asked for, or can be and sends less (of a ring three
        times what goes round, of a fetch twice a share of that, by heads twice queries, keys, values and what is made,
        1/c of it)."""
        parallel = self._config.parallel
        if parallel.context != "auto":
            return parallel.context == "heads"
        (heads, keys), c = self._heads(q, k), parallel.cp
        can = heads % c == 0 and (keys % c == 0 or c % keys == 0)
        by_heads = 2 * (heads + max(keys, c)) * (q[3] + v[3])
        times = 3 if share is None else 2 * share
        return can and by_heads * q[0] < times * c * self._numbers_of_a_token(sent)

    def _heads(self, q: Shape, k: Shape) -> tuple[int, int]:
        """Query and key heads of a tensor-parallel rank."""
        tp = self._config.parallel.tp
        return q[1] // tp, max(1, k[1] // tp)

    def _exchange(
        self, ledger: Ledger, rank: int, call: Call, qkv: tuple[Shape, Shape, Shape], dealt: list[Tensor],
        computed: int, forwards: int,
    ) -> None:  # fmt: skip
        """Queries, keys with values, and what was made: to heads (c − 1)/c of tokens here, back 1/c of the others."""
        c, (n, k) = len(dealt), self._heads(*qkv[:2])
        (rows, *_, h), (*_, v) = qkv[0], qkv[2]
        here = rows * len(dealt[rank]) * (c - 1)
        others = rows * sum(len(each) for i, each in enumerate(dealt) if i != rank)
        for width, to_heads in ((n // c * h, True), (max(k, c) // c * (h + v), True), (n // c * v, False)):
            for _ in range(forwards):
                ledger.all_to_all(CONTEXT, (here if to_heads else others) * width * computed)
            if call.has_gradient:
                ledger.all_to_all(CONTEXT, (others if to_heads else here) * width * computed)

    def _needs(self, microbatch: int, module: nn.Module, side: str) -> tuple[list[Tensor], bool]:
        """What each rank's queries look at, and whether their pattern bounds it, and not documents alone."""
        row = self._row(microbatch, side)
        pattern = module.pattern.within(row.length)  # type: ignore[operator, union-attr]
        is_local = pattern.reach(0, 1, row.length) is not None
        return [reached(pattern, row, here) for here in self._dealt[side]], is_local

    def _row(self, microbatch: int, side: str) -> SequenceMetadata:
        """The whole rows of a micro-batch."""
        rows = self._config.train.micro_batch
        mine = {
            name: torch.from_numpy(self._whole[side + name][microbatch * rows :][:rows])
            for name in ("positions", "documents", "prefix")
            if side + name in self._whole
        }
        return SequenceMetadata(mine["positions"], mine.get("documents"), prefix=mine.get("prefix"))

    def _numbers_of_a_token(self, sent: Sequence[Shape | None]) -> int:
        """Of what is sent of it, in all rows, on one of the tensor-parallel ranks; one head is on all of these."""
        width = 0
        for shape in sent:
            assert shape is not None
            rows, heads, _, channels = shape
            width += rows * max(1, heads // self._config.parallel.tp) * channels
        return width


def _common(places: Tensor, wanted: Tensor) -> int:
    return int(torch.isin(places, wanted).sum())
