"""Activation memory of blocks, measured on fake tensors: shapes without values."""

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.autograd.graph import saved_tensors_hooks

from megatfm.config import Config
from megatfm.errors import UsageError
from megatfm.layers.attention.dot_product import DotProductAttention
from megatfm.layers.attention.patterns.local import Full
from megatfm.layers.embedding import InputEmbedding
from megatfm.models.stack import Stack
from megatfm.ops.attention.kernels import LONG
from megatfm.ops.moe import KERNELS
from megatfm.parallel.layout import iter_blocks, replace_forward
from megatfm.split_points import CarrySpec, SplitPoint, Splittable
from megatfm.terminal import mute_log_once
from megatfm.train.build import build_model

log = logging.getLogger("megatfm")

ACTIVATION_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16}
"""Dtype of activations by `train.precision`; bfloat16 for the others."""

DATA_DEPENDENT_ERRORS = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
"""Errors of fake tensors: a module needs a value, or an operator has no shape rule."""


class SavedTensors:
    """Bytes of the tensors that autograd saves for the backward pass: each storage once, weights left out."""

    def __init__(self, model: nn.Module) -> None:
        self._weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        self._storages: dict[int, torch.UntypedStorage] = {}

    @property
    def bytes(self) -> int:
        """Bytes saved so far."""
        return sum(storage.nbytes() for storage in self._storages.values())

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the tensors that forward passes in this context save."""
        with saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._weights:
            self._storages[storage._cdata] = storage
        return tensor


def measure_block_activations(config: Config) -> tuple[int, int] | None:
    """Measure the bytes that all blocks save for one micro-batch on a single process.

    Returns (without recomputation, with `train.recompute = "full"`): the latter keeps the inputs of all blocks, and
    during the backward pass the activations of one block. Returns None where a module saves more or less depending on
    values.

    Blocks run eagerly (not compiled) and experts as on a GPU. One block of each kind represents the others. Blockwise
    attention counts as a fused kernel, which saves as much. Rows hold one document. Raises UsageError for a family
    without split points, and any error of the model's forward pass.
    """
    try:
        with quiet_fake_tensors(), FakeTensorMode(), replace_grouped_matmul(_ShapeOnlyGroupedMatmul.apply):
            return _measure(config)
    except DATA_DEPENDENT_ERRORS as error:
        log.debug("activation memory is not counted: %s: %s", type(error).__name__, error)
        return None


@contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Silence torch's log about fake tensors, and megatfm's about the kernels that they run in."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        with mute_log_once():
            yield
    finally:
        logger.disabled = was_disabled


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Create floating-point tensors in a dtype."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(default)


class _ShapeOnlyGroupedMatmul(torch.autograd.Function):
    """Stand-in for the experts' grouped matmul that saves the same tensors."""

    @staticmethod
    def forward(ctx, x_MI, weight_GOI, ends_G):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x_MI, weight_GOI, ends_G)
        return x_MI.new_empty(len(x_MI), weight_GOI.shape[1])


@contextmanager
def replace_grouped_matmul(matmul: Callable[..., Any]) -> Iterator[None]:
    """Replace experts' grouped matmuls: rows per expert depend on values, their total does not.

    matmul: takes the rows [M, I], the stacked weights [G, O, I] and the ends of groups [G].
    """
    kernels_before = dict(KERNELS)
    KERNELS.update(dict.fromkeys(KERNELS, matmul))
    try:
        yield
    finally:
        KERNELS.update(kernels_before)


