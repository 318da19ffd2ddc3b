"""Models of transformers as oracles: from the same perturbed weights, through our own conversion tables.

`build_pair(config, dtype)` makes a model and its reference; `LargestErrors` holds the largest differences, which
docs/guide/models.md states and tests hold it to.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.convert.architecture import Architecture, find_architecture
from megatfm.convert.weight_mapping import WeightMapping, from_hf, to_hf
from megatfm.layers.initialisation import list_checkpoint_tensors
from megatfm.models import build

ZOO = Path(__file__).resolve().parents[2] / "docs" / "guide" / "models.md"
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
VANISHING = 1e-6
"""A gradient so far below all gradients together has nothing but rounding in it: keys' biases, which softmax undoes."""


class DoubleTorch:
    """The torch module, but what it calls float and float32 is float64."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def cast_to_float64(dtype: torch.dtype, *modules: ModuleType) -> Iterator[None]:
    """Let transformers' casts to float32 (norms, angles, scales) be to float64 under float64."""
    if dtype != torch.float64:
        yield
        return
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        patches = [mock.patch.object(module, "torch", DoubleTorch()) for module in modules]
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()


def dtype_fixture(*modules: ModuleType) -> Any:
    """A fixture `dtype`, of float64 and float32, with what these modules of transformers call float as wide."""

    @pytest.fixture(params=[torch.float64, torch.float32], ids=["float64", "float32"])
    def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
        with cast_to_float64(request.param, *modules):
            yield request.param

    return dtype


def perturb(model: nn.Module, seed: int = 0, scale: float = 0.2) -> None:
    """Norms around 1, all else around 0: nothing where it starts, and attention neither uniform nor saturated."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        is_norm = re.search(r"norm\d?(_out)?\.weight$", name)
        parameter.data.copy_(1 + noise if is_norm else noise)


@dataclass(frozen=True)
class Pair:
    """A model and transformers' from the same weights, and the table between them."""

    model: nn.Module
    reference: Any
    mappings: list[WeightMapping]
    names: Mapping[str, str]
    """Their names in memory → those of files, which the table has."""


def build_pair(
    config: ModelConfig,
    dtype: torch.dtype,
    seed: int = 0,
    among: Sequence[str] | None = None,
    unused: Collection[str] = (),
) -> Pair:
    """Build the model in training mode, the reference (its classifiers drop) in evaluation mode; set all weights.

    among: names of the architectures that may be chosen. unused: parameters of theirs that their forward never reads.
    """
    actual = build(config).to(dtype)
    perturb(actual, seed)
    state = {name: t for name, t in list_checkpoint_tensors(actual).items() if not isinstance(t, nn.Parameter)}
    for i, tensor in enumerate(state.values()):
        draws = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
        tensor.copy_(0.2 * draws)
    name, architecture, their_config = find_architecture(config, among)
    kind = getattr(transformers, name)
    options = {k: v for k, v in their_config.items() if k not in ("architectures", "model_type")}
    if config.family == "decoder" or config.position.name == "rope":
        options["pad_token_id"] = None  # whose embedding would get no gradient
    expected = (
        kind(kind.config_class(**options, attn_implementation="eager", experts_implementation="eager")).to(dtype).eval()
    )
    mappings = list((architecture.map_fused_weights or architecture.map_weights)(config))
    converted = to_hf(mappings, list_checkpoint_tensors(actual))
    if "lm_head.weight" in converted:  # transformers ties T5 v1.1's as long as nobody puts another in its place
        expected.lm_head.weight = nn.Parameter(expected.lm_head.weight.detach().clone())
    in_files = {
        name: get_checkpoint_name(name, architecture, converted.keys())
        for name, _ in expected.named_parameters()
        if name not in unused
    }
    named = {in_files[name]: p for name, p in expected.named_parameters() if name in in_files}
    named |= {name: tensor for name, tensor in expected.named_buffers() if name in converted}
    assert converted.keys() == named.keys()
    with torch.no_grad():
        for key, parameter in named.items():
            assert parameter.shape == converted[key].shape, key
            parameter.copy_(converted[key])
    back = from_hf(mappings, named)
    local = list_checkpoint_tensors(actual)
    assert back.keys() == local.keys()
    assert all(torch.equal(back[key], local[key]) for key in local)
    return Pair(actual, expected, mappings, in_files)


