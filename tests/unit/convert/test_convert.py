"""Whole folders, both ways: against transformers' own files, folders as others publish them, and what goes wrong."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import megatfm
from megatfm import checkpoint
from megatfm.commands.conversion import parse_size
from megatfm.config import load_config
from megatfm.convert import convert as convert_room
from megatfm.convert.convert import convert
from megatfm.convert.hf_checkpoint import HfFolder
from megatfm.convert.weight_mapping import map_name, to_hf
from megatfm.errors import MegatfmError, UsageError
from tests.support.hf_encoders import (
    ENCODER_TOKENS,
    HF_LONG_ENCODERS,
    LONG_TOKENS,
    build_hf_encoder,
    build_hf_long_encoder,
    get_vocabulary_logits,
    long_encoder_logits,
)
from tests.support.hf_folders import (
    DECODER_TOKENS,
    HF_DECODERS,
    LLAMA_OPTIONS,
    SWITCH_OPTIONS,
    T5_OPTIONS,
    build_hf_decoder,
    build_hf_gpt2,
    build_hf_llama,
    check_same_tensors,
    copy_to_aligned_memory,
    edit_config,
    edit_tensors,
    get_public_config,
    load_complete,
    read_folder_tensors,
    run_convert,
)
from tests.support.reference_gradients import perturb

MODELS = [build_hf_gpt2, build_hf_llama]


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("shards", ["5GB", "9KB"])
def test_every_form_opens_and_survives_conversion(make: Callable[[], Any], shards: str, tmp_path: Path) -> None:
    expected = make()
    expected.save_pretrained(tmp_path / "theirs", max_shard_size=shards)
    assert run_convert(str(tmp_path / "theirs"), str(tmp_path / "ours"), "--to", "megatfm") == 0
    assert run_convert(str(tmp_path / "ours"), str(tmp_path / "back"), "--to", "hf", "--max-shard-size", shards) == 0
    assert (len(list((tmp_path / "back").glob("*.safetensors"))) > 3) == (shards == "9KB")
    check_same_tensors(tmp_path)
    loaded = load_complete(type(expected), tmp_path / "back")
    assert get_public_config(loaded) == get_public_config(expected)
    expected_logits = expected(DECODER_TOKENS).logits
    assert torch.equal(copy_to_aligned_memory(loaded)(DECODER_TOKENS).logits, expected_logits)
    for path in ("theirs", "ours", "ours/checkpoints/step-00000000"):
        logits = megatfm.load(tmp_path / path)(DECODER_TOKENS).logits
        torch.testing.assert_close(logits, expected_logits, rtol=1e-5, atol=1e-5)
    config = load_config(tmp_path / "ours")
    assert config.data.sequence_length == (77 if make is build_hf_llama else 32)
    assert config.model == convert_room.HfFolder(tmp_path / "theirs").config


def test_no_more_than_a_batch_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_hf_gpt2().save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours", "megatfm")
    sizes = []
    read = checkpoint.read_tensors

    def spy(*args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        actual = read(*args, **kwargs)
        sizes.append(sum(tensor.nbytes for tensor in actual.values()))
        return actual

    monkeypatch.setattr(checkpoint, "read_tensors", spy)
    monkeypatch.setattr(convert_room, "READ_BYTES", 12_000)
    convert(tmp_path / "ours", tmp_path / "back", "hf")
    assert len(sizes) > 5
    assert max(sizes) <= 12_000
    assert read_folder_tensors(tmp_path / "back").keys() == read_folder_tensors(tmp_path / "theirs").keys()


def test_a_bare_model_s_file_is_read(tmp_path: Path) -> None:
    """GPT-2's published files have no prefix, and masks of attention."""
    reference = build_hf_gpt2()
    reference.save_pretrained(tmp_path / "theirs")
    saved = read_folder_tensors(tmp_path / "theirs")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in saved.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 32, 32)
    save_file(bare, tmp_path / "theirs" / "model.safetensors")
    logits = megatfm.load(tmp_path / "theirs")(DECODER_TOKENS).logits
    torch.testing.assert_close(logits, reference(DECODER_TOKENS).logits)


