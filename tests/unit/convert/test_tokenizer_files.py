"""Tokenizers beside models, both ways, and what config.json and generation_config.json say of their ids."""

import argparse
import inspect
import io
import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import Tokenizer as Library
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

import megatfm
from megatfm import checkpoint, tokenizers
from megatfm.commands import generation
from megatfm.config import Config, ModelConfig
from megatfm.config.prep import TokenizerConfig
from megatfm.convert import tokenizer_files
from megatfm.convert.convert import convert
from megatfm.convert.starting_config import OBJECTIVES
from megatfm.data_prep.tokenize import make_tokenizer_files
from megatfm.errors import UsageError
from megatfm.inference.prompts import PromptOptions, build_prompts
from megatfm.inference.text import generate_text_beam, open_text_model
from megatfm.models import build
from megatfm.tokenizers import TOKENIZER_FILENAMES, train_byte_bpe, train_sentencepiece, train_wordpiece
from tests.support.hf_encoders import BERT_ENCODER
from tests.support.hf_folders import GPT_OPTIONS, LLAMA_OPTIONS
from tests.support.reference_gradients import perturb
from tests.support.text_objectives import LLAMA2_PIECES

TEXTS = [inspect.getsource(textwrap), "Größe, naïve, 東京\n" * 20]


def run_of(folder: Path, family: str, files: dict[str, bytes]) -> Path:
    """A checkpoint of a small model in a run with this tokenizer."""
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    tokenizer = tokenizers.load(folder)
    options = {
        "decoder": {"ffn.activation": "swiglu"},
        "encoder": BERT_ENCODER | {"position.max_positions": 48},
        "encoder_decoder": {
            "position.name": "t5", "attention.scale": 1.0, "lm_head.scale": 24**-0.5, "ffn.activation": "relu",
        },
    }  # fmt: skip
    sizes = {"vocab_size": tokenizer.vocab_size, "d_model": 24, "n_layers": 2, "attention.n_heads": 4, "ffn.d_ff": 40}
    model = ModelConfig.from_dotted(options[family] | sizes | {"family": family})
    config = Config.model_validate({
        "name": "small", "model": model, "optimizer": {"name": "adamw", "lr": 1e-3},
        "objective": {"name": OBJECTIVES[family]},
        "data": {"train": "x", "tokenizer": str(tokenizers.find_tokenizer_file(folder)), "sequence_length": 48},
        "train": {"steps": 3, "global_batch": 2, "micro_batch": 2},
    })  # fmt: skip
    built = build(model)
    perturb(built)
    tensors = {f"model.{name}": parameter.detach() for name, parameter in built.named_parameters()}
    state = {"step": 3, "tokenizer": tokenizer.hash, "config": config.model_dump(mode="json")}
    checkpoint.save(folder / "checkpoints", 3, tensors, state)
    return folder


TOKENIZERS = {
    "sentencepiece": lambda: {"tokenizer.model": train_sentencepiece(TEXTS, vocab_size=400, sentinels=4)},
    "sentencepiece-unigram": lambda: {
        "tokenizer.model": train_sentencepiece(TEXTS, vocab_size=380, sentinels=4, model_type="unigram")
    },
    "byte-bpe": lambda: {"tokenizer.json": train_byte_bpe(TEXTS, vocab_size=400, sentinels=4)},
    "prep": lambda: make_tokenizer_files(TokenizerConfig(kind="byte-bpe", vocab_size=400, sentinels=4), TEXTS),
    "wordpiece": lambda: {"tokenizer.json": train_wordpiece(TEXTS, vocab_size=400, sentinels=4)},
}


