"""Decoders and encoder-decoders in whole folders, with their tokenizers, and used afterwards."""

import argparse
import inspect
import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer as Library
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

import megatfm
from megatfm import checkpoint, tokenizers
from megatfm.commands import generation
from megatfm.config import Config, ModelConfig, load_config
from megatfm.config.position import LinearScaling, Llama3Scaling, YarnScaling
from megatfm.convert import tokenizer_files
from megatfm.convert.architecture import ARCHITECTURES, find_architecture
from megatfm.convert.convert import convert
from megatfm.convert.hf_checkpoint import HfFolder
from megatfm.convert.starting_config import OBJECTIVES
from megatfm.errors import MegatfmError, UsageError
from megatfm.inference.prompts import PromptOptions, build_prompts
from megatfm.inference.text import generate_text_beam, open_text_model
from megatfm.models import build
from megatfm.parallel.mesh import build_mesh
from megatfm.tokenizers import TOKENIZER_FILENAMES, train_byte_bpe, train_sentencepiece, train_wordpiece
from megatfm.train.build import build_engine
from megatfm.train.init_from import load_weights
from tests.support.hf_decoders import GPT_OPTIONS, HF_DECODERS, LLAMA_OPTIONS, build_hf_decoder, decoder_logits
from tests.support.hf_encoders import BERT_ENCODER
from tests.support.hf_folders import (
    DECODER_TOKENS,
    check_same_tensors,
    copy_to_aligned_memory,
    edit_config,
    edit_tensors,
    load_complete,
)
from tests.support.reference_gradients import perturb
from tests.support.workers import Workers

TEXTS = [inspect.getsource(textwrap), "Größe, naïve, 東京\n" * 20]


@pytest.mark.parametrize("name", HF_DECODERS)
def test_decoders_survive_conversion_there_and_back(name: str, tmp_path: Path) -> None:
    reference = build_hf_decoder(name)
    reference.save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours", "megatfm")
    with torch.no_grad():
        expected = decoder_logits(reference, is_megatfm=False)
        for path in ("theirs", "ours"):
            actual = decoder_logits(megatfm.load(tmp_path / path), is_megatfm=True)
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    convert(tmp_path / "ours", tmp_path / "back", "hf")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["architectures"] == [HF_DECODERS[name][0]]
    kernel = getattr(reference.config, "_experts_implementation", None)  # other products of experts round otherwise
    same_kernel = {"experts_implementation": kernel} if kernel else {}
    loaded = load_complete(type(reference), tmp_path / "back", **same_kernel)
    with torch.no_grad():
        assert torch.equal(decoder_logits(copy_to_aligned_memory(loaded), is_megatfm=False), expected)
    check_same_tensors(tmp_path)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "deepseek-v3", "olmoe", "deepseek-v2"])
def test_files_with_all_experts_of_a_block_in_one_tensor(name: str, tmp_path: Path) -> None:
    reference = build_hf_decoder(name)
    reference.save_pretrained(tmp_path, save_original_format=False)
    assert any(key.endswith("experts.gate_up_proj") for key in load_file(tmp_path / "model.safetensors"))
    with torch.no_grad():
        expected = decoder_logits(reference, is_megatfm=False)
        actual = decoder_logits(megatfm.load(tmp_path), is_megatfm=True)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "other"), [("qwen3-moe", "num_experts"), ("deepseek-v3", "num_local_experts")])
def test_the_number_of_experts_under_its_other_name(name: str, other: str, tmp_path: Path) -> None:
    """Qwen's published files have `num_experts` alone."""
    build_hf_decoder(name).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    number = config.pop("n_routed_experts" if name == "deepseek-v3" else "num_local_experts")
    path.write_text(json.dumps(config | {other: number}))
    assert HfFolder(tmp_path).config.layer_config(-1).ffn.n_experts == number


def test_t5_s_published_files_have_copies_and_a_table_that_nothing_uses(tmp_path: Path) -> None:
    build_hf_decoder("t5").save_pretrained(tmp_path)
    copies = [f"{name}.weight" for name in ("encoder.embed_tokens", "decoder.embed_tokens", "lm_head")]
    unused = {"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": torch.ones(32, 4)}
    edit_tensors(tmp_path, lambda t: t.update(unused | {name: t["shared.weight"].clone() for name in copies}))
    megatfm.load(tmp_path)
    edit_tensors(tmp_path, lambda t: t.update({copies[1]: t[copies[1]] + 1}))
    with pytest.raises(MegatfmError, match=r"decoder\.embed_tokens\.weight differs from shared\.weight"):
        megatfm.load(tmp_path)


