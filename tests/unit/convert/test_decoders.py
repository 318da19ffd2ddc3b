"""Decoders and encoder-decoders in whole folders, and used afterwards."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import megatfm
from megatfm.config import ModelConfig, load_config
from megatfm.config.position import LinearScaling, Llama3Scaling, YarnScaling
from megatfm.convert.architecture import ARCHITECTURES, find_architecture
from megatfm.convert.convert import convert
from megatfm.convert.hf_checkpoint import HfFolder
from megatfm.errors import MegatfmError, UsageError
from megatfm.inference.text import open_text_model
from megatfm.parallel.mesh import build_mesh
from megatfm.train.build import build_engine
from megatfm.train.init_from import load_weights
from tests.support.hf_folders import (
    DECODER_TOKENS,
    HF_DECODERS,
    LLAMA_OPTIONS,
    build_hf_decoder,
    build_hf_llama,
    check_same_tensors,
    copy_to_aligned_memory,
    decoder_logits,
    edit_config,
    edit_tensors,
    load_complete,
    read_folder_tensors,
    run_convert,
)
from tests.support.reference_gradients import perturb
from tests.support.workers import Workers


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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "auto"])
def test_weights_are_exported_in_a_chosen_dtype(dtype: str, tmp_path: Path) -> None:
    """Biases that balance experts keep their dtype, as in transformers."""
    build_hf_decoder("deepseek-v3").double().save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours", "megatfm")
    assert run_convert(str(tmp_path / "ours"), str(tmp_path / "back"), "--to", "hf", "--dtype", dtype) == 0
    expected, actual = (read_folder_tensors(tmp_path / folder) for folder in ("theirs", "back"))
    assert expected.keys() == actual.keys()
    written = json.loads((tmp_path / "back" / "config.json").read_text())["dtype"]
    assert written == ("float64" if dtype == "auto" else dtype)
    for name, tensor in expected.items():
        expected_dtype = tensor.dtype if "e_score_correction_bias" in name else getattr(torch, written)
        assert actual[name].dtype == expected_dtype, name
        assert torch.equal(actual[name], tensor.to(expected_dtype)), name
    loaded = load_complete(transformers.DeepseekV3ForCausalLM, tmp_path / "back")
    assert loaded.dtype == getattr(torch, written)


@pytest.mark.parametrize(("value", "dtype", "message"), [
    (7e4, "float16", r"--dtype float16: head\.weight holds 7e\+04, beyond .* 6\.55e\+04: give --dtype bfloat16"),
    (-3.4e38, "bfloat16", r"--dtype bfloat16: head\.weight holds 3\.4e\+38, .*: give --dtype float32"),
    (7e4, "bfloat16", None),
    (math.inf, "float16", None),
])  # fmt: skip
def test_a_weight_beyond_the_dtype_is_refused_by_name(
    value: float, dtype: str, message: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_hf_llama().save_pretrained(tmp_path / "theirs")
    edit_tensors(tmp_path / "theirs", lambda tensors: tensors["lm_head.weight"].view(-1)[5:6].fill_(value))
    convert(tmp_path / "theirs", tmp_path / "ours", "megatfm")
    words = (str(tmp_path / "ours"), str(tmp_path / "back"), "--to", "hf", "--dtype", dtype)
    if message is not None:
        with pytest.raises(UsageError, match=message):
            run_convert(*words)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "theirs"]
        return
    assert run_convert(*words) == 0
    assert ("NaN or infinity in head.weight" in capsys.readouterr().err) == math.isinf(value)
