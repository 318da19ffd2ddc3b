"""Initial weights: distributions, their reproducible draw, and the distribution of each matrix of a model.

Initial values depend only on (seed, parameter name, row), not on rank, device, layout or order. NumPy's Philox draws
them on the CPU in blocks of rows. Each block has its own generator, so threads can draw blocks in parallel. A rank
draws the rows of a block up to the last one that it holds (all rows for truncated normals), and keeps its own.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from megatfm import rng
from megatfm.config import ModelConfig, require_variant
from megatfm.config.model_parts import NormalInitSection
from megatfm.errors import UsageError
from megatfm.registry import Registry

ROW_BLOCK = 128
"""Rows of a block. Part of the definition of initial weights: never change it."""
MAX_DRAW = 2**20
"""Elements drawn at a time, unless one row has more. The values do not depend on it."""
MIN_ELEMENTS_FOR_THREADS = 2**18
"""Below this size, one thread is as fast as several."""


@dataclass(frozen=True)
class _Scaled:
    """Base of distributions: the learning rate's factor under muP, which comparisons ignore."""

    width_ratio: float = field(default=1.0, compare=False, kw_only=True)
    """muP's factor on the learning rate, base width / width, for matrices whose inputs grow with the width."""


@dataclass(frozen=True)
class Normal(_Scaled):
    """Draw from N(0, std²)."""

    std: float


@dataclass(frozen=True)
class TruncatedNormal(_Scaled):
    """Draw from N(0, std²) truncated to ± 2 std by redrawing, as in BERT."""

    std: float


@dataclass(frozen=True)
class Uniform(_Scaled):
    """Uniform in [−bound, bound)."""

    bound: float


@dataclass(frozen=True)
class Constant(_Scaled):
    """One value everywhere."""

    value: float


@dataclass(frozen=True)
class FixedValues(_Scaled):
    """A list of values along the first dim."""

    values: tuple[float, ...]


InitDistribution = Normal | TruncatedNormal | Uniform | Constant | FixedValues


