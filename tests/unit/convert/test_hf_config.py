"""Every key of every architecture's config.json, edited: transformers computes the same, or we refuse."""

import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import megatfm
from megatfm.convert.architecture import ARCHITECTURES, TASK_CLASSES
from megatfm.convert.architectures.sparse_encoders import GLOBAL_TOKENS_KEY as SEEN_BY_ALL
from megatfm.errors import MegatfmError, UsageError
from tests.support.hf_decoders import GPT_OPTIONS, HF_DECODERS, LLAMA_OPTIONS, build_hf_decoder, decoder_logits
from tests.support.hf_encoders import (
    HF_ENCODERS,
    HF_LONG_ENCODERS,
    LONG_TOKENS,
    build_hf_encoder,
    build_hf_long_encoder,
    get_vocabulary_logits,
    long_encoder_logits,
)
from tests.support.hf_folders import perturb_parameters
from tests.support.hf_images import HF_IMAGES, build_hf_image_model, image_logits, write_pixels
from tests.support.layouts import SLOW, extend

TOKENS = torch.randint(7, 60, (3, 9), generator=torch.Generator().manual_seed(3))
LLAMA = {**LLAMA_OPTIONS, "max_position_embeddings": 64}
ROPE = {"rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3_ROPE = {"rope_type": "llama3", **ROPE, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in (*HF_ENCODERS, *HF_LONG_ENCODERS)},
    **{name: (name, HF_IMAGES[name]) for name in HF_IMAGES},
    **{name: HF_DECODERS[name] for name in ("gpt1", "mistral", "mla", "mla-whole-queries", "t5", "t5-v1.1")},
    **{name: HF_DECODERS[name] for name in ("mixtral", "qwen2", "qwen3", "qwen3-moe", "deepseek-v3")},
    **{name: HF_DECODERS[name] for name in ("olmoe", "deepseek-v2", "gpt-oss", "gemma2", "gemma3", "switch")},
    "gpt2": ("GPT2LMHeadModel", {**GPT_OPTIONS, "tie_word_embeddings": False}),
    "llama": ("LlamaForCausalLM", {**LLAMA, "attention_bias": True}),
    "llama-linear": ("LlamaForCausalLM", {**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "llama-yarn": ("LlamaForCausalLM", {**LLAMA, "rope_parameters": {"rope_type": "yarn", **ROPE, "beta_fast": 4.0}}),
    "llama-3.1": ("LlamaForCausalLM", {**LLAMA, "rope_parameters": LLAMA3_ROPE}),
}  # fmt: skip
VARIANTS: dict[str, tuple[str, ...]] = {
    "BertForPreTraining": (),
    "AlbertForPreTraining": (),
    "BigBirdForPreTraining": (),
    "mla-whole-queries": ("q_lora_rank",),
    "t5-v1.1": ("tie_word_embeddings", "scale_decoder_outputs", "feed_forward_proj", "dense_act_fn", "is_gated_act"),
    "llama-linear": ("rope_theta",),
    "llama-yarn": ("rope_theta", "max_position_embeddings", "original_max_position_embeddings"),
    "llama-3.1": ("original_max_position_embeddings",),
}  # fmt: skip
"""Class that another case edits as a whole → the keys that differ."""
WORDS = ("gelu_new", "relu", "silu", "gelu_fast", "gated-gelu", "gated-silu", "mish", "p2c")
WITHIN = (
    "mscale", "mscale_all_dim", "truncate", "attention_factor", "beta_fast", "beta_slow", "partial_rotary_factor",
)  # fmt: skip
TWO_TOWERS = ("CLIPModel", "SiglipModel")
WITH_SECTIONS = (*TWO_TOWERS, "LlavaForConditionalGeneration")
"""Classes whose config.json has a section for each tower; tests/unit/convert/test_llava.py tries both."""
MASKED_IMAGES = "ForMaskedImageModeling"
"""End of classes that read the keys of the image classifier of their type; tests/unit/convert/test_images.py tries
encoder_stride."""
NOT_COMPARED = {
    "legacy": "which names of the head's tensors are read; we read both, and transformers draws the head anew",
    "architectures": "which class it is",
    "quantization_config": "needs further packages there",
    "torchscript": "removed there",
    "use_mask_token": "whether a tensor of pretraining is there, which no pass reads",
    "vision_use_head": "whether a head is there beside the tower",
    "return_dict": "how outputs are packed; with False, decoders don't run there",
}


def build_hf_case(case: str) -> Any:
    name, values = CASES[case]
    if name in HF_ENCODERS:
        return build_hf_encoder(name)
    if name in HF_LONG_ENCODERS:
        return build_hf_long_encoder(name)
    if name in HF_IMAGES:
        return build_hf_image_model(name)
    if case in HF_DECODERS:
        return build_hf_decoder(case)
    kind = getattr(transformers, name)
    return perturb_parameters(kind(kind.config_class(**values)))


def others(value: Any) -> list[Any]:
    """Values of the same kind, and those that stand for none."""
    match value:
        case bool():
            return [not value]
        case int():
            return [value + 1, value * 2 + 2, max(value // 2, 1), 0, -1]
        case float():
            return [value * 2 + 0.125, value / 2]
        case str():
            return [word for word in WORDS if word != value]
        case list():
            return [value[:1], [*value, *value]]
        case dict():
            return [{}]
    return [1, 0.5, True, "relu", {"factor": 2.0, "rope_type": "linear"}]


class Turns:
    """One other value of a key, and it is none or left out, in turns of keys and cases: all in `make test-all`."""

    def __init__(self, case: str, every: bool) -> None:
        self.every, self.count = every, [*CASES].index(case)

    def of(self, values: list[Any]) -> list[Any]:
        self.count += 1
        return values if self.every else values[self.count % len(values) :][:1]

    def come(self) -> bool:
        """Return True once in eight times."""
        self.count += 1
        return self.every or self.count % 8 == 0


def edits(base: Mapping[str, Any], case: str, every: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each key with other values, none or left out; keys that are not there; keys of tables; all that is idle."""
    turns = Turns(case, every)
    keys = ARCHITECTURES.get(CASES[case][0]).all_keys()
    foreign = {key for name in ARCHITECTURES.names() for key in ARCHITECTURES.get(name).all_keys()}
    declared_idle = {key for key, declared in keys.items() if declared.is_ignored}
    chosen = (set(base) | foreign | {"layer_types", "never_heard_of"}) - NOT_COMPARED.keys()
    for key in sorted(chosen & {*VARIANTS[case]} if case in VARIANTS else chosen):
        if key in declared_idle:
            if key in base and (key in IDLE or turns.come()):
                yield f"{key}, idle", {**base, key: IDLE.get(key, others(base[key])[0])}
            continue
        # What is not declared is refused before its value is looked at.
        if key not in keys and key not in base and key != "never_heard_of" and not turns.come():
            continue
        values = turns.of(others(base.get(key)))
        is_none, is_left_out = every or turns.count % 2 == 0, every or turns.count % 2 == 1
        for value in [*values, *([None] if is_none else [])] if key in keys else [1]:
            if value != base.get(key):
                yield f"{key} = {value!r}", {**base, key: value}
        if is_left_out and key in base and (key not in keys or base[key] != keys[key].default):
            yield f"no {key}", {other: value for other, value in base.items() if other != key}
    for key, table in base.items():
        if key.startswith("rope_") and isinstance(table, dict):
            for inner in (*table, *WITHIN):
                for value in turns.of([*others(table.get(inner, 2.0)), None]):
                    yield f"{key}.{inner} = {value!r}", {**base, key: {**table, inner: value}}
                if inner in table:
                    yield f"no {key}.{inner}", {**base, key: {k: v for k, v in table.items() if k != inner}}
            edited = {**base, key: {**table, "mscale": 1.5, "mscale_all_dim": 0.5}}
            yield f"{key}.mscale and {key}.mscale_all_dim", edited
            for value in (table, {"rope_type": "linear", "factor": 2.0}, {"type": "linear", "factor": 2.0}):
                yield f"rope_scaling = {value!r} beside", {**base, "rope_scaling": value}
                alone = {k: v for k, v in base.items() if k != key}
                yield f"rope_scaling = {value!r} alone", {**alone, "rope_scaling": value, "rope_theta": 500.0}
    free = declared_idle - NOT_COMPARED.keys() - PARTICULAR - base.keys()
    junk = {key: True if bool in keys[key].kinds else None for key in free if keys[key].kinds}
    junk |= {key: 3 for key in free if int in keys[key].kinds or not keys[key].kinds}
    yield "all that is idle", {**base, **junk}


IDLE = {
    "dtype": "bfloat16", "chunk_size_feed_forward": 3, "summary_activation": "tanh", "classifier_pooling": "mean",
    "pos_embed_shift": 0.5, "pos_embed_jitter": 1.5,
}  # fmt: skip
"""Values that transformers takes, of keys in which it doesn't take any."""
PARTICULAR = {"attn_implementation", "_attn_implementation", "num_labels", "_num_labels", "auto_map"}


def logits(model: Any, case: str, *, is_megatfm: bool, config: Mapping[str, Any]) -> torch.Tensor:
    """config: config.json; which tokens of a Longformer all see, transformers has as an input."""
    if case in HF_IMAGES:
        return image_logits(model, config.get("image_size"), is_megatfm=is_megatfm, name=case)
    if config["model_type"] in ("big_bird", "longformer"):
        return model(LONG_TOKENS).logits if is_megatfm else long_encoder_logits(model, config.get(SEEN_BY_ALL, [0]))
    if type(model).__name__.startswith(("T5", "Switch")) or (is_megatfm and model.config.family == "encoder_decoder"):
        return decoder_logits(model, is_megatfm=is_megatfm)
    output = model(TOKENS)
    return output.logits if is_megatfm else get_vocabulary_logits(output)


def their_logits(case: str, folder: Path, config: Mapping[str, Any]) -> torch.Tensor | str:
    """Or why there are none: it can't be opened, or not with all of its weights."""
    try:
        model, info = getattr(transformers, CASES[case][0]).from_pretrained(
            folder, output_loading_info=True, dtype=torch.float32, local_files_only=True
        )
        if lost := info["missing_keys"] or info["mismatched_keys"] or info["unexpected_keys"]:
            return f"{sorted(lost)[0]} does not fit"
        return logits(model.eval(), case, is_megatfm=False, config=config)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


RELATED = (
    "AlbertForMaskedLM", "RobertaForMaskedLM", "DebertaV2ForMaskedLM", "Dinov2ForImageClassification", "DINOv3ViTModel",
    "Swinv2ForImageClassification", "mistral", "qwen2", "qwen3", "qwen3-moe", "gemma2", "olmoe", "deepseek-v2",
    "deepseek-v3", "gpt-oss", "switch",
)  # fmt: skip
"""Cases that take more than a second, of families of which another case has most keys: BERT, DeBERTa, DINOv2, Swin,
Llama, Gemma, mixtures of experts, T5."""


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=SLOW)], ids=["in turns", "every value"])
@pytest.mark.parametrize("case", extend(CASES, kept=CASES.keys() - {*RELATED}))
def test_every_edit_is_computed_as_transformers_does_or_refused(case: str, every: bool, tmp_path: Path) -> None:
    build_hf_case(case).save_pretrained(tmp_path)
    if case in HF_IMAGES:
        write_pixels(tmp_path)
    file = tmp_path / "config.json"
    base = json.loads(file.read_text())
    full = getattr(transformers, CASES[case][0]).config_class.from_pretrained(tmp_path).to_dict()
    base = {**json.loads(json.dumps(full)), **base}
    opened, refused, wrong = [], [], []
    logging.disable(logging.ERROR)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, edited in [("as it is", base), *edits(base, case, every)]:
            file.write_text(json.dumps(edited))
            try:
                actual = logits(model := megatfm.load(tmp_path), case, is_megatfm=True, config=edited)
                if model.config.lm_head.name == "none" and case not in HF_IMAGES:
                    refused.append(name)  # said, see test_a_missing_head_is_reported
                    continue
            except MegatfmError:
                refused.append(name)
                continue
            expected = their_logits(case, tmp_path, edited)
            if isinstance(expected, str):
                wrong.append(f"{name}: opened, though {expected}")
            elif actual.shape != expected.shape or not torch.allclose(actual, expected, rtol=1e-4, atol=1e-4):
                wrong.append(f"{name}: other logits")
            opened.append(name)
    logging.disable(logging.NOTSET)
    assert wrong == [], "\n".join(wrong)
    assert {"as it is", "all that is idle"} <= {*opened}
    assert case in VARIANTS or "never_heard_of = 1" in refused


def test_every_architecture_is_edited() -> None:
    """And of those with one config.json, one whole; classes of a task are opened as their bare model."""
    known = {name: ARCHITECTURES.get(name) for name in ARCHITECTURES.names() if not TASK_CLASSES.fullmatch(name)}
    heads = {name: known[name].model_type for name in known if not known[name].is_base_model}
    heads = {name: kind for name, kind in heads.items() if not (name in WITH_SECTIONS or name.endswith(MASKED_IMAGES))}
    assert {name for name, _ in CASES.values()} == heads.keys()
    assert {heads[CASES[case][0]] for case in CASES.keys() - VARIANTS.keys()} == {*heads.values()}


@pytest.mark.parametrize("name", TWO_TOWERS)
def test_sections_of_towers_that_are_absent_mean_what_they_mean_in_transformers(name: str) -> None:
    """And every key of the sections that transformers writes is taken, or known to change nothing."""
    written = json.loads(json.dumps(getattr(transformers, name).config_class().to_dict()))
    architecture = ARCHITECTURES.get(name)
    bare = {"model_type": written["model_type"], "architectures": [name]}
    assert architecture.parse_config(written, name) == architecture.parse_config(bare, name)


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES.names() if name not in WITH_SECTIONS])
def test_absent_keys_of_config_json_mean_transformers_defaults(name: str) -> None:
    """And every key that transformers writes is declared."""
    written = json.loads(json.dumps(getattr(transformers, name).config_class().to_dict()))
    keys = ARCHITECTURES.get(name).all_keys()
    assert written.keys() - keys.keys() == set()
    follows = {
        "head_dim", "qk_head_dim", "d_head", "num_key_value_heads", "rope_parameters", "architectures", "layer_types",
        "id2label", "hidden_size", "num_layers", "num_decoder_layers", "encoder_sparse_step", "decoder_sparse_step",
        "dense_act_fn", "is_gated_act", "scale_decoder_outputs", "tie_word_embeddings",
    }  # fmt: skip
    for key, declared in keys.items():
        if key in written and not declared.is_ignored and not declared.alias_of and declared.default is not None:
            assert declared.default == written[key], key
        elif key in written and not declared.is_ignored and key not in follows:
            assert written[key] is None, key


@pytest.mark.parametrize("name", ["DeepseekV3ForCausalLM", "Gemma2ForCausalLM", "Qwen2ForCausalLM"])
@pytest.mark.parametrize("n_layers", [-1, 0, 16_385, 10**15])
def test_numbers_of_layers_that_no_model_has_are_refused_at_once(name: str, n_layers: int) -> None:
    """A list of a kind for each layer would fill the memory, and an empty one has no first."""
    with pytest.raises(UsageError, match=f"num_hidden_layers = {n_layers} is not between 1 and 16384"):
        ARCHITECTURES.get(name).parse_config({"num_hidden_layers": n_layers}, name)
