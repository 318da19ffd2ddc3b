"""Low-rank adapters: the model with them is the merged one, whatever layers it has; and what can't have any.

Experts with adapters are compared with a loop over tokens, in which each expert's matrix is W + scale · B A.
"""

from typing import Any

import pytest
import torch

from megatfm.config import ModelConfig, TextClassifierHeadConfig
from megatfm.config.model_parts import LoRAConfig
from megatfm.errors import UsageError
from megatfm.layers.initialisation import initialise
from megatfm.layers.linear import Linear
from megatfm.layers.lora import InputDropout, LoRA, is_factor, merge_lora, name_factors
from megatfm.layers.moe.experts import Experts
from megatfm.layers.task_heads import TextClassifier
from megatfm.models import build
from megatfm.ops.cross_entropy import IGNORE
from tests.support.batches import PassThroughObjective, family_batch
from tests.support.frozen_parity import LORA, build_adapted
from tests.support.models import FAMILY_MODELS, PATTERN_MODELS, UNTIED_MODEL, build_moe, moe_inputs, moe_sequence
from tests.support.tensors import assert_same_gradients, draw

EXPERTS = ["experts.w_*"]
SOFT = {"name": "soft_moe", "n_experts": 3, "d_ff": 16, "dropout": 0.0}
MOE = UNTIED_MODEL.with_changes({"ffn": {"name": "moe", "n_experts": 4, "top_k": 2, "d_ff": 16}})
PLAIN_MODELS = FAMILY_MODELS | {
    "experts": MOE,
    "experts with biases": MOE.with_changes({"ffn.bias": True, "ffn.activation": "gelu"}),
    "shared experts": MOE.with_changes({"ffn.n_shared_experts": 1}),
    "soft experts": FAMILY_MODELS["bert"].with_changes({"ffn": SOFT}),
}


def losses(model: torch.nn.Module, config: ModelConfig) -> dict[str, float]:
    terms = PassThroughObjective([])(model, family_batch(config))
    return {name: float(term.detach()) for name, term in terms.items()}


@pytest.mark.parametrize("name", PLAIN_MODELS)
def test_a_merged_model_computes_the_same(name: str) -> None:
    plain = PLAIN_MODELS[name]
    targets = EXPERTS if "experts" in name else []
    adapted = build_adapted(plain.with_changes({"lora": {**LORA, "targets": targets}})).double().eval()
    initialise(adapted, 7)
    merged = build(plain).double().eval()
    initialise(merged, 7)  # buffers that are not stored, too
    expected = losses(adapted, plain)
    assert losses(merged, plain) != pytest.approx(expected, rel=1e-5), "adapters do something"
    merged.load_state_dict(dict(merge_lora(adapted.state_dict(), LORA["alpha"] / LORA["rank"])))
    assert losses(merged, plain) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_dropout_of_adapters_changes_the_loss_or_is_refused(name: str) -> None:
    plain = FAMILY_MODELS[name]
    for target in ("wq", "wk", "wv", "wo", "ffn.w_up", "ffn.w_down"):
        lora = {**LORA, "targets": [target], "dropout": 0.5}
        try:
            adapted = build_adapted(plain.with_changes({"lora": lora})).double().train()
        except UsageError:
            continue
        initialise(adapted, 7)
        losses_with_dropout = losses(adapted, plain)
        for module in adapted.modules():
            if isinstance(module, InputDropout):
                module.rate = 0.0
        assert losses(adapted, plain) != losses_with_dropout, target


@pytest.mark.parametrize("both_orders", [False, True])
def test_an_adapter_of_a_task_s_last_layer_counts(both_orders: bool) -> None:
    """Also where the scores of both orders of a pair are added before the bias, for which the matrix is used itself."""
    section = TextClassifierHeadConfig(classes=3, both_orders=both_orders, pooler="none")
    config = FAMILY_MODELS["bert"]
    adapted, merged = (TextClassifier(config, section).double().eval() for _ in range(2))
    for place, parameter in enumerate(adapted.parameters()):
        parameter.data = draw(*parameter.shape, seed=place)
    adapted.classifier.lora = LoRA(adapted.classifier, LoRAConfig(rank=2, alpha=3.0), "classifier").double()
    for parameter in adapted.classifier.lora.parameters():
        parameter.data = draw(*parameter.shape, seed=parameter.shape[0])
    merged.load_state_dict(dict(merge_lora(adapted.state_dict(), 3.0 / 2)))
    examples = torch.tensor([[4, -1, 4, 5, 5, -1]])
    fields = {
        "examples": examples, "targets": torch.tensor([[2, IGNORE, 1, 0, 1, IGNORE]]),
        "parts": torch.tensor([[0, 0, 1, 0, 1, 0]]),
    }  # fmt: skip
    hidden_BTD = draw(1, 6, config.d_model, seed=9)
    loss = adapted(hidden_BTD, **fields)
    torch.testing.assert_close(loss, merged(hidden_BTD, **fields), rtol=1e-12, atol=1e-12)
    loss.backward()
    assert all(p.grad is not None and p.grad.any() for p in adapted.classifier.lora.parameters())


def test_a_model_starts_as_it_was() -> None:
    adapted, plain = (build(UNTIED_MODEL.with_changes({"lora": lora})).double() for lora in (LORA, None))
    for model in (adapted, plain):
        initialise(model, 7)
    assert losses(adapted, UNTIED_MODEL) == losses(plain, UNTIED_MODEL)
    names = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert len(names) == 2 * 2 * 7
    assert all(map(is_factor, names))


