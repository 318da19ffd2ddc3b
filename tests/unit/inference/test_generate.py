"""Generation: the cache changes nothing, tokens are chosen as transformers does, and `megatfm generate` prints them."""

import argparse
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatfm.commands.generation import add_generate_arguments, generate_command
from megatfm.errors import MegatfmError, UsageError
from megatfm.inference.decoding import Prompts, Sampling, generate, stream
from megatfm.inference.text import IncrementalDetokenizer, open_text_model
from megatfm.models import Decoder
from megatfm.tokenizers import SentencePieceTokenizer, Tokenizer
from tests.plugins import plugin
from tests.support.small_runs import SMALL_DECODER, random_model, write_next_checkpoint

PROMPT = torch.tensor([[1, 17, 300, 42, 8], [1, 17, 299, 5, 399]])


def test_the_longest_context_is_still_exact(model: Decoder) -> None:
    """The cache has room for every token of prompt and continuation, and not for one more."""
    assert generate(model, PROMPT, max_tokens=1).shape == (2, 6)
    assert generate(model, PROMPT, max_tokens=0).shape == (2, 5)


def test_rows_stop_at_the_stop_token(model: Decoder) -> None:
    free = generate(model, PROMPT, max_tokens=20)
    stop = int(free[0, 8])
    assert stop not in free[:, :8]
    stopped = generate(model, PROMPT, max_tokens=20, stop_token=stop)
    ends = [next((t for t in range(5, 25) if row[t] == stop), 24) for row in free.tolist()]
    assert stopped.shape[1] == max(ends) + 1
    for row, end in enumerate(ends):
        assert torch.equal(stopped[row, : end + 1], free[row, : end + 1])
        assert (stopped[row, end + 1 :] == stop).all()