NORM = "transformer.ln_f.weight"


def write_index(folder: Path, content: dict[str, Any]) -> None:
    """Write an index in place of the one file."""
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def test_one_file_is_read_before_an_index_as_in_transformers(tmp_path: Path) -> None:
    expected = build_hf_gpt2()
    expected.save_pretrained(tmp_path / "other")
    edit_tensors(tmp_path / "other", lambda tensors: [tensor.add_(1) for tensor in tensors.values()])
    expected.save_pretrained(tmp_path / "theirs", max_shard_size="9KB")
    shutil.copy(tmp_path / "other" / "model.safetensors", tmp_path / "theirs")
    reference = load_complete(type(expected), tmp_path / "theirs")
    logits = megatfm.load(tmp_path / "theirs")(DECODER_TOKENS).logits
    torch.testing.assert_close(logits, reference(DECODER_TOKENS).logits, rtol=1e-5, atol=1e-5)


def test_a_few_weights_in_float32_do_not_make_a_model_float32(tmp_path: Path) -> None:
    """DeepSeek's routers have biases in float32."""
    build_hf_decoder("deepseek-v3").bfloat16().save_pretrained(tmp_path / "theirs")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    edit_tensors(tmp_path / "theirs", lambda tensors: tensors.update({name: tensors[name].float()}))
    convert(tmp_path / "theirs", tmp_path / "ours", "megatfm")
    convert(tmp_path / "ours", tmp_path / "back", "hf")
    check_same_tensors(tmp_path)
    assert read_folder_tensors(tmp_path / "back")[name].dtype == torch.float32
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(("spoil", "message"), [
    ({"architectures": ["MambaForCausalLM"]}, r"unknown Hugging Face architecture 'MambaFor"),
    ({"activation_function": "mish"}, r"theirs: config.json: activation 'mish'"),
    ({"scale_attn_by_inverse_layer_idx": True}, r"scale_attn_by_inverse_layer_idx = True is not"),
    ({"n_head": 5}, r"n_heads = 5 does not divide d_model = 24"),
    ({"n_embd": "wide"}, r"config.json: n_embd = 'wide' is not an integer"),
    ({"activation_function": None}, r"activation_function = None is not a string"),
    ({"never_heard_of": 1}, r"never_heard_of = 1: megatfm knows no such key of a GPT2LMHeadModel"),
    ({"hidden_size": 36}, r"hidden_size = 36 is another name of n_embd, which is 24"),
    ({"model_type": "llama"}, r"model_type = 'llama' is not supported, only 'gpt2'"),
    ({"n_layer": 3}, r"transformer\.h\.2\..* is not in its files, but GPT2LMHeadModel has it"),
    ({"n_layer": 1}, r"transformer\.h\.1\..* is in its files, but is no weight of a GPT2LMHeadModel"),
    ({"n_positions": 31}, r"would give decoder\.embedding\.positions\.weight \[32, .* has \[31"),
    (lambda f: (f / "config.json").write_text("{"), r"config\.json: not JSON"),
    (lambda f: (f / "config.json").write_text("[]"), r"config\.json: not a JSON object"),
    (lambda f: write_index(f, {}), r"index\.json: has no weight_map from tensor na"),
    (lambda f: write_index(f, {"weight_map": {"a": "../x"}}), r"to files in its"),
    (lambda f: (f / "model.safetensors").write_bytes(b"\1" * 30), r"model\.safetensors: can't read it"),
    (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), r"pickled weights are never opened"),
    (lambda f: edit_tensors(f, lambda t: t.update({"lm_head.weight": t["transformer.wte.weight"] + 1})),
     r"lm_head\.weight differs from transformer\.wte\.weight"),
    *((lambda f, dtype=dtype: edit_tensors(f, lambda t: t.update({NORM: t[NORM].to(dtype)})),
       rf"{NORM} is stored as {name}, and megatfm reads F32, BF16, F16, F64: dequantise")
      for dtype, name in ((torch.float8_e4m3fn, "F8_E4M3"), (torch.int8, "I8"), (torch.complex64, "C64"))),
])  # fmt: skip
def test_damaged_folders_are_named(spoil: Callable[[Path], Any] | dict[str, Any], message: str, tmp_path: Path) -> None:
    build_hf_gpt2().save_pretrained(tmp_path / "theirs")
    if isinstance(spoil, dict):
        edit_config(tmp_path / "theirs", **spoil)
    else:
        spoil(tmp_path / "theirs")
    with pytest.raises(MegatfmError, match=message):
        convert(tmp_path / "theirs", tmp_path / "ours", "megatfm")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"], "nothing half-made is left"


