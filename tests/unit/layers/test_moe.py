"""Mixtures of experts against transformers' layers, and against each token's formula."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from pydantic import ValidationError
from torch import Tensor
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.mixtral import modeling_mixtral
from transformers.models.switch_transformers import modeling_switch_transformers

from megatfm.cost import TokenCounts, compute_module_cost
from megatfm.layers.initialisation import initialise, make_initialiser
from megatfm.layers.loss_terms import BlockOutput
from megatfm.layers.moe.moe import MoE
from megatfm.layers.moe.routers import stable_topk
from megatfm.layers.sequence import SequenceMetadata
from tests.support.models import F_, ROUTER_LOSSES, B, D, E, T, build_moe, moe_config, moe_inputs, moe_sequence
from tests.support.reference_gradients import TOLERANCE, cast_to_float64, dtype_fixture

MODULES = (modeling_deepseek_v3, modeling_mixtral, modeling_switch_transformers)
dtype = dtype_fixture(*MODULES)


def to_hf_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors, or gradients, by the names of transformers' layers."""
    named = {
        "gate.weight": tensors["router.weight"],
        "experts.gate_up_proj": torch.cat([tensors["experts.w_gate"], tensors["experts.w_up"]], 1),
        "experts.down_proj": tensors["experts.w_down"],
    }
    shared = {
        f"shared_experts.{part}_proj.weight": tensors[f"shared.w_{part}.weight"] for part in ("gate", "up", "down")
    }
    return named | shared


@pytest.mark.parametrize(("normalise", "groups"), [(False, 2), (True, 1)])
def test_groups_of_deepseek_v3_are_transformers(normalise: bool, groups: int, dtype: torch.dtype) -> None:
    """Outputs and gradients; the other routers and numbers of groups are in tests/parity/test_decoders.py."""
    router = {
        "n_group": groups, "topk_group": groups // 2 or 1, "norm_topk_prob": normalise, "routed_scaling_factor": 2.5,
    }  # fmt: skip
    config = transformers.DeepseekV3Config(
        hidden_size=D, moe_intermediate_size=F_, num_experts_per_tok=3, n_routed_experts=E, n_shared_experts=2, **router
    )
    hf_layer = modeling_deepseek_v3.DeepseekV3MoE(config).to(dtype)
    actual = build_moe(dtype, n_shared_experts=2, router={"name": "deepseek_v3", **router, **ROUTER_LOSSES})
    hf_layer.gate.e_score_correction_bias.copy_(actual.router.bias)
    for name, tensor in to_hf_names(dict(actual.named_parameters())).items():
        hf_layer.get_parameter(name).data.copy_(tensor.data)
    x, other = moe_inputs(dtype), moe_inputs(dtype)
    y, expected = actual(x, moe_sequence()).y, hf_layer(other)
    assert (y - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()
    direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)
    y.backward(direction)
    expected.backward(direction)
    gradients = to_hf_names({name: p.grad for name, p in actual.named_parameters()})
    gradients["x"] = x.grad
    reference = {name: p.grad for name, p in hf_layer.named_parameters()} | {"x": other.grad}
    assert gradients.keys() == reference.keys()
    for name, gradient in reference.items():
        assert gradient.norm() > 0
        assert (gradients[name] - gradient).norm() <= TOLERANCE[dtype] * gradient.norm(), name


@pytest.mark.parametrize("top_k", [1, 3])
def test_terms_are_those_that_transformers_defines(top_k: int) -> None:
    """One layer: transformers adds the shares of all layers up before it multiplies."""
    with cast_to_float64(torch.float64, *MODULES):
        actual, x = build_moe(top_k=top_k, router={"name": "top_k", **ROUTER_LOSSES}), moe_inputs()
        logits = F.linear(x, actual.router.weight)
        result = actual(x, moe_sequence())
        shares = result.counts["load"] / result.counts["load"].sum()
        actual.shares.copy_(shares)
        losses = actual(x, moe_sequence()).losses
        reference = modeling_mixtral.load_balancing_loss_func((logits.flatten(0, 1),), E, top_k)
        of_four = modeling_mixtral.load_balancing_loss_func((logits.flatten(0, 1),) * 4, E, top_k)
        torch.testing.assert_close(of_four, reference, msg="one term for all layers, where ours are added")
        rows = [modeling_mixtral.load_balancing_loss_func((row,), E, top_k) for row in logits]
        z = modeling_switch_transformers.router_z_loss_func(logits)
        expected = {"balance": reference * B * T / top_k, "router_z": z * B * T}
        expected["sequence_balance"] = torch.stack(rows).sum() / top_k
    if top_k == 1:
        probabilities = logits.softmax(-1)
        switch = modeling_switch_transformers.load_balancing_loss_func(probabilities, probabilities.argmax(-1))
        torch.testing.assert_close(switch * B, expected["sequence_balance"])
    assert losses.keys() == expected.keys()
    for name, term in expected.items():
        torch.testing.assert_close(losses[name], term, rtol=1e-6, atol=0)  # their counts are float32
        aux_gradients, hf_gradients = (
            torch.autograd.grad(loss, [x, actual.router.weight], retain_graph=True) for loss in (losses[name], term)
        )
        assert all(gradient.norm() > 0 for gradient in hf_gradients)
        torch.testing.assert_close(aux_gradients, hf_gradients, rtol=1e-5, atol=1e-6)


