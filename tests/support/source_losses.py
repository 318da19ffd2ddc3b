"""The loss of each source of rows: by an engine in some layout, and row by row from all logits."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatfm.config import Config
from megatfm.engines.interface import RowSources
from megatfm.layers.initialisation import initialise
from megatfm.models import build
from megatfm.objectives import SpecialTokens, build_objective
from megatfm.parallel.mesh import build_mesh
from megatfm.train.build import build_engine
from tests.support.deepspeed_runs import BUCKETS
from tests.support.workers import Workers

SPECIAL = SpecialTokens(bos=1, eos=2, pad=0, vocab_size=96, mask=3, cls=4, sep=5)
ROWS, LENGTH, MICRO_BATCH = 12, 16, 3
NAMES = ("web", "books", "absent", "code")
SOURCES = np.array([0, 1, 3, 3, 0, 0, 1, 3, 0, 1, 1, 1])
"""The source of each row; the third has none."""
DECODER: dict[str, Any] = {"family": "decoder"}
ENCODER: dict[str, Any] = {"family": "encoder", "lm_head": {"name": "transform"}}


def config_of(model: dict[str, Any], parallel: dict[str, Any]) -> Config:
    is_encoder, is_native = model["family"] == "encoder", "engine" not in parallel
    size = {"vocab_size": 96, "d_model": 32, "n_layers": 4, "attention": {"n_heads": 4}, "ffn": {"d_ff": 48}}
    precision = "fp64" if is_native else "fp32"
    return Config.model_validate(
        {
            "name": "sources",
            "model": {**size, **model},
            "objective": {"name": "masked" if is_encoder else "causal"},
            "data": {"train": "none", "tokenizer": "none", "sequence_length": LENGTH},
            "optimizer": {"name": "adamw", "lr": 1e-3},
            "train": {"global_batch": ROWS, "micro_batch": MICRO_BATCH, "steps": 1, "precision": precision},
            "parallel": {"dp_shard": 1, **parallel},
            **({} if is_native else {"deepspeed": {"json_file": str(BUCKETS)}}),
        }
    )


def global_batch() -> dict[str, Tensor]:
    """Rows of one to three documents with padding, and targets at a third of the tokens."""
    random = np.random.default_rng(5)
    documents = np.sort(random.integers(0, 3, (ROWS, LENGTH)), axis=1)
    documents -= documents[:, :1]
    documents = np.unique(documents, return_inverse=True)[1].reshape(documents.shape)
    positions = np.stack([[int((row[:i] == row[i]).sum()) for i in range(LENGTH)] for row in documents])
    targets = random.integers(6, 96, (ROWS, LENGTH))
    targets[random.random((ROWS, LENGTH)) < 0.6] = -100
    targets[4] = -100
    batch = {
        "tokens": random.integers(6, 96, (ROWS, LENGTH)),
        "targets": targets,
        "documents": documents,
        "positions": positions,
    }
    return {name: torch.from_numpy(values) for name, values in batch.items()}


def expected_losses(config: Config, batch: dict[str, Tensor]) -> dict[str, float]:
    """Row by row, from logits; source by source."""
    model = build(config.model).double()
    initialise(model, config.train.seed)
    sums, counts = dict.fromkeys(NAMES, 0.0), dict.fromkeys(NAMES, 0)
    for row, source in enumerate(SOURCES.tolist()):
        inputs = {name: values[row : row + 1] for name, values in batch.items() if name != "targets"}
        with torch.no_grad():
            log_p = F.log_softmax(model(**inputs).logits[0], dim=-1)
        for place, target in enumerate(batch["targets"][row].tolist()):
            if target >= 0:
                sums[NAMES[source]] -= float(log_p[place, target])
                counts[NAMES[source]] += 1
    return {name: sums[name] / counts[name] for name in NAMES if counts[name]}


def losses_by_source(config: Config) -> dict[str, float]:
    mesh = build_mesh(config.parallel, dist.get_world_size(), "cpu")
    engine = build_engine(config, mesh, torch.device("cpu"), config.train.precision)
    objective = build_objective(config.objective, config.model, SPECIAL, (LENGTH,))
    rows = ROWS // mesh.data_ranks
    first, batch = mesh.data_rank * rows, global_batch()
    starts = range(first, first + rows, MICRO_BATCH)
    microbatches = [{key: v[i : i + MICRO_BATCH] for key, v in batch.items()} for i in starts]
    sources = RowSources(NAMES, [SOURCES[i : i + MICRO_BATCH] for i in starts])
    totals = engine.forward_backward(microbatches, objective, sources=sources)
    engine.zero_grad()
    plain = engine.forward_backward(microbatches, objective)
    assert (totals.sums, totals.target_counts) == (plain.sums, plain.target_counts)
    assert plain.loss_by_source == {}
    return totals.loss_by_source


def check_losses_by_source(workers: Workers, model: dict[str, Any], parallel: dict[str, Any]) -> None:
    """Compare what each rank of a layout says with the losses of rows computed one by one."""
    config = config_of(model, parallel)
    section = config.parallel
    ranks = section.dp_shard * section.tp * section.pp * section.cp
    expected = expected_losses(config, global_batch())
    assert list(expected) == ["web", "books", "code"]
    for result in workers.run(losses_by_source, ranks, config):
        assert result == pytest.approx(expected, rel=1e-11 if config.train.precision == "fp64" else 1e-5)
