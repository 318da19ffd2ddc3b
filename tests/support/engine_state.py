"""Engines that train, save into a checkpoint and load from it."""

from pathlib import Path

from torch import Tensor

from megatfm import checkpoint
from megatfm.config import AdamWConfig, ParallelConfig
from megatfm.engines.native.engine import NativeEngine
from tests.support.batches import CAUSAL, global_batch
from tests.support.models import UNTIED_MODEL
from tests.support.parity import build_engine, microbatches


def train_steps(engine: NativeEngine, first: int, last: int) -> None:
    """Train on the batches of these steps."""
    for step in range(first, last):
        engine.forward_backward(microbatches(engine, global_batch(seed=step)), CAUSAL)
        engine.step(1e-2, clip=0.3)


def tensor_of(part: checkpoint.ShardedTensor | Tensor) -> Tensor:
    """The tensor of a part of a state."""
    return part.tensor if isinstance(part, checkpoint.ShardedTensor) else part


def train_and_save(
    folder: Path, parallel: ParallelConfig, optimizer: AdamWConfig
) -> tuple[Path, dict[str, Tensor]]:
    """Three train_steps, a checkpoint, and two steps more; returns the weights held at the end."""
    engine = build_engine(UNTIED_MODEL, parallel, optimizer)
    train_steps(engine, 0, 3)
    path = checkpoint.save(folder, 3, engine.state_dict(), {})
    train_steps(engine, 3, 5)
    return path, {name: tensor.clone() for name, tensor in engine.local.items()}


def load_and_train(
    path: Path, parallel: ParallelConfig, optimizer: AdamWConfig, folder: Path
) -> tuple[Path, dict[str, Tensor]]:
    """Load into an engine that is elsewhere already, save again at once, and take the two steps."""
    engine = build_engine(UNTIED_MODEL, parallel, optimizer)
    train_steps(engine, 7, 8)
    state = engine.empty_state_dict(checkpoint.read_names(path))
    checkpoint.load(path, state)
    engine.load_state_dict(state)
    again = checkpoint.save(folder, 3, engine.state_dict(), {})
    train_steps(engine, 3, 5)
    return again, {name: tensor.clone() for name, tensor in engine.local.items()}