def test_tokens_come_one_at_a_time(model: Decoder) -> None:
    lengths: list[int] = []

    def count(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        lengths.append(inputs[0].shape[1])

    with model.register_forward_pre_hook(count):
        tokens = stream(model, PROMPT, Sampling(), max_tokens=3)
        assert next(tokens).shape == (2,)
        assert lengths == [5]
        assert len(list(tokens)) == 2
        assert lengths == [5, 1, 1]


def test_an_empty_prompt_is_refused(model: Decoder) -> None:
    with pytest.raises(UsageError, match="bos"):
        generate(model, PROMPT[:, :0], max_tokens=1)


def test_a_plugin_s_family_generates_without_a_cache(caplog: pytest.LogCaptureFixture) -> None:
    """Its class says that it is causal, and its forward takes no cache: with one, it would read one token alone."""
    plugin("looped")
    model = random_model(SMALL_DECODER.with_changes({"family": "looped"}))
    result = PROMPT
    with torch.no_grad():
        for _ in range(6):
            result = torch.cat([result, model(result).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(generate(model, PROMPT, max_tokens=6), result)
    assert "family 'looped' takes no cache: each token recomputes its prefix" in caplog.text
    ragged = Prompts([PROMPT[0], PROMPT[1, :3]])
    alone = generate(model, Prompts([PROMPT[1, :3]]), max_tokens=6)
    assert torch.equal(generate(model, ragged, max_tokens=6)[1, 2:], alone[0])


V = 50
DRAWS = 4000


@pytest.fixture
def logits() -> Tensor:
    return torch.randn(V, generator=torch.Generator().manual_seed(4), dtype=torch.float64) * 2


def frequencies(sampling: Sampling, logits_V: Tensor) -> Tensor:
    """How often each token is chosen, over many positions."""
    rows = logits_V.expand(4, V)
    chosen = torch.cat([sampling.sample(rows, position) for position in range(DRAWS // 4)])
    return torch.bincount(chosen, minlength=V) / DRAWS


def expected(logits_V: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """The distribution that transformers samples from."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores = TemperatureLogitsWarper(temperature)(None, logits_V[None])
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    return TopPLogitsWarper(top_p)(None, scores).softmax(-1)[0]


def check_frequencies(logits: Tensor, temperature: float, top_k: int, top_p: float) -> None:
    probabilities = expected(logits, temperature, top_k, top_p)
    actual = frequencies(Sampling(temperature, top_k, top_p), logits)
    assert not actual[probabilities == 0].any(), "a token outside the cut was chosen"
    deviations = (actual - probabilities) / (probabilities * (1 - probabilities) / DRAWS).clamp_min(1e-12).sqrt()
    assert deviations.abs().max() < 4.5


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [
    (1.0, 0, 1.0), (0.5, 0, 1.0), (1.0, 7, 1.0), (1.0, 0, 0.7), (0.8, 20, 0.9), (1.0, 99, 1.0), (1.0, 0, 0.01),
])  # fmt: skip
def test_tokens_have_transformers_probabilities(logits: Tensor, temperature: float, top_k: int, top_p: float) -> None:
    check_frequencies(logits, temperature, top_k, top_p)


def test_a_draw_depends_on_seed_row_and_position_alone(logits: Tensor) -> None:
    def draws(seed: int, positions: range) -> list[int]:
        return [int(Sampling(1.0, seed=seed).sample(logits[None], position)) for position in positions]

    assert draws(0, range(30)) == [*draws(0, range(15)), *draws(0, range(15, 30))]
    assert draws(0, range(30)) != draws(1, range(30))
    rows = Sampling(1.0).sample(logits.expand(40, V), 7)
    assert len(set(rows.tolist())) > 5
    assert torch.equal(rows[:10], Sampling(1.0).sample(logits.expand(10, V), 7))


def test_a_low_temperature_is_greedy_and_never_overflows(logits: Tensor) -> None:
    for temperature in (0.0, 1e-300, 1e-6):
        assert int(Sampling(temperature).sample(logits[None] * 1e30, 0)) == int(logits.argmax())


def test_ids_beyond_the_tokenizer_are_never_chosen(logits: Tensor) -> None:
    logits[-1] = 1e9
    for temperature in (0.0, 1.0):
        assert int(Sampling(temperature, vocab_size=V - 1).sample(logits[None], 0)) < V - 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_broken_logits_are_named(logits: Tensor, bad: float) -> None:
    rows = logits.repeat(3, 1)
    rows[1, 3] = bad
    for temperature in (0.0, 1.0):
        with pytest.raises(MegatfmError, match="of text 2 at position 9 are not finite"):
            Sampling(temperature).sample(rows, [3, 9, 4])
    with pytest.raises(MegatfmError, match="of text 1 at position 3 are not finite"):
        Sampling().sample(torch.full_like(rows, -float("inf")), 3)


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (40, 1.0), (0, 0.9)])
def test_ids_that_a_head_masks_are_never_chosen(logits: Tensor, top_k: int, top_p: float) -> None:
    masked = logits.clone()
    masked[::2] = -float("inf")
    check_frequencies(masked, 1.0, top_k, top_p)
    assert int(Sampling().sample(masked[None], 0)) == int(masked.argmax())


@pytest.mark.parametrize("values", [
    {"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1},
])  # fmt: skip
def test_values_out_of_range_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(values))):
        Sampling(**values)


TEXTS = [
    "def f(x):\n\treturn x  # Größe", "東京 🗼 ▁ naïve", "\u2581\U0001f469\u200d\U0001f680", "<0x41> <s>", "",
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tokenizer_model: bytes) -> Tokenizer:
    return SentencePieceTokenizer(tokenizer_model)


@pytest.mark.parametrize("text", TEXTS)
def test_the_pieces_make_up_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids, stream = tokenizer.encode(text), IncrementalDetokenizer(tokenizer)
    pieces = [stream.add([token]) for token in ids]
    assert "".join(pieces) == text
    assert stream.end() == ""


def test_no_half_character_is_shown(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🗼")
    assert len(ids) == 4, "this one must come in bytes for the test to say anything"
    stream = IncrementalDetokenizer(tokenizer)
    assert [stream.add([token]) for token in ids] == ["", "", "", "🗼"]
    stream.add(ids[:2])
    assert stream.end() == "\ufffd"


def test_broken_bytes_become_marks_and_reserved_ids_nothing(tokenizer: Tokenizer) -> None:
    first = tokenizer.encode("🗼")[0]
    after = tokenizer.encode("x")
    reserved = [tokenizer.bos, tokenizer.pad, tokenizer.mask, *tokenizer.sentinels]
    assert IncrementalDetokenizer(tokenizer).add([*after, *reserved, first, *after]) == "x\ufffdx"
    assert IncrementalDetokenizer(tokenizer).add([tokenizer.unk]) == "\ufffd"


# ------------------------------------------------------------------------------------------------ the command


def run_command(*words: str) -> int:
    parser = argparse.ArgumentParser()
    add_generate_arguments(parser)
    return generate_command(parser.parse_args(words))


def read_texts(run: Path) -> list[str]:
    return [json.loads(line)["text"] for line in (run / "samples.jsonl").read_text(encoding="utf-8").splitlines()]


def test_generate_prints_prompt_and_continuation(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(str(run), "--prompt", "Größe ", "--max-tokens", "9", "--temperature", "0") == 0
    loaded = open_text_model(run)
    ids = [loaded.tokenizer.bos, *loaded.tokenizer.encode("Größe ")]
    logits_end = loaded.tokenizer.vocab_size  # the model has rows that no text stands for
    loaded.model.head.weight.data[logits_end:] = 0
    result = generate(loaded.model, torch.tensor([ids]), max_tokens=9, stop_token=loaded.tokenizer.eos)
    text = loaded.tokenizer.decode(result[0, len(ids) :])
    assert capsys.readouterr().out == f"Größe {text}\n"
    (sample,) = (run / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(sample) == {"prompt": "Größe ", "text": text, "step": 30}


def test_several_samples_are_kept_beside_the_first_ones(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_command(str(run), "--num-samples", "3", "--max-tokens", "12")
    run_command(str(run), "--max-tokens", "12")
    samples = read_texts(run)
    assert len(samples) == 4
    assert samples[0] == samples[3]
    assert len(set(samples)) == 3
    assert capsys.readouterr().out.count("--- sample") == 3


def test_a_sample_ends_where_any_stop_token_does_however_long_the_others_are(run: Path) -> None:
    """Ids that are ordinary text, so that a repeated one would show."""
    loaded = open_text_model(run)
    tokens, vocabulary = torch.tensor([[loaded.tokenizer.bos]] * 3), loaded.tokenizer.vocab_size
    sampling = Sampling(1.0, top_p=0.9, vocab_size=vocabulary)
    free = torch.stack(list(stream(loaded.model, tokens, sampling, max_tokens=12)), 1).tolist()
    stops = [free[0][3], free[1][5]]
    write_next_checkpoint(run, {"stop": stops})
    run_command(str(run), "--num-samples=3", "--max-tokens=12", "--temperature=1", "--top-p=0.9")
    texts = read_texts(run)
    ends = [next((n for n, id in enumerate(row, 1) if id in stops), 12) for row in free]
    assert len(set(ends)) > 1
    assert texts == [loaded.tokenizer.decode(row[:end]) for row, end in zip(free, ends, strict=True)]


def test_generate_prints_the_likeliest_beam(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_command(str(run), "--prompt", "Gr", "--max-tokens", "9", "--temperature", "0")
    run_command(str(run), "--prompt", "Gr", "--max-tokens", "9", "--num-beams", "3", "--length-penalty", "0")
    greedy, best = read_texts(run)
    assert greedy != best
    assert capsys.readouterr().out == f"Gr{greedy}\nGr{best}\n"


def test_says_when_the_text_outgrows_the_training_length(
    run: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """By the logger, which a program that uses the library can silence; without handlers it prints to stderr."""
    run_command(str(run), "--max-tokens", "23")
    assert not caplog.messages
    run_command(str(run), "--max-tokens", "24")
    assert caplog.messages == ["the text may reach 25 tokens, and the model was trained on 24 at a time"]
    assert capsys.readouterr().err == ""


def test_broken_weights_end_in_one_line(run: Path) -> None:
    write_next_checkpoint(run, {}, {"model.decoder.norm.weight": torch.full((32,), float("nan"))})
    with pytest.raises(MegatfmError, match="not finite"):
        run_command(str(run))
    assert not (run / "samples.jsonl").exists()


@pytest.mark.parametrize("words", [
    ["--max-tokens", "0"],
    ["--num-samples", "0"],
    ["--device", "cuda:99"],
    ["--top-p", "2"],
    ["--num-beams", "-1"],
    ["--num-beams", "2", "--num-samples", "2"],
    ["--num-beams", "2", "--top-p", "0.5"],
    ["--num-beams", "2", "--seed", "1"],
    ["--length-penalty", "1"],
])  # fmt: skip
def test_wrong_arguments_of_generate_are_refused(run: Path, words: list[str]) -> None:
    with pytest.raises(UsageError):
        run_command(str(run), *words)


def test_a_read_only_run_still_answers(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "samples.jsonl").mkdir()
    assert run_command(str(run), "--max-tokens", "3") == 0
    assert "samples.jsonl: not written" in capsys.readouterr().err
