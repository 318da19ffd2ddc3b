"""Every layout gives the gradients of one device, in float64, within ‖g−r‖ ≤ 1e-9·max(‖r‖, 1e-6·‖all gradients‖)."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatfm.config import AdamWConfig, ModelConfig, MuonConfig, OptimizerSection, ParallelConfig
from megatfm.engines.native.engine import NativeEngine
from megatfm.engines.native.zero import ZeroOptions
from megatfm.layers.initialisation import draw
from megatfm.models import build
from megatfm.objectives import Causal, SpecialTokens
from megatfm.ops.cross_entropy import cross_entropy_reference
from megatfm.optim.parameters import optimizer_groups
from megatfm.parallel.mesh import build_mesh
from megatfm.parallel.parallelize import parallelize
from tests.support.grids import cells

MODEL = ModelConfig(
    vocab_size=96,
    d_model=32,
    n_layers=2,
    attention={"n_heads": 4, "n_kv_heads": 2},
    ffn={"d_ff": 80},
    embedding={"tied": False},
)
TIED = MODEL.with_changes({"embedding.tied": True})
ADAMW = AdamWConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=0.3)
MUON = MuonConfig(lr=1e-2, matrix_lr=0.02, weight_decay=0.1, max_grad_norm=0.3)
CAUSAL = Causal(SpecialTokens(bos=1, eos=2, pad=0))
ROWS, LENGTH = 8, 12

LAYOUTS = {
    "zero3 on 1": ParallelConfig(),
    "zero0 on 2": ParallelConfig(dp_shard=2, zero=0),
    "zero1 on 2": ParallelConfig(dp_shard=2, zero=1),
    "zero2 on 2": ParallelConfig(dp_shard=2, zero=2),
    "zero3 on 2": ParallelConfig(dp_shard=2),
    "zero3 on 2, shards accumulated": ParallelConfig(dp_shard=2, grad_accumulation="sharded"),
    "replicas on 2": ParallelConfig(dp_replicate=2, dp_shard=1),
    "tp2": ParallelConfig(tp=2),
    "tp2 without sequence parallel": ParallelConfig(tp=2, sequence_parallel=False),
    "zero3 2 × tp2": ParallelConfig(dp_shard=2, tp=2),
    "zero1 2 × tp2": ParallelConfig(dp_shard=2, tp=2, zero=1),
    "hsdp 2 × 2": ParallelConfig(dp_replicate=2, dp_shard=2),
    "zero1 2 × replicas 2": ParallelConfig(dp_replicate=2, dp_shard=2, zero=1),
}
WORLD = {
    layout: parallel.dp_replicate * max(parallel.dp_shard, 1) * parallel.tp
    for layout, parallel in LAYOUTS.items()
}


def global_batch(seed: int, rows: int = ROWS, length: int = LENGTH) -> dict[str, Tensor]:
    """Packed rows with several documents each, padding, and an uneven number of targets from row to row."""
    random = np.random.default_rng(seed)
    tokens = torch.from_numpy(random.integers(0, 95, (rows, length)))
    targets = torch.from_numpy(random.integers(0, 95, (rows, length)))
    documents = torch.from_numpy(np.sort(random.integers(0, 3, (rows, length)), axis=1))
    padding = torch.arange(length)[None] >= length - torch.arange(rows)[:, None]
    targets[padding], documents[padding] = -100, -1
    starts = torch.tensor([[int((row == d).nonzero()[0]) for d in row] for row in documents])
    return {
        "tokens": tokens,
        "targets": targets,
        "documents": documents,
        "positions": torch.arange(length)[None] - starts,
    }


def one_device(config: ModelConfig) -> torch.nn.Module:
    model = build(config).double()
    for path, module in model.named_modules():
        for key, initial in getattr(module, "initial", {}).items():
            parameter = getattr(module, key)
            values = draw(
                initial, 7, f"{path}.{key}", parameter.shape, (0,) * parameter.dim(), parameter.shape
            )
            parameter.data.copy_(values)
    return model


def one_device_gradients(model: torch.nn.Module, batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Plain autograd through all logits at once."""
    model.zero_grad()
    inputs = {name: batch[name] for name in ("positions", "documents", "keys") if name in batch}
    hidden = model(batch["tokens"], **inputs).hidden
    loss = cross_entropy_reference(hidden.flatten(0, 1), model.head.weight, batch["targets"].flatten())
    loss = loss / (batch["targets"] != -100).sum()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def make_engine(
    config: ModelConfig,
    parallel: ParallelConfig,
    optimizer: OptimizerSection,
    *,
    precision: str = "fp64",
    recomputed: str = "none",
    compile_blocks: bool = False,
    async_tp: bool = False,
) -> NativeEngine:
    mesh = build_mesh(parallel, dist.get_world_size(), "cpu")
    with torch.device("meta"):
        model = build(config)
    optimizers = optimizer_groups(optimizer, model)
    layout = parallelize(
        model, mesh, sequence_parallel=parallel.sequence_parallel, context=parallel.cp_method
    )
    return NativeEngine(
        model,
        layout,
        mesh,
        device=torch.device("cpu"),
        precision=precision,
        seed=7,
        optimizers=optimizers,
        sharing=ZeroOptions.of(parallel),
        recomputed=recomputed,
        compile_blocks=compile_blocks,
        async_tp=async_tp,
    )


