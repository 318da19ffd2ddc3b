"""Folders of encoders, both ways: against transformers' own files, files as they are published, and ELECTRA's pairs."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import megatfm
from megatfm import checkpoint
from megatfm.config import ModelConfig, load_config
from megatfm.convert.architecture import ARCHITECTURES, TASK_CLASSES, find_architecture
from megatfm.convert.convert import _check_padding, convert
from megatfm.convert.electra_pair import DEBERTA_CLASSES, ELECTRA_CLASSES
from megatfm.convert.hf_checkpoint import HfFolder
from megatfm.convert.starting_config import make_starting_config
from megatfm.errors import MegatfmError, UsageError
from megatfm.models import build
from tests.support.hf_encoders import (
    ENCODER_TOKENS,
    HF_ENCODERS,
    SMALL_ENCODER,
    XLNET_OPTIONS,
    build_hf_encoder,
    get_vocabulary_logits,
)
from tests.support.hf_folders import (
    GPT_OPTIONS,
    LLAMA_OPTIONS,
    check_same_tensors,
    convert_there_and_back,
    copy_to_aligned_memory,
    edit_config,
    edit_tensors,
    load_complete,
    perturb_parameters,
    read_folder_tensors,
)
from tests.support.reference_gradients import perturb

assert_close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", HF_ENCODERS)
def test_encoders_survive_conversion_there_and_back(name: str, tmp_path: Path) -> None:
    reference = build_hf_encoder(name)
    reference.save_pretrained(tmp_path / "theirs")
    loaded = convert_there_and_back(tmp_path, reference)
    check_same_tensors(tmp_path)
    expected = get_vocabulary_logits(reference(ENCODER_TOKENS))
    assert torch.equal(get_vocabulary_logits(copy_to_aligned_memory(loaded)(ENCODER_TOKENS)), expected)
    for folder in ("theirs", "ours"):
        assert_close(megatfm.load(tmp_path / folder)(ENCODER_TOKENS).logits, expected)
    edit_config(tmp_path / "theirs", architectures=None)
    assert HfFolder(tmp_path / "theirs").name == name, "recognised by its weights"
    assert_close(megatfm.load(tmp_path / "theirs")(ENCODER_TOKENS).logits, expected)


def rename_norms(tensors: dict[str, torch.Tensor]) -> None:
    for key in [key for key in tensors if "LayerNorm" in key]:
        tensors[key.replace("weight", "gamma").replace("bias", "beta")] = tensors.pop(key)


def rename_head(tensors: dict[str, torch.Tensor]) -> None:
    for key in [key for key in tensors if key.startswith("cls.")]:
        new = re.sub(r"^cls\.predictions\.(transform\.)?", "lm_predictions.lm_head.", key)
        tensors[new] = tensors.pop(key)
    tensors["deberta.embeddings.position_embeddings.weight"] = torch.zeros(32, 24)


@pytest.mark.parametrize(("name", "change"), [
    ("BertForPreTraining", rename_norms),
    ("BertForMaskedLM", lambda t: t.update({"bert.pooler.dense.weight": torch.zeros(24, 24)})),
    ("BertForMaskedLM", lambda t: t.update({"bert.embeddings.position_ids": torch.arange(32)[None]})),
    ("BertForMaskedLM", lambda t: t.update({"cls.predictions.decoder.bias": t["cls.predictions.bias"].clone()})),
    ("AlbertForMaskedLM", lambda t: t.update({"sop_classifier.classifier.bias": torch.zeros(2)})),
    ("DebertaForMaskedLM", rename_head),
    ("DebertaV2ForMaskedLM", rename_head),
])  # fmt: skip
def test_files_as_they_are_published_open(name: str, change: Callable[..., None], tmp_path: Path) -> None:
    reference = build_hf_encoder(name)
    reference.save_pretrained(tmp_path)
    edit_tensors(tmp_path, change)
    assert_close(megatfm.load(tmp_path)(ENCODER_TOKENS).logits, get_vocabulary_logits(reference(ENCODER_TOKENS)))


def test_a_deberta_without_the_legacy_head_opens(tmp_path: Path) -> None:
    reference = build_hf_encoder("DebertaForMaskedLM", legacy=False)
    reference.save_pretrained(tmp_path)
    assert any("lm_predictions" in key for key in read_folder_tensors(tmp_path))
    assert_close(megatfm.load(tmp_path)(ENCODER_TOKENS).logits, reference(ENCODER_TOKENS).logits)


@pytest.mark.parametrize(("name", "change", "message"), [
    ("BertForMaskedLM", {"is_decoder": True}, "is_decoder = True is not supported"),
    ("BertForMaskedLM", {"position_embedding_type": "relative_key"}, "position_embedding_type = 'relative_key'"),
    ("BertForMaskedLM", {"tie_word_embeddings": False}, "tie_word_embeddings = False is not supported"),
    ("AlbertForMaskedLM", {"inner_group_num": 2}, "inner_group_num = 2"),
    ("AlbertForMaskedLM", {"embedding_size": 24}, "embedding_size = hidden_size"),
    ("DebertaForMaskedLM", {"position_biased_input": True}, "position_biased_input = True"),
    ("DebertaForMaskedLM", {"pos_att_type": ["c2p"]}, r"pos_att_type = \['c2p'\]"),
    ("DebertaForMaskedLM", {"talking_head": True}, "talking_head = True"),
    ("DebertaV2ForMaskedLM", {"conv_kernel_size": 3}, "conv_kernel_size = 3"),
    ("DebertaV2ForMaskedLM", {"share_att_key": False}, "share_att_key = False"),
    ("DebertaV2ForMaskedLM", {"position_buckets": -1}, "position_buckets = -1"),
    ("ElectraForMaskedLM", {"hidden_act": "relu"}, "hidden_act = 'relu'"),
    ("RobertaForMaskedLM", {"hidden_act": "gelu_new"}, "hidden_act = 'gelu_new'"),
    ("XLNetLMHeadModel", {"attn_type": "uni"}, "attn_type = 'uni'"),
    ("XLNetLMHeadModel", {"clamp_len": 7}, "clamp_len = 7"),
])  # fmt: skip
def test_options_of_encoders_that_megatfm_lacks_are_refused(
    name: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    build_hf_encoder(name).save_pretrained(tmp_path)
    edit_config(tmp_path, **change)
    with pytest.raises(UsageError, match=message):
        megatfm.load(tmp_path)


BERT = {
    "vocab_size": 60, "d_model": 24, "n_layers": 2, "attention.n_heads": 4, "ffn.d_ff": 40, "norm.name": "layer_norm",
    "norm.eps": 1e-12, "norm.placement": "post", "embedding.norm": True, "ffn.activation": "gelu",
    "attention.bias": True, "ffn.bias": True, "position.name": "learned", "position.max_positions": 32,
    "embedding.n_segments": 2, "lm_head.name": "transform", "lm_head.bias": True,
}  # fmt: skip
GENERATOR = {"d_model": 12, "n_heads": 2, "d_ff": 20, "n_layers": 1}
ELECTRA = ModelConfig.from_dotted(**BERT, family="electra", generator=GENERATOR, **{"embedding.dim": 10})


def save_model(config: ModelConfig, folder: Path) -> torch.nn.Module:
    """Save a perturbed model as a checkpoint, and return it."""
    model = build(config)
    perturb(model)
    stored_config = make_starting_config(folder, config, None, 32).model_dump(mode="json")
    state = {"step": 0, "megatfm": "0", "config": stored_config, "tokenizer": None}
    tensors = ((f"model.{name}", parameter.detach()) for name, parameter in model.named_parameters())
    checkpoint.write_checkpoint_from_iterator(folder / "checkpoints", 0, tensors, state)
    return model.eval()


def test_an_electra_becomes_a_pair_and_a_pair_an_electra(tmp_path: Path) -> None:
    actual = save_model(ELECTRA, tmp_path / "ours")
    (first_line, *_) = convert(tmp_path / "ours", tmp_path / "pair", "hf")
    assert "ElectraForPreTraining" in first_line
    assert "ElectraForMaskedLM" in first_line
    halves = [load_complete(getattr(transformers, n), tmp_path / "pair" / half) for half, n in ELECTRA_CLASSES.items()]
    verdict, guess = (half.eval()(ENCODER_TOKENS).logits for half in halves)
    assert_close(actual(ENCODER_TOKENS).logits, verdict)
    assert_close(actual.generator(ENCODER_TOKENS).logits, guess)

    convert(tmp_path / "pair", tmp_path / "again", "megatfm")
    converted = megatfm.load(tmp_path / "again")
    assert converted.config.generator == ELECTRA.generator
    original = dict(actual.named_parameters())
    assert original.keys() == dict(converted.named_parameters()).keys()
    assert all(torch.equal(p, original[name]) for name, p in converted.named_parameters())
    assert torch.equal(megatfm.load(tmp_path / "pair")(ENCODER_TOKENS).logits, actual(ENCODER_TOKENS).logits)
    alone = megatfm.load(tmp_path / "pair" / "discriminator")
    assert torch.equal(alone(ENCODER_TOKENS).logits, actual(ENCODER_TOKENS).logits)


def test_halves_that_are_no_pair_are_refused(tmp_path: Path) -> None:
    save_model(ELECTRA, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "pair", "hf")
    table = "electra.embeddings.word_embeddings.weight"
    edit_tensors(tmp_path / "pair" / "generator", lambda t: t.update({table: t[table] + 1}))
    with pytest.raises(MegatfmError, match=r"word_embeddings\.weight of the two halves differ"):
        megatfm.load(tmp_path / "pair")
    edit_config(tmp_path / "pair" / "generator", type_vocab_size=3)
    with pytest.raises(UsageError, match=r"generator has model\.embedding\.n_segments = 3"):
        megatfm.load(tmp_path / "pair")


def test_the_boundary_head_is_reported_as_not_converted(tmp_path: Path) -> None:
    config = ModelConfig.from_dotted(**BERT, family="encoder", extra_heads={"boundary": {}})
    actual = save_model(config, tmp_path / "ours")
    notes = convert(tmp_path / "ours", tmp_path / "back", "hf")
    (output,) = [note for note in notes if "not converted" in note]
    assert all(f"boundary.{name}" in output for name, _ in actual.boundary.named_parameters() if name != "weight")
    assert "encoder." not in output
    expected = load_complete(transformers.BertForMaskedLM, tmp_path / "back").eval()(ENCODER_TOKENS).logits
    assert_close(expected, actual(ENCODER_TOKENS).logits)


def test_every_architecture_here_is_tried() -> None:
    types = {"bert", "roberta", "albert", "deberta", "deberta-v2", "electra", "xlnet", "modernbert"}
    actual = {n: a for n in ARCHITECTURES.names() if (a := ARCHITECTURES.get(n)).model_type in types}
    tried = {name for name, architecture in actual.items() if not architecture.is_base_model}
    assert {name for name in tried if not TASK_CLASSES.fullmatch(name)} == set(HF_ENCODERS)


def test_a_model_that_transformers_lacks_is_refused_with_the_nearest() -> None:
    config = ModelConfig.from_dotted(**(BERT | {"norm.placement": "pre"}), family="encoder")
    lacking = r"nearest, BertForMaskedLM, lacks model\.norm\.placement = 'pre', .*norm\.final"
    with pytest.raises(UsageError, match=lacking):
        find_architecture(config)


def test_roberta_s_positions_need_its_padding_token() -> None:
    config = ModelConfig.from_dotted(**(BERT | {"position.offset": 2}), family="encoder")
    _, _, expected = find_architecture(config)
    _check_padding(expected, {"pad_token_id": 1})
    _check_padding(find_architecture(ModelConfig.from_dotted(**BERT, family="encoder"))[2], {"pad_token_id": 3})
    with pytest.raises(UsageError, match=r"count positions from 3, .* train with model\.position\.offset = 4"):
        _check_padding(expected, {"pad_token_id": 3})


BARE = ["Bert", "Roberta", "Albert", "Deberta", "DebertaV2", "Electra", "XLNet"]
FOLDERS = [*((stem, "Model") for stem in BARE), ("XLNet", "ForQuestionAnswering")]


@pytest.mark.parametrize(("stem", "task"), FOLDERS)
def test_bare_encoders_and_downstream_folders_open(
    stem: str, task: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Their encoder gives the same vectors; a head that is not read is named."""
    options = next(HF_ENCODERS[name] for name in HF_ENCODERS if name.startswith((f"{stem}For", f"{stem}LM")))
    kind = getattr(transformers, f"{stem}{task}")
    sizes = XLNET_OPTIONS if stem == "XLNet" else SMALL_ENCODER
    reference = perturb_parameters(kind(kind.config_class(**(sizes | options))))
    reference.save_pretrained(tmp_path / "theirs")
    actual = megatfm.load(tmp_path / "theirs")
    expected = getattr(reference, reference.base_model_prefix) if task != "Model" else reference
    assert_close(actual(ENCODER_TOKENS).hidden, expected(ENCODER_TOKENS).last_hidden_state)
    assert actual(ENCODER_TOKENS).logits is None
    pooled = any("pooler" in name for name in reference.state_dict())
    assert ("not read, as it belongs to no" in caplog.text) == (task != "Model" or pooled)

    notes = convert(tmp_path / "theirs", tmp_path / "ours", "megatfm")
    assert torch.equal(megatfm.load(tmp_path / "ours")(ENCODER_TOKENS).hidden, actual(ENCODER_TOKENS).hidden)
    assert any("not read" in note for note in notes) == (task != "Model" or pooled)
    convert(tmp_path / "ours", tmp_path / "back", "hf")
    back = getattr(transformers, f"{stem}Model").from_pretrained(tmp_path / "back")
    assert_close(back.eval()(ENCODER_TOKENS).last_hidden_state, actual(ENCODER_TOKENS).hidden)


