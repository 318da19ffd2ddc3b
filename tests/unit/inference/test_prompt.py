"""A prompt stands where the objective has put the given part of a text in training."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatfm.config import ModelConfig
from megatfm.errors import UsageError
from megatfm.inference.decoding import Prompts, Sampling
from megatfm.inference.prompts import build_prompts
from megatfm.inference.text import TextModel, generate_text, generate_text_beam, load
from megatfm.objectives import SpecialTokens
from megatfm.objectives.base import make_prefix_lm_example, make_seq2seq_example
from tests.support.trained_runs import SMALL_DECODER, random_model, write_trained_run

TEXT = "import textwrap"
PAIRS = SMALL_DECODER.model_copy(update={"family": "encoder_decoder"})


def opened(folder: Path, tokenizer_model: bytes, config: ModelConfig, objective: str) -> TextModel:
    return load(
        write_trained_run(folder / "run", tokenizer_model, random_model(config, torch.float32), objective)
    )


def special_of(loaded: TextModel) -> SpecialTokens:
    return SpecialTokens(*(getattr(loaded.tokenizer, role) for role in ("bos", "eos", "pad")))


def check(prompts: Prompts, fields: dict[str, np.ndarray]) -> None:
    """The prompt is what the fields of a sequence start with, before anything that was wanted."""
    inputs = len(prompts.tokens[0])
    assert prompts.tokens[0].tolist() == fields["tokens"][:inputs].tolist()
    assert fields["targets"][: inputs - 1].tolist() == [-100] * (inputs - 1)
    assert fields["targets"][inputs - 1] != -100
    if prompts.encoder is not None:
        assert prompts.encoder[0].tolist() == fields["encoder_tokens"].tolist()
    if prompts.prefix:
        assert fields["prefix"][:inputs].all()
        assert not fields["prefix"][inputs:].any()


@pytest.mark.parametrize("text", [TEXT, "a <extra_1> b <extra_id_0>"])
@pytest.mark.parametrize("config", [SMALL_DECODER, PAIRS])
def test_span_corruption(text: str, config: ModelConfig, tmp_path: Path, tokenizer_model: bytes) -> None:
    loaded = opened(tmp_path, tokenizer_model, config, "span_corruption")
    s, encode = loaded.tokenizer.sentinels, loaded.tokenizer.encode
    inputs = [*encode(TEXT), s[0]] if text == TEXT else [*encode("a "), s[1], *encode(" b "), s[0]]
    wanted = np.array([s[0], 9])
    make = make_seq2seq_example if config is PAIRS else make_prefix_lm_example
    check(build_prompts(loaded, text), make(np.array(inputs), wanted, special_of(loaded)))


@pytest.mark.parametrize("sentinel", ["auto", "always", "never"])
@pytest.mark.parametrize("config", [SMALL_DECODER, PAIRS])
def test_a_prompt_of_a_converted_model_is_read_as_it_is(
    config: ModelConfig,
    sentinel: str,
    tmp_path: Path,
    tokenizer_model: bytes,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nobody knows what it was trained for: T5's tasks have no sentinel. A run's own objective is known."""
    run = opened(tmp_path, tokenizer_model, config, "span_corruption")
    plain, first = run.tokenizer.encode(TEXT).tolist(), run.tokenizer.sentinels[0]

    def given(loaded: TextModel) -> list[int]:
        prompts = build_prompts(loaded, TEXT, sentinel=sentinel)
        return [
            token
            for token in (prompts.encoder or prompts.tokens)[0].tolist()
            if token != loaded.tokenizer.eos
        ]

    assert given(run) == (plain if sentinel == "never" else [*plain, first])
    assert caplog.text == ""
    assert given(replace(run, knows_objective=False)) == ([*plain, first] if sentinel == "always" else plain)
    assert ("put <extra_0> where text is to be filled in" in caplog.text) == (sentinel == "auto")


