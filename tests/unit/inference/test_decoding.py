"""Prompts of different lengths together, with and without cache, under every kind of position."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatfm.config import ModelConfig
from megatfm.errors import UsageError
from megatfm.inference.beam_search import beam_search, gnmt_penalty
from megatfm.inference.decoding import DecodingState, Prompts, generate
from megatfm.layers.attention.kv_cache import KVCache
from megatfm.layers.attention.patterns import PATTERNS as SHIPPED
from megatfm.layers.initialisation import initialise, initialise_buffers
from megatfm.models import build
from tests.support.reference_gradients import perturb

SMALL = {
    "vocab_size": 30, "d_model": 16, "n_layers": 2, "attention.n_heads": 4, "ffn.d_ff": 24, "embedding.tied": False,
}  # fmt: skip
MODELS = {
    "rope": {"attention.n_kv_heads": 2},
    "alibi": {"position.name": "alibi"},
    "t5": {"position.name": "t5", "position.buckets": 8, "position.max_distance": 6},
    "shaw": {"position.name": "shaw", "position.max_distance": 3},
    "sinusoidal": {"position.name": "sinusoidal", "norm.placement": "post"},
    "learned": {"position.name": "learned", "position.max_positions": 40},
    "none": {"position.name": "none"},
    "latent": {"attention.name": "mla", "attention.kv_lora_rank": 6, "attention.qk_rope_head_dim": 4},
    "latent, queries and values of other widths": {
        **{"attention.name": "mla", "attention.kv_lora_rank": 6, "attention.qk_rope_head_dim": 2},
        **{"attention.q_lora_rank": 5, "attention.v_head_dim": 7, "attention.softcap": 2.0},
    },
    "shared layers": {"n_layers": 4, "distinct_layers": 2},
    "soft caps": {"attention.softcap": 2.0, "lm_head.softcap": 9.0},
    "experts, limited": {"ffn.name": "moe", "ffn.n_experts": 4, "ffn.top_k": 2, "ffn.capacity_factor": 0.6},
    "experts, few places": {"ffn.name": "moe", "ffn.n_experts": 4, "ffn.top_k": 1, "ffn.expert_capacity": 1},
}
PATTERNS = {
    "window": {"attention.pattern": {"name": "window", "width": 3}, "attention.n_kv_heads": 2},
    "window of one token": {"attention.pattern": {"name": "window", "width": 1}},
    "window, alibi": {"attention.pattern": {"name": "window", "width": 4}, "position.name": "alibi"},
    "window, shaw": {"attention.pattern": {"name": "window", "width": 4}, "position.name": "shaw",
                     "position.max_distance": 3},
    "window, latent": {"attention.pattern": {"name": "window", "width": 3}, **MODELS["latent"]},
    "windows of two kinds": {"layer_types": ["near", "all"],
                             "layer_type.near.attention.pattern": {"name": "window", "width": 2},
                             "layer_type.all": {}},
    "dilated": {"attention.pattern": {"name": "window", "width": 2, "dilation": 2}},
    "first": {"attention.pattern": {"name": "window", "width": 2, "initial_tokens": 3}, "attention.n_kv_heads": 2},
    "first, alibi": {"attention.pattern": {"name": "window", "width": 2, "initial_tokens": 3},
                     "position.name": "alibi"},
    "first, shaw": {"attention.pattern": {"name": "window", "width": 2, "initial_tokens": 1}, "position.name": "shaw",
                    "position.max_distance": 3},
    "first, latent": {"attention.pattern": {"name": "window", "width": 2, "initial_tokens": 2}, **MODELS["latent"]},
    "bigbird": {"attention.pattern": {"name": "bigbird", "block_size": 2, "n_random_blocks": 1}},
    "bigbird, extra": {
        "attention.pattern": {"name": "bigbird", "block_size": 2, "n_random_blocks": 1, "n_global_tokens": 2},
    },
    "chunked": {"attention.pattern": {"name": "chunked", "size": 4}},
    "strided": {"attention.pattern": {"name": "strided", "stride": 3}},
    "fixed": {"attention.pattern": {"name": "fixed", "stride": 4, "n_summary_tokens": 1}},
    "window, sinks": {"attention.pattern": {"name": "window", "width": 3}, "attention.sinks": True},
    "local and compressed": {"position.name": "sinusoidal", "layer_types": ["local", "compressed"],
                             "layer_type.local.attention.pattern": {"name": "chunked", "size": 4},
                             "layer_type.compressed.attention": {"name": "compressed", "factor": 2}},
}  # fmt: skip
SIDES = ("decoder", "prefix", "encoder_decoder")
LENGTHS = (6, 1, 4)
NEW = 7


def build_case(parts: str, side: str) -> tuple[torch.nn.Module, Prompts]:
    family = "encoder_decoder" if side == "encoder_decoder" else "decoder"
    model = build(ModelConfig.from_dotted(**(SMALL | (MODELS | PATTERNS)[parts]), family=family)).double().eval()
    initialise_buffers(model)
    perturb(model, seed=1, scale=0.5)
    random = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, 30, (n,), generator=random) for n in LENGTHS]
    encoder = [torch.randint(0, 30, (n,), generator=random) for n in (2, 5, 3)]
    return model, Prompts(prompts, encoder if family == "encoder_decoder" else None, side == "prefix")


def steps(model: torch.nn.Module, prompts: Prompts, *, cache: bool) -> Tensor:
    """Logits [B, NEW, V] while the rows grow by some tokens."""
    decoding, logits = DecodingState(model, prompts, NEW, cache=cache), []
    for step in range(NEW):
        logits.append(decoding.logits())
        decoding.append(torch.full((len(prompts.tokens),), step + 3))
    return torch.stack(logits, 1)


def alone(prompts: Prompts, row: int) -> Prompts:
    encoder = None if prompts.encoder is None else [prompts.encoder[row]]
    return Prompts([prompts.tokens[row]], encoder, prompts.prefix)


CASES = [*itertools.product(MODELS, SIDES), *((parts, "decoder") for parts in PATTERNS), ("window", "encoder_decoder")]
CASES = [case for case in CASES if not (case[0].startswith("latent") and case[1] == "encoder_decoder")]


@pytest.mark.parametrize(("parts", "side"), CASES)
def test_a_row_is_what_it_is_alone_and_without_cache(parts: str, side: str) -> None:
    model, prompts = build_case(parts, side)
    together = steps(model, prompts, cache=True)
    torch.testing.assert_close(together, steps(model, prompts, cache=False), rtol=1e-10, atol=1e-10)
    for row, cache in ((0, False), (1, False), (2, False), (2, True)):
        single = steps(model, alone(prompts, row), cache=cache)
        torch.testing.assert_close(together[row : row + 1], single, rtol=1e-10, atol=1e-10)


def test_every_pattern_of_decoders_is_tried() -> None:
    """Beside full attention, the decoder's default, and patterns of encoders and images."""
    tried = {options["name"] for kind in PATTERNS.values() for key, options in kind.items() if key.endswith("pattern")}
    shipped = {name for name in SHIPPED.names() if SHIPPED.get(name).__module__.startswith("megatfm.")}
    assert shipped - {"full", "longformer", "windows_2d"} == tried
    with pytest.raises(UsageError, match="choose family = 'encoder'"):
        build(ModelConfig.from_dotted(**SMALL, **{"attention.pattern": {"name": "longformer", "width": 2}}))


