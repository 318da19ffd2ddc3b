"""Alignment of tensors of engines, checkpoints and foreign files: kernels expect memory that begins as torch's does.

Bit for bit holds only so: BLAS may add up in another order where a tensor begins elsewhere, or lies by columns.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import megatfm
from megatfm import checkpoint
from megatfm.checkpoint import ShardedTensor, file_format
from megatfm.checkpoint.planner import WriteItem
from megatfm.checkpoint.staging import Staging
from megatfm.config import OptimizerSection, ParallelConfig, SoapConfig
from megatfm.convert.convert import convert
from megatfm.convert.hf_checkpoint import HfFolder
from megatfm.engines.native.engine import NativeEngine
from megatfm.layers import initialisation
from megatfm.layers.initialisation import draw
from megatfm.models import build
from megatfm.ops import transfer
from tests.support.batches import CAUSAL, global_batch
from tests.support.hf_encoders import HF_ENCODERS, build_hf_encoder
from tests.support.hf_folders import DECODER_TOKENS, build_hf_decoder
from tests.support.layouts import extend
from tests.support.models import OPTIMIZERS, UNTIED_MODEL
from tests.support.parity import build_engine, microbatches
from tests.support.sharded_engines import assert_same_after_resume, get_tensor, load_checkpoint, train_steps
from tests.support.tensors import OFF, assert_aligned_inputs, is_misaligned, misalign
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


TENSORS = {
    name: torch.arange(float(size), dtype=dtype).to(dtype)
    for name, (size, dtype) in {
        "odd": (3, torch.uint8), "b": (5, torch.bfloat16), "f": (7, torch.float32), "d": (9, torch.float64),
        "wide": (70_001, torch.float32), "none": (0, torch.float32), "last": (11, torch.float32),
    }.items()
}  # fmt: skip
"""In a file, each begins where the one before ends."""


@pytest.fixture
def numpy_begins_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    real = np.empty

    def empty(size: int, dtype: type) -> np.ndarray:
        memory = real(size + 2 * 4096, dtype)
        return memory[-memory.ctypes.data % 4096 + OFF :][:size]

    monkeypatch.setattr(transfer.np, "empty", empty)


@pytest.mark.usefixtures("numpy_begins_elsewhere")
@pytest.mark.parametrize("direct", [False, True])
def test_tensors_of_a_checkpoint_are_aligned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    if direct:
        monkeypatch.setattr(file_format, "DIRECT_BYTES", 1)
    path = checkpoint.write_checkpoint_from_iterator(tmp_path, 1, TENSORS.items(), {})
    read = checkpoint.read_tensors(path)
    assert [name for name, tensor in read.items() if is_misaligned(tensor)] == []
    assert all(torch.equal(read[name], tensor) for name, tensor in TENSORS.items())


@pytest.mark.usefixtures("numpy_begins_elsewhere")
def test_the_staging_copy_is_aligned() -> None:
    pieces = {WriteItem(name, ((), ()), ("F32", ()), 0, 0): tensor for name, tensor in TENSORS.items()}
    staging = Staging()
    for _ in range(2):
        copies = staging.copy(pieces)
        assert [str(index) for index, copy in copies.items() if copy.numel() and is_misaligned(copy)] == []
        assert all(torch.equal(copies[index], piece) for index, piece in pieces.items())


MODELS = ["gpt1", "mistral", "mla", "t5", *HF_ENCODERS]


def build_hf_model(name: str) -> Any:
    return build_hf_encoder(name) if name in HF_ENCODERS else build_hf_decoder(name)


def shift(file: Path) -> None:
    """Have the tensors of a file begin 8 bytes behind a multiple of 64."""
    tensors = load_file(file)
    for pad in range(8, 200):
        save_file(tensors, file, metadata={"format": "pt", "pad": "x" * pad})
        if (8 + int.from_bytes(file.read_bytes()[:8], "little")) % 64 == 8:
            break
    with safe_open(file, framework="pt") as opened:
        assert any(is_misaligned(opened.get_tensor(key)) for key in opened.keys())  # noqa: SIM118


@pytest.mark.parametrize("name", MODELS)
def test_a_loaded_model_is_aligned_like_a_new_one(name: str, tmp_path: Path) -> None:
    build_hf_model(name).save_pretrained(tmp_path / "theirs")
    shift(tmp_path / "theirs" / "model.safetensors")
    convert(tmp_path / "theirs", tmp_path / "ours", "megatfm")
    inputs = (DECODER_TOKENS, DECODER_TOKENS.flip(1))[: 1 + name.startswith("t5")]
    logits = []
    for folder in ("theirs", "ours"):
        model = megatfm.load(tmp_path / folder)
        assert [n for n, p in model.named_parameters() if is_misaligned(p)] == []
        assert [n for n, b in model.named_buffers() if is_misaligned(b)] == []
        with assert_aligned_inputs():
            logits.append(model(*inputs).logits)
    fresh = build(model.config).eval()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(logits[0], fresh(*inputs).logits)
    assert torch.equal(logits[1], logits[0])


def test_tensors_of_a_foreign_folder_are_aligned(tmp_path: Path) -> None:
    """Rules reckon with it before it becomes a weight."""
    build_hf_model("gpt1").save_pretrained(tmp_path)
    shift(tmp_path / "model.safetensors")
    opened = HfFolder(tmp_path)
    for name in opened.files:
        assert not is_misaligned(opened.read_tensor(name)), name
