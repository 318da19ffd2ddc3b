"""Whole folders, both ways: against transformers' own files, and what goes wrong."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import megatfm
from megatfm import checkpoint
from megatfm.commands.models import add_convert_arguments, convert_command, size
from megatfm.config import load_config
from megatfm.convert import convert as convert_room
from megatfm.convert.convert import convert
from megatfm.errors import MegatfmError, UsageError

TOKENS = torch.randint(0, 60, (2, 9), generator=torch.Generator().manual_seed(3))


def perturbed(model: PreTrainedModel) -> PreTrainedModel:
    """Nothing at its initial value: biases and norms neither."""
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def fresh(model: PreTrainedModel) -> PreTrainedModel:
    """For bits to be compared: transformers leaves weights where they lie in the file, anywhere."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
    return model.eval()


def gpt2() -> PreTrainedModel:
    return perturbed(
        GPT2LMHeadModel(GPT2Config(vocab_size=60, n_positions=32, n_embd=24, n_layer=2, n_head=3))
    )


def llama() -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=60, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=77, attention_bias=True, tie_word_embeddings=False,
        rope_parameters={"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
    )  # fmt: skip
    return perturbed(LlamaForCausalLM(config))


MODELS = [gpt2, llama]


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    add_convert_arguments(parser)
    return convert_command(parser.parse_args(words))


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("shards", ["5GB", "9KB"])
def test_there_and_back(make: Callable[[], Any], shards: str, tmp_path: Path) -> None:
    """Files that transformers wrote become ours, and files from which transformers loads the same model."""
    theirs = make()
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=shards)
    assert run(str(tmp_path / "theirs"), str(tmp_path / "ours"), "--to", "megatfm") == 0
    assert run(str(tmp_path / "ours"), str(tmp_path / "back"), "--to", "hf", "--max-shard-size", shards) == 0
    assert (len(list((tmp_path / "back").glob("*.safetensors"))) > 3) == (shards == "9KB")

    original, back = (whole(tmp_path / name) for name in ("theirs", "back"))
    assert original.keys() == back.keys()
    for name, tensor in original.items():
        assert torch.equal(back[name], tensor), name
    loaded, info = type(theirs).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info.values()), info
    assert config_of(loaded) == config_of(theirs)
    assert torch.equal(fresh(loaded)(TOKENS).logits, theirs(TOKENS).logits)


def whole(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def config_of(model: PreTrainedModel) -> dict[str, Any]:
    return {key: value for key, value in model.config.to_dict().items() if not key.startswith("_")}


@pytest.mark.parametrize("make", MODELS)
def test_every_form_opens(make: Callable[[], Any], tmp_path: Path) -> None:
    theirs = make()
    theirs.save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours", "megatfm")
    wanted = theirs(TOKENS).logits
    for path in ("theirs", "ours", "ours/checkpoints/step-00000000"):
        logits = megatfm.load(tmp_path / path)(TOKENS).logits
        torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-5)
    config = load_config(tmp_path / "ours")
    assert config.data.sequence_length == (77 if make is llama else 32)
    assert config.model == convert_room.HfFolder(tmp_path / "theirs").config