def by_hand(module: MoE, x: Tensor, real: Tensor, is_taken: Tensor) -> Tensor:
    """Token by token, for a normalised softmax."""
    y = torch.zeros_like(x)
    for b, t in real.nonzero().tolist():
        p = (module.router.weight @ x[b, t]).softmax(-1)
        best = sorted(range(E), key=lambda e: (-p[e].item(), e))[: is_taken.shape[-1]]
        total = sum(p[e] for e in best)
        for k, e in enumerate(best):
            if is_taken[b, t, k]:
                inner = F.silu(module.experts.w_gate[e] @ x[b, t]) * (module.experts.w_up[e] @ x[b, t])
                y[b, t] = y[b, t] + p[e] / total * (module.experts.w_down[e] @ inner)
    return y


@pytest.mark.parametrize("capacity", [None, 0.6])
def test_padding_goes_through_no_expert_and_counts_nowhere(capacity: float | None) -> None:
    documents = torch.zeros(B, T, dtype=torch.int64)
    documents[0, 4:], documents[2, 0:] = -1, -1  # a row without any token, too
    real, x, module = documents >= 0, moe_inputs(), build_moe(capacity_factor=capacity)
    choices = stable_topk((x @ module.router.weight.T), 3).where(real[..., None], E)
    is_taken = torch.ones_like(choices, dtype=torch.bool)
    if capacity:
        most, loads = math.ceil(capacity * T * 3 / E), torch.zeros(B, E, dtype=torch.int64)
        for k in range(3):
            for b, t in real.nonzero().tolist():
                e = choices[b, t, k]
                is_taken[b, t, k], loads[b, e] = loads[b, e] < most, loads[b, e] + 1
    result = module(x, moe_sequence(documents))
    torch.testing.assert_close(result.y, by_hand(module, x, real, is_taken), rtol=1e-12, atol=1e-12)
    assert not result.y[~real].any()
    assert result.counts["load"].tolist() == torch.bincount(choices[real].flatten(), minlength=E).tolist()
    assert int(result.counts["dropped"]) == int((~is_taken[real]).sum())
    assert (int(result.counts["dropped"]) > 0) == (capacity is not None)
    assert ("dropped" in module.statistics(result.counts)) == (capacity is not None), "else there is nothing to draw"
    p = (x @ module.router.weight.T).softmax(-1)[real]
    torch.testing.assert_close(result.counts["entropy"], -(p * p.log()).sum())
    alone = module(x[1:2], moe_sequence(rows=1))
    for name in ("sequence_balance", "router_z", "balance"):  # of the rows, one is whole and one cut short
        remainder = module(x[:1, :4], SequenceMetadata(torch.arange(4)[None], None))
        torch.testing.assert_close(result.losses[name], alone.losses[name] + remainder.losses[name])
    gradient = torch.autograd.grad(result.y.sum() + sum(result.losses.values()), x)[0]
    assert gradient.isfinite().all()
    assert not gradient[~real].any()


def test_equal_scores_choose_the_first_experts_at_any_size() -> None:
    scores = torch.zeros(400, 64)
    scores[:, 5] = 1
    for n in (1, 3, 400):
        assert stable_topk(scores[:n], 4).tolist() == [[5, 0, 1, 2]] * n


def test_gradients_of_idle_and_overfull_experts() -> None:
    for d_ff in (F_, 5):  # in float32 by the grouped product, and by the loop
        module, x = build_moe(torch.float32, top_k=1, d_ff=d_ff), moe_inputs(torch.float32).detach().abs()
        module.router.weight.data.fill_(-1.0)
        module.router.weight.data[3] = 1.0
        result = module(x, moe_sequence())
        assert result.counts["load"].tolist() == [0, 0, 0, B * T, 0, 0, 0, 0]
        result.y.sum().backward()
        for parameter in module.experts.parameters():
            assert parameter.grad.isfinite().all()
            assert [bool(g.any()) for g in parameter.grad] == [e == 3 for e in range(E)]


def test_jitter_is_in_training_alone_and_within_its_bounds() -> None:
    module, x = build_moe(top_k=1, router={"name": "switch", "jitter": 0.1}), moe_inputs().detach()
    jittered = module.router.jitter(x, moe_sequence())
    factor = jittered / x
    assert 0.9 <= float(factor.min()) < 0.91
    assert 1.09 < float(factor.max()) <= 1.1
    assert torch.equal(module.router.jitter(x[1:], SequenceMetadata(
        torch.arange(T).expand(2, T), None, rng_keys=torch.arange(1, 3))), jittered[1:])  # fmt: skip
    assert torch.equal(module.eval().router.jitter(x, moe_sequence()), x)