def test_a_prefix_is_seen_by_all_of_it_and_nothing_made_is() -> None:
    """The model run over the whole text at once, with the prompt as its prefix."""
    model, prompts = build_case("rope", "prefix")
    together = steps(model, prompts, cache=True)
    for row, prompt in enumerate(prompts.tokens):
        text = torch.cat([prompt, torch.arange(3, 3 + NEW - 1)])[None]
        prefix = (torch.arange(text.shape[1]) < len(prompt))[None]
        with torch.no_grad():
            full = model(text, prefix=prefix).logits[0, len(prompt) - 1 :]
            causal = model(text).logits[0, len(prompt) - 1 :]
        torch.testing.assert_close(together[row], full, rtol=1e-10, atol=1e-10)
        assert (full - causal).abs().max() > 0.01 or len(prompt) == 1


@pytest.mark.parametrize(("parts", "side"), [*(("rope", side) for side in SIDES), ("local and compressed", "decoder")])
def test_beams_select_all_that_belongs_to_a_row(parts: str, side: str) -> None:
    """Rows in another order, some twice, go on as themselves."""
    model, prompts = build_case(parts, side)
    order = torch.tensor([2, 0, 0, 1])
    decoding = DecodingState(model, prompts, NEW)
    decoding.logits()
    decoding.append(torch.tensor([7, 8, 9]))
    decoding.reorder(order)
    logits = decoding.logits()
    for place, row in enumerate(order.tolist()):
        single = DecodingState(model, alone(prompts, row), NEW)
        single.logits()
        single.append(torch.tensor([7 + row]))
        torch.testing.assert_close(logits[place : place + 1], single.logits(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("beams", [1, 2])
def test_a_prompt_whose_likeliest_tokens_all_end_it_does_not_stop_the_others(beams: int) -> None:
    model, prompts = build_case("rope", "decoder")
    rows = list(prompts.tokens[:2])
    likeliest = DecodingState(model, Prompts(rows), NEW).logits().sort(descending=True).indices
    stops = [token for token in likeliest[0, :6].tolist() if token not in likeliest[1, : 2 * beams]][: 2 * beams]
    assert len(stops) == 2 * beams

    def search(prompts: list[Tensor]) -> list[tuple[list[int], float]]:
        results = beam_search(model, Prompts(prompts), beams=beams, max_tokens=NEW, stop_token=stops)
        return [(result.tokens.tolist(), pytest.approx(result.score)) for result in results]

    assert search(rows) == [*search(rows[:1]), *search(rows[1:])]


@pytest.mark.parametrize("alpha", [math.nan, math.inf, 1e4, -1e4])
def test_a_length_penalty_beyond_all_numbers_is_refused(alpha: float) -> None:
    with pytest.raises(UsageError, match=r"length penalty = .*: choose a number from -10 to 10, e\.g\. 0\.6"):
        gnmt_penalty(alpha)
    assert 0 < gnmt_penalty(-10)(10**6) < gnmt_penalty(10)(10**6) < math.inf


def test_one_beam_is_greedy() -> None:
    model, prompts = build_case("rope", "decoder")
    greedy = generate(model, prompts, max_tokens=NEW)[:, -NEW:]
    actual = beam_search(model, prompts, beams=1, max_tokens=NEW, stop_token=None)
    assert torch.equal(torch.stack([item.tokens for item in actual]), greedy)


def test_sampling_counts_positions_without_padding() -> None:
    """The first prompt's text therefore does not depend on its neighbours."""
    model, prompts = build_case("rope", "decoder")
    short_first = Prompts([prompts.tokens[1], prompts.tokens[0]])
    options = {"max_tokens": NEW, "temperature": 1.0, "seed": 4}
    together = generate(model, short_first, **options)
    single = generate(model, prompts.tokens[1][None], **options)
    assert torch.equal(together[0, -NEW:], single[0, -NEW:])


def decode(model: torch.nn.Module, prompts: Prompts) -> Any:
    decoding = DecodingState(model, prompts, NEW)
    for _ in range(NEW):
        decoding.logits()
        decoding.append(torch.full((len(prompts.tokens),), 3))
    return decoding


def test_a_window_s_cache_keeps_a_window() -> None:
    decoding = decode(*build_case("windows of two kinds", "decoder"))
    assert decoding.cache.length == max(LENGTHS) + NEW - 1
    near, full = (
        layer.update(*[torch.zeros(3, 4, 1, 4).double()] * 2, n_last=keeps)[0]
        for layer, keeps in zip(decoding.cache.layers, (1, None), strict=True)
    )
    assert near.shape[2] == 2
    assert full.shape[2] == max(LENGTHS) + NEW


HELD = {
    "window": 2, "window, sinks": 2, "window of one token": 0, "window, alibi": 3, "window, shaw": 3,
    "window, latent": 2, "dilated": 2, "chunked": 3, "first": 3 + 1, "first, shaw": 1 + 1, "first, latent": 2 + 1,
    "windows of two kinds": 1, "local and compressed": 3,
}  # fmt: skip
"""Tokens whose keys a first block holds for the next one; patterns that may look at any token hold all."""


@pytest.mark.parametrize("parts", PATTERNS)
def test_a_cache_holds_what_may_be_seen_again(parts: str) -> None:
    model, prompts = build_case(parts, "decoder")
    layer = decode(model, alone(prompts, 0)).cache.layers[0]
    keys = layer._keys
    assert keys.shape[2] == HELD.get(parts, layer.capacity)
    assert keys.untyped_storage().nbytes() == keys.nbytes, "no more is held than what is looked at"


def test_a_cache_of_latents_holds_what_heads_are_made_of() -> None:
    """A latent and the channels of the position: 6 + 2 numbers a token, where heads take 4 · (4 + 2 + 7)."""
    model, prompts = build_case("latent, queries and values of other widths", "decoder")
    decoding = DecodingState(model, prompts, NEW)
    decoding.logits()
    for layer in decoding.cache.layers:
        assert layer._keys.shape == (3, 1, layer.capacity, 6 + 2)
        assert layer._values.numel() == 0


def test_a_prefix_and_a_window_need_all_of_it() -> None:
    model, prompts = build_case("window", "prefix")
    with pytest.raises(UsageError, match=r"pattern = 'window' and a prompt as a prefix.*generate without cache"):
        DecodingState(model, prompts, NEW)
    together = steps(model, prompts, cache=False)
    for row in range(len(LENGTHS)):
        torch.testing.assert_close(together[row : row + 1], steps(model, alone(prompts, row), cache=False))


@pytest.mark.parametrize(("pattern", "refused"), [
    ({"name": "window", "width": 3}, True),
    ({"name": "window", "width": 3, "initial_tokens": 1}, True),
    ({"name": "chunked", "size": 3}, True),
    ({"name": "strided", "stride": 3}, True),
    ({"name": "window", "width": 9}, False),
    ({"name": "full"}, False),
], ids=str)  # fmt: skip
@torch.no_grad()
def test_a_prefix_in_a_cache_is_kept_or_refused(pattern: dict[str, Any], refused: bool) -> None:
    """The prefix of 5 of 9 tokens at once, then token by token, as one pass over all."""
    tokens_BT, prefix_BT = torch.arange(18).view(2, 9) % 11, (torch.arange(9) < 5).expand(2, -1)
    for attention in ({}, MODELS["latent"]):
        model = build(ModelConfig.from_dotted({**SMALL, **attention, "attention.pattern": pattern})).double().eval()
        initialise(model, 3)
        cache = KVCache(2, 9)
        if refused:
            with pytest.raises(UsageError, match=rf"prefix.*{pattern['name'].title()}.*without a cache"):
                model(tokens_BT[:, :5], prefix=prefix_BT[:, :5], cache=cache)
            continue
        parts = [model(tokens_BT[:, :5], prefix=prefix_BT[:, :5], cache=cache).logits]
        parts += [model(tokens_BT[:, at : at + 1], cache=cache).logits for at in range(5, 9)]
        at_once = model(tokens_BT, prefix=prefix_BT).logits
        torch.testing.assert_close(torch.cat(parts, 1), at_once, rtol=1e-10, atol=1e-10)
