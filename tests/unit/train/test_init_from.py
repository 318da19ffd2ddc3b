"""Which weights are taken over from another run, by name, and what is said of the others."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatfm import checkpoint
from megatfm.config import ParallelConfig
from megatfm.errors import UsageError
from megatfm.train.init_from import load_weights, match_weights
from tests.support.models import ADAMW, UNTIED_MODEL
from tests.support.parity import build_engine
from tests.support.workers import Workers

BODY = {"decoder.embedding.tokens.weight": (40, 8), "decoder.layers.0.attn.wq.weight": (8, 8)}
STORED = {**BODY, "head.weight": (40, 8), "head.bias": (40,)}
SOURCE = Path("runs/before")


def test_all_are_taken_over_where_all_fit() -> None:
    takeover = match_weights(STORED, STORED, [], SOURCE)
    assert takeover.loaded == STORED
    assert not takeover.missing
    assert str(takeover) == "the weights of runs/before"


def test_the_table_tells_what_is_taken_drawn_and_left() -> None:
    expected = {**BODY, "topic.weight": (5, 8)}
    takeover = match_weights(expected, STORED, ["decoder.*"], SOURCE)
    assert takeover.loaded == BODY
    assert str(takeover) == "2 of the 3 weights of runs/before"
    assert takeover.format_table() == [
        "weights of runs/before",
        "  loaded       2 tensors, 384 parameters",
        "  initialized  1 tensors, 40 parameters: topic.weight [5, 8]",
        "  not used     2 tensors, 360 parameters: head.weight [40, 8], head.bias [40]",
    ]


def test_another_family_is_told_apart_from_other_sizes() -> None:
    expected = {name.replace("decoder.", "encoder."): shape for name, shape in BODY.items()}
    with pytest.raises(
        UsageError, match=r"of another model\.family \(decoder, head; here encoder\): choose that"
    ):
        match_weights(expected, STORED, [], SOURCE)
    wider = {name: (*shape[:-1], 16) for name, shape in STORED.items()}
    with pytest.raises(
        UsageError, match=r"use the weights of a model of the same sizes, or choose its sizes$"
    ):
        match_weights(wider, STORED, [], SOURCE)


@pytest.mark.parametrize(
    ("expected", "only", "message"),
    [
        (
            {**BODY, "topic.weight": (5, 8)},
            [],
            r"""no topic\.weight: name the .* 'train\.init_include=\["decoder\.\*"\]'$""",
        ),
        ({**BODY, "head.weight": (50, 8)}, [], r"head\.weight is \[40, 8\] there and \[50, 8\] here"),
        ({**BODY, "topic.weight": (5, 8)}, ["topic.*"], r"it has no topic\.weight"),
        (BODY, ["decoder.layer.*"], r"'decoder\.layer\.\*' matches none .*such as 'decoder\.\*'"),
        ({"other.weight": (3,)}, [], r"it has no other\.weight: these are the weights of another"),
    ],
)
def test_what_does_not_fit_is_named_with_a_way_out(expected: dict, only: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        match_weights(expected, STORED, only, SOURCE)


def takes_what_rank_0_found(folder: Path) -> float:
    """The other run saves between two ranks' looks."""
    engine = build_engine(UNTIED_MODEL, ParallelConfig(dp_shard=2), ADAMW)
    for step in (1, 2):
        for tensor in engine.local.values():
            tensor.fill_(float(step))
        checkpoint.save(folder, step, engine.state_dict(), {})
    local = folder / f"step-0000000{2 - dist.get_rank()}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "find_checkpoint", lambda _: local)
        taken = load_weights(engine, folder)
    assert taken.source.name == "step-00000002"
    return float(torch.cat([tensor.flatten() for tensor in engine.local.values()]).mean())


def test_all_ranks_take_the_checkpoint_that_rank_0_found(workers: Workers, tmp_path: Path) -> None:
    assert workers.run(takes_what_rank_0_found, 2, tmp_path) == [2.0, 2.0]
