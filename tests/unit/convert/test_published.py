"""Folders as others publish them: old ones, and some with more than a class of transformers reads."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import megatfm
from megatfm.convert.convert import convert
from megatfm.convert.hf_checkpoint import HfFolder
from megatfm.errors import MegatfmError, UsageError
from tests.support.hf_decoders import HF_DECODERS, LLAMA_OPTIONS, SWITCH_OPTIONS, T5_OPTIONS, hf_decoder
from tests.support.hf_encoders import ENCODER_TOKENS, first_logits, hf_encoder, hf_long_encoder
from tests.support.hf_folders import edit_config, edit_tensors, folder_tensors
from tests.support.reference_gradients import perturb


@pytest.mark.parametrize("window", [16, 17, 40])
def test_a_window_slides_beyond_the_longest_sequence(window: int, tmp_path: Path) -> None:
    """As wide as max_position_embeddings, wider, and wider than these rows."""
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
    reference = hf_encoder(name)
    reference.save_pretrained(tmp_path)
    edit_config(tmp_path, model_type=None, architectures=None, eos_token_ids=0)
    opened = HfFolder(tmp_path)
    assert opened.name == name
    assert "its config.json names no class: taken for a" in opened.notes[0]
    torch.testing.assert_close(
        megatfm.load(tmp_path)(ENCODER_TOKENS).logits,
        first_logits(reference(ENCODER_TOKENS)),
        rtol=1e-5,
        atol=1e-5,
    )


def test_names_of_tensors_that_several_classes_have_tell_nothing(tmp_path: Path) -> None:
    hf_encoder("BertForMaskedLM").bert.save_pretrained(tmp_path)
    edit_config(tmp_path, model_type=None, architectures=None)
    with pytest.raises(UsageError, match="names neither an architecture nor a model_type"):
        HfFolder(tmp_path)


@pytest.mark.parametrize("modules", [0, 1, 2])
def test_deepseek_s_modules_for_later_tokens_are_left_and_named(modules: int, tmp_path: Path) -> None:
    reference = hf_decoder("deepseek-v3")
    reference.save_pretrained(tmp_path)
    count = HF_DECODERS["deepseek-v3"][1]["num_hidden_layers"]
    edit_config(tmp_path, num_nextn_predict_layers=modules)
    names = [
        f"model.layers.{count + i}.{part}.weight"
        for i in range(max(1, modules))
        for part in ("eh_proj", "enorm")
    ]
    edit_tensors(tmp_path, lambda tensors: tensors.update({name: torch.zeros(2) for name in names}))
    if not modules:
        with pytest.raises(MegatfmError, match=rf"{names[0]} is in its files, but is no weight of a"):
            HfFolder(tmp_path)
        return
    assert [note for note in HfFolder(tmp_path).notes if names[0] in note and "not read" in note] != []
    tokens = torch.arange(9)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            megatfm.load(tmp_path)(tokens).logits, reference(tokens).logits, rtol=1e-5, atol=1e-5
        )
    edit_tensors(
        tmp_path,
        lambda tensors: tensors.update({f"model.layers.{count + modules}.enorm.weight": torch.zeros(2)}),
    )
    with pytest.raises(
        MegatfmError, match=f"{count + modules}.enorm.weight is in its files, but is no weight"
    ):
        HfFolder(tmp_path)


@pytest.mark.parametrize("steps", [(1, 1), (2, 2), (0, 0), (3, None)])
def test_switch_s_steps_overrule_its_numbers_of_layers(steps: tuple[int, int | None], tmp_path: Path) -> None:
    """Which blocks have experts is read off the modules that transformers builds."""
    values: dict[str, Any] = {
        **SWITCH_OPTIONS,
        "num_layers": 4,
        "num_decoder_layers": 4,
        "num_sparse_decoder_layers": 1,
    }
    values |= {"num_sparse_encoder_layers": 1, "encoder_sparse_step": steps[0]}
    values |= {} if steps[1] is None else {"decoder_sparse_step": steps[1]}
    reference = transformers.SwitchTransformersForConditionalGeneration(
        transformers.SwitchTransformersConfig(**values)
    )
    perturb(reference)
    reference.save_pretrained(tmp_path)
    edit_config(
        tmp_path,
        encoder_sparse_step=steps[0],
        **({} if steps[1] is None else {"decoder_sparse_step": steps[1]}),
    )
    sparse = {
        side: {
            int(name.split(".")[2])
            for name in folder_tensors(tmp_path)
            if name.startswith(side) and "experts" in name
        }
        for side in ("encoder", "decoder")
    }
    if sparse["encoder"] != sparse["decoder"]:
        with pytest.raises(
            UsageError, match=r"encoder_sparse_step and decoder_sparse_step.* put experts into other"
        ):
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
    hf_long_encoder("BigBirdForMaskedLM").save_pretrained(tmp_path / "theirs")
    with caplog.at_level(logging.WARNING, "megatfm"):
        megatfm.load(tmp_path / "theirs")
    assert "its random blocks are drawn in evaluation as in training; transformers' .eval()" in caplog.text
    assert "transformers' .eval()" in "\n".join(convert(tmp_path / "theirs", tmp_path / "ours", "megatfm"))


def test_a_discriminator_alone_is_said_not_to_be_trained_by_any_objective(tmp_path: Path) -> None:
    hf_encoder("ElectraForPreTraining").save_pretrained(tmp_path / "theirs")
    output = convert(tmp_path / "theirs", tmp_path / "ours", "megatfm")
    text = (tmp_path / "ours" / "config.toml").read_text()
    for words in ("\n".join(output), text):
        assert "no objective trains a discriminator without its generator" in words
    assert "continue from its weights" not in text.replace("\n# ", " ")
