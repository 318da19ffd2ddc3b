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
from megatfm.convert.architecture import ARCHITECTURES, TASK_CLASSES, find_architecture, list_candidates
from megatfm.convert.architectures.sparse_encoders import GLOBAL_TOKENS_KEY as SEEN_BY_ALL
from megatfm.errors import MegatfmError, UsageError
from tests.support.hf_encoders import (
    HF_ENCODERS,
    HF_IMAGES,
    HF_LONG_ENCODERS,
    LONG_TOKENS,
    build_hf_encoder,
    build_hf_image_model,
    build_hf_long_encoder,
    get_vocabulary_logits,
    image_logits,
    long_encoder_logits,
    write_pixels,
)
from tests.support.hf_folders import (
    GPT_OPTIONS,
    HF_DECODERS,
    LLAMA_OPTIONS,
    build_hf_decoder,
    decoder_logits,
    perturb_parameters,
)
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
WITH_SECTIONS = (*TWO_TOWERS, "SiglipForImageClassification", "LlavaForConditionalGeneration")
"""Classes whose config.json has a section for each tower; tests/unit/convert/test_llava.py tries those of two."""
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


LINEAR = {"rope_type": "linear", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(("name", "keys", "message"), [
    ("RobertaForMaskedLM", {"pad_token_id": -1}, "pad_token_id = -1: RoBERTa's positions begin after it"),
    ("ModernBertForMaskedLM", {"global_attn_every_n_layers": 0}, "global_attn_every_n_layers = 0 and local_attention"),
    ("ModernBertForMaskedLM", {"pad_token_id": 50368}, "pad_token_id = 50368 is no token of vocab_size = 50368"),
    ("DeepseekV3ForCausalLM", {"num_key_value_heads": 8}, "num_key_value_heads must be num_attention_heads"),
    ("DeepseekV3ForCausalLM", {"rope_scaling": YARN | {"mscale_all_dim": "x"}}, "mscale_all_dim = 'x' is no number"),
    ("DeepseekV2ForCausalLM", {"num_attention_heads": 6}, "num_attention_heads = 6 does not divide hidden_size = 4096"),
    ("DeepseekV2ForCausalLM", {}, "num_experts_per_tok is not there: say how many"),
    ("DeepseekV2ForCausalLM", {"num_experts_per_tok": 2, "topk_method": "group_limited_greedy"}, "n_group is not ther"),
    ("Gemma2ForCausalLM", {"final_logit_softcapping": 30}, "transformers takes 30.0 alone"),
    ("Gemma2ForCausalLM", {"layer_types": ["x"]}, r"layer_types = \['x'\] is not sliding_attention or full_attention"),
    ("Gemma3ForCausalLM", {"sliding_window_pattern": 0}, "sliding_window_pattern = 0: choose 1 or more"),
    ("Gemma3ForCausalLM", {"rope_scaling": {"factor": 2.0}}, "rope_scaling has no rope_type, so transformers ignores"),
    ("Gemma3ForCausalLM", {"rope_scaling": LINEAR, "rope_parameters": {"full_attention": LINEAR}}, "has both rope_sca"),
    ("Gemma3ForCausalLM", {"rope_parameters": {"full_attention": 3}}, "rope_parameters.full_attention = 3 is not a"),
    ("Gemma3ForCausalLM", {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}, "rope_theta": 6.0},
     "has both rope_parameters.full_attention.rope_theta and rope_theta"),
    ("GptOssForCausalLM", {"head_dim": 0}, "head_dim = 0 is not supported: give one above 0"),
    ("OlmoeForCausalLM", {"head_dim": 8}, "head_dim = 8: OLMoE's norms of queries and keys are as wide"),
    ("SwitchTransformersForConditionalGeneration", {"num_sparse_encoder_layers": 6}, "put experts into other layers"),
    ("ViTForImageClassification", {"num_labels": 3, "id2label": {"0": "a"}}, "num_labels = 3, but id2label has 1"),
    ("Swinv2ForImageClassification", {"image_size": 100}, "image_size = 100: stage 2 has a map of 7"),
    ("LlamaForCausalLM", {"rope_scaling": LINEAR, "rope_parameters": YARN}, "rope_scaling and rope_parameters differ"),
    ("LlamaForCausalLM", {"rope_parameters": LINEAR | {"factor": "x"}}, "rope_parameters.factor = 'x' is not a number"),
    ("LlamaForCausalLM", {"rope_parameters": {"rope_theta": "x"}}, "rope_parameters.rope_theta = 'x' is not a number"),
    ("LlamaForCausalLM", {"rope_parameters": {"rope_theta": 6.0}, "rope_theta": 5.0}, "= 6.0, but rope_theta = 5.0"),
    ("LlamaForCausalLM", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor other than 1"),
    ("LlamaForCausalLM", {"rope_parameters": YARN | {"truncate": 1}}, "rope_parameters.truncate = 1 is not true or"),
    ("LlamaForCausalLM", {"rope_parameters": {"factor": 2.0}}, "rope_parameters.factor = 2.0 is not supported here"),
])  # fmt: skip
def test_a_config_json_that_megatfm_lacks_is_refused_by_key(name: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ARCHITECTURES.get(name).parse_config(keys, name)


@pytest.mark.parametrize(("name", "keys", "changes", "message"), [
    ("DeepseekV3ForCausalLM", {}, {"attention.scale": 0.3}, "scale = 0.3: here transformers has one with YaRN alone"),
    ("DeepseekV3ForCausalLM", {}, {"norm.eps": 1e-5}, "model.norm.eps must be 1e-6"),
    ("DeepseekV3ForCausalLM", {"n_shared_experts": 0}, {}, "n_shared_experts = 0: DeepSeek's blocks have at least one"),
    ("MixtralForCausalLM", {}, {"ffn.router.norm_topk_prob": False}, "norm_topk_prob = false: Mixtral's weights add"),
    ("MixtralForCausalLM", {}, {"ffn.capacity_factor": 1.5}, "ffn.capacity_factor = 1.5: transformers has no capacity"),
    ("Gemma2ForCausalLM", {}, {"layer_type.local.attention.pattern": {"name": "chunked", "size": 4}}, "only windows"),
    ("LongformerForMaskedLM", {}, {"attention.pattern.width": 5}, "width = 5: transformers' windows are even"),
    ("SwitchTransformersForConditionalGeneration", {}, {"layer_type.sparse.ffn.expert_capacity": None},
     "model.ffn.expert_capacity is not set"),
    ("SwitchTransformersForConditionalGeneration", {}, {"layer_types": ["sparse", "dense"]}, "in these layers of the"),
    ("CLIPModel", {}, {"text_tower.causal": False}, "text_tower.causal = False .* the class .* has causal"),
    ("LlavaForConditionalGeneration", {"text_config": {"vocab_size": 32001}}, {"vision_tower.final_norm": True},
     "vision_tower.final_norm = true: LLaVA's connector has two matrices"),
    ("ViTForImageClassification", {}, {"position.grid": (14, 7)}, r"grid = \[14, 7\]: transformers has square tables"),
    ("SwinForImageClassification", {}, {"stages.grid": (56, 28)}, r"grid = \[56, 28\]: transformers stores square im"),
])  # fmt: skip
def test_a_model_that_a_class_of_transformers_lacks_is_refused_by_key(
    name: str, keys: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    architecture = ARCHITECTURES.get(name)
    config = architecture.parse_config(keys, name).with_changes(changes)
    with pytest.raises(UsageError, match=message):
        architecture.config_to_hf(config)


@pytest.mark.parametrize(("name", "other", "changes", "message"), [
    ("SwinForImageClassification", "ViTForImageClassification",
     {"attention.pattern": {"name": "windows_2d", "window": 7}}, r"model\.family = 'encoder' has no stages"),
    ("CLIPModel", "LlamaForCausalLM", {}, r"model\.family = 'decoder' has no two towers"),
    ("LlavaForConditionalGeneration", "LlamaForCausalLM", {}, r"family = 'decoder' reads no images beside text"),
    ("AlbertForMaskedLM", "BertForMaskedLM", {}, r"without model\.distinct_layers this is an ELECTRA generator's"),
])  # fmt: skip
def test_a_model_of_another_kind_is_refused_by_a_class(
    name: str, other: str, changes: dict[str, Any], message: str
) -> None:
    config = ARCHITECTURES.get(other).parse_config({}, other)
    with pytest.raises(UsageError, match=message):
        ARCHITECTURES.get(name).config_to_hf(config.with_changes(changes) if changes else config)


def test_classes_are_a_list_of_names() -> None:
    with pytest.raises(UsageError, match="architectures = 'BertModel' is no list of names"):
        list_candidates({"architectures": "BertModel"})


@pytest.mark.parametrize("name", ["Gemma3ForCausalLM", "ModernBertForMaskedLM"])
def test_learned_positions_are_exported_also_where_all_blocks_have_others(name: str) -> None:
    """Learned positions are added to the embedding, whatever the kinds of blocks override."""
    config = ARCHITECTURES.get(name).parse_config({}, name)
    assert find_architecture(config, [name])[0] == name
    changes = {"position": {"name": "learned", "max_positions": 64}}
    with pytest.raises(UsageError, match=r"lacks model\.position = {'name': 'learned', 'max_positions': 64"):
        find_architecture(config.with_changes(changes), [name])