def test_targets_and_other_trained_weights() -> None:
    lora = {"rank": 2, "targets": ["wq", "decoder.layers.1.ffn.w_*"], "trained": ["head.weight", "*.norm.*"]}
    model = build(UNTIED_MODEL.with_changes({"lora": lora}))
    adapted = {path for path, m in model.named_modules() if isinstance(m, Linear) and m.lora is not None}
    block = "decoder.layers.1.ffn"
    assert adapted == {
        "decoder.layers.0.attn.wq", "decoder.layers.1.attn.wq", f"{block}.w_gate", f"{block}.w_up", f"{block}.w_down",
    }  # fmt: skip
    trained = {name for name, p in model.named_parameters() if p.requires_grad and not is_factor(name)}
    assert {"head.weight", "decoder.norm.weight"} < trained
    assert all(name == "head.weight" or ".norm." in name for name in trained)


def test_experts_have_adapters_where_they_are_named() -> None:
    model = build(MOE.with_changes({"lora": {"rank": 2}}))
    assert not any("experts" in name for name, p in model.named_parameters() if p.requires_grad)
    model = build(MOE.with_changes({"lora": {"rank": 2, "targets": ["layers.1.ffn.experts.w_[gu]*", "wq"]}}))
    trained = {name: list(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    experts = "decoder.layers.1.ffn.experts"
    assert {name: shape for name, shape in trained.items() if "experts" in name} == {
        f"{experts}.w_gate_lora_a": [4, 2, 32], f"{experts}.w_gate_lora_b": [4, 16, 2],
        f"{experts}.w_up_lora_a": [4, 2, 32], f"{experts}.w_up_lora_b": [4, 16, 2],
    }  # fmt: skip
    assert len(trained) == 4 + 2 * 2


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_each_expert_is_that_of_its_merged_matrix(activation: str) -> None:
    """Output and all gradients, against a loop over tokens; expert 5 has none."""
    mixture, scale = build_moe(n_experts=6, activation=activation, top_k=2), 0.75
    experts, x_BTD = mixture.experts, moe_inputs()
    for key in experts.matrix_names:
        experts.add_lora(key, 3, scale)
        for name in name_factors(key):
            parameter = experts.get_parameter(name)
            parameter.data = 0.4 * draw(*parameter.shape, seed=len(name))
    choices_BTK = torch.randint(0, 5, (*x_BTD.shape[:2], 2), generator=torch.Generator().manual_seed(3))
    weights_BTK = torch.rand(choices_BTK.shape, generator=torch.Generator().manual_seed(4)).double()
    actual, _ = experts(x_BTD, weights_BTK, choices_BTK, moe_sequence())
    expected = torch.stack([
        torch.stack([
            sum(weight * expert_of_merged(experts, int(e), x_D, scale) for weight, e in zip(w_K, c_K, strict=True))
            for x_D, w_K, c_K in zip(x_TD, w_TK, c_TK, strict=True)
        ])
        for x_TD, w_TK, c_TK in zip(x_BTD, weights_BTK, choices_BTK, strict=True)
    ])  # fmt: skip
    inputs = [x_BTD, *experts.parameters()]
    assert_same_gradients(actual, expected, inputs, rtol=1e-12, atol=1e-12)
    assert all(gradient.any() for gradient in torch.autograd.grad(actual.sum(), inputs))


def expert_of_merged(experts: Experts, e: int, x_D: torch.Tensor, scale: float) -> torch.Tensor:
    """The output of one expert for one token, by the matrices W + scale · B A."""
    matrices = {
        key: experts.get_parameter(key)[e] + scale * experts.get_parameter(b)[e] @ experts.get_parameter(a)[e]
        for key in experts.matrix_names
        for a, b in [name_factors(key)]
    }
    inner = matrices["w_up"] @ x_D
    if "w_gate" in matrices:
        return matrices["w_down"] @ (torch.nn.functional.silu(matrices["w_gate"] @ x_D) * inner)
    return matrices["w_down"] @ torch.nn.functional.gelu(inner)


@pytest.mark.parametrize(("config", "lora", "message"), [
    (UNTIED_MODEL, {"targets": ["q_proj"]}, "'q_proj' matches no linear layer.*there are w_down, w_gate"),
    (UNTIED_MODEL, {"targets": ["tokens"]}, "'tokens' is decoder.embedding.tokens, a Embedding"),
    (MOE, {"targets": ["experts.w_up"], "dropout": 0.1}, "experts.w_up holds the matrices of several experts"),
    (MOE, {"targets": ["router"]}, "'router' is decoder.layers.0.ffn.router, a TopKRouter, and adapters go"),
    (UNTIED_MODEL, {"trained": ["haed.*"]}, "model.lora.trained: 'haed.*' matches no weight"),
    (FAMILY_MODELS["t5"], {"targets": ["cross.wk"], "dropout": 0.1}, "reads something else than its block's"),
    (FAMILY_MODELS["latent attention"], {"targets": ["wk"], "dropout": 0.1}, "attn.wk lies in no block, or reads"),
    (FAMILY_MODELS["deberta"], {"targets": ["w?_position"], "dropout": 0.1}, "attn.wq_position lies in no block, or"),
    (FAMILY_MODELS["swin v2"], {"targets": ["hidden"], "dropout": 0.1}, "attn.position.hidden lies in no block, or"),
    (
        ModelConfig.from_dotted(PATTERN_MODELS["longformer"]), {"targets": ["wq_global"], "dropout": 0.1},
        "attn.wq_global lies in no block, or",
    ),
    (UNTIED_MODEL, {"rank": 0}, "greater than or equal to 1|greater than 0"),
])  # fmt: skip
def test_modules_without_an_adapter_are_named(config: ModelConfig, lora: dict[str, Any], message: str) -> None:
    with pytest.raises((UsageError, ValueError), match=message):
        build(config.with_changes({"lora": {"rank": 2, **lora}}))
