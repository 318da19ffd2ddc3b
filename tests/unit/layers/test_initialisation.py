"""Initial weights: any box is a slice of the whole, for ever the same; encoders start as in their authors' code."""

import math
import re
import threading
from statistics import NormalDist

import numpy as np
import pytest
import torch
from torch import nn

from megatfm import rng
from megatfm.config import ModelConfig
from megatfm.errors import UsageError
from megatfm.layers import initialisation as initial_module
from megatfm.layers.initialisation import Constant, InitDistribution, Normal, TruncatedNormal, Uniform, draw, initialise
from megatfm.layers.norm import NORMS
from megatfm.models import build

SMALL = {
    "family": "encoder", "vocab_size": 300, "d_model": 96, "n_layers": 2, "attention.n_heads": 3, "ffn.d_ff": 200,
    "norm.name": "layer_norm", "norm.placement": "post", "embedding.norm": True, "ffn.activation": "gelu",
    "attention.bias": True, "ffn.bias": True, "position.name": "learned", "position.max_positions": 64,
    "embedding.n_segments": 2, "lm_head.name": "transform", "lm_head.bias": True,
}  # fmt: skip
SENTENCE = {"extra_heads.sentence.classes": 2}
ELECTRA = {"family": "electra", "embedding.dim": 64, "generator": {"d_model": 48, "n_heads": 1, "d_ff": 96}}


def test_the_truncated_normal_is_the_distribution_of_its_name() -> None:
    """Quantiles against the standard library's normal, cut at two standard deviations."""
    values = draw(TruncatedNormal(0.02), 0, "x", (1000, 500), (0, 0), (1000, 500)).flatten().double() / 0.02
    assert values.abs().max() <= 2
    assert values.abs().max() > 1.999
    normal = NormalDist()
    low, high = normal.cdf(-2), normal.cdf(2)
    for share in (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99):
        expected = normal.inv_cdf(low + share * (high - low))
        assert float((values <= expected).double().mean()) == pytest.approx(share, abs=5 * 0.5 / 500_000**0.5)
    assert float(values.std()) == pytest.approx(0.8796, abs=0.003)


@pytest.mark.parametrize("options", [SENTENCE, ELECTRA], ids=["encoder", "electra"])
@pytest.mark.parametrize(("init", "spread"), [("bert", 0.8796), ("normal", 1.0)])
def test_matrices_by_the_distribution_biases_0_norms_1(init: str, spread: float, options: dict[str, object]) -> None:
    model = build(ModelConfig.from_dotted(**(SMALL | options), **{"init.name": init, "init.std": 0.05}))
    initialise(model, seed=1)
    kinds = set[str]()
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            kinds.add("bias")
            assert not parameter.any(), name
        elif "norm" in name:
            kinds.add("norm")
            assert (parameter == 1).all(), name
        else:
            kinds.add("matrix")
            error = 6 / (2 * parameter.numel()) ** 0.5
            assert float(parameter.detach().std()) == pytest.approx(0.05 * spread, rel=error), name
            assert (parameter.abs() <= 0.1).all() or init == "normal", name
    assert kinds == {"bias", "norm", "matrix"}


def test_no_two_matrices_start_alike() -> None:
    model = build(ModelConfig.from_dotted(**SMALL, **{"init.name": "bert"}))
    initialise(model, seed=1)
    matrices = [p.flatten()[:50] for p in model.parameters() if p.dim() == 2]
    same = [torch.equal(first, second) for i, first in enumerate(matrices) for second in matrices[:i]]
    assert not any(same)


NAME = "layers.0.attn.wq.weight"
GOLDEN_ROWS = [
    [0.005372224, 0.02573459, -0.0076963543, -0.024308708],
    [0.011229237, 0.011535636, -0.006505326, -0.009393031],
    [0.020541817, -0.016886659, 0.011876656, -0.0048044045],
    [-0.028418534, -0.0043794923, -0.0209287, -0.010539443],
]


