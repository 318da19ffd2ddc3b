"""Alignment of an engine's tensors, however it shards and packs: kernels expect memory that begins as torch's does.

Bit for bit holds only so: BLAS may add up in another order where a tensor begins elsewhere, or lies by columns.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatfm import checkpoint
from megatfm.checkpoint import ShardedTensor
from megatfm.config import OptimizerSection, ParallelConfig, SoapConfig
from megatfm.engines.native.engine import NativeEngine
from megatfm.layers import initialisation
from megatfm.layers.initialisation import draw
from megatfm.models import build
from tests.support.batches import CAUSAL, global_batch
from tests.support.layouts import extend
from tests.support.models import OPTIMIZERS, UNTIED_MODEL
from tests.support.parity import build_engine, microbatches
from tests.support.sharded_engines import assert_same_after_resume, get_tensor, load_checkpoint, train_steps
from tests.support.tensors import assert_aligned_inputs, is_misaligned, misalign
from tests.support.workers import Workers

LAYOUTS = {
    "one": (1, ParallelConfig()),
    "zero 0": (2, ParallelConfig(dp_shard=2, zero=0)),
    "zero 1": (2, ParallelConfig(dp_shard=2, zero=1)),
    "zero 2": (2, ParallelConfig(dp_shard=2, zero=2)),
    "zero 3": (2, ParallelConfig(dp_shard=2)),
    "zero 3, shards": (2, ParallelConfig(dp_shard=2, grad_accumulation="sharded")),
    "replicas": (2, ParallelConfig(dp_replicate=2, dp_shard=1)),
    "tp": (2, ParallelConfig(tp=2)),
}
ODD = UNTIED_MODEL.with_changes(
    {"vocab_size": 97, "d_model": 20, "ffn.d_ff": 26, "attention.n_heads": 2, "attention.n_kv_heads": 1}
)
"""Next to no piece of a buffer, and no half of a tensor, fills whole lines of 64 bytes."""


def planted(engine: NativeEngine, seed: int) -> list[dict[str, Tensor]]:
    """A batch in memory that a loader might have from anywhere."""
    parts = microbatches(engine, global_batch(seed=seed))
    return [{field: misalign(values) for field, values in part.items()} for part in parts]


def wrong(tensors: dict[str, Tensor | ShardedTensor]) -> list[str]:
    return [name for name, tensor in tensors.items() if is_misaligned(get_tensor(tensor))]


def trains_in_torchs_memory(parallel: ParallelConfig, optimizer: OptimizerSection) -> None:
    engine = build_engine(ODD, parallel, optimizer)
    assert wrong(engine.local) == []
    batches = [planted(engine, step) for step in range(3)]
    with assert_aligned_inputs():
        for step in range(2):
            engine.forward_backward(batches[step], CAUSAL)
            assert wrong(engine.gradients()) == []
            engine.step(1e-2, clip=0.3)
            assert wrong(engine.state_dict()) == []
        engine.evaluate(batches[2], CAUSAL)
    assert wrong(engine.local) == []
    full = [tensor for tensor in engine.model.parameters() if type(tensor) is torch.nn.Parameter]
    assert wrong(dict(enumerate(full))) == []  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_reckons_in_torchs_memory(workers: Workers, layout: str) -> None:
    ranks, parallel = LAYOUTS[layout]
    workers.run(trains_in_torchs_memory, ranks, parallel, OPTIMIZERS["soap"])


@pytest.mark.parametrize(
    "name", extend([name for name in OPTIMIZERS if name != "soap"], kept=["adafactor", "lion", "muon"])
)
def test_every_optimizer_reckons_with_torch_s_memory(workers: Workers, name: str) -> None:
    """Every one but SOAP, which the test above tries; on one device, the test below tries each."""
    workers.run(trains_in_torchs_memory, 2, ParallelConfig(dp_shard=2), OPTIMIZERS[name])


def check_misaligned_state(folder: Path, optimizer: OptimizerSection) -> None:
    """State that lies anywhere, and by columns, is taken over as what a checkpoint filled in place."""
    trained, engine, other = (build_engine(UNTIED_MODEL, ParallelConfig(), optimizer) for _ in range(3))
    train_steps(trained, 0, 2)
    path = checkpoint.save(folder, 2, trained.state_dict(), {})
    load_checkpoint(engine, path)
    state = other.empty_state_dict(checkpoint.read_tensor_specs(path))
    checkpoint.load(path, state)
    other.load_state_dict({name: moved(part) for name, part in state.items()})
    for target in (engine, other):
        batches = [microbatches(target, global_batch(seed=step)) for step in range(2)]
        with assert_aligned_inputs():
            for batch in batches:
                target.forward_backward(batch, CAUSAL)
                target.step(1e-2, clip=0.3)
    assert wrong(other.state_dict()) == []
    for name, tensor in engine.state_dict().items():
        assert torch.equal(get_tensor(tensor), get_tensor(other.state_dict()[name])), name


def moved(part: Tensor | ShardedTensor) -> Tensor | ShardedTensor:
    tensor = get_tensor(part)
    copy = misalign(tensor.T.contiguous().T if tensor.dim() == 2 else tensor)
    return ShardedTensor(copy, part.global_shape, part.offsets) if isinstance(part, ShardedTensor) else copy


AS_ANOTHER = ("adamw", "lamb", "adamw, weights averaged")
"""Optimizers whose state is that of another one."""


@pytest.mark.parametrize("name", extend(OPTIMIZERS, kept=OPTIMIZERS.keys() - {*AS_ANOTHER}))
def test_state_is_taken_from_any_memory(workers: Workers, tmp_path: Path, name: str) -> None:
    workers.run(check_misaligned_state, 1, tmp_path, OPTIMIZERS[name])


WIDE = SoapConfig(lr=1e-2, precondition_frequency=1, max_precond_dim=64)


@pytest.mark.parametrize("layout", extend(["one", "zero 1", "zero 3", "tp"], kept=["one", "zero 1"]))
def test_soap_resumes_to_the_bit_when_its_bases_turn_each_step(workers: Workers, tmp_path: Path, layout: str) -> None:
    """LAPACK gives bases by columns, a checkpoint by rows."""
    assert_same_after_resume(workers, tmp_path, *LAYOUTS[layout], WIDE)


def check_initial_alignment(parallel: ParallelConfig) -> None:
    engine = build_engine(ODD, parallel, OPTIMIZERS["adamw"])
    assert wrong(engine.local) == []
    assert wrong(dict(engine.model.named_buffers())) == []


def test_drawn_weights_and_buffers_lie_in_torchs_memory(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    workers.run(check_initial_alignment, 1, ParallelConfig())
    monkeypatch.setattr(initialisation, "draw", lambda *args, **kwargs: misalign(draw(*args, **kwargs)))
    model = build(ODD)
    initialisation.initialise(model, 0)
    assert wrong(dict(model.named_parameters())) == []
    assert wrong(dict(model.named_buffers())) == []
