"""Batches and steps of a traced rank."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megatfm.config import Config
from megatfm.data.loader import without_documents
from megatfm.engines.interface import Arrays, Engine
from megatfm.imaginary.device import ImaginaryGPU
from megatfm.imaginary.kernels import list_compilations
from megatfm.imaginary.ledger import Ledger
from megatfm.parallel.layout import iter_blocks
from megatfm.train.signals import StopSignals
from megatfm.verify.shrink import draw_batch, objective_for
from megatfm.verify.traffic import TrafficTally

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
    """Take steps, and record the last one in `record`. Those before it have a micro-batch each: they are taken for the
    optimizer's state."""
    objective, signals, memory = objective_for(config), StopSignals(engine.device), gpu.memory
    gpu.weight_shapes = _watch_model(engine, memory, record)
    for step in range(steps):
        gpu.kernels, gpu.waits, gpu.copies = Counter(), Counter(), Counter()
        record.saved.clear()
        memory.begin("passes")
        gpu.traffic = traffic = TrafficTally(engine.process_groups())
        engine.forward_backward(batches if step == steps - 1 else batches[:1], objective)
        record.passes, record.at_peak = memory.peak, memory.at_peak()
        memory.begin("optimizer")
        engine.step(config.optimizer.lr, config.optimizer.max_grad_norm)
        gpu.traffic = None
        signals.agree_deferred()
        record.optimizer, record.at_rest = memory.peak, memory.live_bytes
        if record.optimizer > record.passes:
            record.at_peak = memory.at_peak()
    record.sent = [(flow.axis, flow.collective, flow.calls, flow.sent_bytes) for flow in traffic.list_traffic()]
    record.kernels = {f"{phase}: {name}": count for (phase, name), count in gpu.kernels.most_common()}
    record.waits, record.copies = dict(gpu.waits.most_common()), dict(gpu.copies.most_common())
    record.all_pairs = dict(gpu.all_pairs)
    record.saved = {path: n_bytes // len(batches) for path, n_bytes in record.saved.items()}
    record.graph_breaks, record.recompilations = list_compilations()
    record.largest = f"{gpu.largest[0]} bytes: {gpu.largest[1]}"


def _watch_model(engine: Engine, memory: Ledger, record: "Trace") -> frozenset[tuple[int, ...]]:
    """Set the ledger's layer to the block that runs forward, and record what it saves. Return the weights' shapes."""
    model = getattr(engine, "model", None)
    if not isinstance(model, nn.Module):
        return frozenset()
    paths = {module: path for path, module in model.named_modules()}
    counted: dict[int, Any] = {}
    for block in iter_blocks(model):
        watch = _BlockWatch(memory, paths[block], record.saved, counted)
        if block._compiled_call_impl is not None:  # its hooks would be compiled
            record.is_compiled = True
            block._compiled_call_impl = partial(watch.call, block._compiled_call_impl)
            continue
        block.register_forward_pre_hook(watch.enter, with_kwargs=True)
        block.register_forward_hook(watch.leave)
    return frozenset(tuple(parameter.shape) for parameter in model.parameters())


class _BlockWatch:
    """Adds to `saved` the bytes that each forward pass of a block saves for its backward pass, its input among them.

    They are counted when the backward pass reaches the block's output: what only callers held is freed by then.
    counted: storages that a block has counted; an input that blocks share counts once.
    """

    def __init__(self, memory: Ledger, path: str, saved: dict[str, int], counted: dict[int, Any]) -> None:
        self._memory, self._path, self._saved, self._counted = memory, path, saved, counted
        self._earlier: dict[int, Any] = {}
        self._inputs: dict[int, Any] = {}

    def enter(self, *inputs: Any) -> None:
        """Begin a forward pass. inputs: arguments of a forward pre-hook or of the block."""
        self._memory.layer, self._earlier = self._path, self._memory.list_activations(self._path)
        self._inputs = self._memory.list_storages(_list_trained(inputs))

    def leave(self, *hook_arguments: Any) -> None:
        """End a forward pass. hook_arguments: of a forward hook; the last one is the block's output."""
        self._memory.layer = "-"
        outputs = _list_trained(hook_arguments[-1])
        is_recomputed = torch._C._current_autograd_node() is not None  # in a backward pass
        if not outputs or is_recomputed:
            return
        created = self._memory.list_activations(self._path)
        storages = {key: storage for key, storage in created.items() if self._earlier.get(key) is not storage}
        for key in self._memory.list_storages(outputs):  # a later stage's input, or the next block's
            storages.pop(key, None)
        storages |= self._inputs

        def count(_: Any) -> None:
            new = {key: storage for key, storage in storages.items() if self._counted.get(key) is not storage}
            self._saved[self._path] = self._saved.get(self._path, 0) + self._memory.count_live(new)
            self._counted.update(new)
            storages.clear()  # counted at the first output that the backward pass reaches

        for tensor in outputs:
            tensor.register_hook(count)

    def call(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.enter(args, kwargs)
        output = run(*args, **kwargs)
        self.leave(output)
        return output


def _list_trained(values: Any) -> list[Tensor]:
    """Return the tensors in nested arguments that require gradients."""
    return [value for value in tree_leaves(values) if isinstance(value, Tensor) and value.requires_grad]