def draw_full_tensor(shape: tuple[int, ...], seed: int = 7, name: str = NAME, std: float = 0.02) -> torch.Tensor:
    return draw(Normal(std), seed, name, shape, (0,) * len(shape), shape)


def test_draws_keep_their_golden_values() -> None:
    """A change of these changes every run from its seed: a newer NumPy may do it, and must not do it unseen."""
    assert initial_module.ROW_BLOCK == 128
    drawn = draw_full_tensor((300, 4))
    assert drawn.dtype == torch.float32
    np.testing.assert_array_equal(drawn[[0, 127, 128, 299]].numpy(), np.array(GOLDEN_ROWS, np.float32))


@pytest.mark.parametrize("shape", [(300, 5), (128, 3), (129, 3), (1, 4), (260,), (200, 3, 2)])
def test_a_box_is_a_slice_of_the_whole(shape: tuple[int, ...]) -> None:
    full = draw_full_tensor(shape)
    rows = shape[0]
    starts = sorted({0, min(1, rows - 1), rows // 2, min(127, rows - 1), min(128, rows - 1), rows - 1})
    for start in starts:
        for size in {1, (rows - start) // 2, rows - start}:
            for column in {0, *([shape[1] - 2] if len(shape) > 1 else [])}:
                offsets = (start, *([column] if len(shape) > 1 else []), *[0] * (len(shape) - 2))
                sizes = (size, *([2 if column else shape[1]] if len(shape) > 1 else []), *shape[2:])
                box = draw(Normal(0.02), 7, NAME, shape, offsets, sizes)
                slices = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
                assert torch.equal(box, full[slices])
                assert box.is_contiguous()


def at_once(initial: InitDistribution, rows: int, width: tuple[int, ...], block: int) -> np.ndarray:
    """A block as it is defined: all of its numbers, and then those that are drawn anew, by one generator."""
    generator = np.random.Generator(rng.bit_generator(7, "initial", NAME, block))
    if isinstance(initial, Uniform):
        return ((generator.random((rows, *width)) * 2 - 1) * initial.bound).astype(np.float32)
    values = generator.standard_normal((rows, *width), dtype=np.float32)
    while isinstance(initial, TruncatedNormal) and (beyond := np.abs(values) > 2).any():
        values[beyond] = generator.standard_normal(int(beyond.sum()), dtype=np.float32)
    return values * np.float32(initial.std)  # type: ignore[union-attr]


@pytest.mark.parametrize("initial", [Normal(0.02), TruncatedNormal(0.02), Uniform(0.5)])
@pytest.mark.parametrize("piece", [1, 100, 2**20])
def test_rows_drawn_in_pieces_have_the_same_bits(
    initial: InitDistribution, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers of odd count, so that generators have half a draw left between pieces."""
    monkeypatch.setattr("megatfm.layers.initialisation.MAX_DRAW", piece)
    shape = (initial_module.ROW_BLOCK + 5, 3, 7)
    full = np.concatenate([at_once(initial, rows, shape[1:], block) for block, rows in enumerate((128, 5))])
    boxes = ((0, 0, 0), shape), ((17, 0, 0), (1, 3, 7)), ((120, 1, 2), (13, 2, 4)), ((132, 0, 6), (1, 3, 1))
    for offsets, sizes in boxes:
        cut = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
        assert np.array_equal(draw(initial, 7, NAME, shape, offsets, sizes).numpy(), full[cut])


def test_one_expert_takes_the_memory_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 64 experts draws nothing after it, and keeps nothing before it."""
    shape, drawn = (64, 16, 8), []
    monkeypatch.setattr("megatfm.layers.initialisation.MAX_DRAW", 2 * 16 * 8)
    real = initial_module._draw_values
    monkeypatch.setattr(initial_module, "_draw_values", lambda *inputs: (drawn.append(inputs[-1]), real(*inputs))[1])
    draw(Normal(1.0), 7, NAME, shape, (9, 0, 0), (1, 16, 8))
    assert drawn == [(2, 16, 8)] * 5


def test_more_rows_leave_the_others_as_they_are() -> None:
    assert torch.equal(draw_full_tensor((300, 4))[:200], draw_full_tensor((200, 4)))


def test_seed_and_name_decide() -> None:
    drawn = [draw_full_tensor((4, 4), **key) for key in ({}, {"seed": 8}, {"name": "layers.1.attn.wq.weight"})]
    assert not any(torch.equal(a, b) for a in drawn for b in drawn if a is not b)
    blocks = draw_full_tensor((3 * initial_module.ROW_BLOCK, 2)).split(initial_module.ROW_BLOCK)
    assert not any(torch.equal(a, b) for a in blocks for b in blocks if a is not b)


@pytest.mark.parametrize("std", [1.0, 0.02, 1e-4])
def test_draws_are_normal(std: float) -> None:
    values = draw_full_tensor((1000, 100), std=std).double() / std
    n = values.numel()
    assert abs(float(values.mean())) < 5 / math.sqrt(n)
    assert abs(float(values.square().mean()) - 1) < 5 * math.sqrt(2 / n)
    assert abs(float((values**4).mean()) - 3) < 5 * math.sqrt(96 / n)
    assert float(values.abs().max()) > 4, "no tails"


def test_constants_and_empty_boxes() -> None:
    assert torch.equal(draw(Constant(1.0), 7, NAME, (6,), (2,), (3,)), torch.ones(3))
    assert draw(Normal(1.0), 7, NAME, (6, 4), (6, 0), (0, 4)).shape == (0, 4)
    assert draw(Constant(2.0), 7, NAME, (6,), (6,), (0,)).shape == (0,)


@pytest.mark.parametrize("initial", [Normal(0.02), TruncatedNormal(0.02), Uniform(0.5)])
def test_threads_draw_the_same_bits_as_one_thread(initial: InitDistribution, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, offsets, sizes = (6 * initial_module.ROW_BLOCK + 7, 501), (100, 1), (4 * initial_module.ROW_BLOCK + 90, 499)
    assert math.prod(sizes) >= initial_module.MIN_ELEMENTS_FOR_THREADS
    alone = draw(initial, 7, NAME, shape, offsets, sizes)
    drew: set[int] = set()
    together = threading.Barrier(2, timeout=30)  # passed only by two threads at a time
    bits = rng.bit_generator

    def seen(*key: rng.KeyPart) -> np.random.Philox:
        if len(drew) < 2:
            drew.add(threading.get_ident())
            together.wait()
        return bits(*key)

    monkeypatch.setattr(rng, "bit_generator", seen)
    assert torch.equal(draw(initial, 7, NAME, shape, offsets, sizes, threads=2), alone)
    assert len(drew) == 2
    assert threading.get_ident() not in drew


@pytest.mark.parametrize("tensor", ["weight", "shift"])
def test_a_part_without_initial_values_is_refused(monkeypatch: pytest.MonkeyPatch, tensor: str) -> None:
    """Its memory would stay as it was: other values on every rank, or zeros that stop all gradients."""

    class Shifted(nn.Module):
        def __init__(self, d_model: int, eps: float) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(d_model))
            self.register_buffer("shift", torch.zeros(d_model), persistent=False)
            self.initial = {name: Constant(1.0) for name in ("weight", "shift") if name != tensor}

    monkeypatch.setitem(NORMS._parts, "shifted", Shifted)
    config = ModelConfig.from_dotted(
        {"vocab_size": 8, "d_model": 4, "n_layers": 1, "attention.n_heads": 1, "ffn.d_ff": 4, "norm.name": "shifted"}
    )
    place = f"decoder.layers.0.attn_residual.norm.{tensor}"
    expected = f"{place}: has no initial values: set self.initial = {{'{tensor}': …}} in Shifted, with a distribution"
    with pytest.raises(UsageError, match=re.escape(expected)):
        build(config)
