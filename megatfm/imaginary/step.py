"""Batches and steps of a traced rank."""

from collections import Counter
from typing import TYPE_CHECKING

import torch

from megatfm.config import Config
from megatfm.engines.interface import Arrays, Engine
from megatfm.imaginary.device import ImaginaryGPU
from megatfm.train.signals import StopSignals
from megatfm.verify.shrink import draw_batch, objective_for
from megatfm.verify.traffic import TrafficCounter

if TYPE_CHECKING:
    from megatfm.imaginary.trace import Trace


def batches_of(config: Config, data_ranks: int, microbatches: int | None) -> list[Arrays]:
    """Return a rank's micro-batches of a step, all the same: rows of one document. microbatches: at most so many."""
    share = config.train.global_batch // data_ranks // config.train.micro_batch
    train = config.train.model_copy(update={"global_batch": config.train.micro_batch})
    rows = draw_batch(config.model_copy(update={"train": train}), "one")
    fields = {name: torch.from_numpy(values) for name, values in rows.items()}
    return [dict(fields) for _ in range(min(share, microbatches or share))]


def take_steps(
    config: Config, engine: Engine, gpu: ImaginaryGPU, batches: list[Arrays], steps: int, record: "Trace"
) -> None:
    """Take steps, and record the last one in `record`."""
    objective, signals = objective_for(config), StopSignals(engine.device)
    for _ in range(steps):
        gpu.kernels, gpu.waits, gpu.copies = Counter(), Counter(), Counter()
        gpu.phase, gpu.peak = "passes", gpu.now
        with TrafficCounter(engine.process_groups()) as traffic:
            engine.forward_backward(batches, objective)
            record.passes, gpu.phase, gpu.peak = gpu.peak, "optimizer", gpu.now
            engine.step(config.optimizer.lr, config.optimizer.max_grad_norm)
        signals.agree_deferred()
        record.optimizer, record.at_rest = gpu.peak, gpu.now
    record.sent = [(flow.axis, flow.collective, flow.calls, flow.sent_bytes) for flow in traffic.flows()]
    record.kernels = {f"{phase}: {name}": count for (phase, name), count in gpu.kernels.most_common()}
    record.waits, record.copies = dict(gpu.waits.most_common()), dict(gpu.copies.most_common())
    record.all_pairs = dict(gpu.all_pairs)
    record.largest = f"{gpu.largest[0]} bytes: {gpu.largest[1]}"