def test_state_follows_the_counts_of_a_step() -> None:
    module = build_moe(router={"name": "deepseek_v3", "bias_update_rate": 0.25, "aux_loss_coef": 1.0})
    before, x = module.router.bias.clone(), moe_inputs()
    result = [module(x, moe_sequence()), module(-x, moe_sequence())]
    for output in result:
        assert isinstance(output, BlockOutput)
        module.accumulate_counts(output.counts)
    load = sum(output.counts["load"] for output in result)
    with torch.no_grad():
        module.update(module.observed)
    torch.testing.assert_close(module.router.bias, before + 0.25 * (load.double().mean() - load).sign())
    torch.testing.assert_close(module.shares, load.double() / (2 * B * T * 3))
    module.reset_counts()
    assert not module.observed


def test_a_step_without_tokens_keeps_the_state() -> None:
    router = {"name": "noisy_top_k", "importance_loss_coef": 0.1, "load_loss_coef": 0.1, "aux_loss_coef": 0.1}
    module, nothing = build_moe(router=router), torch.full((B, T), -1)
    module.accumulate_counts(module(moe_inputs(), moe_sequence()).counts)
    with torch.no_grad():
        module.update(module.observed)
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    module.reset_counts()
    module.accumulate_counts(module(moe_inputs(), moe_sequence(nothing)).counts)
    assert int(module.observed["tokens"]) == 0
    with torch.no_grad():
        module.update(module.observed)
    for name, buffer in module.named_buffers():
        assert torch.equal(buffer, before[name]), name
    assert all(torch.isfinite(term) for term in module(moe_inputs(), moe_sequence()).losses.values())
    assert module.statistics(module.observed)["importance_cv2"] == 0


def test_statistics_have_the_variation_itself_where_the_loss_has_a_tangent() -> None:
    module = build_moe(router={"name": "noisy_top_k", "importance_loss_coef": 0.1, "load_loss_coef": 0.1})
    with torch.no_grad():
        result = module(moe_inputs(), moe_sequence())
    statistics = module.statistics(result.counts)
    for name in ("importance", "load"):
        sums = result.counts[f"balanced {name}"].double()
        expected = float((sums.std(unbiased=False) / sums.mean()) ** 2)
        assert statistics[f"{name}_cv2"] == pytest.approx(expected, rel=1e-9)
    assert result.counts["load"].sum() == B * T * 3, "choices, where what is balanced is called a load, too"


def test_a_balanced_start() -> None:
    """Shares begin even, where the term is 1 a token and has no gradient."""
    config = moe_config()
    module = MoE(config, make_initialiser(config)).double()
    initialise(module, 1)
    x = moe_inputs()
    loss = module(x, moe_sequence()).losses["balance"]
    torch.testing.assert_close(loss, torch.tensor(float(B * T), dtype=torch.float64))
    assert torch.autograd.grad(loss, module.router.weight)[0].norm() < 1e-12


@pytest.mark.parametrize(("keys", "message"), [
    ({"drop_policy": "position"}, "drop_policy = 'position' has no meaning where experts take all tokens"),
    ({"top_k": 9}, "top_k = 9 is more than n_experts = 8: choose 8 or less"),
    ({"capacity_factor": 0.0}, "greater than 0"),
    ({"router": {"name": "top_k", "jitter": 0.1}}, "jitter"),
    ({"router": {"name": "switch"}}, "chooses one: set top_k = 1"),
    ({"router": {"name": "deepseek_v3", "n_group": 3}}, "the nearest that does is 2"),
    ({"router": {"name": "deepseek_v3", "topk_group": 2}}, "choose 1 or less"),
    ({"router": {"name": "deepseek_v3", "n_group": 4}}, "choose router.topk_group = 2 or more"),
    ({"capacity_factor": 1.0, "expert_capacity": 4}, "say the same thing twice"),
    ({"dropout": 0.1}, "dropout = 0.1 is for dense networks"),
])  # fmt: skip
def test_contradictory_options_of_experts_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        moe_config(**keys)


def test_a_token_meets_its_experts_and_the_shared_ones() -> None:
    module, expert_size = build_moe(n_shared_experts=2), 3 * D * F_
    cost = compute_module_cost(module, TokenCounts(5.0))
    assert cost.matmul_macs == 5 * (E * D + 3 * expert_size + 2 * expert_size)
    assert cost.inactive_parameters == (E - 3) * expert_size


def test_families_whose_streams_have_no_padding_are_refused() -> None:
    config = moe_config()
    with pytest.raises(ValidationError, match=r"ffn\.name = 'moe' has no meaning with family = 'discriminator'"):
        config.with_changes({"family": "discriminator"})