@pytest.mark.parametrize(("name", "changes", "message"), [
    ("qwen3", {"use_sliding_window": True}, "use_sliding_window = True is not supported, only False"),
    ("qwen3", {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types has sliding_attention, but"),
    ("qwen3-moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2 is not supported, only 1"),
    ("deepseek-v3", {"n_group": 8}, "n_group = 8 of n_routed_experts = 8: transformers ranks groups"),
    ("mla", {"rope_interleave": False}, "rope_interleave = False is not supported, only True"),
    ("gpt1", {"afn": "mish"}, "afn = 'mish' is not one of gelu"),
    ("t5", {"feed_forward_proj": "gated-relu", "is_gated_act": True}, "gated activation 'relu'"),
    ("t5", {"dense_act_fn": "silu"}, "dense_act_fn = 'silu' is not supported, only 'relu'"),
    ("mla", {"rms_norm_eps": 1e-5}, "rms_norm_eps = 1e-05 is not supported, only 1e-06"),
    ("mla", {"sliding_window": 8}, "sliding_window = 8 is not supported, only None"),
    ("mistral", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
     "rope_type 'dynamic' is not supported"),
])  # fmt: skip
def test_options_of_decoders_that_megatfm_lacks_are_refused(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    build_hf_decoder(name).save_pretrained(tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(UsageError, match=message):
        HfFolder(tmp_path)


@pytest.mark.parametrize(("keys", "theta", "scaling"), [
    ({}, 10_000.0, None),
    ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, None),
    ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}, 5e5, LinearScaling(factor=2.0)),
    ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                          "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}},
     5e5, Llama3Scaling(factor=8.0, original_length=8192)),
    ({"max_position_embeddings": 64, "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 9.0}},
     9.0, YarnScaling(factor=4.0, original_length=64)),
])  # fmt: skip
def test_rope_in_old_and_new_config_files(keys: dict[str, Any], theta: float, scaling: object) -> None:
    read = ARCHITECTURES.get("LlamaForCausalLM").parse_config({**LLAMA_OPTIONS, **keys}, "LlamaForCausalLM")
    assert (read.position.theta, read.position.scaling) == (theta, scaling)


@pytest.mark.parametrize(("changes", "lacks"), [
    ({"norm.placement": "sandwich"}, r"model\.norm\.placement = 'sandwich'"),
    ({"position.name": "alibi"}, r"model\.position\.name = 'alibi'"),
    ({"attention.softcap": 50.0}, r"model\.attention\.softcap = 50\.0"),
    ({"attention.bias": True, "ffn.bias": True, "attention.qk_norm": True, "n_mtp_heads": 1},
     r"lacks model\.n_mtp_heads = 1, model\.attention\.qk_norm = True"),
    ({"position.scaling": {"name": "ntk", "factor": 2.0}}, "model.position.scaling"),
])  # fmt: skip
def test_options_of_decoders_that_transformers_lacks_are_refused(changes: dict[str, Any], lacks: str) -> None:
    sizes = {"vocab_size": 60, "d_model": 24, "n_layers": 2, "attention.n_heads": 4, "ffn.d_ff": 40}
    config = ModelConfig.from_dotted(sizes | changes)
    with pytest.raises(UsageError, match=f"no architecture of transformers .*{lacks}"):
        find_architecture(config)


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
        "data": {"train": "x", "tokenizer": str(folder / next(iter(files))), "sequence_length": 48},
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
    "byte-bpe": lambda: {"tokenizer.json": train_byte_bpe(TEXTS, vocab_size=400, sentinels=4)},
    "wordpiece": lambda: {"tokenizer.json": train_wordpiece(TEXTS, vocab_size=400, sentinels=4)},
}


@pytest.mark.parametrize("kind", ["sentencepiece", "byte-bpe"])
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
    output = convert(run, tmp_path / "theirs", "hf")
    tokenizer, reference = tokenizers.load(run), AutoTokenizer.from_pretrained(tmp_path / "theirs")
    (first, second), cls, sep = map(tokenizer.encode, ("import", "größe")), tokenizer.cls, tokenizer.sep
    if kind == "sentencepiece":
        assert reference("import")["input_ids"] == first.tolist()
        assert [note for note in output if "was trained with <cls> before it and <sep> after it" in note] != []
        return
    assert reference("import")["input_ids"] == [cls, *first, sep]
    pair = reference("import", "größe")
    assert pair["input_ids"] == [cls, *first, sep, *second, sep]
    assert pair["token_type_ids"] == [0] * (len(first) + 2) + [1] * (len(second) + 1)
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "theirs")
    assert loaded(**reference("import", return_tensors="pt")).logits.shape[1] == len(first) + 2
    assert tokenizers.load(tmp_path / "theirs").hash == tokenizer.hash


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


