"""Presets under usual layouts: each is the same computation, or refused for a reason that the config gives."""

import argparse
import itertools
import re
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatfm.commands.verify import add_verify_arguments, verify_command
from megatfm.config import list_model_presets, load_config
from megatfm.errors import MegatfmError, UsageError
from megatfm.verify.layouts import LAYOUTS
from megatfm.verify.rank_processes import RankPool
from megatfm.verify.shrink import draw_batch, shrink
from megatfm.verify.verify import verify_presets
from tests.support.layouts import EXTENDED

EACH_LAYOUT = {
    "llama3-8b": ("tp2-cp2",), "mistral-7b-v0.1": ("cp2-heads",), "gpt-oss-20b": ("cp3-ring",),
    "deberta-v3-base": ("dp2-zero1",), "electra-small": ("dp2",), "t5-small": ("pp2-dp2",), "switch-base-8": ("ep2",),
}  # fmt: skip
"""A case of each axis, and of kinds of models of which test_expected.py has none."""
EACH_KIND = {
    "llama3-8b": ("dp2-zero0", "cp3-ring"), "mistral-7b-v0.1": ("cp2",), "deepseek-v2-lite": ("tp2", "ep2"),
    "deberta-v3-base": ("cp2",), "t-dmca": ("cp2",), "longformer-base": ("cp2",), "bigbird-base": ("cp3-ring",),
    "spanbert-base": ("cp2",), "electra-small": ("cp2",), "xlnet-base": ("pp2", "cp2"), "t5-small": ("tp2",),
    "quickstart-moe": ("ep2", "cp3-ring"),
}  # fmt: skip
"""Together with those, a case of each layout and kind of model, among them all that once differed."""

REASONS = (
    r"parallel\.ep = 2, but the model has no experts to divide",
    r"parallel\.tp = 2 does not divide model\.(attention|generator)\.n_heads = \d+",
    r"parallel\.cp_method = 'ulysses': \d+ query and \d+ key heads of a tensor-parallel rank can't be dealt",
    r"parallel\.tp = 2: ffn\.name = 'soft_moe' is not cut",
    r"4 pipeline stages \(parallel\.pp = 2, 2 on each rank\), but the model can be cut into \d at most",
)


def check(cases: list[tuple[str, str]]) -> None:
    for case in verify_presets(cases):
        assert not case.is_wrong, case
        assert case.outcome == "agrees" or any(re.search(reason, case.text) for reason in REASONS), case


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("preset", "layouts"), [
    *EACH_LAYOUT.items(), *(pytest.param(*case, marks=EXTENDED) for case in EACH_KIND.items()),
])  # fmt: skip
def test_some_presets_agree(preset: str, layouts: Sequence[str]) -> None:
    check([(preset, layout) for layout in layouts])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_presets_agree(layout: str) -> None:
    check([(preset, layout) for preset in list_model_presets()])


def run_command(*words: str) -> int:
    parser = argparse.ArgumentParser()
    add_verify_arguments(parser)
    return verify_command(parser.parse_args(list(words)))


def test_the_table_and_the_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--presets", "gpt2-124m,gpt2-xl", "parallel.zero=1", "--layouts", "dp2,tp2")
    assert run_command(*words) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split() == ["dp2", "tp2"]
    assert [line.split() for line in printed[1:3]] == [
        ["gpt2-124m", "agrees", "agrees"],
        ["gpt2-xl", "agrees", "refused"],
    ]
    assert printed[3].startswith("refused: gpt2-xl tp2: parallel.tp = 2 does not divide model.attention.n_heads = 25")
    assert printed[4].startswith("3 of 4 cases agree, 1 are refused, 0 differ; ")
    monkeypatch.setattr("megatfm.verify.verify.compute_expected_traffic", lambda *_: [{}, {}])
    assert run_command("--presets", "gpt2-124m", "--layouts", "dp2") == 1
    assert "DIFFERENT: gpt2-124m dp2: rank 0, " in capsys.readouterr().out


@pytest.mark.parametrize(("words", "reason"), [
    (["--presets", "quickstrt"], r"'quickstrt': no such preset \(did you mean 'quickstart'\?\)"),
    (["--presets", "--layouts", "dp3"], r"'dp3': no such layout .* there are dp2, "),
    (["quickstart", "--layouts", "dp2"], "--layouts is for --presets"),
    ([], "verify needs a CONFIG"),
])  # fmt: skip
def test_words_that_do_not_fit(words: list[str], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        run_command(*words)


def fewest_threads(pool: RankPool, enough: int) -> int:
    """Threads of the rank with most of them, once those of closed process groups have ended: they take a moment.

    enough: so few end the wait; 0: wait until the number has stayed the same for half a second."""
    end, counts = time.monotonic() + 20.0, []
    while time.monotonic() < end:
        counts.append(max(len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in pool.pids))
        if counts[-1] <= enough or (not enough and len(counts) > 10 and len(set(counts[-10:])) == 1):
            break
        time.sleep(0.05)
    return counts[-1]


def test_a_team_is_there_again_after_a_failure() -> None:
    """A new team keeps nothing of past steps."""
    layouts = (["parallel.tp=2"], ["parallel.dp_shard=2"], ["parallel.pp=2", "parallel.dp_shard=1"])
    configs = [shrink(load_config("quickstart", layout))[0] for layout in layouts]
    with RankPool() as pool:
        batch = draw_batch(configs[0])
        targets = batch.pop("targets")
        with pytest.raises(MegatfmError, match=r"rank [01] failed: KeyError: 'targets'"):
            pool.step(configs[0], batch)
        first = pool.step(configs[0], {**batch, "targets": targets})
        idle = fewest_threads(pool, 0)
        for config in itertools.islice(itertools.cycle(configs), 6):
            answers = pool.step(config, draw_batch(config))
        assert fewest_threads(pool, idle) <= idle, "threads of past process groups are left"
        second_answers = pool.step(configs[0], {**batch, "targets": targets})
    assert [answer.loss for answer in second_answers] == [answer.loss for answer in first]
    assert len(answers) == 2
