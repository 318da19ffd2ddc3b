"""What sequence parallelism copies besides what it sends: nothing, however many rows a micro-batch has."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatfm.config import ParallelConfig
from megatfm.parallel import collectives
from tests.support.batches import CAUSAL, global_batch
from tests.support.models import ADAMW, LENGTH, UNTIED_MODEL
from tests.support.parity import build_engine
from tests.support.workers import Workers

COPIES = (
    "aten::clone",
    "aten::copy_",
    "aten::cat",
    "aten::index_select",
    "aten::_to_copy",
    "aten::contiguous",
)


class Copies(TorchDispatchMode):
    """Counts bytes that are laid anew, but by gloo."""

    def __init__(self) -> None:
        super().__init__()
        self.sends = False
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name in COPIES and isinstance(result, Tensor):
            self.bytes["copied"] += result.nbytes * (not self.sends)
        return result


def copied(rows: int, parallel: ParallelConfig) -> dict[str, int]:
    """Bytes of a micro-batch of so many rows, forward and backward, in float32; calls of collectives."""
    engine = build_engine(UNTIED_MODEL, parallel, ADAMW, precision="fp32")
    batch = global_batch(seed=0, rows=rows)
    calls = Counter[str]()
    with pytest.MonkeyPatch.context() as patch, Copies() as copies:
        for name in ("_gather", "_reduce_scatter"):
            real = getattr(collectives, name)

            def watched(x: Tensor, dim: int, group: Any, real: Any = real, name: str = name) -> Tensor:
                calls[name] += 1
                calls["laid anew"] += not x.movedim(dim, 0).is_contiguous()
                copies.sends = True
                try:
                    return real(x, dim, group)
                finally:
                    copies.sends = False

            patch.setattr(collectives, name, watched)
        engine.forward_backward([batch], CAUSAL)
    return {**copies.bytes, **calls}


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_collectives_along_the_sequence_copy_nothing(workers: Workers, rows: int) -> None:
    """And what they give needs no copy to be multiplied: a rank lays no more anew than one device does alone."""
    (alone,) = workers.run(copied, 1, rows, ParallelConfig())
    for rank in workers.run(copied, 2, rows, ParallelConfig(tp=2)):
        assert rank["_gather"] >= 2 * UNTIED_MODEL.n_layers
        assert rank["_reduce_scatter"] >= 2 * UNTIED_MODEL.n_layers
        assert rank["laid anew"] == 0
        assert rank["copied"] <= alone["copied"]


def part(rows: int) -> tuple[list[int], list[int], list[list[float]]]:
    """What a rank has of tokens that are numbered through; what a gather makes of it; sums of rows."""
    from megatfm.parallel.collectives import TensorParallelGroup
    from megatfm.parallel.mesh import TENSOR, build_mesh

    ranks = TensorParallelGroup(
        build_mesh(ParallelConfig(tp=2), 2, "cpu").group(TENSOR), sequence_parallel=True
    )
    tokens_BT1 = torch.arange(rows * LENGTH).view(rows, LENGTH, 1).double()
    tokens = ranks.split_tokens(tokens_BT1)
    assert tokens.shape == (rows, LENGTH // 2, 1)
    return (
        tokens.flatten().int().tolist(),
        ranks.gather_replicated(tokens).flatten().int().tolist(),
        ranks.row_sums(tokens).tolist(),
    )


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_parts_follow_one_another_through_the_rows(workers: Workers, rows: int) -> None:
    (first, full, selected), (second, _, remaining) = workers.run(part, 2, rows)
    assert first + second == full == list(range(rows * LENGTH))
    sums = torch.arange(rows * LENGTH).view(rows, LENGTH, 1).sum(1).tolist()
    assert [[a[0] + b[0]] for a, b in zip(selected, remaining, strict=True)] == sums
