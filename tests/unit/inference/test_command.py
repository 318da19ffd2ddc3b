"""`megatfm generate`, from its arguments to what it prints and keeps."""

import argparse
import json
from pathlib import Path

import pytest
import torch

from megatfm.commands.models import add_generate_arguments, generate_command
from megatfm.errors import MegatfmError, UsageError
from megatfm.inference.decoding import Sampling, generate, stream
from megatfm.inference.text import load
from tests.support.trained_runs import write_next_checkpoint


def run_command(*words: str) -> int:
    parser = argparse.ArgumentParser()
    add_generate_arguments(parser)
    return generate_command(parser.parse_args(words))


def test_prints_the_prompt_and_what_follows(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(str(run), "--prompt", "Größe ", "--max-tokens", "9", "--temperature", "0") == 0
    loaded = load(run)
    ids = [loaded.tokenizer.bos, *loaded.tokenizer.encode("Größe ")]
    logits_end = loaded.tokenizer.vocab_size  # the model has rows that no text stands for
    loaded.model.head.weight.data[logits_end:] = 0
    result = generate(loaded.model, torch.tensor([ids]), max_tokens=9, stop_token=loaded.tokenizer.eos)
    text = loaded.tokenizer.decode(result[0, len(ids) :])
    assert capsys.readouterr().out == f"Größe {text}\n"
    kept = [json.loads(line) for line in (run / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    assert kept == [{"prompt": "Größe ", "text": text, "step": 30}]


def test_several_samples_are_kept_beside_the_first_ones(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_command(str(run), "--num-samples", "3", "--max-tokens", "12")
    run_command(str(run), "--max-tokens", "12")
    samples = [json.loads(line)["text"] for line in (run / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 4
    assert samples[0] == samples[3]
    assert len(set(samples)) == 3
    assert capsys.readouterr().out.count("--- sample") == 3


def test_a_sample_ends_where_any_stop_token_does_however_long_the_others_are(run: Path) -> None:
    """Ids that are ordinary text, so that a repeated one would show."""
    loaded = load(run)
    tokens, vocabulary = torch.tensor([[loaded.tokenizer.bos]] * 3), loaded.tokenizer.vocab_size
    sampling = Sampling(1.0, top_p=0.9, vocab_size=vocabulary)
    free = torch.stack(list(stream(loaded.model, tokens, sampling, max_tokens=12)), 1).tolist()
    stops = [free[0][3], free[1][5]]
    write_next_checkpoint(run, {"stop": stops})
    run_command(str(run), "--num-samples=3", "--max-tokens=12", "--temperature=1", "--top-p=0.9")
    texts = [json.loads(line)["text"] for line in (run / "samples.jsonl").read_text().splitlines()]
    ends = [next((n for n, id in enumerate(row, 1) if id in stops), 12) for row in free]
    assert len(set(ends)) > 1
    assert texts == [loaded.tokenizer.decode(row[:end]) for row, end in zip(free, ends, strict=True)]


def test_beams(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The likeliest text of three beams, which is not the greedy one, printed and kept."""
    run_command(str(run), "--prompt", "Gr", "--max-tokens", "9", "--temperature", "0")
    run_command(str(run), "--prompt", "Gr", "--max-tokens", "9", "--num-beams", "3", "--length-penalty", "0")
    greedy, best = [json.loads(line)["text"] for line in (run / "samples.jsonl").read_text().splitlines()]
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


@pytest.mark.parametrize(
    "words",
    [
        ["--max-tokens", "0"],
        ["--num-samples", "0"],
        ["--device", "cuda:99"],
        ["--top-p", "2"],
        ["--num-beams", "-1"],
        ["--num-beams", "2", "--num-samples", "2"],
    ],
)
def test_bad_arguments(run: Path, words: list[str]) -> None:
    with pytest.raises(UsageError):
        run_command(str(run), *words)


def test_a_read_only_run_still_answers(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "samples.jsonl").mkdir()
    assert run_command(str(run), "--max-tokens", "3") == 0
    assert "samples.jsonl: not written" in capsys.readouterr().err