def test_the_target_must_be_new_and_the_format_another(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build_hf_gpt2().save_pretrained(tmp_path / "theirs")
    for name in ("empty", ".empty.partial-0123", ".other.partial-0123"):
        (tmp_path / name).mkdir()
    convert(tmp_path / "theirs", tmp_path / "empty", "megatfm")
    assert "/.empty.partial-0123: left by a conversion that was killed" in caplog.text
    assert ".other.partial" not in caplog.text
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("text")
    for source, target, to, message in (
        ("theirs", "theirs", "megatfm", "exists already"),
        ("theirs", "link", "megatfm", "exists already"),
        ("theirs", "x", "hf", "already in that format: use --to megatfm"),
        ("empty", "x", "megatfm", "already in that format: use --to hf"),
        ("nothing", "x", "hf", "there is no such folder: give one with a run or checkpoint"),
        ("texts", "x", "megatfm", r"config\.json; for megatfm's it is neither a .*`megatfm prep` turns text"),
    ):
        with pytest.raises(UsageError, match=message):
            convert(tmp_path / source, tmp_path / target, to)


def test_max_shard_size_is_parsed() -> None:
    assert [parse_size(size) for size in ("5GB", "200 mb", "1.5KB", "7")] == [5 * 10**9, 2 * 10**8, 1500, 7]
    for wrong in ("9" * 400, "", "GB", "-1GB", "0", "5 GiB"):
        with pytest.raises(UsageError, match="--max-shard-size"):
            parse_size(wrong)


@pytest.mark.parametrize(("flags", "message"), [
    *(([to, flag, "float32" if flag == "--dtype" else "1GB"], f"{flag} is for --to hf: leave it out with --to {to}")
      for to in ("megatfm", "peft") for flag in ("--max-shard-size", "--dtype")),
    (["moe", "--experts", "2", "--max-shard-size", "1GB"], "--max-shard-size is for --to hf"),
    (["moe", "--experts", "2", "--base", "b"], "--to megatfm: leave it out with --to moe"),
    (["moe"], "--to moe needs --experts"),
    (["hf", "--experts", "4"], "--experts is for --to moe"),
    (["megatfm", "--hf-config", "c", "--base", "b"], "--to megatfm: leave it out with --hf-config"),
])  # fmt: skip
def test_options_of_another_format_are_refused(flags: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        run_convert(str(tmp_path), str(tmp_path / "new"), "--to", *flags)


# ----------------------------------------------------------------------------- folders as others publish them


@pytest.mark.parametrize("window", [16, 17, 40])
def test_a_window_slides_beyond_the_longest_sequence(window: int, tmp_path: Path) -> None:
    values = {**LLAMA_OPTIONS, "sliding_window": window, "max_position_embeddings": 16}
    reference = transformers.MistralForCausalLM(transformers.MistralConfig(**values))
    perturb(reference)
    reference.save_pretrained(tmp_path / "theirs")
    tokens = torch.randint(0, values["vocab_size"], (2, 36), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = reference.eval()(tokens).logits
        actual = megatfm.load(tmp_path / "theirs")(tokens).logits
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    convert(tmp_path / "theirs", tmp_path / "ours", "megatfm")
    convert(tmp_path / "ours", tmp_path / "back", "hf")
    assert transformers.AutoConfig.from_pretrained(tmp_path / "back").sliding_window == window


@pytest.mark.parametrize("name", ["BertForPreTraining", "RobertaForMaskedLM", "XLNetLMHeadModel"])
def test_config_files_of_transformers_2_name_no_class(name: str, tmp_path: Path) -> None:
    reference = build_hf_encoder(name)
    reference.save_pretrained(tmp_path)
    edit_config(tmp_path, model_type=None, architectures=None, eos_token_ids=0)
    opened = HfFolder(tmp_path)
    assert opened.name == name
    assert "its config.json names no class: taken for a" in opened.notes[0]
    logits = megatfm.load(tmp_path)(ENCODER_TOKENS).logits
    torch.testing.assert_close(logits, get_vocabulary_logits(reference(ENCODER_TOKENS)), rtol=1e-5, atol=1e-5)


def test_mappings_that_leave_a_tensor_out_are_refused(tmp_path: Path) -> None:
    build_hf_gpt2().save_pretrained(tmp_path)
    folder = HfFolder(tmp_path)
    name = folder.mappings.pop().megatfm[0]
    with pytest.raises(MegatfmError, match=f"GPT2LMHeadModel: no weight mapping gives {name}: its mappings are inc"):
        list(convert_room.read_converted_tensors(folder, convert_room.list_tensor_shapes(folder.config)))
    with pytest.raises(MegatfmError, match="there is no tensor a"):
        to_hf([map_name("a", "b")], {})


def test_names_of_tensors_that_several_classes_have_tell_nothing(tmp_path: Path) -> None:
    build_hf_encoder("BertForMaskedLM").bert.save_pretrained(tmp_path)
    edit_config(tmp_path, model_type=None, architectures=None)
    with pytest.raises(UsageError, match="names neither an architecture nor a model_type"):
        HfFolder(tmp_path)


@pytest.mark.parametrize("modules", [0, 1, 2])
def test_deepseek_s_modules_for_later_tokens_are_left_and_named(modules: int, tmp_path: Path) -> None:
    reference = build_hf_decoder("deepseek-v3")
    reference.save_pretrained(tmp_path)
    count = HF_DECODERS["deepseek-v3"][1]["num_hidden_layers"]
    edit_config(tmp_path, num_nextn_predict_layers=modules)
    names = [f"model.layers.{count + i}.{part}.weight" for i in range(max(1, modules)) for part in ("eh_proj", "enorm")]
    edit_tensors(tmp_path, lambda tensors: tensors.update({name: torch.zeros(2) for name in names}))
    if not modules:
        with pytest.raises(MegatfmError, match=rf"{names[0]} is in its files, but is no weight of a"):
            HfFolder(tmp_path)
        return
    assert [note for note in HfFolder(tmp_path).notes if names[0] in note and "not read" in note] != []
    tokens = torch.arange(9)[None]
    with torch.no_grad():
        logits = megatfm.load(tmp_path)(tokens).logits
        torch.testing.assert_close(logits, reference(tokens).logits, rtol=1e-5, atol=1e-5)
    name = f"model.layers.{count + modules}.enorm.weight"
    edit_tensors(tmp_path, lambda tensors: tensors.update({name: torch.zeros(2)}))
    with pytest.raises(MegatfmError, match=f"{count + modules}.enorm.weight is in its files, but is no weight"):
        HfFolder(tmp_path)


@pytest.mark.parametrize("steps", [(1, 1), (2, 2), (0, 0), (3, None)])
def test_switch_s_steps_overrule_its_numbers_of_layers(steps: tuple[int, int | None], tmp_path: Path) -> None:
    """Which blocks have experts is read off the modules that transformers builds."""
    values: dict[str, Any] = {**SWITCH_OPTIONS, "num_layers": 4, "num_decoder_layers": 4}
    values |= {"num_sparse_decoder_layers": 1, "num_sparse_encoder_layers": 1, "encoder_sparse_step": steps[0]}
    values |= {} if steps[1] is None else {"decoder_sparse_step": steps[1]}
    reference = transformers.SwitchTransformersForConditionalGeneration(transformers.SwitchTransformersConfig(**values))
    perturb(reference)
    reference.save_pretrained(tmp_path)
    edit_config(tmp_path, **{key: value for key, value in values.items() if key.endswith("sparse_step")})
    names = [name for name in read_folder_tensors(tmp_path) if "experts" in name]
    sides = ("encoder", "decoder")
    sparse = {side: {int(name.split(".")[2]) for name in names if name.startswith(side)} for side in sides}
    if sparse["encoder"] != sparse["decoder"]:
        with pytest.raises(UsageError, match=r"encoder_sparse_step and decoder_sparse_step.* put experts into other"):
            HfFolder(tmp_path)
        return
    config = HfFolder(tmp_path).config
    assert {depth for depth in range(4) if config.layer_config(depth).ffn.name == "moe"} == sparse["encoder"]


def test_a_class_whose_head_can_t_be_told_from_the_model_is_refused_by_name(tmp_path: Path) -> None:
    reference = transformers.T5ForSequenceClassification(transformers.T5Config(**T5_OPTIONS, num_labels=2))
    reference.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="unknown Hugging Face architecture 'T5ForSequenceClassification'"):
        HfFolder(tmp_path)


def test_bigbird_s_other_rule_in_evaluation_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build_hf_long_encoder("BigBirdForMaskedLM").save_pretrained(tmp_path / "theirs")
    with caplog.at_level(logging.WARNING, "megatfm"):
        megatfm.load(tmp_path / "theirs")
    assert "its random blocks are drawn in evaluation as in training; transformers' .eval()" in caplog.text
    assert "transformers' .eval()" in "\n".join(convert(tmp_path / "theirs", tmp_path / "ours", "megatfm"))


def test_a_discriminator_alone_is_said_not_to_be_trained_by_any_objective(tmp_path: Path) -> None:
    build_hf_encoder("ElectraForPreTraining").save_pretrained(tmp_path / "theirs")
    output = convert(tmp_path / "theirs", tmp_path / "ours", "megatfm")
    text = (tmp_path / "ours" / "config.toml").read_text()
    for words in ("\n".join(output), text):
        assert "no objective trains a discriminator without its generator" in words
    assert "continue from its weights" not in text.replace("\n# ", " ")


# ------------------------------------------------------------------------------------- BigBird and Longformer


@pytest.mark.parametrize("name", HF_LONG_ENCODERS)
def test_long_encoders_there_and_back(name: str, tmp_path: Path) -> None:
    reference = build_hf_long_encoder(name)
    reference.save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours", "megatfm")
    with torch.no_grad():
        expected = long_encoder_logits(reference)
        for folder in ("theirs", "ours"):
            actual = megatfm.load(tmp_path / folder)(LONG_TOKENS).logits
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    convert(tmp_path / "ours", tmp_path / "back", "hf")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["architectures"] == [name]
    original, back = (load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "back"))
    # Masked tokens don't use the pooler that the class has all the same.
    used = {key for key in original if name != "BigBirdForMaskedLM" or "pooler" not in key}
    assert used == back.keys()
    assert all(torch.equal(original[key], back[key]) for key in used)


@pytest.mark.parametrize(("name", "changes", "message"), [
    ("BigBirdForMaskedLM", {"attention_type": "original_full"}, "attention_type = 'original_full' is not"),
    ("BigBirdForMaskedLM", {"num_random_blocks": 0}, "num_random_blocks = 0 does not run in transformers"),
    ("LongformerForMaskedLM", {"attention_window": [4, 8]}, r"attention_window = \[4, 8\] differs by layer"),
    ("LongformerForMaskedLM", {"attention_window": [4]}, r"\[4\] has 1 widths, but num_hidden_layers = 2"),
])  # fmt: skip
def test_options_of_long_encoders_that_megatfm_lacks_are_refused(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    build_hf_long_encoder(name).save_pretrained(tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(UsageError, match=message):
        HfFolder(tmp_path)
