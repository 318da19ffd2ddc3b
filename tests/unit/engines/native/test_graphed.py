"""Passes that are recorded once and repeated: by a stand-in for CUDA's graphs, which repeats operators on the memory
that they were recorded with, so that whatever came from elsewhere would be missing."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatfm.config import Config, ParallelConfig, load_config
from megatfm.engines.native.cuda_graphs import GraphedModel, Run, make_graph_capture
from megatfm.engines.native.engine import NativeEngine
from megatfm.errors import MegatfmError, UsageError
from megatfm.layers.attention.patterns.mask import PatternMask
from tests.support.batches import CAUSAL, global_batch
from tests.support.models import TIED_MODEL, UNTIED_MODEL
from tests.support.parity import build_engine, microbatches
from tests.support.tensors import HostWaits
from tests.support.workers import Workers


class OperatorTape(TorchDispatchMode):
    """The operators that ran, with the tensors that they read and gave."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and "profiler" not in func.namespace:
            self.calls.append((func, args, kwargs or {}, result))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, output in self.calls:
            replayed = func(*args, **kwargs)
            if func._schema.is_mutable:
                continue
            for leaf, value in zip(tree_leaves(output), tree_leaves(replayed), strict=True):
                if isinstance(leaf, Tensor) and not func._schema.name.startswith("aten::empty"):
                    leaf.copy_(value)


class Taped:
    """A recorder on a CPU. Memory holds nonsense after recording, as nothing has run on a GPU."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def warm_up(self, run: Run) -> None:
        with HostWaits() as waits:
            run()
        assert waits.operators == []

    def record(self, run: Run) -> Run:
        self.recorded += 1
        with OperatorTape() as tape:
            run()
        for _, _, _, output in tape.calls:
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.is_floating_point():
                    tensor.detach().fill_(torch.nan)

        def replay() -> None:
            self.replayed += 1
            tape.replay()

        return replay


def steps(engine: NativeEngine) -> list[dict[str, Any]]:
    """Losses, norms, gradients, weights and an evaluation over batches, one of other shapes, one watched."""
    actual: list[dict[str, Any]] = []
    for number in range(5):
        batch = global_batch(seed=number, length=8 if number == 3 else 12)
        batch["keys"] = torch.arange(len(batch["tokens"])) + 100 * number
        parts = microbatches(engine, batch)
        other = microbatches(engine, {**global_batch(seed=9, length=12), "keys": torch.arange(8)})
        if number == 2:  # watched, so not replayed; then dropped, and replayed
            watched = engine.forward_backward(parts, CAUSAL, record_activations=True)
            dropped = {f"dropped {name}": tensor.clone() for name, tensor in engine.gradients().items()}
            actual.append({"watched": watched.loss, **dropped})
            engine.zero_grad()
            parts = other
        elif number == 3:  # two shapes in one step
            parts = [*parts, *other]
        sums = engine.forward_backward(parts, CAUSAL)
        gradients = {name: tensor.clone() for name, tensor in engine.gradients().items()}
        actual.append({"loss": sums.loss, "norm": engine.step(1e-2, 0.3, skip=number == 1), **gradients})
    actual.append({"evaluated": engine.evaluate(parts, CAUSAL).loss})
    actual.append({name: tensor.clone() for name, tensor in engine.local.items()})
    return actual


DROPPED = TIED_MODEL.with_changes({"dropout": 0.1, "attention.dropout": 0.1})


def compare() -> None:
    with pytest.MonkeyPatch.context() as patch:
        # A GPU, for which the recorder stands, has no kernel document by document.
        patch.setattr(PatternMask, "document_spans", lambda mask: None)
        compare_steps()


def compare_steps() -> None:
    for config, precision in ((UNTIED_MODEL, "fp32"), (DROPPED, "bf16"), (TIED_MODEL, "fp16")):
        taped = Taped()
        engine = build_engine(config, ParallelConfig(), precision=precision, graphs=taped)
        expected = steps(build_engine(config, ParallelConfig(), precision=precision))
        actual = steps(engine)
        for a, b in zip(expected, actual, strict=True):
            assert a.keys() == b.keys()
            for key, value in a.items():
                assert torch.equal(*(torch.as_tensor(x).nan_to_num() for x in (value, b[key]))), key
        assert (taped.recorded, taped.replayed) == (2, 4 * 4 + 2 * 4)
        assert isinstance(engine.passes, GraphedModel)


def test_a_recorded_step_is_the_step(workers: Workers) -> None:
    """To the bit: with dropout, a loss scale, a step that is skipped, and shapes that change; each recorded once."""
    workers.run(compare, 1)


def record_too_many() -> str:
    """The log line at the third shape, where two are kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatfm.engines.native.cuda_graphs.MAX_SHAPES", 2)
        engine = build_engine(UNTIED_MODEL, ParallelConfig(), precision="fp32", graphs=Taped())
        for length in (8, 12, 8, 12):
            engine.forward_backward(microbatches(engine, global_batch(seed=0, length=length)), CAUSAL)
            engine.zero_grad()
        with pytest.raises(MegatfmError) as error:
            engine.forward_backward(microbatches(engine, global_batch(seed=0, length=10)), CAUSAL)
    return str(error.value)


def test_graphs_of_endless_shapes_are_refused(workers: Workers) -> None:
    (line,) = workers.run(record_too_many, 1)
    assert "micro-batches have more than 2 shapes" in line
    assert "set train.cuda_graphs = false" in line


def refused(config: Config) -> str:
    with pytest.raises(UsageError) as error:
        make_graph_capture(config, torch.device("cpu"))
    return f"{error.value} ({dist.get_world_size()})"


def test_a_cpu_has_no_graphs(workers: Workers) -> None:
    assert make_graph_capture(load_config("quickstart", []), torch.device("cpu")) is None
    (result,) = workers.run(refused, 1, load_config("quickstart", ["train.cuda_graphs=true"]))
    assert "for one process on a GPU, but this run has 1 on cpu: set train.cuda_graphs = false" in result


class Counting(nn.Module):
    """A plugin's feed-forward network that counts what it meets."""

    observed: Mapping[str, Tensor] = MappingProxyType({})

    def accumulate_counts(self, counts: Any) -> None: ...
    def update(self, observed: Any) -> None: ...
    def reset_counts(self) -> None: ...


def test_a_module_that_counts_is_refused() -> None:
    with pytest.raises(UsageError, match=r"train\.cuda_graphs = true: 1 updates counts in each pass"):
        GraphedModel(nn.Sequential(nn.Linear(2, 2), Counting()), Taped())
