"""Adapters to PEFT's format and back, against PEFT itself: logits, gradients, files, and what is refused."""

import copy
import functools
import itertools
import json
import math
import re
import shutil
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import modeling_rope_utils
from transformers.models.llama import modeling_llama
from transformers.models.mixtral import modeling_mixtral

from megatfm import checkpoint
from megatfm.checkpoint.locate import ADAPTER_CONFIG
from megatfm.convert.convert import convert, merge_adapters
from megatfm.convert.load import load_hf_model
from megatfm.convert.peft import ADAPTER_WEIGHTS, flatten_experts, to_peft
from megatfm.convert.peft_adapter import PeftAdapter
from megatfm.convert.peft_import import from_peft
from megatfm.convert.weight_mapping import WeightMapping, map_name
from megatfm.errors import MegatfmError, UsageError
from megatfm.inference.text import load_model
from megatfm.layers.lora import is_factor
from tests.support.hf_encoders import ENCODER_TOKENS, build_hf_encoder, get_vocabulary_logits
from tests.support.hf_folders import build_hf_decoder, build_hf_gpt2, build_hf_llama, decoder_logits
from tests.support.reference_gradients import cast_to_float64

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing`:FutureWarning",
    "ignore:fan_in_fan_out is set to False:UserWarning",
    "ignore:Setting `save_embedding_layers`:UserWarning",
    # PEFT looks for these among modules alone, and uses them for parameters, too.
    "ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning",
)

MODELS: dict[str, tuple[Any, list[str]]] = {
    "llama": (build_hf_llama, ["q_proj", "v_proj", "down_proj"]),
    "gpt2, three matrices in one": (build_hf_gpt2, ["c_attn", "c_fc"]),
    "gemma3": (lambda: build_hf_decoder("gemma3"), ["k_proj", "o_proj", "gate_proj"]),
    "mla, keys and values in one": (lambda: build_hf_decoder("mla"), ["q_a_proj", "kv_b_proj", "o_proj"]),
    "t5": (lambda: build_hf_decoder("t5"), ["q", "v", "wi"]),
    "bert": (lambda: build_hf_encoder("BertForMaskedLM"), ["query", "value", "attention.output.dense"]),
    "modernbert": (lambda: build_hf_encoder("ModernBertForMaskedLM"), ["Wqkv", "Wo"]),
    "mixtral": (lambda: build_hf_decoder("mixtral"), ["q_proj"]),
    "olmoe, outputs of experts alone": (lambda: build_hf_decoder("olmoe"), []),
    "gpt-oss": (lambda: build_hf_decoder("gpt-oss"), ["v_proj"]),
    "deepseek-v3, inputs of experts": (lambda: build_hf_decoder("deepseek-v3"), ["o_proj"]),
}
TARGET_PARAMETERS = {
    "mixtral": ["gate_up_proj", "down_proj"],
    "olmoe, outputs of experts alone": ["mlp.experts.down_proj"],
    "gpt-oss": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "deepseek-v3, inputs of experts": ["gate_up_proj"],
}
"""Model → its parameters of experts that are adapted, too."""
assert_close = functools.partial(torch.testing.assert_close, rtol=2e-4, atol=2e-5)


def save_adapter(model: Any, folder: Path, targets: list[str], **options: Any) -> Any:
    """A PEFT model whose adapters are not 0, saved with its base."""
    import peft

    base = folder / "base"
    model.save_pretrained(base)
    values = {"r": 4, "lora_alpha": 6, "target_modules": targets, "lora_dropout": 0.0, **options}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**values)).eval()
    generator = torch.Generator().manual_seed(2)
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
            assert "lora_" in name or "modules_to_save" in name
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    adapted.save_pretrained(folder / "adapter")
    return adapted


def import_adapter(folder: Path, **options: Any) -> Any:
    """The saved adapter, converted and opened with its base."""
    from_peft(folder / "adapter", folder / "megatfm")
    return load_model(folder / "megatfm", **options)


def export_adapter(peft_model: Any, folder: Path) -> Any:
    """PEFT's model of the converted adapter."""
    to_peft(folder / "megatfm", folder / "back")
    base = type(peft_model.get_base_model()).from_pretrained(folder / "base")
    return type(peft_model).from_pretrained(base, folder / "back").eval()


def logits(model: Any, *, is_megatfm: bool = False) -> torch.Tensor:
    """Logits of some tokens."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    has_encoder_alone = getattr(inner, "encoder", None) and not hasattr(inner, "decoder")
    if has_encoder_alone or "MaskedLM" in type(inner).__name__:
        return get_vocabulary_logits(inner(ENCODER_TOKENS))
    return decoder_logits(inner, is_megatfm=is_megatfm)


@pytest.mark.parametrize("name", MODELS)
def test_an_adapter_of_peft_survives_conversion_there_and_back(name: str, tmp_path: Path) -> None:
    build, targets = MODELS[name]
    peft_model = save_adapter(build(), tmp_path, targets, target_parameters=TARGET_PARAMETERS.get(name))
    lora_model = import_adapter(tmp_path)
    expected = logits(peft_model)
    assert_close(logits(lora_model, is_megatfm=True), expected)
    assert all(parameter.requires_grad == is_factor(n) for n, parameter in lora_model.named_parameters())
    assert_close(logits(export_adapter(peft_model, tmp_path)), expected)

    convert(tmp_path / "megatfm", tmp_path / "merged", "hf")
    assert_close(logits(load_hf_model(tmp_path / "merged"), is_megatfm=True), expected)
    merge_adapters(tmp_path / "megatfm", tmp_path / "plain")
    plain = load_model(tmp_path / "plain")
    assert not any(is_factor(n) for n, _ in plain.named_parameters())
    assert_close(logits(plain, is_megatfm=True), expected)


def test_files_come_back_to_the_bit(tmp_path: Path) -> None:
    save_adapter(build_hf_llama(), tmp_path, ["q_proj", "v_proj"], lora_dropout=0.1)
    from_peft(tmp_path / "adapter", tmp_path / "megatfm")
    to_peft(tmp_path / "megatfm", tmp_path / "back")
    before, after = (load_file(tmp_path / folder / ADAPTER_WEIGHTS) for folder in ("adapter", "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    config = json.loads((tmp_path / "back" / ADAPTER_CONFIG).read_text())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (4, 6, 0.1)
    assert config["target_modules"] == ["q_proj", "v_proj"]
    assert config["base_model_name_or_path"] == str(tmp_path / "base")


def test_gradients_are_those_of_peft(tmp_path: Path) -> None:
    with cast_to_float64(torch.float64, modeling_llama, modeling_rope_utils):
        peft_model = save_adapter(build_hf_llama().double(), tmp_path, ["q_proj", "o_proj", "up_proj"]).double()
        torch.tanh(logits(peft_model)).square().sum().backward()
    lora_model = import_adapter(tmp_path, dtype="float64")
    torch.tanh(logits(lora_model, is_megatfm=True)).square().sum().backward()
    names = {"attn.wq": "self_attn.q_proj", "attn.wo": "self_attn.o_proj", "ffn.w_up": "mlp.up_proj"}
    expected = {name: p.grad for name, p in peft_model.named_parameters() if p.grad is not None}
    assert len(expected) == 12
    for layer, (name, peft_name), factor in itertools.product(range(2), names.items(), "ab"):
        actual = lora_model.get_parameter(f"decoder.layers.{layer}.{name}.lora.{factor}.weight").grad
        key = f"base_model.model.model.layers.{layer}.{peft_name}.lora_{factor.upper()}.default.weight"
        torch.testing.assert_close(actual, expected[key], rtol=1e-9, atol=1e-12)
    assert all(p.grad is None for n, p in lora_model.named_parameters() if ".lora." not in n)


def test_gradients_of_experts_are_those_of_peft(tmp_path: Path) -> None:
    """A of both halves of `gate_up_proj` is one in PEFT, so its gradient is the sum of the halves'."""
    with cast_to_float64(torch.float64, modeling_mixtral, modeling_rope_utils):
        model = build_hf_decoder("mixtral").double()
        model.config._experts_implementation = "eager"  # others have no float64
        peft_model = save_adapter(model, tmp_path, [], target_parameters=TARGET_PARAMETERS["mixtral"]).double()
        torch.tanh(logits(peft_model)).square().sum().backward()
    lora_model = import_adapter(tmp_path, dtype="float64")
    torch.tanh(logits(lora_model, is_megatfm=True)).square().sum().backward()
    named = dict(lora_model.named_parameters())
    grads = {name: p.grad for name, p in peft_model.named_parameters() if p.grad is not None}
    assert len(grads) == 8
    for layer in range(2):
        prefix = f"base_model.model.model.layers.{layer}.mlp.experts"
        for wrapper, keys in (("base_layer.", ("w_gate", "w_up")), ("", ("w_down",))):
            experts = f"decoder.layers.{layer}.ffn.experts"
            a_grads, b_grads = ([named[f"{experts}.{key}_lora_{x}"].grad for key in keys] for x in "ab")
            a, b = flatten_experts(sum(a_grads), torch.cat(b_grads, dim=1))
            for letter, actual in (("A", a), ("B", b)):
                expected = grads[f"{prefix}.{wrapper}lora_{letter}.default.weight"]
                torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


def test_experts_of_older_files_are_refused(tmp_path: Path) -> None:
    save_adapter(build_hf_decoder("mixtral"), tmp_path, [], target_parameters=["down_proj"])
    path = tmp_path / "adapter" / ADAPTER_CONFIG
    written = json.loads(path.read_text())
    for version in ("0.18.1", None):
        path.write_text(json.dumps({**written, "peft_version": version}))
        with pytest.raises(UsageError, match=r"written by a PEFT before 0\.19\.0"):
            import_adapter(tmp_path)
    path.write_text(json.dumps(written))
    tensors = load_file(tmp_path / "adapter" / ADAPTER_WEIGHTS)
    name = next(name for name in tensors if name.endswith("lora_B.weight"))
    save_file({**tensors, name: tensors[name][:, 1:].contiguous()}, tmp_path / "adapter" / ADAPTER_WEIGHTS)
    with pytest.raises(MegatfmError, match=r"mlp\.experts\.down_proj are not those of 5 experts"):
        import_adapter(tmp_path)


def test_ranks_and_scales_by_matrix_are_read(tmp_path: Path) -> None:
    peft_model = save_adapter(
        build_hf_llama(), tmp_path, ["q_proj", "v_proj"], rank_pattern={"v_proj": 2}, alpha_pattern={"v_proj": 8},
        use_rslora=True,
    )  # fmt: skip
    assert_close(logits(import_adapter(tmp_path), is_megatfm=True), logits(peft_model))


@pytest.mark.parametrize(("start", "is_read"), [("gaussian", True), ("orthogonal", True), ("pissa", False)])
def test_a_start_that_is_taken_out_of_the_base_is_not_read(start: str, is_read: bool, tmp_path: Path) -> None:
    """PEFT subtracts PiSSA's start from the base whenever it opens the adapter; merged by PEFT, all starts go over."""
    peft_model = save_adapter(build_hf_llama(), tmp_path, ["q_proj", "down_proj"], init_lora_weights=start)
    expected = logits(peft_model)
    if is_read:
        assert_close(logits(import_adapter(tmp_path), is_megatfm=True), expected)
        return
    with pytest.raises(UsageError, match="merge it by PEFT's merge_and_unload"):
        import_adapter(tmp_path)
    peft_model.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert_close(logits(load_hf_model(tmp_path / "merged"), is_megatfm=True), expected)


def test_further_trained_weights_are_converted(tmp_path: Path) -> None:
    peft_model = save_adapter(build_hf_llama(), tmp_path, ["q_proj"], modules_to_save=["lm_head", "model.norm"])
    lora_model = import_adapter(tmp_path)
    assert_close(logits(lora_model, is_megatfm=True), logits(peft_model))
    assert lora_model.get_parameter("head.weight").requires_grad
    assert_close(logits(export_adapter(peft_model, tmp_path)), logits(peft_model))


@pytest.mark.parametrize("tables", [["embed_tokens"], ["embed_tokens", "lm_head"]], ids="+".join)
def test_adapters_of_tables_become_trained_tables(tables: list[str], tmp_path: Path) -> None:
    peft_model = save_adapter(build_hf_llama(), tmp_path, ["q_proj", *tables], alpha_pattern={"lm_head": 5})
    lora_model, expected = import_adapter(tmp_path), logits(peft_model)
    assert_close(logits(lora_model, is_megatfm=True), expected)
    names = {"embed_tokens": "decoder.embedding.tokens.weight", "lm_head": "head.weight"}
    assert {name for name in names if lora_model.get_parameter(names[name]).requires_grad} == set(tables)
    assert_close(logits(export_adapter(peft_model, tmp_path)), expected)


def test_weights_in_bfloat16_round_nothing_of_their_adapters_away(tmp_path: Path) -> None:
    save_adapter(build_hf_llama().bfloat16(), tmp_path, ["q_proj", "lm_head"])
    assert "the adapter of lm_head is merged into it" in "".join(from_peft(tmp_path / "adapter", tmp_path / "megatfm"))
    convert(tmp_path / "megatfm", tmp_path / "merged", "hf", dtype=torch.float32)
    files = (next((tmp_path / folder).glob("*.safetensors")) for folder in ("base", "adapter", "merged"))
    base, adapter, merged = map(load_file, files)
    for module in ("lm_head", "model.layers.0.self_attn.q_proj"):
        a, b = (adapter[f"base_model.model.{module}.lora_{letter}.weight"].double() for letter in "AB")
        torch.testing.assert_close(merged[f"{module}.weight"], (base[f"{module}.weight"] + 1.5 * b @ a).float())


@pytest.mark.filterwarnings("ignore:.*ensure_weight_tying:UserWarning")
def test_adapters_of_tables_that_megatfm_lacks_are_refused(tmp_path: Path) -> None:
    refused = {"ensure_weight_tying": ["c_attn", "wte"], "no lora_A .* linear layer: merge": ["wte"]}
    for reason, targets in refused.items():
        save_adapter(build_hf_gpt2(), tmp_path, targets)
        with pytest.raises(UsageError, match=reason):
            import_adapter(tmp_path)


TRAINED = {
    "a table that is the head's, too": ("gpt2, three matrices in one", ["decoder.embedding.tokens.weight"]),
    "a table of both sides": ("t5", ["*.embedding.tokens.weight"]),
    "one bias of a module": ("bert", ["head.bias"]),
    "a module with a copy of the table in it": ("bert", ["head.*"]),
    "the module and the table": ("bert", ["head.*", "encoder.embedding.tokens.weight"]),
    "a table whose copy has a bias beside it": ("modernbert", ["encoder.embedding.tokens.weight"]),
}


@pytest.mark.filterwarnings("ignore:.*ensure_weight_tying:UserWarning")
@pytest.mark.parametrize("case", TRAINED)
def test_parts_of_modules_and_tied_tables_are_whole_modules_in_peft(case: str, tmp_path: Path) -> None:
    """PEFT opens a file only if it holds all weights of its modules, and copies a module without what it is tied to."""
    name, trained = TRAINED[case]
    build, targets = MODELS[name]
    peft_model = save_adapter(build(), tmp_path, targets)
    from_peft(tmp_path / "adapter", tmp_path / "before")
    source = checkpoint.find_checkpoint(tmp_path / "before")
    state, tensors = copy.deepcopy(dict(checkpoint.read_state(source))), checkpoint.read_tensors(source)
    config: Any = state["config"]
    config["model"]["lora"]["trained"] = trained
    changed = [key for key in tensors if any(fnmatchcase(key, f"model.{pattern}") for pattern in trained)]
    for place, key in enumerate(changed):
        noise = torch.randn(tensors[key].shape, generator=torch.Generator().manual_seed(place))
        tensors[key] = tensors[key] + 0.3 * noise
    shutil.copytree(tmp_path / "before", tmp_path / "megatfm", ignore=shutil.ignore_patterns("checkpoints"))
    checkpoint.save(tmp_path / "megatfm" / "checkpoints", 0, tensors, state)
    expected = logits(load_model(tmp_path / "megatfm"), is_megatfm=True)
    assert (expected - logits(peft_model)).abs().max() > 0.01, "something was trained"
    assert_close(logits(export_adapter(peft_model, tmp_path)), expected)
    from_peft(tmp_path / "back", tmp_path / "again", tmp_path / "base")
    again = load_model(tmp_path / "again")
    assert_close(logits(again, is_megatfm=True), expected)
    assert all(again.get_parameter(key.removeprefix("model.")).requires_grad for key in changed)


@pytest.mark.filterwarnings("ignore:.*ensure_weight_tying:UserWarning")
@pytest.mark.parametrize(("modules", "tied"), [
    (["embed_tokens"], False), (["lm_head"], False), (["embed_tokens", "lm_head"], False), (["embed_tokens"], True),
])  # fmt: skip
def test_tables_that_peft_untied_are_not_read(modules: list[str], tied: bool, tmp_path: Path) -> None:
    build, targets = MODELS["gemma3"]
    peft_model = save_adapter(build(), tmp_path, targets, modules_to_save=modules, ensure_weight_tying=tied)
    if tied:
        assert_close(logits(import_adapter(tmp_path), is_megatfm=True), logits(peft_model))
        return
    with pytest.raises(UsageError, match=r"embed_tokens\.weight and lm_head\.weight differ, .*ensure_weight_tying"):
        import_adapter(tmp_path)


def test_no_trained_weight_is_left_out(tmp_path: Path) -> None:
    """An adapter of a base model without its head has names without the prefix of the complete model."""
    mappings = [map_name("encoder.pool", "bert.pooler.weight"), WeightMapping(("encoder.w",), ("bert.a", "bert.b"))]
    architecture = SimpleNamespace(map_fused_weights=None, base_model_prefix="bert.")
    base: Any = SimpleNamespace(architecture=architecture, config=None, mappings=mappings, name="BertModel")

    def convert_weights(*names: str) -> dict[str, Any]:
        return PeftAdapter(tmp_path, {}, base, [])._convert_other_weights({name: torch.ones(2) for name in names})

    assert convert_weights("pooler.weight").keys() == {"encoder.pool"}
    with pytest.raises(UsageError, match=r"holds bert\.a without bert\.b, which is in the same matrix of megatfm"):
        convert_weights("a")


@pytest.mark.parametrize(("changes", "reason"), [
    ({"use_dora": True}, "use_dora = True"),
    ({"bias": "all"}, "bias = 'all'"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa', by which PEFT changes the base's weights"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights = 'pissa_niter_4'"),
    ({"init_lora_weights": "olora"}, "init_lora_weights = 'olora'"),
    ({"kasa_config": {"beta": 1.0}}, "kasa_config = "),
    ({"peft_type": "IA3"}, "peft_type = 'IA3'"),
    ({"kasa_config": {}}, "kasa_config = {}"),
    ({"never_heard_of": 1}, "never_heard_of = 1, which megatfm's adapters lack"),
    ({"lora_alpha": "much"}, "lora_alpha and alpha_pattern give no scale for .*: could not convert"),
    ({"lora_alpha": 0}, r"give no scale for .*: alpha = 0\.0 is no positive number"),
    ({"lora_alpha": math.inf}, r"give no scale for .*: alpha = inf is no positive number"),
    ({"lora_dropout": "much"}, "no adapters of megatfm: lora.dropout: Input should be a valid number"),
    ({"lora_dropout": 1.5}, "no adapters of megatfm: lora.dropout: Input should be less than or equal to"),
    ({"alpha_pattern": {"(": 8}}, "lora_alpha and alpha_pattern give no scale for .*: missing"),
    ({"base_model_name_or_path": "meta-llama/Llama-3.2-1B"},
     "its model is in no folder here: give --base BASE; .*hf download meta-llama/Llama-3.2-1B"),
    ({"base_model_name_or_path": None}, "its model is in no folder here: .*doesn't name"),
])  # fmt: skip
def test_adapters_that_megatfm_lacks_are_refused(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    save_adapter(build_hf_llama(), tmp_path, ["q_proj"])
    path = tmp_path / "adapter" / ADAPTER_CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(UsageError, match=reason):
        import_adapter(tmp_path)
    assert not (tmp_path / "megatfm").exists()


def test_files_that_lie_are_refused(tmp_path: Path) -> None:
    save_adapter(build_hf_llama(), tmp_path, ["q_proj"])
    path = tmp_path / "adapter" / ADAPTER_WEIGHTS
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("lora_B.weight"))
    save_file({**tensors, name: tensors[name][:-1].contiguous()}, path)
    with pytest.raises((UsageError, MegatfmError), match=r"attn\.wq"):
        import_adapter(tmp_path)
    a_name = name.replace("lora_B", "lora_A")
    for a, b in (
        (tensors[a_name][:, :, None, None], tensors[name][:, :, None, None]),  # as of a convolution
        (tensors[a_name][0], tensors[name]),
        (tensors[a_name][:0], tensors[name]),
    ):
        save_file({**tensors, a_name: a.contiguous(), name: b.contiguous()}, path)
        with pytest.raises(UsageError, match=r"A \[.* and B \[.* of .*q_proj are not those of a linear layer"):
            import_adapter(tmp_path)
    for missing, half in ((name, "lora_B"), (a_name, "lora_A")):
        save_file({key: tensor for key, tensor in tensors.items() if key != missing}, path)
        with pytest.raises(MegatfmError, match=f"has no {half} beside it"):
            import_adapter(tmp_path)
    pair = {f"base_model.model.lm_head.lora_{letter}.weight": torch.ones(4, 4) for letter in "AB"}
    for more, message in (
        ({"lm_head.weight": torch.ones(4)}, r"lm_head\.weight doesn't start with base_model\.model\."),
        ({"base_model.model.never.weight": torch.ones(4)}, r"never\.weight is no weight of a LlamaForCausalLM"),
        (pair, r"of lm_head do not fit its table \[60, 24\]"),
    ):
        save_file(tensors | more, path)
        with pytest.raises(MegatfmError, match=message):
            import_adapter(tmp_path)
    path.write_bytes(b"\x80\x04pickle")
    with pytest.raises(MegatfmError, match="can't read it"):
        import_adapter(tmp_path)
    path.unlink()
    with pytest.raises(UsageError, match="there is no such file: adapters are read from safetensors only"):
        import_adapter(tmp_path)


def test_adapters_that_peft_lacks_are_refused(tmp_path: Path) -> None:
    save_adapter(build_hf_gpt2(), tmp_path, ["c_attn"])
    from_peft(tmp_path / "adapter", tmp_path / "megatfm")
    source = checkpoint.find_checkpoint(tmp_path / "megatfm")
    state: Any = copy.deepcopy(dict(checkpoint.read_state(source)))
    state["config"]["model"]["lora"]["targets"] = ["wq"]
    tensors = {key: t for key, t in checkpoint.read_tensors(source).items() if not re.search(r"w[kv]\.lora", key)}
    checkpoint.save(tmp_path / "queries" / "checkpoints", 0, tensors, state)
    with pytest.raises(UsageError, match=r"transformers holds transformer\.h\.0\..* otherwise than as"):
        to_peft(tmp_path / "queries", tmp_path / "back")
    merge_adapters(tmp_path / "megatfm", tmp_path / "plain")
    with pytest.raises(UsageError, match=r"its model has no adapters \(model\.lora\): use --to hf"):
        to_peft(tmp_path / "plain", tmp_path / "back")
    assert not (tmp_path / "back").exists()
