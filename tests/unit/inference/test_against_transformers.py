"""Greedy and beam search give what transformers' `generate` gives, for prompts and inputs of different lengths."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from megatfm.config import ModelConfig
from megatfm.errors import UsageError
from megatfm.inference.beam_search import LengthPenalty, beam_search, gnmt_penalty
from megatfm.inference.decoding import Prompts, generate
from tests.support.reference_gradients import Pair, build_pair

VOCABULARY, STOP = 40, [3, 17]
SMALL = {
    "vocab_size": VOCABULARY, "d_model": 24, "n_layers": 2, "attention.n_heads": 4, "ffn.d_ff": 40, "norm.eps": 1e-5,
    "embedding.tied": False,
}  # fmt: skip
GPT2 = {
    **SMALL, "norm.name": "layer_norm", "ffn.activation": "gelu_tanh", "attention.bias": True, "ffn.bias": True,
    "position.name": "learned", "position.max_positions": 64,
}  # fmt: skip
T5 = {
    **SMALL, "family": "encoder_decoder", "ffn.activation": "relu", "attention.scale": 1.0,
    "position.name": "t5",
}  # fmt: skip
MODELS = {
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "llama": ("LlamaForCausalLM", {**SMALL, "attention.n_kv_heads": 2, "position.theta": 100.0}),
    "t5": ("T5ForConditionalGeneration", T5),
}
LENGTHS = (7, 3, 5, 1)
NEW = 14


def power(alpha: float) -> LengthPenalty:
    """n^α, as in transformers."""
    return lambda n: float(n) ** alpha


def pair_of(model: str, seed: int = 0) -> Pair:
    name, values = MODELS[model]
    # In float32: transformers' masks of padded rows are not made for float64.
    pair = build_pair(ModelConfig.from_dotted(**values), torch.float32, seed, among=[name])
    pair.model.eval()
    for head in (pair.model.head, pair.reference.lm_head):
        head.weight.data *= 4  # far from uniform, so that no two texts are nearly alike
    return pair


def rows(seed: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randint(4, VOCABULARY, (n,), generator=random) for n in LENGTHS]


def prompts_of(model: str, seed: int = 0) -> Prompts:
    if model == "t5":
        return Prompts([torch.tensor([0])] * len(LENGTHS), encoder=rows(seed))
    return Prompts(rows(seed))


def generate_by_transformers(pair: Pair, model: str, seed: int = 0, **options: object) -> Tensor:
    """The new tokens [B, n] of their `generate`, on rows padded as they want it."""
    longest, padded = max(LENGTHS), []
    for row in rows(seed):
        empty = torch.zeros(longest - len(row), dtype=torch.int64)
        padded.append(torch.cat([row, empty] if model == "t5" else [empty, row]))
    inputs = torch.stack(padded)
    start = {"decoder_start_token_id": 0} if model == "t5" else {}
    out = pair.reference.generate(
        inputs, attention_mask=(inputs != 0).long(), max_new_tokens=NEW, do_sample=False, pad_token_id=0,
        eos_token_id=STOP, bos_token_id=None, **start, **options,
    )  # fmt: skip
    return out[:, 1 if model == "t5" else longest :]


def until_stop(tokens: list[int]) -> list[int]:
    ends = [i + 1 for i, token in enumerate(tokens) if token in STOP]
    return tokens[: ends[0]] if ends else tokens


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("model", MODELS)
def test_greedy_tokens_are_those_of_transformers(model: str, seed: int) -> None:
    pair = pair_of(model, seed)
    expected = [until_stop(row) for row in generate_by_transformers(pair, model, seed).tolist()]
    for cache in (True, False):
        result = generate(pair.model, prompts_of(model, seed), max_tokens=NEW, stop_token=STOP, cache=cache).tolist()
        start = 1 if model == "t5" else max(LENGTHS)
        assert [until_stop(row[start:]) for row in result] == expected
    assert len({token for row in expected for token in row}) > 6, "texts this dull would prove nothing"


@pytest.mark.parametrize(("beams", "alpha"), [(1, 1.0), (2, 0.0), (3, 1.0), (4, 2.0), (4, -0.5), (5, 0.6)])
@pytest.mark.parametrize("model", MODELS)
def test_beams_are_those_of_transformers(model: str, beams: int, alpha: float) -> None:
    seed = 11
    pair, actual = pair_of(model, seed), []
    search = {"num_beams": beams, "length_penalty": alpha, "early_stopping": "never"}
    expected = generate_by_transformers(pair, model, seed, **search).tolist()
    options = {"beams": beams, "max_tokens": NEW, "stop_token": STOP, "penalty": power(alpha)}
    for cache in (True, False) if beams == 3 else (True,):
        actual = beam_search(pair.model, prompts_of(model, seed), **options, cache=cache)
        assert [item.tokens.tolist() for item in actual] == [until_stop(row) for row in expected]
    if beams > 1:
        greedy = generate(pair.model, prompts_of(model, seed), max_tokens=NEW, stop_token=STOP).tolist()
        assert any(until_stop(row[-NEW:]) != item.tokens.tolist() for row, item in zip(greedy, actual, strict=True))


@pytest.mark.parametrize("penalty", [gnmt_penalty(0.6), gnmt_penalty(0.0), power(1.0), power(-1.0)])
def test_enough_beams_find_the_best_text_of_all(penalty: LengthPenalty) -> None:
    """Among all texts of up to four tokens out of four, each scored by itself."""
    config = ModelConfig.from_dotted(**{**MODELS["llama"][1], "vocab_size": 5})
    actual = build_pair(config, torch.float64, 3).model.eval()
    actual.head.weight.data *= 3
    prompt = torch.tensor([4, 1, 4])
    search = {"beams": 128, "max_tokens": 4, "stop_token": 3, "penalty": penalty, "vocab_size": 4}
    (observed,) = beam_search(actual, Prompts([prompt]), **search)
    best, scores = (-math.inf, ()), []
    for n in range(1, 5):
        for text in itertools.product(range(4), repeat=n):
            if 3 in text[:-1] or (n < 4 and text[-1] != 3):
                continue
            full = torch.cat([prompt, torch.tensor(text)])
            with torch.no_grad():
                logs = actual(full[None]).logits[0, :, :4].log_softmax(-1)
            score = float(logs[2:-1].gather(1, full[3:, None]).sum()) / penalty(n)
            scores.append(score)
            best = max(best, (score, text))
    assert tuple(observed.tokens.tolist()) == best[1]
    assert observed.score == pytest.approx(best[0], rel=1e-9)
    assert len(scores) == 1 + 3 + 9 + 27 * 4


def test_beams_go_past_ids_that_a_head_masks() -> None:
    """Beams equal those of a vocabulary of the other ids alone, numbered without a gap."""
    actual = build_pair(ModelConfig.from_dotted(**MODELS["llama"][1]), torch.float64, 3).model.eval()
    few = beam_search(actual, Prompts(rows(0)), beams=4, max_tokens=6, stop_token=STOP, vocab_size=20)
    hook = actual.register_forward_hook(
        lambda _, __, output: output._replace(logits=output.logits.index_fill(-1, torch.arange(20, 40), -math.inf))
    )
    masked = beam_search(actual, Prompts(rows(0)), beams=4, max_tokens=6, stop_token=STOP)
    hook.remove()
    assert [item.tokens.tolist() for item in masked] == [item.tokens.tolist() for item in few]


def test_the_penalties() -> None:
    assert gnmt_penalty(0.6)(1) == 1.0
    assert gnmt_penalty(1.0)(7) == 2.0


def test_prompts_that_a_model_cannot_continue_are_refused() -> None:
    t5, gpt2 = pair_of("t5").model, pair_of("gpt2").model
    token = torch.tensor([5])
    with pytest.raises(UsageError, match="'encoder_decoder' needs tokens for its encoder"):
        generate(t5, Prompts([token]), max_tokens=1)
    with pytest.raises(UsageError, match="'decoder' has no encoder: give no tokens for one"):
        generate(gpt2, Prompts([token], [token]), max_tokens=1)
    with pytest.raises(UsageError, match="the encoder needs at least one token for each prompt"):
        generate(t5, Prompts([token, token], encoder=[token]), max_tokens=1)
    reason = "of 64 tokens and 2 more, but model.position.max_positions = 64: ask for at most 1$"
    with pytest.raises(UsageError, match=reason):
        generate(gpt2, Prompts([token.repeat(64)]), max_tokens=2)
    with pytest.raises(UsageError, match=r"a prompt of 69 tokens .* = 64: shorten it by 5$"):
        generate(gpt2, Prompts([token.repeat(69)]), max_tokens=2)
    assert generate(gpt2, Prompts([token.repeat(64)]), max_tokens=1).shape == (1, 65)
    with pytest.raises(UsageError, match="at least one beam"):
        beam_search(gpt2, Prompts([token]), beams=0, max_tokens=1, stop_token=None)