@pytest.mark.parametrize("kind", ["sentencepiece", "sentencepiece-unigram", "byte-bpe", "prep"])
@pytest.mark.parametrize("family", ["decoder", "encoder_decoder"])
def test_a_run_becomes_a_folder_that_transformers_uses_and_back(family: str, kind: str, tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", family, TOKENIZERS[kind]())
    convert(run, tmp_path / "theirs", "hf")
    written = json.loads((tmp_path / "theirs" / "config.json").read_text())
    actual = open_text_model(run)
    reference = AutoTokenizer.from_pretrained(tmp_path / "theirs")
    for text in ("import textwrap\n    def x(self):  pass", " Größe, naïve 東京", "a  b\t\n"):
        assert reference(text, add_special_tokens=False)["input_ids"] == actual.tokenizer.encode(text).tolist()
        (ids,) = (
            build_prompts(actual, text, PromptOptions(sentinel="never")).encoder or build_prompts(actual, text).tokens
        )
        assert reference(text)["input_ids"] == ids.tolist(), "a text begins and ends as in training"
    roles = ("bos", "eos", "pad")
    assert [written[f"{r}_token_id"] for r in roles] == [getattr(actual.tokenizer, r) for r in roles]
    assert [getattr(reference, f"{r}_token_id") for r in roles] == [getattr(actual.tokenizer, r) for r in roles]
    assert written.get("max_position_embeddings", written.get("n_positions")) == 48
    if family == "encoder_decoder":
        assert written["decoder_start_token_id"] == actual.tokenizer.pad

    convert(tmp_path / "theirs", tmp_path / "back", "megatfm")
    convert(tmp_path / "back", tmp_path / "again", "hf")
    for name in TOKENIZER_FILENAMES:
        files = [path.read_bytes() for path in tmp_path.glob(f"[ta]*/{name}")]
        assert len(files) in (0, 2), name
        assert len({*files}) <= 1, name
    back = open_text_model(tmp_path / "back")
    assert back.tokenizer.hash == actual.tokenizer.hash
    assert back.config.data.sequence_length == 48
    assert back.config.objective == actual.config.objective
    assert generate_text_beam(back, "import", 9, 2, 0.6, PromptOptions(sentinel="always")) == generate_text_beam(
        actual, "import", 9, 2, 0.6
    )
    stored, converted = (checkpoint.read_tensors(find(path), "model.") for path in (run, tmp_path / "back"))
    assert stored.keys() == converted.keys()
    assert all(torch.equal(stored[name], converted[name]) for name in stored)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_an_encoder_s_texts_begin_and_end_in_transformers_as_in_training(kind: str, tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", "encoder", TOKENIZERS[kind]())
    convert(run, tmp_path / "theirs", "hf")
    tokenizer, reference = tokenizers.load(run), AutoTokenizer.from_pretrained(tmp_path / "theirs")
    (first, second), cls, sep = map(tokenizer.encode, ("import", "größe")), tokenizer.cls, tokenizer.sep
    assert reference("import")["input_ids"] == [cls, *first, sep]
    pair = reference("import", "größe")
    assert pair["input_ids"] == [cls, *first, sep, *second, sep]
    assert pair["token_type_ids"] == [0] * (len(first) + 2) + [1] * (len(second) + 1)
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "theirs")
    assert loaded(**reference("import", return_tensors="pt")).logits.shape[1] == len(first) + 2
    assert tokenizers.load(tmp_path / "theirs").hash == tokenizer.hash


def save_llama_with_sentencepiece(folder: Path, **options: Any) -> bytes:
    """Llama 2's folder without a tokenizer.json; returns its tokenizer.model."""
    writer = io.BytesIO()
    settings = {**LLAMA2_PIECES, "vocab_size": 400, **options}
    lines = [line for text in TEXTS for line in text.splitlines()]
    SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=writer, minloglevel=2, **settings)
    config = transformers.LlamaConfig(**LLAMA_OPTIONS | {"vocab_size": 400})
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.model").write_bytes(writer.getvalue())
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer", "add_bos_token": true}')
    return writer.getvalue()


