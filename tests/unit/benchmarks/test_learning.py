"""Learning of models: tasks made by rule, each trained once at a size that means nothing, and the worth of context."""

import importlib.util
import itertools
import json
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.documentation import load_script
from tests.support.forked_commands import ForkedCommand
from tests.support.layouts import EXTENDED, SLOW
from tests.support.workers import Workers

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def tasks() -> Any:
    return load_script("attention_learns")


def value_of(tokens: list[int]) -> int:
    """Value of an expression as Nangia & Bowman define it: medians are cut to an integer, sums are modulo ten."""
    open_: list[list[int]] = [[]]
    operators: list[int] = []
    for token in tokens:
        if token < 4:
            operators.append(token)
            open_.append([])
        elif token == 4:
            values = open_.pop()
            median = int(torch.tensor(values, dtype=torch.float64).quantile(0.5))
            open_[-1].append((min(values), max(values), median, sum(values) % 10)[operators.pop()])
        else:
            open_[-1].append(token - 5)
    ((value,),) = open_
    return value


def test_expressions_are_those_of_long_range_arena(tasks: Any) -> None:
    random, lengths, values = Random(5), [], []
    for _ in range(60):
        (before, *tokens, after), value = tasks.Expressions().draw(random)
        assert (before, after) == (tasks.BEFORE, tasks.AFTER)
        assert 500 < len(tokens) < 2000
        depth = deepest = 0
        for token in tokens:
            depth += (token < 4) - (token == 4)
            deepest = max(deepest, depth)
        assert deepest < 10
        assert value == value_of(tokens)
        lengths.append(len(tokens))
        values.append(value)
    assert len(set(lengths)) > 50
    assert set(values) == set(range(10))


def test_rows_ask_what_can_be_known(tasks: Any) -> None:
    listops = tasks.ListOps(256, tasks.Expressions(20, 60))
    for encoder in (False, True):
        batch = next(listops.iter_batches(3, encoder=encoder))
        documents, targets = batch["documents"][0], batch["targets"][0]
        for number in range(int(documents.max()) + 1):
            at = (documents == number).nonzero()[:, 0]
            requested = at[0 if encoder else -1]
            assert targets[requested] == value_of(batch["tokens"][0, at[1:-1]].tolist())
            assert batch["positions"][0, at].tolist() == list(range(len(at)))
        assert (targets >= 0).sum() == documents.max() + 1 > 3
    recall = tasks.Recall(facts=5)
    batch = recall.draw_batch(3, 40, 1)
    for tokens, targets in zip(batch["tokens"].tolist(), batch["targets"].tolist(), strict=True):
        facts = dict(divmod(token, recall.values) for token in tokens if token < 5 * recall.values)
        assert len(facts) == 5
        for token, target in zip(tokens[-5:], targets[-5:], strict=True):
            assert target == facts[token - 5 * recall.values]
    for at, distance in enumerate(recall.find_distances(batch).tolist(), 35):
        fact = int(batch["tokens"][0, at - distance])
        assert fact // recall.values == batch["tokens"][0, at] - 5 * recall.values


@pytest.mark.parametrize(
    ("task", "length", "only"), [("listops", 128, ["longformer"]), ("recall", 512, ["window", "linformer"])]
)
def test_the_script_writes_a_dated_result(tmp_path: Path, task: str, length: int, only: list[str]) -> None:
    words = [task, "--sizes", length, "3", "2", "--out", tmp_path, "--only", *only]
    script = ForkedCommand(words, tmp_path / "said", ROOT, program="benchmarks/attention_learns.py")
    assert script.wait(120) == 0, script.output
    (result,) = tmp_path.glob(f"*-attention-learns-{task}.json")
    models = json.loads(result.read_text(encoding="utf-8"))["models"]
    assert list(models) == (["guesses", *only] if task == "listops" else only)
    stages = {name: stage for name, stage in models[only[-1]].items() if name != "seconds"}
    if task == "recall":
        assert list(stages) == ["0 to 32", "32 to 64", "64 to 128", "128 to 256", "256 to 512", "all"]
        assert stages["all"]["of"] == sum(stage["of"] for stage in stages.values()) / 2 == 2 * 8
    else:
        assert len(stages) == 3
    assert all(0 <= stage["right"] <= 1 for stage in stages.values() if stage["of"])


@pytest.fixture(scope="module")
def worth() -> Any:
    return load_script("quickstart_learns")


