"""Every pattern under every layout, engine and compiled: refused in one line with the way out, or compared with one
device in a test of its own."""

import itertools
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from megatfm.config import ModelConfig, ParallelConfig
from megatfm.config.objective import CausalObjective, MaskedObjective
from megatfm.errors import UsageError
from megatfm.layers.attention.patterns import PATTERNS
from megatfm.models import build
from megatfm.parallel.cp_plans import check_context_plans
from megatfm.parallel.tp_plans import match_styles
from megatfm.train.build import plan_pipeline_split
from tests.support.context_parity import (
    BIASED_PATTERNS,
    CONTEXT_MODELS,
    CONTEXT_MODELS_BY_RANKS,
    DECODER,
    DECODER_PATTERNS,
    ENCODER,
    ENCODER_PATTERNS,
    LATENT_MODEL,
    SMALL_MOE,
    attention_kinds,
    context_layouts_of,
    use_one_block_of_each_kind,
)
from tests.support.layouts import traffic_config
from tests.support.pattern_models import PATTERN_MODELS

SHARED = ("linformer_headwise", "linformer_both", "linformer_all")
"""Which sketches are shared is nothing to a layout."""
OF_ENCODERS = {name: kind for name, kind in ENCODER_PATTERNS.items() if name not in SHARED}
MODELS: dict[str, dict[str, Any]] = {
    f"{family}, {name}": use_one_block_of_each_kind(base, {name: kind})
    for family, base, kinds_of in (
        ("decoder", DECODER, DECODER_PATTERNS),
        ("encoder", ENCODER, OF_ENCODERS),
        ("latent", LATENT_MODEL, {name: DECODER_PATTERNS[name] for name in ("window", "bigbird")}),
        ("alibi", {**DECODER, "position.name": "alibi"}, {"window": BIASED_PATTERNS["window"]}),
        ("t5 positions", {**DECODER, "position.name": "t5"}, {"full": BIASED_PATTERNS["full"]}),
    )
    for name, kind in kinds_of.items()
}
WAYS: dict[str, dict[str, Any]] = {
    "zero": {"dp_shard": 2}, "tp": {"tp": 2}, "pp": {"pp": 2}, "cp": {"cp": 2},
    "cp by heads": {"cp": 2, "cp_method": "ulysses"}, "ep": {"ep": 2, "dp_shard": 2},
    "deepspeed": {"engine": "deepspeed", "zero": 1}, "deepspeed, cp": {"engine": "deepspeed", "zero": 1, "cp": 2},
    "compiled": {},
}  # fmt: skip
REFUSED = {
    "compiled": r"pattern\.name = 'bigbird' draws random blocks .*: leave train\.compile out, or set "
    r".*n_random_blocks = 0"
}
AXES = {"zero": "dp_shard", "tp": "tp", "pp": "pp", "cp": "cp", "cp by heads": "cp", "ep": "ep"}


def is_refused(name: str, way: str) -> bool:
    return way == "compiled" and name.endswith("bigbird")


def accept(sections: dict[str, Any], way: str) -> None:
    """All that is asked of a model and a layout before ranks meet."""
    parallel = ParallelConfig(**{"dp_shard": 1, **WAYS[way]})
    if parallel.ep > 1:
        dense = {key: value for key, value in sections.items() if not key.startswith("ffn.")}
        sections = {**dense, "ffn": SMALL_MOE}
    model = ModelConfig.from_dotted(**sections)
    objective = MaskedObjective() if model.family == "encoder" else CausalObjective()
    config = traffic_config(model, objective, parallel.model_copy(update={"engine": "native"}))
    changed = {"precision": "fp32", "compile": way == "compiled"}
    sections = config.model_dump() | {"parallel": parallel.model_dump()}
    type(config).model_validate({**sections, "train": {**config.train.model_dump(), **changed}})
    with torch.device("meta"):
        built = build(config.model)
    match_styles(built, complete=parallel.tp > 1)
    if parallel.cp > 1:
        check_context_plans(built)
    if parallel.pp > 1:
        plan_pipeline_split(config, built)


@cache
def proven(way: str) -> set[tuple[str, ...]]:
    """Kinds of attention that tests compare with one device in this way."""
    return set(_proven(way))


def _proven(way: str) -> Iterator[tuple[str, ...]]:
    for ranks, names in CONTEXT_MODELS_BY_RANKS.items():
        for name in names:
            for parallel in context_layouts_of(name, ranks).values():
                if getattr(parallel, AXES[way]) > 1:
                    yield from attention_kinds(CONTEXT_MODELS[name])
    if way in ("zero", "tp", "pp"):
        for sections in PATTERN_MODELS.values():
            yield from attention_kinds(ModelConfig.from_dotted(sections))


@pytest.mark.parametrize(("name", "way"), list(itertools.product(MODELS, WAYS)))
def test_a_pattern_is_refused_or_compared(name: str, way: str) -> None:
    sections = MODELS[name]
    if is_refused(name, way):
        with pytest.raises((UsageError, ValidationError)) as caught:
            accept(sections, way)
        assert re.search(REFUSED[way], str(caught.value))
        return
    accept(sections, way)
    if way == "ep":  # which positions there are is nothing to experts
        sections = {key: value for key, value in sections.items() if not key.startswith("position")}
    of_attention = {kind for kind in attention_kinds(ModelConfig.from_dotted(**sections)) if kind[0] == "attention"}
    if way in AXES:
        assert of_attention <= proven(way)


def test_every_pattern_is_here() -> None:
    actual = {
        ModelConfig.from_dotted(**sections).layer_config(0).attention.pattern.name for sections in MODELS.values()
    }
    shipped = {name for name in PATTERNS.names() if PATTERNS.get(name).__module__.startswith("megatfm.")}
    # Windows of maps are for images alone; other tests may have imported them.
    assert shipped - {"windows_2d"} <= actual