@pytest.mark.parametrize("options", [{}, {"add_dummy_prefix": False}, {"remove_extra_whitespaces": True}], ids=str)
def test_a_sentencepiece_model_of_others_has_its_ids_again_after_conversion(
    options: dict[str, bool], tmp_path: Path
) -> None:
    """A text begins with a space in Llama 2's."""
    plain = SentencePieceProcessor(model_proto=save_llama_with_sentencepiece(tmp_path / "theirs", **options))
    convert(tmp_path / "theirs", tmp_path / "ours", "megatfm")
    convert(tmp_path / "ours", tmp_path / "back", "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "back")
    for text in ("import textwrap", " import  x ", "Größe\n\tnaïve 東京🗼"):
        ids = tokenizer(text)["input_ids"]
        assert ids == [plain.bos_id(), *plain.encode(text)]
        assert tokenizer.decode(ids, skip_special_tokens=True) == plain.decode(plain.encode(text))
    assert tokenizers.load(tmp_path / "back").hash == tokenizers.load(tmp_path / "ours").hash


def test_a_sentencepiece_model_that_is_no_tokenizer_json_is_copied_with_a_note(tmp_path: Path) -> None:
    content = save_llama_with_sentencepiece(tmp_path / "theirs", model_type="char", hard_vocab_limit=False)
    convert(tmp_path / "theirs", tmp_path / "ours", "megatfm")
    output = convert(tmp_path / "ours", tmp_path / "back", "hf")
    assert "sentencepiece-char model does; the training put <s> before a text and nothing after it" in "".join(output)
    assert (tmp_path / "back" / "tokenizer.model").read_bytes() == content
    assert not (tmp_path / "back" / "tokenizer.json").exists()


def test_another_tokenizer_than_the_model_s_is_not_taken_along(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", "decoder", TOKENIZERS["byte-bpe"]())
    other = train_byte_bpe([text[::-1] for text in TEXTS], vocab_size=400, sentinels=4)
    (run / "tokenizer.json").write_bytes(other)
    with pytest.raises(UsageError, match=r"tokenizer.json: not the tokenizer that step-00000003 was trained"):
        convert(run, tmp_path / "theirs", "hf")
    assert not (tmp_path / "theirs").exists()
    state = checkpoint.read_state(find(run))
    checkpoint.save(run / "checkpoints", 4, checkpoint.read_tensors(find(run)), {**state, "tokenizer": None})
    output = convert(run, tmp_path / "theirs", "hf")
    assert output[1] == f"no tokenizer: step-00000004 was saved without one; {run / 'tokenizer.json'} may be another"
    assert not (tmp_path / "theirs" / "tokenizer.json").exists()


def find(folder: Path) -> Path:
    (path,) = (folder / "checkpoints").iterdir()
    return path


@pytest.mark.parametrize(("before", "ends"), [(False, 9), (True, 11)])
def test_ids_rates_and_how_to_generate_travel(
    before: bool, ends: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a text begins as the model's own tokenizer begins it; the folder itself makes the same text."""
    expected = tmp_path / "theirs"
    config = transformers.GPT2Config(
        **GPT_OPTIONS | {"vocab_size": 300}, embd_pdrop=0.3, resid_pdrop=0.2, attn_pdrop=0.0, bos_token_id=7,
        eos_token_id=9, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    bias, embedding = model.transformer.ln_f.bias.data, model.transformer.wte.weight.data
    bias += 3 * embedding[ends] / embedding[ends].norm()
    model.save_pretrained(expected)
    (expected / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 11], "top_k": 3}))
    (expected / "tokenizer.json").write_bytes(train_byte_bpe(TEXTS, vocab_size=300, sentinels=0))
    library = Library.from_file(str(expected / "tokenizer.json"))
    begin = library.token_to_id("<s>")
    if before:
        library.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
        library.save(str(expected / "tokenizer.json"))
    convert(expected, tmp_path / "ours", "megatfm")
    convert(tmp_path / "ours", tmp_path / "back", "hf")
    back, original = (json.loads((f / "config.json").read_text()) for f in (tmp_path / "back", expected))
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "embd_pdrop", "resid_pdrop", "attn_pdrop"):
        assert back[key] == original[key], key
    generation_config = json.loads((tmp_path / "back" / "generation_config.json").read_text())
    assert generation_config == {"eos_token_id": [9, 11], "top_k": 3}

    origin = checkpoint.read_state(checkpoint.find_checkpoint(tmp_path / "ours"))["origin"]
    assert tokenizer_files.restore_origin(origin, {"embd_pdrop": 0.5})["bos_token_id"] == 7
    assert "embd_pdrop" not in tokenizer_files.restore_origin(origin, {"embd_pdrop": 0.5}), "it was set since"

    loaded = open_text_model(tmp_path / "ours")
    expected_ids = AutoTokenizer.from_pretrained(expected)("import os")["input_ids"]
    assert build_prompts(loaded, "import os").tokens[0].tolist() == expected_ids
    assert (expected_ids[0] == begin) == before
    assert loaded.eos_token_id == (9, 11)
    ids = torch.tensor([expected_ids])
    result = transformers.GPT2LMHeadModel.from_pretrained(expected).generate(ids, max_new_tokens=6, do_sample=False)
    new = result[0, len(expected_ids) :].tolist()
    assert 1 < new.index(ends) + 1 == len(new) < 6, "it ends by that id, and not at once"
    text = loaded.tokenizer.decode(new)
    for folder in (expected, tmp_path / "ours"):
        assert megatfm.load(folder).generate("import os", max_tokens=6, temperature=0) == text, folder
    assert megatfm.load(expected).encode(["import os"]).shape == (1, GPT_OPTIONS["n_embd"])
    generation.add_generate_arguments(parser := argparse.ArgumentParser())
    words = [str(expected), "--prompt", "import os", "--max-tokens=6", "--temperature=0"]
    assert generation.generate_command(parser.parse_args(words)) == 0
    assert capsys.readouterr().out.endswith(f"import os{text}\n")
    transformers.GPT2Model(config).save_pretrained(expected)
    with pytest.raises(UsageError, match="no head over the vocabulary, and makes no text"):
        megatfm.load(expected).generate("import os")
    (expected / "tokenizer.json").unlink()
    with pytest.raises(UsageError, match="theirs: can't generate text, since megatfm can't open its tokenizer"):
        megatfm.load(expected).generate("import os")
    assert build_prompts(loaded, "import os", PromptOptions(bos="bos")).tokens[0].tolist()[0] == loaded.tokenizer.bos
    assert build_prompts(loaded, "import os", PromptOptions(bos="none")).tokens[0].tolist() == expected_ids[before:]
    assert build_prompts(loaded, "").tokens[0].tolist() == [loaded.tokenizer.bos]
