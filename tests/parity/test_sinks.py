"""gpt-oss's attention against transformers: a window, grouped heads, biases and learned scores without keys."""

import pytest
import torch
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention

from megatfm.config import ModelConfig
from megatfm.layers.block import Block
from megatfm.layers.rope import compute_frequencies
from megatfm.layers.sequence import SequenceMetadata
from tests.support.reference_gradients import perturb

LENGTH, WIDTH, HEADS, KV_HEADS, HEAD = 13, 24, 6, 2, 4
NAMES = {f"w{part}.{kind}": f"{part}_proj.{kind}" for part in "qkvo" for kind in ("weight", "bias")} | {
    "core.sinks.weight": "sinks"
}


@pytest.mark.parametrize("window", [None, 4])
def test_output_and_every_gradient(window: int | None) -> None:
    pattern = "full" if window is None else {"name": "window", "width": window}
    config = ModelConfig.from_dotted(
        {
            "vocab_size": 7,
            "d_model": WIDTH,
            "n_layers": 1,
            "attention.n_heads": HEADS,
            "attention.n_kv_heads": KV_HEADS,
            "attention.bias": True,
            "attention.sinks": True,
            "attention.pattern": pattern,
            "ffn.d_ff": 8,
        }
    )
    actual = Block(config, "decoder").attn.double()
    perturb(actual, scale=0.5)
    expected = GptOssAttention(
        GptOssConfig(
            hidden_size=WIDTH,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=HEAD,
            attention_bias=True,
            attn_implementation="eager",
        ),
        0,
    ).double()
    named, right = dict(actual.named_parameters()), dict(expected.named_parameters())
    assert {NAMES[name] for name in named} == set(right)
    expected.load_state_dict({NAMES[name]: parameter.detach() for name, parameter in named.items()})
    x = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    angles = torch.arange(LENGTH)[:, None] * compute_frequencies(HEAD, 10_000.0)
    turned = (angles.cos()[None].expand(2, -1, -1), angles.sin()[None].expand(2, -1, -1))
    away = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    hidden = (away < 0) | (away >= (window or LENGTH))
    mask = torch.zeros(LENGTH, LENGTH, dtype=torch.float64).masked_fill(hidden, -torch.inf)
    wanted, _ = expected(x, turned, mask[None, None].expand(2, 1, -1, -1))
    result = actual(x, SequenceMetadata(torch.arange(LENGTH).expand(2, -1)))
    torch.testing.assert_close(result, wanted, rtol=1e-11, atol=1e-12)
    g = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    result.backward(g)
    wanted.backward(g)
    for name, parameter in named.items():
        torch.testing.assert_close(parameter.grad, right[NAMES[name]].grad, rtol=1e-9, atol=1e-11)
