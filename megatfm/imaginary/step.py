"""Batches and steps of a traced rank."""

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatfm.config import Config
from megatfm.data.loader import without_documents
from megatfm.engines.interface import Arrays, Engine
from megatfm.imaginary.device import ImaginaryGPU
from megatfm.imaginary.ledger import Ledger
from megatfm.parallel.layout import iter_blocks
from megatfm.train.signals import StopSignals
from megatfm.verify.shrink import draw_batch, objective_for
from megatfm.verify.traffic import TrafficCounter

if TYPE_CHECKING:
    from megatfm.imaginary.trace import Trace


def make_batches(config: Config, data_ranks: int, microbatches: int | None) -> list[Arrays]:
    """Return a rank's micro-batches of a step, all the same: rows of one document, as the loader gives them.

    microbatches: at most so many.
    """
    n_microbatches = config.train.global_batch // data_ranks // config.train.micro_batch
    train = config.train.model_copy(update={"global_batch": config.train.micro_batch})
    rows = draw_batch(config.model_copy(update={"train": train}), "one")
    fields = {name: torch.from_numpy(values) for name, values in without_documents(rows).items()}
    return [dict(fields) for _ in range(min(n_microbatches, microbatches or n_microbatches))]


def take_steps(
    config: Config, engine: Engine, gpu: ImaginaryGPU, batches: list[Arrays], steps: int, record: "Trace"
) -> None:
    """Take steps, and record the last one in `record`."""
    objective, signals, memory = objective_for(config), StopSignals(engine.device), gpu.memory
    gpu.weight_shapes = _watch_model(engine, memory)
    for _ in range(steps):
        gpu.kernels, gpu.waits, gpu.copies = Counter(), Counter(), Counter()
        memory.begin("passes")
        with TrafficCounter(engine.process_groups()) as traffic:
            engine.forward_backward(batches, objective)
            record.passes, record.at_peak = memory.peak, memory.at_peak()
            memory.begin("optimizer")
            engine.step(config.optimizer.lr, config.optimizer.max_grad_norm)
        signals.agree_deferred()
        record.optimizer, record.at_rest = memory.peak, memory.live_bytes
        if record.optimizer > record.passes:
            record.at_peak = memory.at_peak()
    record.sent = [(flow.axis, flow.collective, flow.calls, flow.sent_bytes) for flow in traffic.list_traffic()]
    record.kernels = {f"{phase}: {name}": count for (phase, name), count in gpu.kernels.most_common()}
    record.waits, record.copies = dict(gpu.waits.most_common()), dict(gpu.copies.most_common())
    record.all_pairs = dict(gpu.all_pairs)
    record.largest = f"{gpu.largest[0]} bytes: {gpu.largest[1]}"


def _watch_model(engine: Engine, memory: Ledger) -> frozenset[tuple[int, ...]]:
    """Install hooks that set the ledger's layer to the block that runs forward; return the shapes of the weights."""
    model = getattr(engine, "model", None)
    if not isinstance(model, nn.Module):
        return frozenset()
    paths = {module: path for path, module in model.named_modules()}

    def enter(module: nn.Module, *_: Any) -> None:
        memory.layer = paths[module]

    def leave(*_: Any) -> None:
        memory.layer = "-"

    for block in iter_blocks(model):
        block.register_forward_pre_hook(enter)
        block.register_forward_hook(leave)
    return frozenset(tuple(parameter.shape) for parameter in model.parameters())
