"""Linformer, and transformers' layers of long rows beside ours: what `attention.py` compares besides patterns."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.layers.block import Block
from megatfm.layers.sequence import SequenceMetadata
from megatfm.ops.attention.reference import attention_reference

HEADS, WIDTH, RANK = 2, 64, 128
D_MODEL = HEADS * WIDTH
ALL_AT_ONCE = 4096
"""Tokens of a row above which attention that is not fused is computed by a quarter of so many queries at a time, lest
its scores fill the memory."""

Case = Callable[..., Tensor]
CaseWithInputs = tuple[Case, Sequence[Tensor]]


def draw_heads(length: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(1, HEADS, length, WIDTH, dtype=dtype).requires_grad_() for _ in range(3)]


def make_layer(length: int, **changes: object) -> nn.Module:
    """Build the attention of an encoder, with random weights."""
    config = {
        "family": "encoder", "vocab_size": 7, "d_model": D_MODEL, "n_layers": 1, "attention.n_heads": HEADS,
        "attention.bias": True, "position.name": "none", "ffn.d_ff": 8, **changes,
    }  # fmt: skip
    attention: nn.Module = Block(ModelConfig.from_dotted(config), "encoder").attn
    with torch.no_grad():
        for weight in attention.parameters():
            weight.normal_(std=0.05)
    return attention


def make_linformer(length: int, dtype: torch.dtype) -> CaseWithInputs:
    """Return Linformer attention of heads, and inputs: heads and the projections along the sequence."""
    options = {
        "attention.name": "linformer",
        "attention.max_length": length,
        "attention.projected_length": RANK,
    }
    attn = make_layer(length, **options, **{"attention.share": "headwise"}).to(dtype)
    sketches = attn.of_keys.weight, attn.of_values.weight
    return lambda q, k, v, *projections: attn._attend_documents(projections, q, k, v, None), [
        *draw_heads(length, dtype),
        *sketches,
    ]


class _ByQueries(torch.autograd.Function):
    """Unfused attention of a block of queries at a time; its gradients are computed with its output."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        outputs, gradients = [], [torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)]
        for at in range(0, q.shape[2], ALL_AT_ONCE // 4):
            part = slice(at, at + ALL_AT_ONCE // 4)
            with torch.enable_grad():
                qc, kc, vc = (x.detach().requires_grad_() for x in (q[:, :, part], k, v))
                out = attention_reference(qc, kc, vc)
                gradients[0][:, :, part], *part_gradients = torch.autograd.grad(out, (qc, kc, vc), torch.ones_like(out))
            for total, part_gradient in zip(gradients[1:], part_gradients, strict=True):
                total += part_gradient
            outputs.append(out.detach())
        ctx.save_for_backward(*gradients)
        return torch.cat(outputs, 2)

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, ...]:  # type: ignore[no-untyped-def]
        """The gradients for a gradient of ones."""
        return ctx.saved_tensors


def attend_unfused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention_reference(q, k, v) if q.shape[2] <= ALL_AT_ONCE else _ByQueries.apply(q, k, v)


def make_transformers_longformer(length: int, dtype: torch.dtype) -> CaseWithInputs:
    from transformers import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    config = LongformerConfig(
        hidden_size=D_MODEL, num_attention_heads=HEADS, attention_window=[512], num_hidden_layers=1,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    attention = LongformerSelfAttention(config, 0).to(dtype)
    mask = torch.zeros(1, length, dtype=dtype)
    mask[0, 0] = 1
    at = {"is_index_masked": mask < 0, "is_index_global_attn": mask > 0, "is_global_attn": True}
    return lambda x, *_: attention(x, attention_mask=mask, **at)[0], _draw_inputs(attention, length, dtype)


def make_transformers_bigbird(length: int, dtype: torch.dtype) -> CaseWithInputs:
    from transformers import BigBirdConfig
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel

    config = BigBirdConfig(
        hidden_size=D_MODEL, num_attention_heads=HEADS, max_position_embeddings=length, num_hidden_layers=1,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    attention = BigBirdBlockSparseAttention(config, seed=0).to(dtype)
    blocked, band, of_queries, of_keys = BigBirdModel.create_masks_for_block_sparse_attn(
        torch.ones(1, length, dtype=dtype), config.block_size
    )
    return (
        lambda x, *_: attention(x, band, of_queries, of_keys, blocked, blocked)[0],
        _draw_inputs(attention, length, dtype),
    )


def make_layer_case(pattern: dict[str, object], length: int, dtype: torch.dtype, name: str = "gqa") -> CaseWithInputs:
    attention = make_layer(length, **{"attention.name": name, "attention.pattern": pattern}).to(dtype)
    sequence = SequenceMetadata(torch.arange(length)[None])
    return lambda x, *_: attention(x, sequence), _draw_inputs(attention, length, dtype)


def _draw_inputs(module: nn.Module, length: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(1, length, D_MODEL, dtype=dtype).requires_grad_(), *module.parameters()]


LAYERS: dict[str, Callable[[int, torch.dtype], CaseWithInputs]] = {
    "transformers' longformer layer": make_transformers_longformer,
    "longformer layer": lambda length, dtype: make_layer_case(
        {"name": "longformer", "width": 512, "global_tokens": [0]}, length, dtype, "longformer"
    ),
    "transformers' bigbird layer": make_transformers_bigbird,
    "bigbird layer": lambda length, dtype: make_layer_case({"name": "bigbird"}, length, dtype),
}
MEMORY_CASES = ("linformer 128", *LAYERS)


def make_compared_cases(part: str, length: int, dtype: torch.dtype) -> dict[str, CaseWithInputs]:
    """Return the cases of a part. linformer: it and full attention, fused or not; peers: layers with projections."""
    if part == "peers":
        return {name: make(length, dtype) for name, make in LAYERS.items()}
    tensors = draw_heads(length, dtype)
    return {
        "linformer 128": make_linformer(length, dtype),
        "unfused": (attend_unfused, tensors),
        "fused": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v), tensors),
    }


def make_memory_case(name: str, length: int) -> CaseWithInputs | None:
    """Return Linformer or a layer by name; None for a pattern."""
    if name == "linformer 128":
        return make_linformer(length, torch.float32)
    return LAYERS[name](length, torch.float32) if name in LAYERS else None
