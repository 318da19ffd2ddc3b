"""Our decoder against Hugging Face's Llama, from the same random weights: logits and every gradient."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from megatfm.config import ModelConfig
from megatfm.models import Decoder, build

LENGTH = 13
NAMES = {
    "embedding.tokens": "model.embed_tokens",
    "head": "lm_head",
    "norm": "model.norm",
    "attn_residual.norm": "input_layernorm",
    "ffn_residual.norm": "post_attention_layernorm",
    "attn.wq": "self_attn.q_proj",
    "attn.wk": "self_attn.k_proj",
    "attn.wv": "self_attn.v_proj",
    "attn.wo": "self_attn.o_proj",
    "ffn.w_gate": "mlp.gate_proj",
    "ffn.w_up": "mlp.up_proj",
    "ffn.w_down": "mlp.down_proj",
}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def their_name(ours: str) -> str:
    """layers.3.attn.wq.weight → model.layers.3.self_attn.q_proj.weight"""
    module = ours.removesuffix(".weight").removeprefix("decoder.")
    if not module.startswith("layers."):
        return f"{NAMES[module]}.weight"
    _, layer, part = module.split(".", 2)
    return f"model.layers.{layer}.{NAMES[part]}.weight"


class DoubleTorch:
    """The torch module, but what it calls float and float32 is float64."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture(params=[torch.float64, torch.float32], ids=["float64", "float32"])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """Llama computes norms, softmax and angles in float32 whatever the dtype; here in float64 if that is asked."""
    if request.param == torch.float64:
        monkeypatch.setattr(modeling_llama, "torch", DoubleTorch())
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    return request.param


def make_pair(dtype: torch.dtype, kv_heads: int, tied: bool) -> tuple[Decoder, LlamaForCausalLM]:
    config = ModelConfig(
        vocab_size=50, d_model=24, n_layers=2, n_heads=6, n_kv_heads=kv_heads, d_ff=40,
        norm_eps=1e-4, rope_theta=500.0, tie_embeddings=tied,
    )  # fmt: skip
    ours = build(config).to(dtype)
    generator = torch.Generator().manual_seed(kv_heads)
    for parameter in ours.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        # Norms around 1, matrices of a scale at which attention is far from uniform; nothing at its initial value.
        parameter.data.copy_(1 + 0.3 * noise if parameter.dim() == 1 else 0.3 * noise)
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6,
            num_key_value_heads=kv_heads, rms_norm_eps=1e-4, tie_word_embeddings=tied, hidden_act="silu",
            rope_parameters={"rope_type": "default", "rope_theta": 500.0}, attn_implementation="eager",
        )
    ).to(dtype)  # fmt: skip
    named = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            named.pop(their_name(name)).copy_(parameter)
    assert not named, "Llama has parameters that the decoder has not"
    return ours, theirs


def close(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> None:
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype == dtype
    assert float((ours - theirs).detach().norm() / theirs.detach().norm()) <= TOLERANCE[dtype]


@pytest.mark.parametrize(("kv_heads", "tied"), list(itertools.product([6, 2, 1], [True, False])))
def test_logits_and_every_gradient(dtype: torch.dtype, kv_heads: int, tied: bool) -> None:
    ours, theirs = make_pair(dtype, kv_heads, tied)
    tokens = torch.randint(0, 50, (3, LENGTH), generator=torch.Generator().manual_seed(0))
    targets = tokens.roll(-1, 1)
    targets[:, -1] = -100
    their_logits = theirs(input_ids=tokens).logits
    close(ours(tokens).logits, their_logits, dtype)
    ours(tokens, targets=targets).losses["causal"].backward()
    F.cross_entropy(their_logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    their_parameters = dict(theirs.named_parameters())
    compared = 0
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.norm() > 1e-3, f"nothing to compare for {name}"
        close(parameter.grad, their_parameters[their_name(name)].grad, dtype)
        compared += 1
    assert compared == len(their_parameters) == (20 if tied else 21)


def test_padding_and_packing_leave_a_row_as_it_is_alone(dtype: torch.dtype) -> None:
    ours, theirs = make_pair(dtype, kv_heads=2, tied=False)
    tokens = torch.randint(0, 50, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    documents = torch.tensor([[0] * 5 + [1] * 7 + [-1]])
    positions = torch.tensor([[*range(5), *range(7), 0]])
    packed = ours(tokens, documents=documents, positions=positions).logits
    close(packed[:, :5], theirs(input_ids=tokens[:, :5]).logits, dtype)
    close(packed[:, 5:12], theirs(input_ids=tokens[:, 5:12]).logits, dtype)
    assert packed.isfinite().all()
