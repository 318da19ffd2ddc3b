"""Silent corruption: does the same step give the same bits, and do replicas hold the same weights?"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from blake3 import blake3
from torch import Tensor

from megatfm.checkpoint import ShardedTensor
from megatfm.engines.interface import Arrays, Engine, LossFunction, StepStats
from megatfm.errors import MegatfmError
from megatfm.ranks import gather_errors
from megatfm.train import generators

SHOWN = 5

Block = tuple[str, tuple[int, ...]]
"""Name and offsets: other blocks of the same tensor are no copies."""


def forward_backward_with_replay(
    engine: Engine,
    microbatches: Sequence[Arrays],
    objective: LossFunction,
    step: int,
    *,
    replay_every: int,
    watch: bool = False,
) -> StepStats:
    """The engine's `forward_backward`; every so many steps (0: never) twice, and compared. A collective.

    Raises MegatfmError on all ranks that names the ranks and parameters where one bit differs. Dropout is keyed by
    step and sample, and global generators, which plugins may draw from, are set back, so the two agree wherever the
    kernels are deterministic.
    """
    if replay_every == 0 or step % replay_every:
        return engine.forward_backward(microbatches, objective, record_activations=watch)
    drawn = generators.rng_state_dict(0, engine.device)
    stats = engine.forward_backward(microbatches, objective, record_activations=watch)
    before = {name: gradient.clone() for name, gradient in engine.gradients().items()}
    engine.zero_grad()
    generators.load_rng_state_dict(drawn, 0, engine.device)
    again = engine.forward_backward(microbatches, objective, record_activations=watch)
    differ = [name for name, gradient in engine.gradients().items() if not _same(before[name], gradient)]
    if stats.sums != again.sums and all(map(math.isfinite, stats.sums.values())):
        differ.insert(0, "the loss")
    raise_together(differ, f"step {step}, computed twice, differs")
    return again


def compare_replicas(engine: Engine, step: int, every: int) -> None:
    """Every so many steps (0: never), compare hashes of weights and optimizer state over the axes that hold copies of
    them. A collective.

    Raises MegatfmError on all ranks that names the parameters, and the ranks that differ from most others.
    """
    replicated_axes = engine.replicated_axes
    if every == 0 or step % every or all(engine.mesh.size(axis) == 1 for axis in replicated_axes):
        return
    local_hashes = hashes(engine.state_dict())
    all_hashes: list[dict[Block, str]] = engine.mesh.gather_objects(local_hashes, replicated_axes)
    differ = []
    for (name, place), mine in local_hashes.items():
        # Of what one rank keeps for all, as the state of a whole tensor, there may be no other copy.
        votes = Counter(other[name, place] for other in all_hashes if (name, place) in other)
        best, count = votes.most_common(1)[0]
        tie = list(votes.values()).count(count) > 1
        if len(votes) > 1 and (tie or mine != best):
            differ.append(name)
    raise_together(differ, f"after step {step}, replicas of one parameter differ")


def hashes(state: Mapping[str, ShardedTensor | Tensor]) -> dict[Block, str]:
    """BLAKE3 of this rank's block of everything in a state dict."""
    boxes = {name: ShardedTensor.from_tensor(value) for name, value in state.items()}
    return {
        (name, part.offsets): blake3(_bytes(part.tensor)).hexdigest()
        for name, box in boxes.items()
        for part in box.blocks
    }


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data


def _same(first: Tensor, second: Tensor) -> bool:
    """Bit for bit: NaN is itself, and −0 is not 0."""
    return torch.equal(
        first.contiguous().reshape(-1).view(torch.uint8), second.contiguous().reshape(-1).view(torch.uint8)
    )


def raise_together(differ: list[str], what: str) -> None:
    """Raise one error on every rank if any rank has names in `differ`."""
    if found := gather_errors(differ):
        where = "; ".join(f"{rank}: {join_first(names)}" for rank, names in found.items())
        raise MegatfmError(
            f"{what}: {where}. A processor, its memory or a kernel is at fault: nothing was saved since, so resume "
            "without that machine"
        )


def join_first(names: list[str]) -> str:
    """Join the first names, and say how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
