"""Forward and backward pass of a micro-batch as one CUDA graph, for models so small that launching kernels takes longer
than running them (Nguyen et al. 2021, "Accelerating PyTorch with CUDA Graphs").

A graph repeats the recorded kernels on the same memory. So inputs, factors of the loss and gradients have fixed
buffers, and passes in which the host waits for a value can't be recorded.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from megatfm.config import Config
from megatfm.engines.interface import Batch, CountingModule, LossFunction
from megatfm.engines.losses import TermWeights
from megatfm.engines.passes import GradientSync, LossScaler, Terms
from megatfm.errors import MegatfmError, UsageError

Run = Callable[[], None]

MAX_SHAPES = 64
"""Number of micro-batch shapes whose graphs are kept; a schedule of batches has a few."""


class GraphCapture(Protocol):
    """Records the work that is queued on a device."""

    def warm_up(self, run: Run) -> None:
        """Run the pass once, so that one-time allocations exist."""

    def record(self, run: Run) -> Run:
        """Return a function that repeats the work of `run` on the same memory; outputs are undefined until it is
        called.

        Raises MegatfmError if the host waits within `run`.
        """


class CudaGraphs:
    """Records with torch.cuda.graph. All graphs share memory for intermediate tensors, since they never run at once."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, run: Run) -> None:
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(2):  # the first run compiles and chooses kernels
                run()
        current.wait_stream(side)

    def record(self, run: Run) -> Run:
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: other threads, such as one that saves a checkpoint, may use CUDA meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                run()
        except RuntimeError as error:
            if "captur" not in str(error):
                raise
            raise MegatfmError(
                "train.cuda_graphs: a pass can't be recorded, for example because the host waits for a value "
                f"({str(error).splitlines()[0]}): set train.cuda_graphs = false"
            ) from error
        return graph.replay


def make_graph_capture(config: Config, device: torch.device) -> GraphCapture | None:
    """Return the recorder of passes, None unless configured. Raises UsageError on a CPU and with several processes."""
    if not config.train.cuda_graphs:
        return None
    processes = torch.distributed.get_world_size()
    if device.type != "cuda" or processes > 1:
        raise UsageError(
            f"train.cuda_graphs = true is for one process on a GPU, but this run has {processes} on {device.type}: "
            "set train.cuda_graphs = false"
        )
    return CudaGraphs()


@dataclass(frozen=True)
class CapturedPass:
    """A recorded pass, and the memory that it reads and writes. objective: kept alive, since its id is a key."""

    objective: LossFunction
    inputs: dict[str, Tensor]
    factors: Tensor
    terms: Terms
    replay: Run


class GraphedModel:
    """`ForwardBackward` of a model on a single rank, recorded once for each shape of micro-batches."""

    def __init__(self, model: nn.Module, recorder: GraphCapture) -> None:
        for path, module in model.named_modules():
            if isinstance(module, CountingModule):
                raise UsageError(
                    f"train.cuda_graphs = true: {path or type(module).__name__} updates counts in each pass, but a "
                    "replayed graph runs no Python code: set train.cuda_graphs = false"
                )
        self._model, self._recorder = model, recorder
        self._recorded: dict[object, CapturedPass] = {}
        self._gradients: dict[nn.Parameter, Tensor] = {}

    def step(
        self, batches: Sequence[Batch], objective: LossFunction, scale_loss: LossScaler, gradient_sync: GradientSync
    ) -> list[Terms]:
        """See `ForwardBackward`. scale_loss: a `TermWeights`, whose factors are copied."""
        assert isinstance(scale_loss, TermWeights)
        for batch in batches:
            if _make_key(batch, objective) not in self._recorded:
                if len(self._recorded) == MAX_SHAPES:
                    raise MegatfmError(
                        f"train.cuda_graphs: micro-batches have more than {MAX_SHAPES} shapes, and each needs a graph "
                        "with its own memory: set train.cuda_graphs = false, or use fewer lengths of rows"
                    )
                self._recorded[_make_key(batch, objective)] = self._record(batch, objective, scale_loss)
        self._bind_gradients()
        results = []
        for batch in batches:
            gradient_sync.start_microbatch(is_last=batch is batches[-1])
            recorded = self._recorded[_make_key(batch, objective)]
            torch._foreach_copy_(list(recorded.inputs.values()), [batch[name] for name in recorded.inputs])
            recorded.factors.copy_(scale_loss.factors)
            recorded.replay()
            results.append({name: term.clone() for name, term in recorded.terms.items()})
        return results

    def evaluate(self, batch: Batch, objective: LossFunction) -> Terms:
        """See `ForwardBackward`. Not recorded."""
        return objective(self._model, batch)

    def _record(self, batch: Batch, objective: LossFunction, term_weights: TermWeights) -> CapturedPass:
        inputs = {name: values.clone() for name, values in batch.items()}
        scaled = replace(term_weights, factors=term_weights.factors.clone())
        terms: Terms = {}

        def run() -> None:
            computed = objective(self._model, inputs)
            scaled(computed).backward()
            terms.update({name: term.detach() for name, term in computed.items()})

        parameters = [p for p in self._model.parameters() if p.requires_grad]
        original_grads = [None if p.grad is None else p.grad.clone() for p in parameters]
        _drop_gradients(parameters)
        self._recorder.warm_up(run)
        for parameter in parameters:
            if parameter.grad is not None and parameter not in self._gradients:
                self._gradients[parameter] = parameter.grad
        _drop_gradients(parameters)
        self._bind_gradients()
        replay = self._recorder.record(run)
        for parameter, gradient in zip(parameters, original_grads, strict=True):
            parameter.grad = gradient
        return CapturedPass(objective, inputs, scaled.factors, terms, replay)

    def _bind_gradients(self) -> None:
        """Put gradients into the buffers that graphs accumulate to; missing ones are 0."""
        if without_gradient := [gradient for parameter, gradient in self._gradients.items() if parameter.grad is None]:
            torch._foreach_zero_(without_gradient)
        for parameter, gradient in self._gradients.items():
            if parameter.grad is not None and parameter.grad is not gradient:
                gradient.copy_(parameter.grad)
            parameter.grad = gradient


def _make_key(batch: Batch, objective: LossFunction) -> object:
    return id(objective), tuple((name, values.shape, values.dtype) for name, values in batch.items())


def _drop_gradients(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None