@pytest.mark.parametrize("name", ["GPT2", "Llama", "Mistral"])
def test_bare_decoders_open(name: str, tmp_path: Path) -> None:
    kind = getattr(transformers, f"{name}Model")
    llama = {**LLAMA_OPTIONS, "pad_token_id": 0}
    values = {"GPT2": GPT_OPTIONS, "Llama": llama, "Mistral": llama | {"sliding_window": None}}[name]
    reference = perturb_parameters(kind(kind.config_class(**values)))
    reference.save_pretrained(tmp_path)
    hidden = megatfm.load(tmp_path)(ENCODER_TOKENS).hidden
    assert_close(hidden, reference(ENCODER_TOKENS).last_hidden_state)


def test_a_missing_head_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reference = build_hf_encoder("BertForMaskedLM")
    reference.save_pretrained(tmp_path)
    edit_tensors(tmp_path, lambda t: [t.pop(key) for key in list(t) if "predictions" in key])
    hidden = megatfm.load(tmp_path)(ENCODER_TOKENS).hidden
    assert_close(hidden, reference.bert(ENCODER_TOKENS).last_hidden_state)
    assert "opened without its head: its files lack cls.predictions.bias" in caplog.text
    edit_tensors(tmp_path, lambda t: t.pop("bert.encoder.layer.1.output.dense.weight"))
    with pytest.raises(MegatfmError, match=r"cls\.predictions\.bias is not in its files|layer\.1\.output"):
        megatfm.load(tmp_path)


