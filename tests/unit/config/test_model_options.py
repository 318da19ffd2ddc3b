"""Options of a model: those that a part doesn't have, blocks that differ over depth, sections chosen by name."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from megatfm.config import (
    CausalObjective,
    Config,
    MaskedObjective,
    ModelConfig,
    PluginObjective,
    SpanCorruptionObjective,
    load_config,
    to_toml,
)
from megatfm.config.foreign_keys import FLAT_MODEL_KEYS
from megatfm.errors import UsageError
from megatfm.layers.position import relative_position_bucket

SMALL = {"d_model": 8, "n_layers": 2, "attention.n_heads": 2, "ffn.d_ff": 8}
LATENT = {"attention.name": "mla", "attention.kv_lora_rank": 4, "attention.qk_rope_head_dim": 2}
BUCKETS = {"family": "encoder", "attention.name": "deberta_v2", "position.name": "deberta_v2"}
T5 = {"position.name": "t5"}
LLAMA3 = {"position.scaling.name": "llama3", "position.scaling.factor": 8}
XLNET = {"family": "xlnet", "attention.name": "two_stream", "position.name": "transformer_xl"}
DEBERTA = {"family": "encoder", "attention.name": "deberta", "position.name": "deberta"}


def find_refusal(options: dict[str, Any]) -> tuple[str, str]:
    """Return the key and the message of a refusal."""
    with pytest.raises(ValidationError) as caught:
        ModelConfig.from_dotted(SMALL | options)
    (error,) = caught.value.errors()
    return ".".join(map(str, error["loc"])), str(error["msg"]).removeprefix("Value error, ")


EXTRA = "Extra inputs are not permitted"


@pytest.mark.parametrize(("options", "key", "message"), [
    ({**LATENT, "attention.qk_norm": True}, "attention.qk_norm", EXTRA),
    ({**LATENT, "attention.n_kv_heads": 1}, "attention.n_kv_heads", EXTRA),
    ({"attention.kv_lora_rank": 4}, "attention.kv_lora_rank", EXTRA),
    ({**DEBERTA, "attention.softcap": 2.0}, "attention.softcap", EXTRA),
    ({"position.offset": 2}, "position.offset", EXTRA),
    ({"position.name": "alibi", "position.theta": 5e5}, "position.theta", EXTRA),
    ({"position.name": "none", "position.scaling": {"name": "linear", "factor": 2}}, "position.scaling", EXTRA),
    ({"position.name": "shaw", "position.buckets": 8}, "position.buckets", EXTRA),
    ({"position.max_distance": 8}, "position.max_distance", EXTRA),
    ({"init.name": "t5", "init.std": 0.02}, "init.std", EXTRA),
    ({**XLNET, "attention.bias": True}, "attention.bias", EXTRA),
    ({"attention.name": "mla", "attention.qk_rope_head_dim": 2}, "attention.kv_lora_rank", "Field required"),
    ({"position.name": "learned"}, "position.max_positions", "Field required"),
])  # fmt: skip
def test_unknown_and_missing_options_of_a_part_are_refused(options: dict[str, Any], key: str, message: str) -> None:
    assert find_refusal(options) == (key, message)


@pytest.mark.parametrize(("options", "way_out"), [
    ({"n_encoder_layers": 3}, "choose family = 'encoder_decoder'"),
    ({"family": "encoder_decoder", "embedding.n_segments": 2}, "choose family = 'decoder' or 'encoder'"),
    ({"extra_heads.sentence.classes": 2}, "leave it out, or choose family = 'encoder'"),
    ({"family": "encoder", "n_mtp_heads": 1}, "leave it out, or choose family = 'decoder'"),
    ({"family": "electra"}, "family = 'electra' needs model.generator: give it"),
    ({"generator": {"d_model": 8, "n_heads": 1, "d_ff": 8}}, "or choose family = 'electra'"),
    ({"family": "electra", "generator": {"d_model": 8, "n_heads": 3, "d_ff": 8}},
     "generator.n_heads = 3 does not divide generator.d_model = 8: choose n_heads = 2"),
    ({"init.name": "deepnorm"}, "belong together: set both, or neither"),
    ({"norm.placement": "deepnorm"}, "belong together: set both, or neither"),
    ({"distinct_layers": 3}, "distinct_layers = 3 is more than n_layers = 2: leave it out"),
    ({"family": "xlnet"}, "'two_stream' and position.name = 'transformer_xl' belong together: set all three, or"),
    ({"position.name": "transformer_xl"}, "belong together: set all three, or none"),
    ({**XLNET, "embedding.n_segments": 2}, "has no meaning with family = 'xlnet'"),
    ({**XLNET, "extra_heads": {"my_head": {}}},
     "heads.my_head beside a language model head: family = 'xlnet' trains one of them at a time: set"),
    ({"family": "electra", "generator": {"d_model": 8, "n_heads": 1, "d_ff": 8}, "lm_head.name": "none"},
     "lm_head.name = 'none' has no meaning with family = 'electra', which is trained as a whole"),
    ({"mup": {"base_width": 4}, "embedding.dim": 4}, "mup is for models of one width"),
    ({**T5, "position.buckets": 1}, "choose 2 or more"),
    ({**T5, "position.max_distance": 16}, "each: choose 17 or more, or fewer buckets"),
    ({**T5, "family": "encoder", "position.buckets": 3}, "choose 4 or more"),
    ({**T5, "family": "encoder", "position.max_distance": 8}, "each: choose 9 or more, or fewer buckets"),
    ({**T5, "family": "encoder_decoder", "position.max_distance": 16}, "choose 17 or more"),
    ({**LLAMA3, "position.scaling.low_freq_factor": 4.0}, "choose a smaller one, e.g. low_freq_factor = 1"),
    ({**LLAMA3, "position.scaling.low_freq_factor": 8}, "= 8 is not below high_freq_factor = 4"),
    ({**BUCKETS, "position.buckets": 1}, "choose 2 or more"),
    ({**BUCKETS, "position.max_distance": 17}, "for buckets = 32: choose 18 or more, or fewer buckets"),
    ({"position.scaling": {"name": "yarn", "factor": 2, "original_length": 64, "beta_fast": 0.5}},
     "beta_fast = 0.5 is below beta_slow = 1"),
])  # fmt: skip
def test_parts_that_do_not_go_together_are_refused_with_a_way_out(options: dict[str, Any], way_out: str) -> None:
    assert way_out in find_refusal(options)[1]


@pytest.mark.parametrize("family", ["decoder", "encoder"])
def test_the_smallest_buckets_of_t5_are_an_order_of_distances(family: str) -> None:
    """Sizes that config lets pass give each distance an existing bucket, farther ones no lower bucket."""
    causal, distances = family == "decoder", torch.arange(0, 300)
    for n_buckets in (2, 4, 5, 7, 32):
        for farthest in range(1, 40):
            sizes = {"position.buckets": n_buckets, "position.max_distance": farthest}
            try:
                ModelConfig.from_dotted({**SMALL, **T5, "family": family, **sizes})
            except ValidationError:
                continue
            actual = relative_position_bucket(-distances, n_buckets, farthest, causal=causal)
            assert actual[0] == 0
            assert (actual.diff() >= 0).all(), (n_buckets, farthest)
            assert actual.max() == (n_buckets if causal else n_buckets // 2) - 1


def test_a_plugin_s_section_passes_through() -> None:
    config = ModelConfig.from_dotted(SMALL | {"position.name": "mine", "position.theta": 5.0, "attention.name": "ours"})
    assert config.position.model_extra == {"theta": 5.0}
    assert config.attention.n_heads == 2


@pytest.mark.parametrize(("part", "near"), [("attention", "gqaa"), ("norm", "rms_nrom"), ("position", "ropes")])
def test_an_unknown_name_without_a_plugin_is_refused(part: str, near: str) -> None:
    with pytest.raises(UsageError, match=rf"model\.{part}\.name = '{near}': unknown \(did you mean .* plugins$"):
        load_config("quickstart", [f"model.{part}.name={near}"])


def test_keys_of_earlier_versions_are_refused_with_their_new_names(tmp_path: Path) -> None:
    """All of them at once, those that hold a part's name and those of MLA's table among them."""
    with pytest.raises(ValidationError) as caught:
        ModelConfig.model_validate({**FLAT_MODEL_KEYS, "norm": "rms_norm", "init": "t5", "latent": {"kv_lora_rank": 4}})
    (error,) = caught.value.errors()
    names = {"norm": "norm.name", "init": "init.name", "latent.kv_lora_rank": "attention.kv_lora_rank"}
    for key, place in (FLAT_MODEL_KEYS | names).items():
        assert f"{key} is model.{place} now" in error["msg"]
    known = set(ModelConfig.model_fields)
    assert not known & FLAT_MODEL_KEYS.keys()
    assert {place.partition(".")[0] for place in FLAT_MODEL_KEYS.values()} <= known
    with pytest.raises(UsageError, match=r"model: keys that have moved into sections: d_ff is model\.ffn\.d_ff now$"):
        load_config("quickstart", ["model.d_ff=64"])


def test_a_changed_copy_is_checked_and_keeps_what_a_new_variant_has() -> None:
    config = ModelConfig.from_dotted(SMALL | {"attention.n_kv_heads": 1, "attention.softcap": 5.0})
    latent = config.with_changes(LATENT | {"ffn.d_ff": 16})
    assert (latent.attention.n_heads, latent.attention.softcap, latent.ffn.d_ff) == (2, 5.0, 16)
    assert latent.ffn.activation == config.ffn.activation
    assert not hasattr(latent.attention, "n_kv_heads")
    with pytest.raises(ValidationError, match=r"does not divide d_model"):
        config.with_changes({"attention.n_heads": 3})


def test_dotted_keys_and_tables_meet() -> None:
    changes = {"model.attention": {"n_heads": 4}, "model.attention.bias": True}
    attention = Config.from_dotted(load_config("quickstart").model_dump(), **changes).model.attention
    assert (attention.n_heads, attention.bias) == (4, True)


@pytest.mark.parametrize(("preset", "overrides", "message"), [
    ("deepseek-v2-lite", ["model.attention.qk_rope_head_dim=3"],
     "attention.qk_rope_head_dim = 3 must be even: choose qk_rope_head_dim = 4"),
    ("llama3-8b", ["model.attention.head_dim=2", 'model.position.scaling={name="ntk", factor=2}'],
     "attention.head_dim = 2 has one pair: choose head_dim = 4 or more, or scaling.name = 'linear'"),
    ("llama3-8b", ["model.position.theta=1", 'model.position.scaling={name="yarn", factor=2, original_length=8}'],
     "choose a larger one, e.g. theta = 10000"),
    ("gpt2-124m", ["data.sequence_length=2048"],
     "choose data.sequence_length = 1024, or model.position.max_positions = 2048"),
    ("t5-base", ["model.position.name=learned", "model.position.max_positions=512", "data.target_length=600"],
     "data.target_length = 600: model.position.max_positions = 512"),
    ("quickstart", ["model.attention.name=linformer", "model.attention.max_length=255"],
     "choose data.sequence_length = 255, or model.attention.max_length = 256"),
])  # fmt: skip
def test_positions_that_a_model_lacks_are_refused_on_loading(preset: str, overrides: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_config(preset, overrides)
    assert message in str(caught.value)


FIVE_LAYERS = {"vocab_size": 11, "d_model": 8, "n_layers": 5, "attention.n_heads": 2, "ffn.d_ff": 12}
KINDS = {
    "layer_types": ["wide", "wide", "plain"],
    "layer_type.wide.ffn.d_ff": 20,
    "layer_type.wide.position.theta": 500.0,
    "layer_type.plain": {},
}


def test_kinds_are_a_cycle_over_depth() -> None:
    config = ModelConfig.from_dotted({**FIVE_LAYERS, **KINDS})
    assert [config.get_layer_type(depth) for depth in range(5)] == ["wide", "wide", "plain", "wide", "wide"]
    assert [config.layer_config(depth).ffn.d_ff for depth in range(5)] == [20, 20, 12, 20, 20]
    wide = config.layer_config(0)
    assert (wide.position.theta, wide.d_model, wide.layer_types) == (500.0, 8, ())
    assert config.layer_config(2) == config.with_changes({"layer_types": (), "layer_type": {}})


def test_a_kind_may_take_another_variant_of_a_part() -> None:
    kinds = {"layer_types": ["none", "rope"], "layer_type.none.position.name": "none", "layer_type.rope": {}}
    config = ModelConfig.from_dotted(FIVE_LAYERS | kinds)
    assert [config.layer_config(depth).position.name for depth in range(3)] == ["none", "rope", "none"]


def test_a_plugin_s_keys_can_differ_one_by_one() -> None:
    far = {"layer_types": ["far"], "layer_type.far.attention.pattern.step": 3}
    pattern = {"name": "of_a_plugin", "width": 5, "step": 1}
    config = ModelConfig.from_dotted({**FIVE_LAYERS, "attention.pattern": pattern, **far}).layer_config(0)
    assert config.attention.pattern.model_dump() == pattern | {"step": 3}


def test_without_kinds_all_blocks_are_the_model_s() -> None:
    config = ModelConfig.from_dotted(FIVE_LAYERS)
    assert config.layer_config(3) is config
    assert config.get_layer_type(3) is None


@pytest.mark.parametrize(("change", "expected"), [
    ({"layer_types": ["wied", "plain"]}, r"the kind 'wied' \(did you mean 'wide'\?\).*add \[model.layer_type.wied\]"),
    ({"layer_type.other": {}}, r"layer_type.other: none of the 5 blocks is of this kind"),
    ({"layer_types": [*["plain"] * 5, "wide"]}, r"layer_type.wide: none of the 5 blocks is of this kind"),
    ({"layer_type.wide.d_model": 16}, r"layer_type.wide.d_model: blocks of one model can differ in attention, ffn,"),
    ({"layer_type.wide.ffn.d_f": 16}, r"layer_type.wide.*d_f"),
    ({"distinct_layers": 1}, r"distinct_layers uses a block's weights in several layers"),
])  # fmt: skip
def test_mistakes_are_named(change: dict[str, object], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        ModelConfig.from_dotted({**FIVE_LAYERS, **KINDS, **change})


def test_kinds_on_the_command_line_and_back_from_a_file() -> None:
    options = ['model.layer_types=["wide", "plain"]', "model.layer_type.wide.ffn.d_ff=32", "model.layer_type.plain={}"]
    config = load_config("quickstart", options)
    assert config.model.layer_config(0).ffn.d_ff == 32
    with pytest.raises(UsageError, match=r"layer_type.wide.*d_ff"):
        load_config("quickstart", [*options, "model.layer_type.wide.ffn.d_ff=-1"])


Load = Callable[..., Config]


def test_the_name_chooses_the_section(load: Load) -> None:
    assert load().objective == CausalObjective()
    assert load("objective.mtp_loss_weight=0.5").objective == CausalObjective(mtp_loss_weight=0.5)
    actual = load("objective.name=span_corruption", "objective.noise_density=0.3").objective
    assert actual == SpanCorruptionObjective(noise_density=0.3)
    reloaded = Config.model_validate(load("objective.name=masked").model_dump())
    assert type(reloaded.objective) is MaskedObjective


def test_a_plugins_section_may_have_further_keys(load: Load) -> None:
    config = load("plugins=['mine']", "objective.name=mine", "objective.depth=3")
    assert isinstance(config.objective, PluginObjective)
    assert config.objective.model_extra == {"depth": 3}
    assert "depth = 3" in to_toml(config)
    with pytest.raises(ValidationError, match="frozen"):
        config.objective.name = "other"


@pytest.mark.parametrize(("overrides", "line"), [
    (("objective.mask_rate=2",), "objective.mask_rate: unknown key; known here: name, mtp_loss_weight"),
    (("objective.name=masked", "objective.mask_rate=2"),
     "objective.mask_rate = 2: input should be less than 1; the default"),
    (("objective.name=masked", "objective.rates=2"),
     "objective.rates: unknown key; known here: name, mask_rate, mask_replace_prob"),
    (("objective.name=masked", "objective.random_replace_prob=0.3"),
     "objective.mask_replace_prob = 0.8 and random_replace_prob = 0.3 are more than 1 together: choose for example"),
    (("objective.name=ul2", *(f"objective.{name}_denoiser_weight=0" for name in "rxs")),
     "objective.r_denoiser_weight, x_denoiser_weight and s_denoiser_weight are all 0: give at least one a weight"),
    (("objective=3",), "objective = 3: this is a section; for example objective = {"),
    (("objective.name=7",), "objective.name = 7: input should be a valid string"),
])  # fmt: skip
def test_a_mistake_names_key_and_way_out(load: Load, overrides: tuple[str, ...], line: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(*overrides)
    assert line in str(caught.value)


def test_blocks_of_a_changed_copy_are_those_of_the_copy() -> None:
    """Configs of blocks are kept once they are computed."""
    kinds = load_config("gemma3-1b").model
    kind = kinds.layer_types[0]
    assert kinds.type_config(kind).d_model == kinds.d_model
    assert kinds.model_copy(update={"d_model": 64}).type_config(kind).d_model == 64
    assert kinds.with_changes({"norm.eps": 0.5}).type_config(kind).norm.eps == 0.5
    stages = load_config("swin-t").model
    assert stages.stage_config(1).d_model == 192
    assert stages.model_copy(update={"d_model": 48}).stage_config(1).d_model == 96


@pytest.mark.parametrize(("preset", "overrides", "line"), [
    ("clip-b32", ["text_tower.n_heads=7"], "text_tower.n_heads = 7 does not divide text_tower.d_model = 512: choose"),
    ("clip-b32", ["contrastive.project_image=false", "contrastive.width=9"], "contrastive.width = 9 without project_"),
    ("clip-b32", ["position.name=none", "embedding={}"], "family = 'two_towers' reads images: set embedding.name = "),
    ("clip-b32", ["lm_head.name=linear"], "family = 'two_towers' predicts no tokens: set lm_head.name = 'none'"),
    ("llava-1.5-7b", ["embedding={name='patches'}"], "family = 'vision_language': [model] describes the decoder of t"),
    ("llava-1.5-7b", ["vision_tower.n_heads=7"], "vision_tower.n_heads = 7 does not divide vision_tower.d_model ="),
    ("gpt2-124m", ["position={name='learned_2d'}"], "position.name = 'learned_2d' is for patches of images: set em"),
    ("vit-b16", ["position={name='sinusoidal_2d'}", "d_model=774", "attention.n_heads=6"],
     "position.name = 'sinusoidal_2d' takes channels by fours, and d_model = 774: choose d_model = 776"),
    ("vit-b16", ["position={name='rope_2d'}", "attention.head_dim=66"],
     "position.name = 'rope_2d' takes channels by fours, and attention.head_dim = 66: choose attention.head_dim = 68"),
    ("vit-b16", ["family=hierarchical"], "family = 'hierarchical' needs model.stages: give n_layers and n_heads of"),
    ("simmim-swin-b", ["extra_heads.pixels.stride=8"], "extra_heads.pixels.stride = 8: a token of the last map stand"),
    ("mae-b16", ["pixel_decoder.n_heads=7"], "pixel_decoder.n_heads = 7 does not divide pixel_decoder.d_model = 512:"),
    ("mae-b16", ["position.name=none", "embedding={}"], "family = 'masked_autoencoder' needs embedding.name = 'patc"),
    ("swin-t", ["stages.n_heads=[3,6]"], "stages.n_heads has 2 numbers and stages.n_layers 4: give one of each for ev"),
    ("swin-t", [f"stages.n_heads=[3,6,12,{2**40}]"], "stages.n_heads = [3, 6, 12, 1099511627776], stages.grid = [56, "),
    ("swin-t", ["n_layers=5"], "n_layers = 5 is not the sum of stages.n_layers, which is 12: leave n_layers out"),
    ("swin-t", ["position={name='relative_axes'}"], "position.name = 'relative_axes' is for attention.name = 'pool"),
    ("swin-t", ["embedding.n_class_tokens=1"], "family = 'hierarchical' has no class or register tokens: set embed"),
    ("swin-t", ["lm_head.name=linear"], "family = 'hierarchical' has no head over a vocabulary: set lm_head.name ="),
    ("quickstart-moe", ["ffn.router.name=noisy_top_k", "ffn.n_experts=2", "ffn.top_k=2"],
     "top_k = 2 = n_experts leaves router.name = 'noisy_top_k' nothing to choose: set top_k = 1 or less"),
    ("quickstart-moe", ["ffn.router.name=noisy_top_k", "ffn.n_experts=1", "ffn.top_k=1"],
     "top_k = 1 = n_experts leaves router.name = 'noisy_top_k' nothing to choose: set n_experts = 2 or more"),
])  # fmt: skip
def test_parts_that_contradict_one_another(preset: str, overrides: list[str], line: str) -> None:
    with pytest.raises(UsageError, match=f"^{preset}: model[.a-z]*(\\.|: ){re.escape(line)}"):
        load_config(preset, [f"model.{override}" for override in overrides])