def _measure(config: Config) -> tuple[int, int]:
    dtype = ACTIVATION_DTYPES.get(config.train.precision, torch.bfloat16)
    model = _build(config, dtype)
    blocks = set(iter_blocks(model))
    stack_paths = {block: path.rpartition(".")[0] for path, block in model.named_modules() if block in blocks}
    block_kinds, sums = dict[Hashable, tuple[int, int, Any]](), {"all": 0, "inputs": 0, "largest": 0}

    def measure_block(block: nn.Module, forward: Callable[..., Any], x_BTD: Tensor, *args: Any) -> Any:
        kind = stack_paths[block], type(block), getattr(block, "kind", None), x_BTD.shape
        # The first block of a kind may build what all share, such as a mask, so the second represents the others.
        n_runs, n_bytes, result = block_kinds.get(kind, (0, 0, None))
        if n_runs < 2:
            saved_tensors = SavedTensors(model)
            with saved_tensors.counting():
                result = forward(x_BTD, *args)
            n_runs, n_bytes = n_runs + 1, saved_tensors.bytes
        block_kinds[kind] = n_runs, n_bytes, result
        sums["all"] += n_bytes
        sums["largest"] = max(sums["largest"], n_bytes)
        sums["inputs"] += x_BTD.nbytes
        return result

    for block in stack_paths:
        replace_forward(block, partial(measure_block, block, block.forward))
    splittable = cast(Splittable, model)
    points = [p for p in splittable.split_points if model.get_submodule(p.modules[0]) in stack_paths]
    fields, lengths = _make_inputs(config, model, splittable.split_points)
    carry = {
        name: _make_zeros((config.train.micro_batch, lengths[point.token_field]), spec, dtype)
        for point in splittable.split_points
        for name, spec in point.writes.items()
        if spec.length_of is None  # the length of others depends on values
    }
    splittable.stage({point.name for point in points}).forward(**fields, **carry)
    return sums["all"], sums["inputs"] + sums["largest"]


def _build(config: Config, dtype: torch.dtype) -> nn.Module:
    """Build the model with fused attention, whose memory does not depend on values."""
    with default_dtype(dtype):
        model = build_model(config).train()
    if not hasattr(model, "split_points"):
        raise UsageError(f"model.family = {config.model.family!r} has no split points")
    for attention in model.modules():
        if not isinstance(attention, DotProductAttention):
            continue
        if attention.pattern.builtin_mask is None:
            attention.pattern = Full(causal=True)
        elif config.data.sequence_length < LONG:
            continue
        # A fused kernel draws its dropout again in the backward pass, and so saves no mask.
        attention.dropout.rate, attention.options = 0.0, replace(attention.options, dropout=0.0)
    return model


def _make_inputs(
    config: Config, model: nn.Module, points: Sequence[SplitPoint]
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return the fields of a batch, all zeros since only shapes matter, and token field → length of its rows."""
    length = config.data.sequence_length
    lengths = {point.token_field: length for point in points}
    if len(lengths) > 1:
        lengths["tokens"] = config.data.target_length or length
    fields_read = {module.input_field for module in model.modules() if isinstance(module, InputEmbedding | Stack)}
    fields_read.add("tokens")
    accepted = getattr(model, "accepted", frozenset(lengths) | fields_read)
    # ELECTRA's generator runs only if there are targets.
    fields_read |= {"targets", "original"} & accepted if "original" in accepted else set()
    names = {field.removesuffix("tokens") + name: n for field, n in lengths.items() for name in fields_read}
    rows = config.train.micro_batch
    zeros = {name: torch.zeros(rows, n, dtype=torch.int64) for name, n in names.items() if name in accepted}
    grids = {
        name: torch.zeros(rows, n, 4, dtype=torch.int32)
        for field, n in lengths.items()
        if (name := f"{field.removesuffix('tokens')}grid") in accepted
        and config.model.stages is None  # the maps of stages have the config's size unless a grid is given
    }
    return {**zeros, **grids, "keys": torch.zeros(rows, dtype=torch.int64)}, lengths


def _make_zeros(shape: tuple[int, int], spec: CarrySpec, dtype: torch.dtype) -> Tensor:
    """Return a carried tensor as an earlier pipeline stage would send it."""
    if spec.d_model is None:
        return torch.zeros(shape, dtype=torch.int64)
    return torch.zeros(*shape, spec.d_model, dtype=dtype, requires_grad=True)