def test_a_deberta_v3_becomes_a_pair(tmp_path: Path) -> None:
    """transformers has no class with the verdict: the discriminator is stored without."""
    words = ["model.d_model=24", "model.attention.n_heads=4", "model.n_layers=2", "model.ffn.d_ff=40"]
    words += ["model.generator.d_model=24", "model.generator.n_heads=4", "model.generator.d_ff=40"]
    words += ["model.generator.n_layers=1", "model.vocab_size=60", "model.position.buckets=6"]
    actual = save_model(load_config("deberta-v3-base", words).model, tmp_path / "ours")
    notes = convert(tmp_path / "ours", tmp_path / "pair", "hf")
    assert any("not converted" in note and "discriminator.verdict.weight" in note for note in notes)
    for half, name in DEBERTA_CLASSES.items():
        output = load_complete(getattr(transformers, name), tmp_path / "pair" / half).eval()(ENCODER_TOKENS)
        if half == "generator":
            reference, converted = output.logits, actual.generator(ENCODER_TOKENS).logits
        else:
            reference, converted = output.last_hidden_state, actual(ENCODER_TOKENS).hidden
            hidden = megatfm.load(tmp_path / "pair" / half)(ENCODER_TOKENS).hidden
            assert torch.equal(hidden[0, 0, 0], converted[0, 0, 0])
        assert_close(reference, converted)
    with pytest.raises(UsageError, match="stored without what makes it a discriminator: open it alone"):
        megatfm.load(tmp_path / "pair")
    build_hf_encoder("BertForMaskedLM").save_pretrained(tmp_path / "pair" / "discriminator")
    with pytest.raises(UsageError, match="discriminator: a BertForMaskedLM, but a discriminator is a ElectraForPreT"):
        megatfm.load(tmp_path / "pair")


@pytest.mark.parametrize("version", [{}, {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}])
def test_a_bare_t5_opens(version: dict[str, Any], tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    reference = perturb_parameters(transformers.T5Model(transformers.T5Config(**sizes, **version)))
    reference.save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours", "megatfm")
    convert(tmp_path / "ours", tmp_path / "back", "hf")
    back = transformers.T5Model.from_pretrained(tmp_path / "back").eval()
    expected = reference(input_ids=ENCODER_TOKENS, decoder_input_ids=ENCODER_TOKENS[:, :4]).last_hidden_state
    assert expected.abs().max() > 0.1
    for folder in ("theirs", "ours"):
        hidden = megatfm.load(tmp_path / folder)(ENCODER_TOKENS[:, :4], ENCODER_TOKENS).hidden
        assert_close(hidden, expected)
    last_hidden_state = back(input_ids=ENCODER_TOKENS, decoder_input_ids=ENCODER_TOKENS[:, :4]).last_hidden_state
    assert_close(last_hidden_state, expected)