def get_checkpoint_name(name: str, architecture: Architecture, names: Collection[str]) -> str:
    """The name of a parameter in a file, one of these: transformers spells some models otherwise in memory."""
    prefixed = f"{architecture.base_model_prefix}{name}"
    for spelling in (name, prefixed):
        for old, new in architecture.legacy_names:
            spelling = re.sub(old, new, spelling)
        if spelling in names:
            return spelling
    return name


@dataclass
class LargestErrors:
    """The largest absolute difference of logits, and the largest relative one of a parameter's gradient."""

    logits: float = 0.0
    gradient: float = 0.0
    compared: int = 0

    def compare_logits(self, actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
        """Raises AssertionError beyond the tolerance, relative to the largest logit."""
        assert actual.shape == expected.shape
        assert actual.dtype == expected.dtype == dtype
        difference = float((actual - expected).detach().abs().max())
        assert difference <= TOLERANCE[dtype] * max(1.0, float(expected.detach().abs().max()))
        self.logits = max(self.logits, difference)

    def compare_losses(self, actual: Tensor, expected: Tensor, pair: Pair, dtype: torch.dtype) -> None:
        """Compare losses, and every parameter's gradient of them."""
        self.compare_logits(actual, expected, dtype)
        actual.backward()
        expected.backward()
        self.compare_gradients(pair, dtype)

    def compare_gradients(self, pair: Pair, dtype: torch.dtype, undone: tuple[str, ...] = ()) -> None:
        """Compare every parameter's gradient after both backward passes. Raises AssertionError beyond the tolerance.

        undone: names of theirs that a softmax undoes as it does keys' biases.
        """
        gradients = {name: p.grad for name, p in pair.model.named_parameters() if p.grad is not None}
        assert gradients.keys() == dict(pair.model.named_parameters()).keys()
        local = [
            mapping for mapping in pair.mappings if gradients.keys() >= set(mapping.megatfm)
        ]  # all but those of state
        assert {name for mapping in local for name in mapping.megatfm} == gradients.keys()
        converted = to_hf(local, gradients)
        reference_gradients = {name: p.grad for name, p in pair.reference.named_parameters()}
        reference = {in_file: reference_gradients[name] for name, in_file in pair.names.items()}
        assert reference.keys() == converted.keys()
        for name in [n for n, g in reference.items() if ".experts." in n and (g is None or not g.any())]:
            assert not converted[name].any(), f"{name}: of an expert that no real token chose"
            del reference[name]
        for name in [name for name, g in reference.items() if name.endswith("mask_token") and g is None]:
            assert not converted[name].any(), f"{name}: in no pass of theirs"
            del reference[name]
        full = float(torch.stack([g.norm() for g in reference.values()]).norm())
        for name, expected in reference.items():
            error, norm = float((converted[name] - expected).norm()), float(expected.norm())
            if norm <= VANISHING * full:
                assert name.endswith((".key.bias", "key_global.bias", "k_proj.bias", "key_proj.bias", *undone)), (
                    f"nothing to compare for {name}"
                )
                assert error <= TOLERANCE[dtype] * full, name
                continue
            assert error <= TOLERANCE[dtype] * norm, f"{name}: {error / norm:.1e}"
            self.gradient = max(self.gradient, error / norm)
            self.compared += 1


def get_table_row(preset: str) -> list[str]:
    """The cells of its row in docs/guide/models.md."""
    for line in ZOO.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) > 2 and f"`{preset}`" in cells[0]:
            return cells
    raise AssertionError(f"docs/guide/models.md has no row for {preset}")


def assert_documented(preset: str, dtype: torch.dtype, figures: LargestErrors) -> None:
    """Figures are at most what docs/guide/models.md states, but for another CPU's rounding: four times that."""
    numbers = [float(number) for number in re.findall(r"\d(?:\.\d)?e-\d+", get_table_row(preset)[-1])]
    assert len(numbers) == 4, "logits in float32 and float64, gradients in float32 and float64"
    logits, gradient = numbers[:2], numbers[2:]
    column = dtype == torch.float64
    assert figures.logits <= 4 * logits[column], f"{preset}: logits {figures.logits:.1e}, {dtype}"
    assert figures.gradient <= 4 * gradient[column], f"{preset}: gradient {figures.gradient:.1e}, {dtype}"
