"""Engines declare what they carry out, and configs that ask for more are refused."""

from types import SimpleNamespace

import pytest

from megatfm.config import load_config
from megatfm.engines.interface import Engine
from megatfm.engines.registry import ENGINES, EngineRegistry
from megatfm.errors import UsageError

SETTINGS = {
    "pp": ("parallel.pp = 2", "parallel.pp=2", "fp32"),
    "cp": ("parallel.cp = 2", "parallel.cp=2", "fp32"),
    "fp16": ("train.precision = 'fp16'", "train.precision=fp16", "fp16"),
    "fp8": ("train.precision = 'fp8'", "train.precision=fp8", "fp8"),
    "recompute": ("train.recompute = 'full'", "train.recompute=full", "fp32"),
    "compile": ("train.compile = True", "train.compile=true", "fp32"),
}


@pytest.mark.parametrize("feature", SETTINGS)
def test_a_feature_is_refused_unless_declared(feature: str) -> None:
    engines = EngineRegistry()
    engines.register("able", features=[feature])(lambda setup: None)  # type: ignore[list-item, arg-type, return-value]
    engines.register("plain")(lambda setup: None)  # type: ignore[arg-type, return-value]
    setting, override, precision = SETTINGS[feature]
    for name in ("able", "plain"):
        config = load_config("quickstart", ["plugins=['engines']", f"parallel.engine={name}", override])
        if name == "able":
            engines.check(config, precision)
            continue
        with pytest.raises(UsageError) as refused:
            engines.check(config, precision)
        assert str(refused.value).startswith(f"{setting}: parallel.engine = 'plain' does not declare {feature!r}")
        assert str(refused.value).endswith("or parallel.engine = 'able'")


def test_an_unknown_engine_or_feature() -> None:
    engines = EngineRegistry()
    with pytest.raises(UsageError, match=r"unknown engine 'other'"):
        engines.check(load_config("quickstart", ["plugins=['engines']", "parallel.engine=other"]), "fp32")
    with pytest.raises(UsageError, match=r"there is no 'zero'; there are: pp, cp, ep, fp16, "):
        engines.register("mine", features=["zero"])  # type: ignore[list-item]


def test_an_engine_without_a_member_is_refused() -> None:
    """Engines are refused when they are built, not at the step that needs the member."""
    engines = EngineRegistry()
    members = dict.fromkeys(set(vars(Engine)) - {"layer_statistics", "evaluate"})
    engines.register("half")(lambda setup: SimpleNamespace(**members))
    with pytest.raises(
        UsageError, match=r"^parallel.engine = 'half': SimpleNamespace lacks evaluate, layer_statistics "
    ):
        engines.build("half", None)  # type: ignore[arg-type]


IMAGES_UNDER_DEEPSPEED = {
    "two towers": ("clip-b16", [], r"objective.name = 'contrastive': parallel.engine = 'deepspeed' does not declare "
                   r"'compares_samples' among its features: set another objective, or parallel.engine = 'native'"),
    "two towers by a sigmoid": ("siglip-b16", [], "objective.name = 'contrastive': parallel.engine = 'deepspeed'"),
    "parts of maps": ("mvitv2-t", ["parallel.cp=2", "parallel.zero=1"], "parallel.cp = 2.*needs whole images on each"),
    "parts of windows": ("swinv2-t", ["parallel.cp=2", "parallel.zero=1"], "parallel.cp = 2.*needs whole images on"),
    "one head for two ranks": ("mvitv2-t", ["parallel.tp=2"], "parallel.tp = 2 does not divide model.attention"),
    "a pipeline of sharded gradients": ("llava-1.5-7b", ["parallel.pp=2"], "set parallel.zero = 1, or parallel.pp = 1"),
    "replicas": ("llava-1.5-7b", ["parallel.dp_replicate=2"], "set parallel.dp_replicate = 1"),
    "compiled blocks": ("vit-b16", ["train.compile=true"], "set train.compile = false"),
}  # fmt: skip
READS_TEXT = ("clip-b16", "siglip-b16", "llava-1.5-7b")


@pytest.mark.parametrize(
    ("preset", "overrides", "message"), IMAGES_UNDER_DEEPSPEED.values(), ids=IMAGES_UNDER_DEEPSPEED
)
def test_deepspeed_refuses_models_of_images_by_name(preset: str, overrides: list[str], message: str) -> None:
    base = ["data.tokenizer=t"] if preset in READS_TEXT else []
    with pytest.raises(UsageError, match=message):
        ENGINES.check(load_config(preset, [*base, "parallel.engine=deepspeed", *overrides]), "fp32")