def test_no_more_than_a_batch_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpt2().save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours", "megatfm")
    sizes = []
    read = checkpoint.read_tensors

    def spy(*args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        found = read(*args, **kwargs)
        sizes.append(sum(tensor.nbytes for tensor in found.values()))
        return found

    monkeypatch.setattr(checkpoint, "read_tensors", spy)
    monkeypatch.setattr(convert_room, "READ_BYTES", 12_000)
    convert(tmp_path / "ours", tmp_path / "back", "hf")
    assert len(sizes) > 5
    assert max(sizes) <= 12_000
    assert whole(tmp_path / "back").keys() == whole(tmp_path / "theirs").keys()


def test_a_bare_model_s_file_is_read(tmp_path: Path) -> None:
    """As GPT-2's files are published: without the prefix, and with the masks of attention."""
    theirs = gpt2()
    theirs.save_pretrained(tmp_path / "theirs")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in whole(tmp_path / "theirs").items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 32, 32)
    save_file(bare, tmp_path / "theirs" / "model.safetensors")
    torch.testing.assert_close(megatfm.load(tmp_path / "theirs")(TOKENS).logits, theirs(TOKENS).logits)


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def retensor(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: edit(f, architectures=["MambaForCausalLM"]), r"unknown Hugging Face architecture 'MambaFor"),
        (lambda f: edit(f, activation_function="mish"), r"theirs: config.json: activation 'mish'"),
        (lambda f: edit(f, scale_attn_by_inverse_layer_idx=True), r"scale_attn_by_inverse_layer_idx = True is not"),
        (lambda f: edit(f, n_head=5), r"n_heads = 5 does not divide d_model = 24"),
        (lambda f: edit(f, n_embd="wide"), r"config.json: n_embd = 'wide' is no whole number"),
        (lambda f: edit(f, activation_function=None), r"activation_function = None is no text"),
        (lambda f: edit(f, never_heard_of=1), r"never_heard_of = 1: megatfm knows no such key of a GPT2LMHeadModel"),
        (lambda f: edit(f, hidden_size=36), r"hidden_size = 36 is another name of n_embd, which is 24"),
        (lambda f: edit(f, model_type="llama"), r"model_type = 'llama' is not supported, only 'gpt2'"),
        (lambda f: edit(f, n_layer=3), r"transformer\.h\.2\..* is not in its files, but GPT2LMHeadModel has it"),
        (lambda f: edit(f, n_layer=1), r"transformer\.h\.1\..* is in its files, but no part of a GPT2LMHeadModel"),
        (lambda f: edit(f, n_positions=31), r"would make decoder\.embedding\.positions\.weight \[32, .* has \[31"),
        (lambda f: (f / "config.json").write_text("{"), r"config\.json: not JSON"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\1" * 30), r"model\.safetensors: can't read it"),
        (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), r"pickled weights are never opened"),
        (
            lambda f: retensor(f, lambda t: t.update({"lm_head.weight": t["transformer.wte.weight"] + 1})),
            r"lm_head\.weight differs from transformer\.wte\.weight",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(spoil: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path / "theirs")
    spoil(tmp_path / "theirs")
    with pytest.raises(MegatfmError, match=message):
        convert(tmp_path / "theirs", tmp_path / "ours", "megatfm")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"], "nothing half-made is left"


def test_the_target_must_be_new_and_the_format_another(tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path / "theirs")
    with pytest.raises(UsageError, match="is there already"):
        convert(tmp_path / "theirs", tmp_path / "theirs", "megatfm")
    with pytest.raises(UsageError, match="in that format already: use --to megatfm"):
        convert(tmp_path / "theirs", tmp_path / "x", "hf")
    (tmp_path / "empty").mkdir()
    convert(tmp_path / "theirs", tmp_path / "empty", "megatfm")
    with pytest.raises(UsageError, match="in that format already: use --to hf"):
        convert(tmp_path / "empty", tmp_path / "x", "megatfm")
    with pytest.raises(UsageError, match="there is no such folder: give one with a run or checkpoint"):
        convert(tmp_path / "nothing", tmp_path / "x", "hf")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("text")
    with pytest.raises(UsageError, match=r"texts: holds no model: .* config\.json.* by `megatfm prep`$"):
        convert(tmp_path / "texts", tmp_path / "x", "megatfm")


def test_sizes() -> None:
    assert (size("5GB"), size("200 mb"), size("1.5KB"), size("7")) == (5 * 10**9, 2 * 10**8, 1500, 7)
    for wrong in ("", "GB", "-1GB", "0", "5 GiB"):
        with pytest.raises(UsageError, match="--max-shard-size"):
            size(wrong)
