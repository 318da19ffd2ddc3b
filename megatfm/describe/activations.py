"""What blocks keep for the backward pass, measured on tensors that have shapes and no values."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from megatfm.config import Config
from megatfm.layers.attention.core import Core
from megatfm.layers.attention.patterns import Full
from megatfm.layers.embedding import Embedding
from megatfm.models.steps import ForwardPass, ModelStep, ModelSteps
from megatfm.ops.grouped import KERNELS
from megatfm.parallel.blocks import blocks
from megatfm.train.build import build_model

log = logging.getLogger("megatfm")

COMPUTED = {"fp64": torch.float64, "fp32": torch.float32}
"""The type of activations by `train.precision`; of the mixed ones 2 bytes."""


class Kept:
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


def kept_by_blocks(config: Config) -> tuple[int, int] | None:
    """Bytes that all blocks keep of one micro-batch, one process having all of it: without `train.recompute`, and with
    "full", which keeps the blocks' inputs and in the backward pass one block's own. None where a part of the model
    decides by values how much it keeps.

    Blocks are taken as they run eagerly, and experts as on a GPU; one of a kind stands for the others. Attention by
    blocks of keys keeps what a fused kernel does, and is counted as one. Rows of one document are assumed.
    """
    of_library = logging.getLogger("torch._subclasses.fake_tensor")
    before, of_library.disabled = of_library.disabled, True
    try:
        with FakeTensorMode(), _experts_by_shapes():
            return _measured(config)
    except (
        Exception
    ) as error:  # of any part, a plugin's too, which asks for a value or for a kernel that has no shape rule
        log.debug("what blocks keep is not counted: %s: %s", type(error).__name__, error)
        return None
    finally:
        of_library.disabled = before


class _Products(torch.autograd.Function):
    """What experts' products keep."""

    @staticmethod
    def forward(ctx, x_MI, weight_GOI, ends_G):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x_MI, weight_GOI, ends_G)
        return x_MI.new_empty(len(x_MI), weight_GOI.shape[1])


@contextmanager
def _experts_by_shapes() -> Iterator[None]:
    """Products of experts by their shapes: whose a row is is a matter of values, how many there are is not."""
    before = dict(KERNELS)
    KERNELS.update(dict.fromkeys(KERNELS, _Products.apply))
    try:
        yield
    finally:
        KERNELS.update(before)


def _measured(config: Config) -> tuple[int, int]:
    dtype = COMPUTED.get(config.train.precision, torch.bfloat16)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = build_model(config).train()
    finally:
        torch.set_default_dtype(default)
    for core in model.modules():
        if isinstance(core, Core) and core.pattern.plain is None:
            core.pattern, core.dropout.rate = Full(causal=True), 0.0
            core.variant = replace(core.variant, dropout=0.0)
    of_blocks, seen = {id(block) for block in blocks(model)}, dict[tuple[object, ...], int]()
    steps: ModelSteps = model.steps  # type: ignore[assignment]
    batch = ForwardPass(_inputs(config, model, steps))
    whole, inputs, largest, found = 0, 0, 0, 0
    for step in steps:
        block = step.run if id(step.run) in of_blocks else None
        if block is None:
            _skip(step, batch, dtype)
            continue
        kind = type(block), getattr(block, "kind", None), step.tokens, tuple(step.reads)
        # The first of its kind may make what the others share, such as a mask: the second one stands for the rest.
        if seen.get(kind, 0) < 2:
            kept = Kept(model)
            with kept.counted():
                batch.keep(step, step.run(*step.inputs(batch)))
            seen[kind] = seen.get(kind, 0) + 1
            found = kept.bytes
        whole, largest = whole + found, max(largest, found)
        inputs += sum(batch.carry[part].nbytes for part in step.writes if part in batch.carry)
    return whole, inputs + largest


def _inputs(config: Config, model: nn.Module, steps: ModelSteps) -> dict[str, Tensor]:
    """A batch's fields, as long as rows are: of what embeddings read, shapes matter alone."""
    rows, length = config.train.micro_batch, config.data.sequence_length
    lengths = {step.tokens.removesuffix("tokens"): length for step in steps}
    if len(lengths) > 1:
        lengths[""] = config.data.target_length or length
    read = {module.reads for module in model.modules() if isinstance(module, Embedding)} | {"tokens"}
    zeros = {
        side + name: torch.zeros(rows, t, dtype=torch.int64) for side, t in lengths.items() for name in read
    }
    return {**zeros, "keys": torch.zeros(rows, dtype=torch.int64)}


def _skip(step: ModelStep, batch: ForwardPass, dtype: torch.dtype) -> None:
    """Leave what the step would have: of embeddings and heads only blocks' inputs are needed."""
    for part, field in step.writes.items():
        if field.length is None:
            side = field.like.removesuffix("tokens").removesuffix("positions")
            rows, length = batch[f"{side}tokens"].shape
            batch.carry[part] = (
                torch.zeros(rows, length, dtype=torch.int64)
                if field.width is None
                else torch.zeros(rows, length, field.width, dtype=dtype, requires_grad=True)
            )
