"""Every combination of parts against a transformer that is written out, values and gradients; and that it trains.

This is the reference for what transformers has not: Shaw's positions, DeepNorm, sandwich norms, the Transformer of 2017
with its three ties, ReLU², label smoothing, soft caps together with all else, heads for later tokens, prefixes.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.models import build
from tests.support.models import (
    ACTIVATIONS,
    DENSE_VOCABULARY,
    MASKS,
    NORM_POSITIONS,
    NORMS,
    POSITIONS,
    SMALL_DENSE,
    combination,
)
from tests.support.reference_gradients import perturb

# T queries, S keys, D model width, N query heads, K key-value heads, H head width, V vocabulary


@dataclass
class DenseTransformer:
    """A model's parameters by name, and what its config says."""

    config: ModelConfig
    parameters: Mapping[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.parameters[name]

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = torch.einsum("...i,oi->...o", x, self[f"{name}.weight"])
        return y + self[f"{name}.bias"] if f"{name}.bias" in self.parameters else y

    def norm(self, name: str, x: Tensor) -> Tensor:
        eps = self.config.norm.eps
        if self.config.norm.name == "rms_norm":
            return x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps) * self[f"{name}.weight"]
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + eps)
        return scaled * self[f"{name}.weight"] + self[f"{name}.bias"]

    # ------------------------------------------------------------------------------------------------ sublayers

    def activation(self, x: Tensor) -> Tensor:
        tanh = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        erf = 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
        swish = x / (1 + torch.exp(-x))
        return {
            "relu": x * (x > 0), "relu2": (x * (x > 0)) ** 2, "gelu": erf, "gelu_tanh": tanh, "swish": swish,
            "swiglu": swish, "geglu": erf, "geglu_tanh": tanh,
        }[self.config.ffn.activation]  # fmt: skip

    def ffn(self, name: str, x: Tensor) -> Tensor:
        up = self.linear(f"{name}.w_up", x)
        if self.config.ffn.activation in ("swiglu", "geglu", "geglu_tanh"):
            inner = self.activation(self.linear(f"{name}.w_gate", x)) * up
        else:
            inner = self.activation(up)
        return self.linear(f"{name}.w_down", inner)

    def attention(self, name: str, stack: str, x: Tensor, mask: Tensor, memory: Tensor | None = None) -> Tensor:
        """seen: [T, S], what each query may look at. memory: of cross-attention, which knows no positions."""
        config, local = self.config, memory is None
        source = x if memory is None else memory
        width = config.attention.head_dim or config.d_model // config.attention.n_heads
        q, k, v = (
            self.linear(f"{name}.w{part}", y).unflatten(-1, (-1, width))
            for part, y in (("q", x), ("k", source), ("v", source))
        )
        if config.attention.qk_norm:
            q, k = (
                y / torch.sqrt((y**2).mean(-1, keepdim=True) + config.norm.eps) * self[f"{name}.{part}_norm.weight"]
                for part, y in (("q", q), ("k", k))
            )
        if local and config.position.name == "rope":
            q, k = apply_rope(q, config.position.theta), apply_rope(k, config.position.theta)
        group = config.attention.n_heads // config.attention.kv_heads
        scale = config.attention.scale or 1 / math.sqrt(width)
        away = torch.arange(len(source))[None] - torch.arange(len(x))[:, None]  # key − query
        far = getattr(config.position, "max_distance", 1)
        clipped = away.clamp(-far, far) + far
        heads = []
        for n in range(config.attention.n_heads):
            keys, values = k[:, n // group], v[:, n // group]
            scores = torch.einsum("th,sh->ts", q[:, n], keys)
            if local and config.position.name == "shaw":
                scores = scores + torch.einsum("th,tsh->ts", q[:, n], self[f"{name}.core.keys"][clipped])
            scores = scores * scale
            if config.attention.softcap:
                scores = config.attention.softcap * torch.tanh(scores / config.attention.softcap)
            if local and config.position.name == "alibi":
                scores = scores - compute_alibi_slopes(config.attention.n_heads)[n] * away.abs()
            if local and config.position.name == "t5":
                scores = scores + self[f"{stack}.position.weight"][self.buckets(away, stack), n]
            share = torch.where(mask, scores, -math.inf).softmax(-1)
            out = share @ values
            if local and config.position.name == "shaw":
                out = out + torch.einsum("ts,tsh->th", share, self[f"{name}.core.values"][clipped])
            heads.append(out)
        return self.linear(f"{name}.wo", torch.cat(heads, -1))

    def buckets(self, away: Tensor, stack: str) -> Tensor:
        from transformers.models.t5.modeling_t5 import T5Attention

        config = self.config
        return T5Attention._relative_position_bucket(
            away, stack == "encoder", config.position.buckets, config.position.max_distance
        )

    # ------------------------------------------------------------------------------------------------ the whole

    def sublayer(self, name: str, stack: str, x: Tensor, apply: Callable[[Tensor], Tensor]) -> Tensor:
        norm = f"{name}.norm"
        match self.config.norm.placement:
            case "pre":
                return x + apply(self.norm(norm, x))
            case "post":
                return self.norm(norm, x + apply(x))
            case "sandwich":
                return x + self.norm(f"{name}.norm_out", apply(self.norm(norm, x)))
            case _:
                return self.norm(norm, self.alpha(stack) * x + apply(x))

    def alpha(self, stack: str) -> float:
        """DeepNet, table 1: of N encoder and M decoder layers."""
        m, n = self.config.n_layers, self.config.n_encoder_layers or self.config.n_layers
        if self.config.family != "encoder_decoder":
            return (2 * m) ** (1 / 4)
        return 0.81 * (n**4 * m) ** (1 / 16) if stack == "encoder" else (3 * m) ** (1 / 4)

    def embed(self, stack: str, tokens: Tensor) -> Tensor:
        config = self.config
        tables = "encoder" if config.family == "encoder_decoder" else stack
        x = self[f"{tables}.embedding.tokens.weight"][tokens] * config.embedding_scale
        if config.position.name == "learned":
            x = x + self[f"{stack}.embedding.positions.weight"][: len(tokens)]
        if config.position.name == "sinusoidal":
            channel = torch.arange(config.d_model)
            angle = torch.arange(len(tokens))[:, None] / 10000 ** (2 * (channel // 2).double() / config.d_model)
            x = x + torch.where(channel % 2 == 0, angle.sin(), angle.cos())
        return x

    def block(self, name: str, stack: str, x: Tensor, mask: Tensor, memory: Tensor | None) -> Tensor:
        x = self.sublayer(f"{name}.attn_residual", stack, x, lambda y: self.attention(f"{name}.attn", stack, y, mask))
        if memory is not None:
            all_of_it = torch.ones(len(x), len(memory), dtype=torch.bool)
            x = self.sublayer(
                f"{name}.cross_residual",
                stack,
                x,
                lambda y: self.attention(f"{name}.cross", stack, y, all_of_it, memory),
            )
        return self.sublayer(f"{name}.ffn_residual", stack, x, lambda y: self.ffn(f"{name}.ffn", y))

    def run(self, stack: str, tokens: Tensor, mask: Tensor, memory: Tensor | None = None) -> Tensor:
        config, x = self.config, self.embed(stack, tokens)
        depth = (config.n_encoder_layers if stack == "encoder" else None) or config.n_layers
        for i in range(depth):
            x = self.block(f"{stack}.layers.{i}", stack, x, mask, memory)
        return self.norm(f"{stack}.norm", x) if config.norm.placement in ("pre", "sandwich") else x

    def hidden(self, tokens: Tensor, *, prefix: int = 0, encoder_tokens: Tensor | None = None) -> Tensor:
        """[T, D] of one document; prefix: so many of its tokens are seen by all."""
        length = len(tokens)
        if self.config.family == "encoder":
            return self.run("encoder", tokens, torch.ones(length, length, dtype=torch.bool))
        memory = None
        if encoder_tokens is not None:
            size = len(encoder_tokens)
            memory = self.run("encoder", encoder_tokens, torch.ones(size, size, dtype=torch.bool))
        places = torch.arange(length)
        mask = (places[None] <= places[:, None]) | (places[None] < prefix)
        return self.run("decoder", tokens, mask, memory)

    def logits(self, hidden: Tensor) -> Tensor:
        config = self.config
        tables = "decoder" if config.family == "decoder" else "encoder"
        tied = f"{tables}.embedding.tokens" if config.embedding.tied else "head"
        x = torch.einsum("...d,vd->...v", hidden * config.head_scale, self[f"{tied}.weight"])
        x = x + self["head.bias"] if config.lm_head.bias else x
        return config.lm_head.softcap * torch.tanh(x / config.lm_head.softcap) if config.lm_head.softcap else x

    def future_logits(self, hidden: Tensor, ahead: int) -> Tensor:
        """Loss of the head that looks `ahead` tokens beyond the next one."""
        places = torch.arange(len(hidden))
        mask = places[None] <= places[:, None]
        x = self.block(f"future.{ahead}.layers.0", "decoder", hidden, mask, None)
        ends = self.config.norm.placement in ("post", "deepnorm")
        return self.logits(x if ends else self.norm(f"future.{ahead}.final_norm", x))

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Summed over targets ≥ 0, a share of each spread over the vocabulary."""
        logs, share = logits.log_softmax(-1), self.config.lm_head.label_smoothing
        exact = F.one_hot(targets.clamp(min=0), logits.shape[-1]).double()
        expected = (1 - share) * exact + share / logits.shape[-1]
        return -(expected * logs).sum(-1)[targets >= 0].sum()


def apply_rope(x: Tensor, theta: float) -> Tensor:
    """Channels i and i + H/2 of x [T, n, H] as a complex number, times e^(i · position · θ^(−2i/H))."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None, None] / theta ** (torch.arange(half).double() / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * angles)
    return torch.cat([turned.real, turned.imag], -1)


def compute_alibi_slopes(n: int) -> list[float]:
    """ALiBi (section 3, and its released code): geometric; for other than powers of two filled from twice as many."""
    if n & (n - 1) == 0:
        return [2 ** (-8 * (i + 1) / n) for i in range(n)]
    power = 1 << (n.bit_length() - 1)
    return compute_alibi_slopes(power) + compute_alibi_slopes(2 * power)[0::2][: n - power]


PARTS = {
    "transformer-2017": {"family": "encoder_decoder", "norm.name": "layer_norm", "norm.placement": "post",
                         "ffn.activation": "relu", "ffn.bias": True, "position.name": "sinusoidal",
                         "embedding.scale": 4.0, "lm_head.label_smoothing": 0.1, "n_encoder_layers": 3},
    "grouped heads, qk-norm": {"attention.n_heads": 4, "attention.n_kv_heads": 2, "attention.qk_norm": True,
                               "attention.head_dim": 6},
    "soft caps": {"attention.softcap": 1.5, "lm_head.softcap": 2.0, "lm_head.bias": True, "position.name": "alibi"},
    "soft cap with shaw, one key-value head": {
        "attention.softcap": 1.5, "position.name": "shaw", "position.max_distance": 2, "attention.n_heads": 4,
        "attention.n_kv_heads": 1,
    },
    "label smoothing, soft cap, scales": {
        "lm_head.label_smoothing": 0.2, "lm_head.softcap": 3.0, "lm_head.scale": 0.5, "attention.scale": 0.7,
        "embedding.tied": False,
    },
    "later tokens": {"n_mtp_heads": 2, "lm_head.label_smoothing": 0.1},
    "alibi with six heads": {"attention.n_heads": 6, "d_model": 24, "position.name": "alibi"},
    "t5 with more encoder layers, biases": {
        "family": "encoder_decoder", "n_encoder_layers": 3, "attention.bias": True, "position.name": "t5",
        "position.buckets": 4, "position.max_distance": 5, "norm.placement": "deepnorm", "init.name": "deepnorm",
    },
}  # fmt: skip
DOCUMENTS = (6, 1, 4)
PREFIXES = (3, 0, 4)
ENCODER_DOCUMENTS = (5, 3, 2)


def draw(n: int, seed: int) -> Tensor:
    return torch.randint(0, DENSE_VOCABULARY, (n,), generator=torch.Generator().manual_seed(seed))


def spans(lengths: tuple[int, ...]) -> list[slice]:
    ends = list(itertools.accumulate(lengths))
    return [slice(end - n, end) for end, n in zip(ends, lengths, strict=True)]


def row(lengths: tuple[int, ...], padding: int) -> dict[str, Tensor]:
    """Documents and positions [1, T] of a packed row."""
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])
    return {
        "documents": torch.cat([documents, torch.full((padding,), -1)])[None],
        "positions": torch.cat([positions, torch.zeros(padding, dtype=torch.int64)])[None],
    }


def batch(config: ModelConfig, mask: str) -> dict[str, Tensor]:
    """One row of three documents and two padding tokens."""
    result = {**row(DOCUMENTS, 2), "tokens": draw(13, 1)[None], "targets": draw(13, 2)[None]}
    result["targets"] = result["targets"].where(result["documents"] >= 0, -100)
    result["targets"][0, 2] = -100
    if mask == "prefix":
        result["prefix"] = torch.zeros(1, 13, dtype=torch.int64)
        for piece, n in zip(spans(DOCUMENTS), PREFIXES, strict=True):
            result["prefix"][0, piece.start : piece.start + n] = 1
    if config.family == "encoder_decoder":
        result |= {f"encoder_{key}": value for key, value in row(ENCODER_DOCUMENTS, 1).items()}
        result["encoder_tokens"] = draw(11, 3)[None]
    return result


def reference(config: ModelConfig, model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Logits of the documents one after the other, and the sum of all losses."""
    dense = DenseTransformer(config, dict(model.named_parameters()))
    logits, loss = [], torch.zeros((), dtype=torch.float64)
    for document, piece in enumerate(spans(DOCUMENTS)):
        options: dict[str, Any] = {"prefix": PREFIXES[document] if "prefix" in inputs else 0}
        if "encoder_tokens" in inputs:
            options["encoder_tokens"] = inputs["encoder_tokens"][0, spans(ENCODER_DOCUMENTS)[document]]
        hidden = dense.hidden(inputs["tokens"][0, piece], **options)
        logits.append(dense.logits(hidden))
        targets = inputs["targets"][0, piece]
        loss = loss + dense.loss(logits[-1], targets)
        for ahead in range(1, config.n_mtp_heads + 1):
            later = torch.full_like(targets, -100)
            later[:-ahead] = targets[ahead:]
            loss = loss + dense.loss(dense.future_logits(hidden, ahead), later)
    return torch.cat(logits), loss


def compare(config: ModelConfig, mask: str) -> None:
    """Logits, loss and the gradient of every parameter, in float64."""
    actual = build(config).double()
    for _, module in actual.named_modules():
        if hasattr(module, "slopes"):
            module.slopes.copy_(torch.tensor(compute_alibi_slopes(config.attention.n_heads)))
    perturb(actual, scale=0.4)
    result = batch(config, mask)
    inputs = {key: value for key, value in result.items() if key != "targets"}
    expected_logits, expected_loss = reference(config, actual, result)
    logits = actual(**inputs).logits
    assert logits.isfinite().all()
    torch.testing.assert_close(logits[0, : sum(DOCUMENTS)], expected_logits, rtol=1e-10, atol=1e-10)
    loss = sum(actual(**result).losses.values())
    torch.testing.assert_close(loss, expected_loss, rtol=1e-10, atol=1e-10)
    named = dict(actual.named_parameters())
    gradients = torch.autograd.grad(loss, list(named.values()))
    expected = torch.autograd.grad(expected_loss, list(named.values()))
    norm = torch.stack([g.norm() for g in expected]).norm()
    for name, first, second in zip(named, gradients, expected, strict=True):
        assert (first - second).norm() <= 1e-9 * torch.maximum(second.norm(), 1e-6 * norm), name
        assert second.norm() > 1e-6 * norm or name.endswith("wk.bias"), f"nothing to compare for {name}"


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("position", POSITIONS)
def test_every_position_under_every_mask_and_norm_position(position: str, mask: str) -> None:
    turns = itertools.cycle(itertools.product(NORMS, ACTIVATIONS))
    for norm_position in NORM_POSITIONS:
        norm, activation = next(turns)
        compare(combination(norm_position, norm, activation, position, mask), mask)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_with_every_norm(activation: str) -> None:
    for norm in NORMS:
        compare(combination("pre", norm, activation, "rope", "causal"), "causal")


@pytest.mark.parametrize("parts", PARTS)
def test_combined_parts_equal_the_dense_reference(parts: str) -> None:
    config = ModelConfig.from_dotted(**(SMALL_DENSE | PARTS[parts]))
    compare(config, "pairs" if config.family == "encoder_decoder" else "causal")


def test_transformer_2017_has_one_table_for_both_sides_and_the_head() -> None:
    model = build(ModelConfig.from_dotted(**(SMALL_DENSE | PARTS["transformer-2017"])))
    assert model.encoder.embedding.tokens is model.decoder.embedding.tokens
    assert model.head.weight is model.encoder.embedding.tokens.weight
    assert model.encoder.norm is None
    assert model.decoder.norm is None