def test_nothing_stands_before_the_prompt_of_an_encoder_decoder(
    tmp_path: Path, tokenizer_model: bytes
) -> None:
    loaded = opened(tmp_path, tokenizer_model, PAIRS, "causal")
    with pytest.raises(UsageError, match="begin = 'bos': an encoder-decoder's prompt is its encoder's"):
        build_prompts(loaded, TEXT, begin="bos")


def test_a_sentinel_that_is_not_there(tmp_path: Path, tokenizer_model: bytes) -> None:
    loaded = opened(tmp_path, tokenizer_model, PAIRS, "span_corruption")
    with pytest.raises(UsageError, match="<extra_9>: the tokenizer has 4 sentinels"):
        build_prompts(loaded, "a <extra_9>")


@pytest.mark.parametrize("objective", ["prefix", "ul2"])
@pytest.mark.parametrize("config", [SMALL_DECODER, PAIRS])
def test_prefix(config: ModelConfig, objective: str, tmp_path: Path, tokenizer_model: bytes) -> None:
    """UL2's end of a text is a prefix, too, after its mode token where there is one."""
    loaded = opened(tmp_path, tokenizer_model, config, objective)
    tokens, special = loaded.tokenizer.encode(TEXT), special_of(loaded)
    mode = loaded.tokenizer.modes.get("S") if objective == "ul2" else None
    if config is PAIRS:
        inputs = tokens if mode is None else np.append(mode, tokens)
        check(build_prompts(loaded, TEXT), make_seq2seq_example(inputs, np.array([9]), special))
    else:
        first = special.bos if mode is None else mode
        check(
            build_prompts(loaded, TEXT),
            make_prefix_lm_example(np.append(first, tokens), np.array([9]), special),
        )


def test_causal(tmp_path: Path, tokenizer_model: bytes) -> None:
    loaded = opened(tmp_path, tokenizer_model, PAIRS, "causal")
    tokens, special = loaded.tokenizer.encode(TEXT), special_of(loaded)
    full = make_seq2seq_example(np.zeros(0, np.int64), np.append(tokens, 9), special)
    prompts = build_prompts(loaded, TEXT)
    assert prompts.tokens[0].tolist() == full["tokens"].tolist()[:-1]
    assert prompts.encoder[0].tolist() == full["encoder_tokens"].tolist()
    assert not prompts.prefix


def test_an_encoder_makes_no_text(tmp_path: Path, tokenizer_model: bytes) -> None:
    loaded = opened(
        tmp_path, tokenizer_model, SMALL_DECODER.model_copy(update={"family": "encoder"}), "masked"
    )
    with pytest.raises(UsageError, match="'encoder' makes no text"):
        build_prompts(loaded, TEXT)


@pytest.mark.parametrize(("config", "objective"), [(SMALL_DECODER, "prefix"), (PAIRS, "span_corruption")])
def test_samples_and_beams_from_a_prompt(
    config: ModelConfig, objective: str, tmp_path: Path, tokenizer_model: bytes
) -> None:
    loaded = opened(tmp_path, tokenizer_model, config, objective)
    shown: list[str] = []
    (greedy,) = generate_text(loaded, TEXT, Sampling(vocab_size=400), 9, 1, shown.append)
    assert "".join(shown) == TEXT + greedy
    assert generate_text_beam(loaded, TEXT, 9, 1, 0.0) == greedy
    assert generate_text_beam(loaded, TEXT, 9, 8, 0.6)


def test_no_more_than_the_positions_there_are(
    tmp_path: Path, tokenizer_model: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    config = SMALL_DECODER.with_changes({"position.name": "learned", "position.max_positions": 12})
    loaded = opened(tmp_path, tokenizer_model, config, "causal")
    length = 1 + len(loaded.tokenizer.encode("import"))
    generate_text_beam(loaded, "import", 40, 2, 0.6)
    assert (
        f"the model makes {13 - length} tokens at most, for model.position.max_positions = 12" in caplog.text
    )
