"""A pass asks for no copy from the host, and attention that no kernel knows holds some rows of scores at a time."""

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import megatfm
from megatfm import parallel
from megatfm.config import ModelConfig, load_config
from megatfm.engines.losses import to_device
from megatfm.layers.initialisation import initialise
from megatfm.layers.position import Rope
from megatfm.layers.sequence import SequenceMetadata
from megatfm.models import build
from megatfm.ops.attention import reference
from megatfm.ops.cross_entropy import IGNORE
from tests.support.models import ROW_LENGTH, SCORE_MODELS, SCORE_SIZES, loss_gradients, score_inputs

SMALL = [
    "model.d_model=32", "model.n_layers=2", "model.attention.n_heads=2", "model.ffn.d_ff=32", "model.vocab_size=64",
]  # fmt: skip
B, T = 2, 16
LISTS = re.compile(r"torch\.(?:as_)?tensor\((?:[^()]|\([^()]*\))*?\bdevice=")
"""Tensors made of lists on a device; arguments may have calls, over several lines."""
PLAIN = ["model.dropout=0", "model.attention.dropout=0"]


class Copies(TorchDispatchMode):
    """Notes operators that bring what lies on the host to another device, and those that hash."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []
        self.hashed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.device.type == "cpu"]
        if inputs and any(isinstance(x, Tensor) and x.device.type == "meta" for x in tree_leaves(result)):
            self.operators.append(str(func))
        self.hashed += "bitwise_xor" in str(func)
        return result


def passes(overrides: list[str], preset: str = "gpt2-124m") -> Copies:
    """Passes over a batch on another device than the host: torch's "meta" stands for a GPU."""
    with torch.device("meta"):
        model = build(load_config(preset, [*SMALL, *overrides]).model).train()
        batch = dict.fromkeys(("tokens", "targets", "positions", "documents"), torch.zeros(B, T, dtype=torch.int64))
        batch["keys"] = torch.zeros(B, dtype=torch.int64)
    with Copies() as copies:
        (loss,) = model(**batch).losses.values()
        loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    return copies


YARN = '{name="rope", scaling={name="yarn", factor=4.0, original_length=8}}'


@pytest.mark.parametrize("overrides", [
    ["model.dropout=0.1", "model.attention.dropout=0.1", "model.drop_path=0.2"],
    [*PLAIN, f"model.position={YARN}"],
    [*PLAIN, 'model.position={name="sinusoidal"}'],
], ids=["dropout", "rope", "sinusoidal"])  # fmt: skip
def test_no_copy_from_the_host(overrides: list[str]) -> None:
    assert passes(overrides).operators == []


def test_keys_are_hashed_only_where_something_is_dropped() -> None:
    assert passes(PLAIN).hashed == 0
    assert passes(["model.dropout=0.1", "model.attention.dropout=0"]).hashed > 0


def test_batches_are_copied_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[torch.Size] = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: (pinned.append(self.shape), self)[1])
    moved: list[bool] = []
    real = Tensor.to
    monkeypatch.setattr(
        Tensor, "to", lambda self, *a, non_blocking=False, **k: (moved.append(non_blocking), real(self, *a, **k))[1]
    )
    batch = {"tokens": np.zeros((2, 3), np.int64), "keys": np.zeros(2, np.int64)}
    assert to_device(batch, torch.device("meta"))["tokens"].device.type == "meta"
    assert pinned == [(2, 3), (2,)]
    assert moved == [True, True]
    assert to_device(batch, torch.device("cpu"))["tokens"].device.type == "cpu"
    assert len(pinned) == 2


def test_places_of_tokens_are_copied_so_too() -> None:
    """Places of rows that are cut over ranks count, too, in each layer and pass."""
    folder = Path(parallel.__file__).parent
    actual = [path.name for path in folder.glob("*.py") if re.search(r"\.to\([\w.]*device\)", path.read_text("utf-8"))]
    assert actual == []


def test_nothing_is_made_of_lists_on_a_device() -> None:
    """`torch.tensor([…], device=…)` copies from memory that isn't pinned, for which the host waits."""
    root = Path(megatfm.__file__).parent
    actual = [
        str(path.relative_to(root))
        for room in ("ops", "layers", "models", "parallel", "engines")
        for path in (root / room).rglob("*.py")
        if LISTS.search(path.read_text("utf-8"))
    ]
    assert actual == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rotary_tables_are_made_once_in_the_type_that_turns(dtype: torch.dtype) -> None:
    model = build(load_config("quickstart", SMALL).model).to(dtype)
    rope = next(module for module in model.modules() if isinstance(module, Rope))
    sequence = SequenceMetadata(torch.arange(T).expand(B, T))
    heads = torch.ones(B, 2, T, 16, dtype=dtype)
    rope(heads, heads, sequence)
    (tables,) = [cached for cached in sequence._cache.values() if isinstance(cached, tuple)]
    assert {table.dtype for table in tables} == {torch.promote_types(dtype, torch.float32)}


# --------------------------------------------------------------------------------------------- rows of scores


STEP = 6
"""Number of queries at a time."""


def pieces_of(family: str, inputs: dict[str, Tensor]) -> int:
    """Pieces of two blocks; XLNet's content stream goes through the first alone."""
    of_row = -(-ROW_LENGTH // STEP)
    if family != "xlnet":
        return 2 * of_row
    most = int((inputs["targets"] != IGNORE).sum(1).max())
    assert most % STEP
    return of_row + 2 * -(-most // STEP)


KINDS = {"shaw": "Full(causal=True) with Shaw's positions", "deberta": "disentangled", "xlnet": "two-stream"}


@pytest.mark.parametrize("name", KINDS)
def test_the_attention_kernel_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    config = ModelConfig.from_dotted({**SCORE_SIZES, **SCORE_MODELS[name]})
    model, inputs = build(config).eval(), score_inputs(config.family, prefix=False)
    initialise(model, 3)
    with caplog.at_level(logging.INFO, "megatfm"), torch.no_grad():
        model(**inputs)
        monkeypatch.setattr(reference, "MAX_SCORES", 1)
        model(**inputs)
    assert [record.message for record in caplog.records if "attention" in record.message] == [
        f"attention {KINDS[name]} on cpu in float32 runs in kernel products, {how}"
        for how in ("all queries at once", "some queries at a time, and again in the backward pass")
    ]


@pytest.mark.parametrize("name", SCORE_MODELS)
def test_gradients_are_those_of_all_queries_at_once(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    config = ModelConfig.from_dotted({**SCORE_SIZES, **SCORE_MODELS[name]})
    inputs = score_inputs(config.family, prefix="prefixes" in name)
    model = build(config).double().train()
    initialise(model, 3)
    full, real, calls = loss_gradients(model, inputs), reference.checkpoint, []

    def counted(*inputs: object, **options: bool) -> object:
        calls.append(inputs)
        return real(*inputs, **options)

    monkeypatch.setattr(reference, "MAX_SCORES", 2 * 4 * ROW_LENGTH * STEP)
    monkeypatch.setattr(reference, "checkpoint", counted)
    parts = loss_gradients(model, inputs)
    assert len(calls) == pieces_of(config.family, inputs)
    assert parts.keys() == full.keys()
    for key, gradient in full.items():
        torch.testing.assert_close(parts[key], gradient, rtol=1e-10, atol=1e-13)
    with torch.no_grad():
        losses_of_all = model(**inputs).losses
    monkeypatch.undo()
    with torch.no_grad():
        for term, loss in model(**inputs).losses.items():
            torch.testing.assert_close(losses_of_all[term], loss, rtol=1e-12, atol=0)