def draw(
    initial: InitDistribution,
    seed: int,
    name: str,
    shape: Sequence[int],
    offsets: Sequence[int],
    sizes: Sequence[int],
    threads: int = 1,
) -> Tensor:
    """Draw the shard [sizes] at `offsets` of the parameter `name` of global `shape`, float32 on the CPU.

    The result is bitwise the same for any number of threads.
    """
    if isinstance(initial, Constant):
        return torch.full(tuple(sizes), initial.value)
    first, last = offsets[0], offsets[0] + sizes[0]
    if isinstance(initial, FixedValues):
        return torch.tensor(initial.values[first:last]).view(-1, *[1] * (len(sizes) - 1)).expand(*sizes)
    values = np.empty(tuple(sizes), np.float32)
    if 0 in sizes:
        return torch.from_numpy(values)
    columns = tuple(slice(start, start + size) for start, size in zip(offsets[1:], sizes[1:], strict=True))

    def fill(block: int) -> None:
        start = block * ROW_BLOCK
        rows = slice(max(first - start, 0), min(last - start, ROW_BLOCK))
        target = values[start + rows.start - first : start + rows.stop - first]
        count = min(ROW_BLOCK, shape[0] - start)
        generator = np.random.Generator(rng.bit_generator(seed, "initial", name, block))
        _draw_rows(initial, generator, (count, *shape[1:]), (rows, *columns), target)

    blocks = range(first // ROW_BLOCK, (last - 1) // ROW_BLOCK + 1)
    if threads == 1 or values.size < MIN_ELEMENTS_FOR_THREADS:
        for block in blocks:
            fill(block)
    else:
        with ThreadPoolExecutor(min(threads, len(blocks))) as pool:  # NumPy releases the GIL
            list(pool.map(fill, blocks))
    return torch.from_numpy(values)


def _draw_rows(
    initial: Normal | TruncatedNormal | Uniform, generator: np.random.Generator, shape: tuple[int, ...],
    region: tuple[slice, ...], target: NDArray[np.float32],
) -> None:  # fmt: skip
    """Draw rows of a block in order, up to the last one in `region`, and write those of the region to `target`.

    A truncated distribution needs all rows of the block, because its redraws come after them in the random stream.
    """
    (rows, *columns), width = region, prod(shape[1:])
    step = max(1, MAX_DRAW // max(width, 1))
    outliers: list[NDArray[np.int64]] = []
    is_truncated = isinstance(initial, TruncatedNormal)
    end = shape[0] if is_truncated else rows.stop
    for start in range(0, end, step):
        values = _draw_values(initial, generator, (min(step, end - start), *shape[1:]))
        if is_truncated:
            outliers.append(np.flatnonzero(np.abs(values) > 2) + start * width)
        first, last = max(rows.start, start), min(rows.stop, start + len(values))
        if first < last:
            target[first - rows.start : last - rows.start] = values[(slice(first - start, last - start), *columns)]
    redrawn = np.concatenate(outliers) if outliers else np.empty(0, np.int64)
    while len(redrawn):
        values = generator.standard_normal(len(redrawn), dtype=np.float32)
        indices = np.unravel_index(redrawn, shape)
        axes = list(zip(indices, region, strict=True))
        is_kept = np.all([(index >= bounds.start) & (index < bounds.stop) for index, bounds in axes], axis=0)
        target[tuple(index[is_kept] - bounds.start for index, bounds in axes)] = values[is_kept]
        redrawn = redrawn[np.abs(values) > 2]
    if not isinstance(initial, Uniform):
        target *= np.float32(initial.std)


def _draw_values(
    initial: Normal | TruncatedNormal | Uniform, generator: np.random.Generator, shape: tuple[int, ...]
) -> NDArray[np.float32]:
    """Draw the next values of the stream; normal distributions with standard deviation 1."""
    if isinstance(initial, Uniform):
        return ((generator.random(shape) * 2 - 1) * initial.bound).astype(np.float32)
    return generator.standard_normal(shape, dtype=np.float32)


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Initialise all parameters and buffers of an unsharded model; a tied one has the name of its first module."""
    for name, tensor, init in iter_inits(model):
        shape = tuple(tensor.shape)
        tensor.copy_(draw(init, seed, name, shape, (0,) * tensor.dim(), shape))


def list_checkpoint_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that a checkpoint stores, by name: parameters (tied ones once) and persistent buffers."""
    stored = model.state_dict(keep_vars=True).items()
    return {
        **dict(model.named_parameters()),
        **{name: tensor for name, tensor in stored if not isinstance(tensor, nn.Parameter)},
    }


@torch.no_grad()
def initialise_buffers(model: nn.Module) -> None:
    """Initialise the buffers of an unsharded model. Most are not in checkpoints, but follow from the config."""
    for _, tensor, init in iter_inits(model):
        if not isinstance(tensor, nn.Parameter):
            shape = tuple(tensor.shape)
            tensor.copy_(draw(init, 0, "", shape, (0,) * len(shape), shape))


def iter_inits(model: nn.Module) -> Iterator[tuple[str, Tensor, InitDistribution]]:
    """Yield name, tensor and distribution of each parameter and buffer, from the modules' attribute `initial`."""
    for path, module in model.named_modules():
        for key, init in getattr(module, "initial", {}).items():
            yield f"{path}.{key}", getattr(module, key), init


def check_inits(model: nn.Module) -> None:
    """Raise UsageError for a parameter or buffer without initial values, which would be whatever memory held.

    Also for initial values of anything else, or that are no distribution.
    """
    modules, initialised = list(model.named_modules()), set[int]()
    for path, module in modules:
        for key, init in getattr(module, "initial", {}).items():
            if not hasattr(module, key):
                raise UsageError(
                    f"{path}: {type(module).__name__} has no parameter or buffer {key!r}, which its `initial` names"
                )
            if not isinstance(init, InitDistribution):
                raise UsageError(
                    f"{path}.{key}: {init!r} in `initial` of {type(module).__name__} is no distribution: use one of "
                    "megatfm.layers.initialisation, such as Constant(1.0)"
                )
            initialised.add(id(getattr(module, key)))
    for path, module in modules:
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for key, tensor in tensors:
            if id(tensor) not in initialised:
                raise UsageError(
                    f"{path}.{key}: has no initial values: set self.initial = {{'{key}': …}} in "
                    f"{type(module).__name__}, with a distribution of megatfm.layers.initialisation, such as "
                    "Constant(1.0)"
                )


Role = Literal[
    "embedding", "position", "segment", "relative",  # tables
    "query", "key", "value", "out",  # attention
    "ffn_in", "ffn_gate", "ffn_out",
    "dense",  # poolers, transforms, projections of embeddings
    "head",
]  # fmt: skip
"""The purpose of a matrix."""

StackKind = Literal["encoder", "decoder"]

Initialiser = Callable[[Role, int, int], InitDistribution]
"""(role, d_in, d_out) → distribution of the initial weights. For tables: number of rows, width."""

TABLE_ROLES = ("embedding", "position", "segment", "relative", "head")
"""Roles of tables and of the output head."""


class MuPInitialiser:
    """An initialiser under muP: scales hidden matrices by √ratio and their learning rate by `ratio`.

    Embedding tables and the output head are not scaled. plain: the initialiser that the config names. ratio: base
    width / width.
    """

    def __init__(self, plain: Initialiser, name: str, ratio: float) -> None:
        self.plain, self.name, self.ratio = plain, name, ratio

    def __call__(self, role: Role, d_in: int, d_out: int) -> InitDistribution:
        """Return the scaled distribution. Raises UsageError for an initialisation that already depends on the width."""
        initial = self.plain(role, d_in, d_out)
        if role in TABLE_ROLES:
            return initial
        if not isinstance(initial, Normal | TruncatedNormal):
            raise UsageError(
                f"model.mup does not go with model.init.name = {self.name!r}, which already depends on the width: "
                "choose gpt2, normal or bert"
            )
        return replace(initial, std=initial.std * self.ratio**0.5, width_ratio=self.ratio)


def with_fixed_inputs(initial: Initialiser) -> Initialiser:
    """Return the initialiser without muP's scaling, for matrices whose input size does not grow with the width."""
    return initial.plain if isinstance(initial, MuPInitialiser) else initial


def compute_mup_lr_scales(model: nn.Module, config: ModelConfig) -> dict[str, float]:
    """Return muP's factors on the learning rate by parameter name; missing names have factor 1.

    Under muP with Adam, matrices whose inputs grow with the width have factor base_width / d_model (Yang et al. 2022,
    table 8): those of attention, feed-forward networks, experts and routers. Tables, vectors, matrices with fixed
    inputs (latents, a head's channels) and the output head, whose output is scaled instead, have factor 1. The factor
    is stored in the parameter's initial distribution.
    """
    if config.mup is None:
        return {}
    ratios = {name: initial.width_ratio for name, _, initial in iter_inits(model)}
    return {name: ratios[name] for name, _ in model.named_parameters() if ratios.get(name, 1.0) != 1.0}


INITIALISATIONS: Registry[Callable[[ModelConfig, StackKind], Initialiser]] = Registry("initialisation (model.init)")


def make_initialiser(config: ModelConfig, stack_kind: StackKind = "decoder") -> Initialiser:
    """Return the config's initialiser for a stack, with muP's scaling if configured."""
    initial = INITIALISATIONS.get(config.init.name)(config, stack_kind)
    if config.mup is None:
        return initial
    return MuPInitialiser(initial, config.init.name, config.mup.base_width / config.d_model)


def count_blocks(config: ModelConfig, stack: StackKind) -> int:
    """Return the number of blocks of a stack."""
    return config.encoder_layers if stack == "encoder" else config.n_layers


@INITIALISATIONS.register("normal")
def normal(config: ModelConfig, stack: StackKind) -> Initialiser:
    """Draw from N(0, std²)."""
    std = require_variant(config.init, NormalInitSection, "model.init").std
    return lambda role, d_in, d_out: Normal(std)


@INITIALISATIONS.register("bert")
def bert(config: ModelConfig, stack: StackKind) -> Initialiser:
    """Draw from N(0, std²) truncated to two standard deviations."""
    std = require_variant(config.init, NormalInitSection, "model.init").std
    return lambda role, d_in, d_out: TruncatedNormal(std)


@INITIALISATIONS.register("gpt2")
def gpt2(config: ModelConfig, stack: StackKind) -> Initialiser:
    """Draw from N(0, std²), with std / √(2 · depth) for projections back to the residual stream."""
    std = require_variant(config.init, NormalInitSection, "model.init").std
    residual_factor = (2 * count_blocks(config, stack)) ** -0.5

    def initial(role: Role, d_in: int, d_out: int) -> Normal:
        residual = role in ("out", "ffn_out")
        return Normal(std * residual_factor if residual else std)

    return initial


@INITIALISATIONS.register("t5")
def t5(config: ModelConfig, stack: StackKind) -> Initialiser:
    """Draw from normals with standard deviations: token embedding 1, queries (d_model · head_dim)^−½, other matrices
    d_in^−½."""

    def initial(role: Role, d_in: int, d_out: int) -> Normal:
        match role:
            case "embedding":
                return Normal(1.0)
            case "query":
                return Normal((d_in * config.head_width) ** -0.5)
            case "position" | "segment" | "relative":
                return Normal(config.d_model**-0.5)
            case _:
                return Normal(d_in**-0.5)

    return initial


def xavier_uniform(d_in: int, d_out: int, gain: float = 1.0) -> Uniform:
    """Draw uniformly within ± gain · √(6 / (d_in + d_out))."""
    return Uniform(gain * (6 / (d_in + d_out)) ** 0.5)


@INITIALISATIONS.register("xavier")
def xavier(config: ModelConfig, stack: StackKind) -> Initialiser:
    """Draw matrices by fan-in and fan-out; tables and the output head N(0, 1/d_model)."""

    def initial(role: Role, d_in: int, d_out: int) -> InitDistribution:
        if role in TABLE_ROLES:
            return Normal(config.d_model**-0.5)
        return xavier_uniform(d_in, d_out)

    return initial


def compute_deepnorm_constants(config: ModelConfig, stack: StackKind) -> tuple[float, float]:
    """Return α, the factor on the residual stream, and β, the gain of initial weights (Wang et al. 2022, table 1)."""
    if config.family != "encoder_decoder":
        return (2 * config.n_layers) ** 0.25, (8 * config.n_layers) ** -0.25
    n, m = config.encoder_layers, config.n_layers
    if stack == "encoder":
        return 0.81 * (n**4 * m) ** (1 / 16), 0.87 * (n**4 * m) ** (-1 / 16)
    return (3 * m) ** 0.25, (12 * m) ** -0.25


@INITIALISATIONS.register("deepnorm")
def deepnorm(config: ModelConfig, stack: StackKind) -> Initialiser:
    """Draw as Xavier, with gain β for feed-forward, value and output projections."""
    plain, beta = xavier(config, stack), compute_deepnorm_constants(config, stack)[1]

    def initial(role: Role, d_in: int, d_out: int) -> InitDistribution:
        if role in ("value", "out", "ffn_in", "ffn_gate", "ffn_out"):
            return xavier_uniform(d_in, d_out, beta)
        return plain(role, d_in, d_out)

    return initial
