"""A checkpoint of rows that are cut opens under any other number: the next step is that of the run before."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatfm import checkpoint
from megatfm.config import ParallelConfig
from tests.support.context_models import CONTEXT_MODELS, PATTERN_NAMES
from tests.support.context_parity import context_case, context_microbatches
from tests.support.grids import SLOW
from tests.support.models import ADAMW
from tests.support.parity import build_engine
from tests.support.workers import Workers

RATE = 1e-2
BOUND = 1e-9
Step = tuple[float, dict[str, Tensor], dict[str, Tensor]]
"""Loss, gradients, and what is left after the step, with the optimizer's state: whole on every rank."""


def next_step(name: str, folder: Path, source: Path | None) -> Step:
    """Of an engine that has taken a step and saved into a folder, or that goes on from what was saved."""
    config, batch, _, objective, _ = context_case(name)
    ranks = torch.distributed.get_world_size()
    # Full attention by ring; auto would take heads.
    parallel = ParallelConfig(cp=ranks, cp_method="ring" if ranks > 1 else "auto")
    engine = build_engine(config, parallel, ADAMW)
    mine = context_microbatches(engine, batch)
    if source is None:
        engine.forward_backward(mine, objective)
        engine.step(RATE, clip=1.0)
        checkpoint.save(folder, 1, engine.state_dict(), {})
    else:
        room = engine.empty_state_dict(checkpoint.names(source))
        checkpoint.load(source, room)
        engine.load_state_dict(room)
    # Other rows than before, which were drawn for dropout with other keys.
    later = [{**item, "keys": item["keys"] + 1, "tokens": item["tokens"].flip(0)} for item in mine]
    loss = engine.forward_backward(later, objective).loss
    gradients = {key: gradient.clone() for key, gradient in engine.gradients().items()}
    engine.step(RATE, clip=1.0)
    left = {
        key: checkpoint.ShardedTensor.from_tensor(value).tensor.clone()
        for key, value in engine.state_dict().items()
    }
    return loss, gradients, left


def far(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Tensors beyond the bound of gradients, relative to themselves or a millionth of all."""
    assert actual.keys() == expected.keys()
    floor = 1e-6 * torch.cat([value.flatten() for value in expected.values()]).norm()
    away = {
        key: float((actual[key] - value).norm() / max(value.norm(), floor)) for key, value in expected.items()
    }
    return {key: error for key, error in away.items() if not error <= BOUND}


def moments(step: Step) -> dict[str, Tensor]:
    """What AdamW keeps; weights themselves move by the sign of gradients that are all but 0."""
    actual = {key: value for key, value in step[2].items() if "exp_avg" in key}
    assert actual
    return actual


def same(one: Step, other: Step) -> bool:
    """To the bit."""
    pairs = [(mine, expected) for mine, expected in zip(one[1:], other[1:], strict=True)]
    assert all(mine.keys() == reference.keys() for mine, reference in pairs)
    return one[0] == other[0] and all(
        torch.equal(value, reference[key]) for mine, reference in pairs for key, value in mine.items()
    )


CASES = [
    pytest.param(PATTERN_NAMES[0], 4, (4, 2, 1), id="decoders from cp4"),
    pytest.param(PATTERN_NAMES[1], 4, (4, 2, 1), id="encoders from cp4"),
    pytest.param(PATTERN_NAMES[0], 1, (4, 2), id="decoders from 1"),
    *(
        pytest.param(name, saved, opened, id=f"{name}, from {saved}", marks=SLOW)
        for name, saved, opened in (
            (PATTERN_NAMES[0], 2, (4, 2, 1)),
            (PATTERN_NAMES[1], 2, (4, 2, 1)),
            (PATTERN_NAMES[1], 1, (4, 2)),
            (f"{PATTERN_NAMES[0]}, rows of 11 tokens", 4, (4, 3, 2, 1)),
            ("latent, patterns", 4, (4, 2, 1)),
        )
    ),
]


@pytest.mark.parametrize(("name", "saved", "opened"), CASES)
def test_the_next_step_is_that_of_the_run_that_saved(
    workers: Workers, tmp_path: Path, name: str, saved: int, opened: tuple[int, ...]
) -> None:
    assert name in CONTEXT_MODELS
    expected = workers.run(next_step, saved, name, tmp_path, None, timeout=180.0)
    source = checkpoint.find_latest(tmp_path)
    assert source is not None
    for ranks in opened:
        results = workers.run(next_step, ranks, name, tmp_path, source, timeout=180.0)
        if ranks == saved:
            assert all(same(one, other) for one, other in zip(expected, results, strict=True))
            continue
        for one in results:
            assert one[0] == pytest.approx(expected[0][0], rel=1e-12)
            assert far(one[1], expected[0][1]) == {}
            assert far(moments(one), moments(expected[0])) == {}