def microbatches(engine: NativeEngine, batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """This data rank's rows, in micro-batches of one or two rows."""
    rows = ROWS // engine.mesh.data_ranks
    mine = {key: value[engine.mesh.data_rank * rows :][:rows] for key, value in batch.items()}
    return [{key: value[i : i + 2] for key, value in mine.items()} for i in range(0, rows, 2)]


def block(engine: NativeEngine, name: str, tensor: Tensor) -> Tensor:
    offsets, sizes = engine.boxes[name]
    return tensor[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]


def gradient_errors(engine: NativeEngine, expected: dict[str, Tensor]) -> dict[str, float]:
    """‖g−r‖ / max(‖r‖, 1e-6·‖all gradients‖) of this rank's block of each gradient that is over the bound."""
    gradients = engine.gradients()
    assert gradients.keys() == expected.keys()
    floor = 1e-6 * torch.cat([g.flatten() for g in expected.values()]).norm()
    errors = {
        name: float(
            (gradient - block(engine, name, expected[name])).norm() / max(expected[name].norm(), floor)
        )
        for name, gradient in gradients.items()
    }
    return {
        name: error for name, error in errors.items() if not error <= 1e-9
    }  # so that NaN is an error, too


def compare_gradients(config: ModelConfig, parallel: ParallelConfig) -> int:
    engine, reference = make_engine(config, parallel, ADAMW), one_device(config)
    for name, parameter in reference.named_parameters():
        assert torch.equal(block(engine, name, parameter.detach()), engine.local[name]), (
            f"initial {name} differs"
        )
    batch = global_batch(seed=3)
    loss, expected = one_device_gradients(reference, batch)
    stats = engine.forward_backward(microbatches(engine, batch), CAUSAL)
    assert stats.target_counts == {"causal": int((batch["targets"] != -100).sum())}
    assert stats.loss == pytest.approx(loss, rel=1e-12)
    assert gradient_errors(engine, expected) == {}
    norm = torch.cat([g.flatten() for g in expected.values()]).norm()
    assert engine.step(0.0, clip=0.0) == pytest.approx(float(norm), rel=1e-12)
    evaluated = engine.evaluate(microbatches(engine, batch), CAUSAL)
    assert evaluated.loss == pytest.approx(loss, rel=1e-12)
    return len(expected)


@pytest.mark.parametrize(
    ("name", "layouts"), cells(dict.fromkeys(("untied", "tied"), LAYOUTS), always=["tp2", "zero3 2 × tp2"])
)
def test_gradients_equal_one_device(workers, name, layouts):
    config = {"untied": MODEL, "tied": TIED}[name]
    for layout in layouts:
        ranks = WORLD[layout]
        compared = workers.run(compare_gradients, ranks, config, LAYOUTS[layout])
        assert compared == [len(list(build(config).parameters()))] * ranks
