"""Every preset of an encoder, made small, with its own objective and dropout: one step in float32 and in bfloat16."""

import pytest
import torch

from megatfm.config import load_config
from megatfm.layers.initialisation import initialise
from megatfm.models import build
from megatfm.objectives import build_objective
from tests.support.golden_curves import SPECIAL, VOCABULARY, batch

SMALL = {
    "model.vocab_size": VOCABULARY,
    "model.d_model": 32,
    "model.n_layers": 2,
    "model.attention.n_heads": 2,
    "model.ffn.d_ff": 48,
    "model.init.std": 0.2,
    "data.sequence_length": 32,
    "train.global_batch": 8,
    "train.micro_batch": 8,
}
LEARNED = {"model.position.max_positions": 32}
GENERATOR = {"model.generator.d_model": 16, "model.generator.n_heads": 2, "model.generator.d_ff": 24}
PRESETS = {
    "bert-base": LEARNED,
    "roberta-base": LEARNED,
    "spanbert-base": LEARNED,
    "albert-base": LEARNED | {"model.embedding.dim": 12},
    "deberta-base": {"model.position.max_distance": 9},
    "deberta-v3-base": GENERATOR
    | {"model.position.max_distance": 9, "model.position.buckets": 4, "model.generator.n_layers": 1},
    "electra-small": LEARNED | GENERATOR | {"model.embedding.dim": 12},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("preset", PRESETS)
def test_one_step_has_all_gradients_and_lowers_the_loss(preset: str, dtype: torch.dtype) -> None:
    config = load_config(preset, [f"{key}={value}" for key, value in (SMALL | PRESETS[preset]).items()])
    model, objective = build(config.model), build_objective(config.objective, config.model, SPECIAL, (32,))
    initialise(model, seed=0)
    model.to(dtype)
    fields = batch(config, objective, 1)
    terms, counts = objective(model, fields), objective.target_counts(fields)
    assert terms.keys() == counts.keys() == objective.loss_weights.keys()
    assert all(count > 0 for count in counts.values())
    sum(objective.loss_weights[name] * term / counts[name] for name, term in terms.items()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name
    before = {name: float(term.detach()) for name, term in terms.items()}
    torch.optim.SGD(model.parameters(), lr=1e-3).step()
    after = {name: float(term.detach()) for name, term in objective(model, fields).items()}
    total = [
        sum(objective.loss_weights[n] * s / float(counts[n]) for n, s in sums.items())
        for sums in (before, after)
    ]
    assert total[1] < total[0], "a step down the gradient goes down"