class PreviousTokenCounter(nn.Module):
    """Gives the token one higher than the last a logit of an eighth of how many stand before it in the row."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n

    def forward(self, tokens: Tensor) -> SimpleNamespace:
        before = (torch.arange(1.0, tokens.shape[1] + 1) / 8).expand_as(tokens)
        logits = torch.zeros(*tokens.shape, self.n).scatter(2, (tokens + 1)[..., None], before[..., None])
        return SimpleNamespace(logits=logits)


@pytest.mark.parametrize("context", [16, 32, 64])
def test_each_target_is_judged_once_from_half_of_a_context_to_all_of_it(worth: Any, context: int) -> None:
    n, first, end = 400, 65, 385
    losses = worth.compute_losses(PreviousTokenCounter(n), torch.arange(n - 1), context, first, end)
    place = torch.arange(first, end)
    before = (context // 2 + 1 + (place - 1) % (context // 2)) / 8
    right = (before.exp() + n - 1).log() - before
    torch.testing.assert_close(losses, right, atol=1e-4, rtol=0)  # a place further is an eighth


def test_means_are_by_how_far_back_a_token_occurred_last(worth: Any) -> None:
    text = torch.randint(0, 90, (300,), generator=torch.Generator().manual_seed(7))
    back = worth.find_distances(text)
    for place, token in enumerate(text.tolist()):
        earlier = [place - at for at in range(place) if text[at] == token]
        assert back[place] == min(earlier, default=0)
    short = torch.zeros(60, dtype=torch.int64)  # no target with a whole context
    means = worth.judge(PreviousTokenCounter(91), iter([text, short]), 64)
    assert means["all"]["of"] == 256 - 64 + 32 * ((300 - 1) // 32 - 8)
    groups = [group for name, group in means.items() if name != "all"]
    assert list(means) == ["all", "1 to 16 back", "17 to 32 back", "more than 32 back", "never"][: len(means)]
    assert sum(group["of"] for group in groups) == means["all"]["of"]
    for context in (16, 32, 64):
        mean = sum(group["of"] * group["nats"][context] for group in groups) / means["all"]["of"]
        assert mean == pytest.approx(means["all"]["nats"][context], abs=1e-3)
        losses = worth.compute_losses(PreviousTokenCounter(91), text, context, 65, 289)
        near = (back[65:289] > 0) & (back[65:289] <= 16)
        mean = means["1 to 16 back"]["nats"][context]
        assert mean == pytest.approx(float(losses[near].mean()), abs=1e-3)


NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton: pip install triton")


@contextmanager
def ignore_torch_s_warnings() -> Iterator[None]:
    """Dynamo looks at the gradient of whatever it meets, and inductor at what is deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def compile_for_a_gpu(preset: str, dtype: str, ways: list[str]) -> list[tuple[str, str, int, int]]:
    """Way, name, registers and spilled bytes of each kernel; in a rank, which has imported inductor."""
    with ignore_torch_s_warnings():
        compiled = itertools.takewhile(
            lambda row: row[0] in ways, load_script("compiled_kernels").compile_preset(preset, dtype)
        )
        return [(way, kernel.name, use.registers, use.spilled) for way, kernel, use in compiled]


def list_kernel_names(case: str) -> list[list[str]]:
    with ignore_torch_s_warnings():
        module = load_script("compiled_kernels")
        return [[kernel.name for kernel in written] for written in module.list_kernels(module.load_case(case))]


@NEEDS_TRITON
@pytest.mark.parametrize(("preset", "dtype", "ways"), [
    ("gpt2-124m", "bf16", ["forward"]),
        pytest.param("gpt2-124m", "bf16", ["forward", "backward"], marks=EXTENDED),
    *(
        pytest.param(preset, dtype, ["forward", "backward"], marks=SLOW)
        for preset in ("bert-base", "llama3-8b")
        for dtype in ("bf16", "fp32")
    ),
])  # fmt: skip
def test_block_kernels_compile_for_a_gpu_without_spills(
    workers: Workers, preset: str, dtype: str, ways: list[str]
) -> None:
    """Kernels include dropout: Triton takes no constant of 64 bits beside an index of 32."""
    (kernels,) = workers.run(compile_for_a_gpu, 1, preset, dtype, ways, timeout=250.0)
    assert list(dict.fromkeys(way for way, *_ in kernels)) == ways
    for _, name, registers, spilled in kernels:
        assert registers <= 128, name
        assert spilled == 0, name


BUDGETS = {"GPT-2 (LayerNorm, GELU)": (4, 11), "Llama (RMSNorm, SwiGLU, RoPE)": (8, 9)}
"""Kernels forward and backward. Where a change makes them fewer, lower them here."""
NORM, ACTIVATION = re.compile("native_layer_norm|rsqrt"), re.compile("gelu|silu")
ADDITION = re.compile(r"triton_poi_fused_(_unsafe_view_)?add(_view)?_\d+")


@NEEDS_TRITON
@pytest.mark.parametrize("case", BUDGETS)
def test_neighbouring_operations_fuse_into_one_kernel(workers: Workers, case: str) -> None:
    ((forward, backward),) = workers.run(list_kernel_names, 1, case, timeout=250.0)
    assert len(forward) <= BUDGETS[case][0], forward
    assert len(backward) <= BUDGETS[case][1], backward
    norms = [name for name in forward if NORM.search(name)]
    assert len(norms) == 2, "the second with the residual that it is of"
    assert "add" in norms[1]
    assert len([name for name in forward if ACTIVATION.search(name)]) == 1
    assert len([name for name in forward if ADDITION.fullmatch(name)]) == 1, "the residual that a block ends with"
