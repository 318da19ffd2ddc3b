"""A decoder's padding, cache, positions and first weights; and muP's promise."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from megatfm.config import ModelConfig
from megatfm.errors import UsageError
from megatfm.layers.attention.kv_cache import KVCache
from megatfm.layers.initialisation import Constant, Normal, compute_mup_lr_scales, initialise
from megatfm.models import Decoder, build
from tests.support.tensors import move_parameters

T = 14
CONFIG = ModelConfig(
    vocab_size=31, d_model=16, n_layers=2, attention={"n_heads": 4, "n_kv_heads": 2}, ffn={"d_ff": 24},
    embedding={"tied": False}, init={"std": 0.1},
)  # fmt: skip


@pytest.fixture
def model() -> Decoder:
    return move_parameters(build(CONFIG), 0.4)


def tokens() -> Tensor:
    return torch.randint(0, 31, (2, T), generator=torch.Generator().manual_seed(1))


def test_a_row_of_padding_is_finite(model: Decoder) -> None:
    padding = {"documents": torch.full((2, T), -1), "positions": torch.zeros(2, T, dtype=torch.int64)}
    assert model(tokens(), **padding).logits.isfinite().all()


@pytest.mark.parametrize("chunks", [[T], [1] * T, [4, 1, 6, T - 11], [T - 1, 1]], ids=str)
def test_the_cache_gives_what_one_pass_gives(model: Decoder, chunks: list[int]) -> None:
    row = tokens()
    expected = model(row).logits
    cache = KVCache(CONFIG.n_layers, capacity=T)
    actual = [model(part, cache=cache).logits for part in row.split(chunks, dim=1)]
    torch.testing.assert_close(torch.cat(actual, 1), expected, rtol=1e-11, atol=1e-11)
    assert cache.length == T
    with pytest.raises(IndexError, match=rf"cache is full: {T + 1} tokens, room for {T}"):
        model(row[:, :1], cache=cache)


def test_left_out_positions_count_from_zero(model: Decoder) -> None:
    row = tokens()
    positions = torch.arange(T).expand(2, T)
    assert torch.equal(model(row).logits, model(row, positions=positions).logits)
    reversed_positions = positions.flip(1)
    assert not torch.allclose(model(row).logits, model(row, positions=reversed_positions).logits)


def test_every_parameter_says_how_it_starts() -> None:
    with torch.device("meta"):
        model = build(CONFIG)
        tied = build(CONFIG.with_changes({"embedding.tied": True}))
    initial = {
        f"{path}.{key}": value
        for path, module in model.named_modules()
        for key, value in getattr(module, "initial", {}).items()
    }
    assert initial.keys() == dict(model.named_parameters()).keys()
    residual = 0.1 / math.sqrt(2 * CONFIG.n_layers)
    for name, value in initial.items():
        norm = "norm" in name
        small = name.endswith(("wo.weight", "w_down.weight"))
        assert value == (Constant(1.0) if norm else Normal(pytest.approx(residual if small else 0.1))), name
    assert tied.head.weight is tied.decoder.embedding.tokens.weight
    assert not tied.head.initial


def test_a_vocabulary_is_needed() -> None:
    with pytest.raises(UsageError, match=r"model\.vocab_size is unknown: set it, or choose a tokenizer"):
        build(CONFIG.model_copy(update={"vocab_size": None}))


# -------------------------------------------------------------------------------------------------------- muP


BASE, WIDTHS = 32, (32, 128, 512)


KINDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "dense": lambda width: {"ffn.d_ff": 2 * width},
    "experts": lambda width: {
        "ffn.name": "moe", "ffn.d_ff": width, "ffn.n_experts": 4, "ffn.top_k": 2, "ffn.router.name": "noisy_top_k",
    },
    "compressed": lambda width: {"attention.name": "compressed", "attention.factor": 3, "position.name": "none"},
    "latents": lambda width: {**LATENT, "attention.kv_lora_rank": 16, "attention.q_lora_rank": 12},
    "latents that grow": lambda width: {
        **LATENT, "attention.kv_lora_rank": width // 2, "attention.q_lora_rank": width // 2, "mup.latent_ranks":
        "scaled",
    },
}  # fmt: skip
LATENT = {"attention.name": "mla", "attention.qk_rope_head_dim": 8, "attention.qk_nope_head_dim": 16}


@cache
def changes(width: int, mup: bool, kind: str) -> dict[str, float]:
    """Root mean square of what four AdamW steps change in the logits and in each sublayer's output, by its path."""
    values = {"vocab_size": 50, "d_model": width, "n_layers": 2, "attention.n_heads": width // 16}
    values |= {"ffn.d_ff": 2 * width, "embedding.tied": False, "init.name": "normal", "init.std": 0.1}
    values |= {"mup.base_width": BASE, **KINDS[kind](width)}
    config = ModelConfig.from_dotted({key: value for key, value in values.items() if mup or not key.startswith("mup.")})
    model = build(config)
    initialise(model, 1)
    scales = compute_mup_lr_scales(model, config)
    groups = [{"params": [p], "lr": 0.01 * scales.get(name, 1.0)} for name, p in model.named_parameters()]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    tokens = torch.randint(0, 50, (4, 17), generator=torch.Generator().manual_seed(2))

    def outputs() -> dict[str, Tensor]:
        actual: dict[str, Tensor] = {}
        for path, module in model.named_modules():
            if path.endswith((".attn", ".ffn")):
                module.register_forward_hook(lambda module, inputs, y, path=path: actual.update({path: first(y)}))
        actual["logits"] = model.eval()(tokens).logits
        return {name: output.detach() for name, output in actual.items()}

    before = outputs()
    model.train()
    for _ in range(4):
        inputs = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "keys": torch.arange(4)}
        model(**inputs).losses["causal"].div(64).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = outputs()
    return {name: float((after[name] - before[name]).square().mean().sqrt()) for name in before}


def first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def change_of_logits(width: int, mup: bool) -> float:
    return changes(width, mup, "dense")["logits"]


@pytest.mark.parametrize("kind", KINDS)
def test_steps_change_each_sublayer_s_output_by_as_much_at_every_width(kind: str) -> None:
    narrow, *wider = [changes(width, True, kind) for width in WIDTHS]
    assert len(narrow) == 5
    for one in wider:
        ratios = {name: one[name] / narrow[name] for name in narrow if name != "logits"}
        assert all(0.65 < ratio < 1.5 for ratio in ratios.values()), ratios


def test_steps_change_the_logits_by_as_much_at_every_width() -> None:
    narrow, *wider = [change_of_logits(width, mup=True) for width in WIDTHS]
    assert all(0.5 < change / narrow < 2 for change in wider), (narrow, wider)


def test_without_mup_they_change_more_and_more() -> None:
    narrow, wide, wider = [change_of_logits(width, mup=False) for width in WIDTHS]
    assert wide > 2 * narrow
    assert wider > 2 * wide


def test_the_base_width_is_the_standard_parametrisation() -> None:
    assert change_of_logits(BASE, mup=True) == change_of_logits(BASE, mup=False)


def test_an_initialisation_that_follows_the_width_is_refused() -> None:
    with pytest.raises(UsageError, match=r"model\.mup does not go with model\.init\.name = 'xavier'"):
        build(CONFIG.with_changes({"mup": {"base_width": 16}, "init": {"name": "xavier"}}))