def trained_on_from(folder: str) -> torch.Tensor:
    """The logits of a run that starts from the weights in a folder, under the folder's own config."""
    config = load_config(folder)
    engine = build_engine(config, build_mesh(config.parallel, 1, "cpu"), torch.device("cpu"), "fp32")
    load_weights(engine, folder)
    engine.model.eval()
    with torch.no_grad():
        return engine.model(DECODER_TOKENS).logits


def test_training_starts_from_a_converted_folder(tmp_path: Path, workers: Workers) -> None:
    reference = build_hf_decoder("gpt1")
    reference.save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours", "megatfm")
    (logits,) = workers.run(trained_on_from, 1, str(tmp_path / "ours"))
    torch.testing.assert_close(logits, reference(DECODER_TOKENS).logits.detach(), rtol=1e-5, atol=1e-5)
    with pytest.raises(UsageError, match="in the Hugging Face format: convert it with"):
        open_text_model(tmp_path / "theirs")


def find(folder: Path) -> Path:
    (path,) = (folder / "checkpoints").iterdir()
    return path


@pytest.mark.parametrize("preset", ["t5-base", "t5-v1.1-base", "gpt2-124m", "bert-base", "xlnet-base", "mla-1b"])
def test_a_preset_made_smaller_can_be_exported(preset: str) -> None:
    words = ["model.d_model=64", "model.attention.n_heads=4", "model.n_layers=2", "data.tokenizer=t"]
    words += ["model.attention.qk_nope_head_dim=16"] * (preset == "mla-1b")
    config = load_config(preset, words).model.with_changes({"vocab_size": 4096})
    name, _, expected = find_architecture(config)
    assert getattr(transformers, name).config_class.from_dict(expected).vocab_size == 4096


@pytest.mark.parametrize(("preset", "words"), [
    ("llama3-8b", ["model.d_model=100", "model.attention.n_heads=6", "model.attention.n_kv_heads=2"]),
    ("xlnet-base", ["model.d_model=65", "model.attention.n_heads=5"]),
])  # fmt: skip
def test_a_decoder_that_transformers_could_not_run_is_not_exported(preset: str, words: list[str]) -> None:
    words += ["model.attention.head_dim=16"] * (preset == "llama3-8b")
    with pytest.raises(UsageError, match=r"does not divide hidden_size|only even widths run"):
        find_architecture(load_config(preset, words).model)


def test_t5_v1_1_as_transformers_5_writes_it(tmp_path: Path) -> None:
    """transformers 5 always says that the output matrix is shared; scale_decoder_outputs has the former meaning."""
    kind, values = HF_DECODERS["t5-v1.1"]
    expected = getattr(transformers, kind)(getattr(transformers, kind).config_class(**values)).eval()
    perturb(expected)
    for folder, shared in (("tied", True), ("untied", False)):
        if not shared:
            expected.lm_head.weight = torch.nn.Parameter(expected.lm_head.weight.detach() * 1.5)
        expected.save_pretrained(tmp_path / folder)
        edit_config(tmp_path / folder, tie_word_embeddings=True, scale_decoder_outputs=False)
        model = megatfm.load(tmp_path / folder)
        assert model.config.embedding.tied == shared
        with torch.no_grad():
            expected_logits = decoder_logits(expected, is_megatfm=False)
            torch.testing.assert_close(decoder_logits(model, is_megatfm=True), expected_logits, rtol=1e-5, atol=1e-5)
        convert(tmp_path / folder, tmp_path / f"ours-{folder}", "megatfm")
        convert(tmp_path / f"ours-{folder}", tmp_path / f"back-{folder}", "hf")
        back = getattr(transformers, kind).from_pretrained(tmp_path / f"back-{folder}").eval()
        with torch.no_grad():
            torch.testing.assert_close(decoder_logits(back, is_megatfm=False), expected_logits, rtol=1e-5, atol=1e-5)


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
    assert build_prompts(loaded, "import os", PromptOptions(begin="bos")).tokens[0].tolist()[0] == loaded.tokenizer.bos
    assert build_prompts(loaded, "import os", PromptOptions(begin="none")).tokens[0].tolist() == expected_ids[before:]
    assert build_prompts(loaded, "").tokens[0].tolist() == [loaded.tokenizer.bos]
