"""Low-rank adapters: the model with them is the merged one, whatever layers it has; and what can't have any."""

from typing import Any

import pytest
import torch

from megatfm.config import ModelConfig
from megatfm.errors import UsageError
from megatfm.layers.initialisation import initialise
from megatfm.layers.linear import Linear
from megatfm.layers.lora import FACTORS, merge_lora
from megatfm.models import build
from tests.support.batches import PassThroughObjective, family_batch
from tests.support.lora_parity import LORA, build_adapted
from tests.support.models import FAMILY_MODELS, UNTIED_MODEL

MOE = UNTIED_MODEL.with_changes({"ffn": {"name": "moe", "n_experts": 4, "top_k": 2, "d_ff": 16}})


def losses(model: torch.nn.Module, config: ModelConfig) -> dict[str, float]:
    terms = PassThroughObjective([])(model, family_batch(config))
    return {name: float(term.detach()) for name, term in terms.items()}


@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_a_merged_model_computes_the_same(name: str) -> None:
    plain = FAMILY_MODELS[name]
    adapted = build_adapted(plain.with_changes({"lora": LORA})).double().eval()
    initialise(adapted, 7)
    merged = build(plain).double().eval()
    initialise(merged, 7)  # buffers that are not stored, too
    expected = losses(adapted, plain)
    assert losses(merged, plain) != pytest.approx(expected, rel=1e-5), "adapters do something"
    merged.load_state_dict(merge_lora(dict(adapted.state_dict()), LORA["alpha"] / LORA["rank"]))
    assert losses(merged, plain) == pytest.approx(expected, rel=1e-11)


def test_a_model_starts_as_it_was() -> None:
    adapted, plain = (build(UNTIED_MODEL.with_changes({"lora": lora})).double() for lora in (LORA, None))
    for model in (adapted, plain):
        initialise(model, 7)
    assert losses(adapted, UNTIED_MODEL) == losses(plain, UNTIED_MODEL)
    names = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert len(names) == 2 * 2 * 7
    assert all(name.endswith(FACTORS) for name in names)


def test_targets_and_other_trained_weights() -> None:
    lora = {"rank": 2, "targets": ["wq", "decoder.layers.1.ffn.w_*"], "trained": ["head.weight", "*.norm.*"]}
    model = build(UNTIED_MODEL.with_changes({"lora": lora}))
    adapted = {path for path, m in model.named_modules() if isinstance(m, Linear) and m.lora is not None}
    block = "decoder.layers.1.ffn"
    assert adapted == {
        "decoder.layers.0.attn.wq", "decoder.layers.1.attn.wq", f"{block}.w_gate", f"{block}.w_up", f"{block}.w_down",
    }  # fmt: skip
    trained = {name for name, p in model.named_parameters() if p.requires_grad and not name.endswith(FACTORS)}
    assert {"head.weight", "decoder.norm.weight"} < trained
    assert all(name == "head.weight" or ".norm." in name for name in trained)


@pytest.mark.parametrize(
    ("config", "lora", "message"),
    [
        (UNTIED_MODEL, {"targets": ["q_proj"]}, "'q_proj' matches no linear layer.*there are w_down, w_gate"),
        (UNTIED_MODEL, {"targets": ["tokens"]}, "'tokens' is decoder.embedding.tokens, a Embedding"),
        (MOE, {"targets": ["experts.w_up"]}, "layers.0.ffn.experts.w_up holds the matrices of several experts"),
        (UNTIED_MODEL, {"trained": ["haed.*"]}, "model.lora.trained: 'haed.*' matches no weight"),
        (FAMILY_MODELS["t5"], {"targets": ["cross.wk"], "dropout": 0.1}, "reads another sequence than its block"),
        (UNTIED_MODEL, {"rank": 0}, "greater than or equal to 1|greater than 0"),
    ],
)  # fmt: skip
def test_what_has_no_adapter_is_named(config: ModelConfig, lora: dict[str, Any], message: str) -> None:
    with pytest.raises((UsageError, ValueError), match=message):
        build(config.with_changes({"lora": {"rank": 2, **lora}}))
