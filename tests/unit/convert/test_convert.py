"""Whole folders, both ways: against transformers' own files, and what goes wrong."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import megatfm
from megatfm import checkpoint
from megatfm.commands.models import add_convert_arguments, convert_command, parse_size
from megatfm.config import load_config
from megatfm.convert import convert as convert_room
from megatfm.convert.convert import convert
from megatfm.errors import MegatfmError, UsageError
from tests.support.hf_folders import (
    DECODER_TOKENS,
    edit_config,
    edit_tensors,
    folder_tensors,
    hf_config_of,
    hf_gpt2,
    hf_llama,
    with_fresh_memory,
)

MODELS = [hf_gpt2, hf_llama]


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    add_convert_arguments(parser)
    return convert_command(parser.parse_args(words))


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("shards", ["5GB", "9KB"])
def test_there_and_back(make: Callable[[], Any], shards: str, tmp_path: Path) -> None:
    """Files that transformers wrote become ours, and files from which transformers loads the same model."""
    expected = make()
    expected.save_pretrained(tmp_path / "theirs", max_shard_size=shards)
    assert run(str(tmp_path / "theirs"), str(tmp_path / "ours"), "--to", "megatfm") == 0
    assert run(str(tmp_path / "ours"), str(tmp_path / "back"), "--to", "hf", "--max-shard-size", shards) == 0
    assert (len(list((tmp_path / "back").glob("*.safetensors"))) > 3) == (shards == "9KB")

    original, back = (folder_tensors(tmp_path / name) for name in ("theirs", "back"))
    assert original.keys() == back.keys()
    for name, tensor in original.items():
        assert torch.equal(back[name], tensor), name
    loaded, info = type(expected).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info.values()), info
    assert hf_config_of(loaded) == hf_config_of(expected)
    assert torch.equal(with_fresh_memory(loaded)(DECODER_TOKENS).logits, expected(DECODER_TOKENS).logits)


@pytest.mark.parametrize("make", MODELS)
def test_every_form_opens(make: Callable[[], Any], tmp_path: Path) -> None:
    expected = make()
    expected.save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours", "megatfm")
    wanted = expected(DECODER_TOKENS).logits
    for path in ("theirs", "ours", "ours/checkpoints/step-00000000"):
        logits = megatfm.load(tmp_path / path)(DECODER_TOKENS).logits
        torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-5)
    config = load_config(tmp_path / "ours")
    assert config.data.sequence_length == (77 if make is hf_llama else 32)
    assert config.model == convert_room.HfFolder(tmp_path / "theirs").config


def test_no_more_than_a_batch_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf_gpt2().save_pretrained(tmp_path / "theirs")
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
    assert folder_tensors(tmp_path / "back").keys() == folder_tensors(tmp_path / "theirs").keys()


def test_a_bare_model_s_file_is_read(tmp_path: Path) -> None:
    """As GPT-2's files are published: without the prefix, and with the masks of attention."""
    reference = hf_gpt2()
    reference.save_pretrained(tmp_path / "theirs")
    bare = {
        name.removeprefix("transformer."): tensor
        for name, tensor in folder_tensors(tmp_path / "theirs").items()
    }
    bare["h.0.attn.bias"] = torch.ones(1, 1, 32, 32)
    save_file(bare, tmp_path / "theirs" / "model.safetensors")
    torch.testing.assert_close(
        megatfm.load(tmp_path / "theirs")(DECODER_TOKENS).logits, reference(DECODER_TOKENS).logits
    )


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
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
        (lambda f: (f / "model.safetensors").write_bytes(b"\1" * 30), r"model\.safetensors: can't read it"),
        (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), r"pickled weights are never opened"),
        (
            lambda f: edit_tensors(f, lambda t: t.update({"lm_head.weight": t["transformer.wte.weight"] + 1})),
            r"lm_head\.weight differs from transformer\.wte\.weight",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(
    spoil: Callable[[Path], Any] | dict[str, Any], message: str, tmp_path: Path
) -> None:
    """spoil: changed keys of config.json, or a function of the folder."""
    hf_gpt2().save_pretrained(tmp_path / "theirs")
    if isinstance(spoil, dict):
        edit_config(tmp_path / "theirs", **spoil)
    else:
        spoil(tmp_path / "theirs")
    with pytest.raises(MegatfmError, match=message):
        convert(tmp_path / "theirs", tmp_path / "ours", "megatfm")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"], "nothing half-made is left"


def test_the_target_must_be_new_and_the_format_another(tmp_path: Path) -> None:
    hf_gpt2().save_pretrained(tmp_path / "theirs")
    with pytest.raises(UsageError, match="exists already"):
        convert(tmp_path / "theirs", tmp_path / "theirs", "megatfm")
    with pytest.raises(UsageError, match="already in that format: use --to megatfm"):
        convert(tmp_path / "theirs", tmp_path / "x", "hf")
    (tmp_path / "empty").mkdir()
    convert(tmp_path / "theirs", tmp_path / "empty", "megatfm")
    with pytest.raises(UsageError, match="already in that format: use --to hf"):
        convert(tmp_path / "empty", tmp_path / "x", "megatfm")
    with pytest.raises(UsageError, match="there is no such folder: give one with a run or checkpoint"):
        convert(tmp_path / "nothing", tmp_path / "x", "hf")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("text")
    with pytest.raises(
        UsageError, match=r"texts: holds no model: .* config\.json.*`megatfm prep` turns text into a corpus$"
    ):
        convert(tmp_path / "texts", tmp_path / "x", "megatfm")


def test_max_shard_size_is_parsed() -> None:
    assert (parse_size("5GB"), parse_size("200 mb"), parse_size("1.5KB"), parse_size("7")) == (
        5 * 10**9,
        2 * 10**8,
        1500,
        7,
    )
    for wrong in ("", "GB", "-1GB", "0", "5 GiB"):
        with pytest.raises(UsageError, match="--max-shard-size"):
            parse_size(wrong)
