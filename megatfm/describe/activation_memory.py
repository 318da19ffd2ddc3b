"""Memory that blocks keep for the backward pass, measured on tensors that have shapes and no values."""

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
from megatfm.ops.grouped_mm import KERNELS
from megatfm.parallel.layout import replace_forward, transformer_blocks
from megatfm.split_points import CarrySpec, SplitPoint, Splittable
from megatfm.train.build import build_model

log = logging.getLogger("megatfm")

ACTIVATION_DTYPES = {"fp64": torch.float64, "fp32": torch.float32}
"""The type of activations by `train.precision`; of the mixed ones 2 bytes."""


BY_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
"""Raised where a part asks for a value, or for a kernel that has no rule of shapes."""


class SavedTensors:
    """Bytes of what autograd holds on to, each storage once. weights: those of them that are there anyway."""

    def __init__(self, model: nn.Module) -> None:
        self._weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        self._storages: dict[int, torch.UntypedStorage] = {}

    @property
    def bytes(self) -> int:
        """So far."""
        return sum(storage.nbytes() for storage in self._storages.values())

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what forward passes in here keep."""
        with saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._weights:
            self._storages[storage._cdata] = storage
        return tensor


def block_activation_bytes(config: Config) -> tuple[int, int] | None:
    """Bytes that all blocks keep of one micro-batch, one process having all of it: without `train.recompute`, and with
    "full", which keeps the blocks' inputs and in the backward pass one block's own. None where a part of the model
    decides by values how much it keeps.

    Blocks are taken as they run eagerly, and experts as on a GPU; one block of a kind represents the others. Attention
    by blocks of keys keeps what a fused kernel does, and is counted as one. Rows of one document are assumed. Raises
    UsageError for a family without split points, and whatever a part of the model raises.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        with FakeTensorMode(), _experts_by_shapes():
            return _measured(config)
    except BY_VALUES as error:
        log.debug("what blocks keep is not counted: %s: %s", type(error).__name__, error)
        return None
    finally:
        logger.disabled = was_disabled


class _Products(torch.autograd.Function):
    """Stand-in for experts' products: saves what they save."""

    @staticmethod
    def forward(ctx, x_MI, weight_GOI, ends_G):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x_MI, weight_GOI, ends_G)
        return x_MI.new_empty(len(x_MI), weight_GOI.shape[1])


@contextmanager
def _experts_by_shapes() -> Iterator[None]:
    """Products of experts by their shapes: whose a row is is a matter of values, how many there are is not."""
    original_kernels = dict(KERNELS)
    KERNELS.update(dict.fromkeys(KERNELS, _Products.apply))
    try:
        yield
    finally:
        KERNELS.update(original_kernels)


def _measured(config: Config) -> tuple[int, int]:
    dtype = ACTIVATION_DTYPES.get(config.train.precision, torch.bfloat16)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = build_model(config).train()
    finally:
        torch.set_default_dtype(default)
    if not hasattr(model, "split_points"):
        raise UsageError(f"model.family = {config.model.family!r} has no split points")
    for core in model.modules():
        if not isinstance(core, DotProductAttention):
            continue
        if core.pattern.builtin_mask is None:
            core.pattern = Full(causal=True)
        elif config.data.sequence_length < LONG:
            continue
        # Blocks of keys look at values; a fused kernel draws its dropout anew in the backward pass, and keeps no mask.
        core.dropout.rate, core.variant = 0.0, replace(core.variant, dropout=0.0)
    paths = {
        block: path.rpartition(".")[0]
        for path, block in model.named_modules()
        if block in set(transformer_blocks(model))
    }
    by_kind, sums = dict[Hashable, tuple[int, int, Any]](), {"whole": 0, "inputs": 0, "largest": 0}

    def measured(block: nn.Module, forward: Callable[..., Any], x_BTD: Tensor, *args: Any) -> Any:
        kind = paths[block], type(block), getattr(block, "kind", None), x_BTD.shape
        # The first of its kind may make what the others share, such as a mask: the second one represents the rest.
        times, n_bytes, result = by_kind.get(kind, (0, 0, None))
        if times < 2:
            saved_tensors = SavedTensors(model)
            with saved_tensors.counted():
                result = forward(x_BTD, *args)
            times, n_bytes = times + 1, saved_tensors.bytes
        by_kind[kind] = times, n_bytes, result
        sums["whole"] += n_bytes
        sums["largest"] = max(sums["largest"], n_bytes)
        sums["inputs"] += x_BTD.nbytes
        return result

    for block in paths:
        replace_forward(block, partial(measured, block, block.forward))
    splittable = cast(Splittable, model)
    points = [p for p in splittable.split_points if model.get_submodule(p.modules[0]) in paths]
    fields, lengths = _inputs(config, model, splittable.split_points)
    carry = {
        name: _zeros((config.train.micro_batch, lengths[point.token_field]), spec, dtype)
        for point in splittable.split_points
        for name, spec in point.writes.items()
        if spec.length_of is None  # others follow from a batch's values
    }
    splittable.stage({point.name for point in points}).forward(**fields, **carry)
    return sums["whole"], sums["inputs"] + sums["largest"]


def _inputs(
    config: Config, model: nn.Module, points: Sequence[SplitPoint]
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return a batch's fields, as long as rows are, since of what embeddings read shapes matter alone; and the length
    of rows by the field of tokens that goes through a split point."""
    length = config.data.sequence_length
    lengths = {point.token_field: length for point in points}
    if len(lengths) > 1:
        lengths["tokens"] = config.data.target_length or length
    read = {module.reads for module in model.modules() if isinstance(module, InputEmbedding | Stack)} | {
        "tokens"
    }
    # ELECTRA's generator runs where there are targets alone.
    accepted = getattr(model, "accepted", frozenset(lengths) | read)
    read |= {"targets", "original"} & accepted if "original" in accepted else set()
    names = {field.removesuffix("tokens") + name: n for field, n in lengths.items() for name in read}
    rows = config.train.micro_batch
    zeros = {name: torch.zeros(rows, n, dtype=torch.int64) for name, n in names.items() if name in accepted}
    grids = {
        name: torch.zeros(rows, n, 4, dtype=torch.int32)
        for field, n in lengths.items()
        if (name := f"{field.removesuffix('tokens')}grid") in accepted
        and config.model.stages is None  # whose maps are the config's where no values say another size
    }
    return {**zeros, **grids, "keys": torch.zeros(rows, dtype=torch.int64)}, lengths


def _zeros(shape: tuple[int, int], spec: CarrySpec, dtype: torch.dtype) -> Tensor:
    """Return what a stage before would have handed on."""
    if spec.d_model is None:
        return torch.zeros(shape, dtype=torch.int64)
    return torch.zeros(*shape, spec.d_model, dtype=dtype, requires_grad=True)
