"""Rows that are cut over ranks: which models and objectives are carried, and what the others are told."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import pytest
import torch
from pydantic import ValidationError

from megatfm.config import Config, ModelConfig, ParallelConfig, objective
from megatfm.config.objective import CausalObjective, MaskedObjective
from megatfm.config.stages import IMAGE_OBJECTIVES
from megatfm.errors import UsageError
from megatfm.layers.attention.patterns import PATTERNS, AttentionPattern
from megatfm.layers.attention.patterns.bigbird import BigBird
from megatfm.layers.attention.patterns.local import Chunked, Longformer, Window
from megatfm.layers.attention.patterns.mask import PatternMask, find_global_queries, find_reachable_keys
from megatfm.layers.sequence import SequenceMetadata
from megatfm.models import build
from megatfm.objectives import OBJECTIVES
from megatfm.parallel.context_parallel import ContextParallel, compute_token_indices, make_zigzag_predicate, split_batch
from megatfm.parallel.cp_plans import check_context_plans
from megatfm.parallel.tp_plans import match_styles
from megatfm.train.build import plan_pipeline_split
from megatfm.verify.shrink import draw_batch
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
from tests.support.expert_parity import EXPERT_MODELS
from tests.support.image_models import IMAGE_MODELS, image_model_batch
from tests.support.image_text_models import TOWER_MODELS
from tests.support.layouts import traffic_config
from tests.support.models import FAMILY_MODELS, PATTERN_MODELS


def shipped(value: object) -> bool:
    """Whether it is the section of one of megatfm's objectives."""
    return isinstance(value, type) and value.__module__ == objective.__name__ and "name" in value.model_fields


@dataclass(frozen=True)
class FakeContextParallel:
    """Stands for `ContextParallel`, on one of several ranks."""

    rank: int
    size: int
    folded: bool

    def token_indices(self, length: int) -> list[torch.Tensor]:
        return [*compute_token_indices(length, self.size, self.folded)]


class SumOverTokens(torch.nn.Module):
    """Declares how it sums over tokens, and has no submodule for it."""

    cp_plan = "all_reduce"


def test_sums_over_tokens_need_the_submodule_that_ranks_share() -> None:
    model = build(next(iter(FAMILY_MODELS.values())))
    model.sums = SumOverTokens()
    with pytest.raises(UsageError, match=r"SumOverTokens \(sums\).*self.all_reduce = nn.Identity"):
        check_context_plans(model)
    model.sums.all_reduce = torch.nn.Identity()
    check_context_plans(model)


def test_every_model_is_compared_with_one_device() -> None:
    models = {
        **FAMILY_MODELS,
        **{name: ModelConfig.from_dotted(**model) for name, model in PATTERN_MODELS.items()},
        **EXPERT_MODELS,
    }
    compared = set().union(*map(attention_kinds, [*CONTEXT_MODELS.values(), EXPERT_MODELS["switch"]]))
    for name, config in models.items():
        if config.family == "hierarchical":
            continue
        with torch.device("meta"):
            check_context_plans(build(config))
        assert attention_kinds(config) <= compared, name


@pytest.mark.parametrize("name", ["swin", "mvit v2", "simmim swin"])
def test_hierarchical_models_need_full_rows(name: str) -> None:
    with torch.device("meta"):
        model = build({**FAMILY_MODELS, **IMAGE_MODELS}[name])
    reason = "needs full rows, because stages merge or pool neighbouring patches"
    with pytest.raises(UsageError, match=rf"parallel\.cp > 1: PyramidStack \(.*\) {reason}"):
        check_context_plans(model)


@pytest.mark.parametrize("model_name", ["class", "mean", "attention", "rotary", "mae", "simmim", *TOWER_MODELS])
def test_image_models_without_such_modules_pass_the_check(model_name: str) -> None:
    with torch.device("meta"):
        check_context_plans(build((IMAGE_MODELS | TOWER_MODELS)[model_name]))


def test_modules_that_need_whole_rows_are_refused_by_name() -> None:
    with torch.device("meta"):
        model = build(FAMILY_MODELS["bert"].with_changes({"extra_heads": {}}))
    model.get_submodule("encoder.layers.0.ffn").cp_plan = None  # type: ignore[assignment]
    with pytest.raises(UsageError) as error:
        check_context_plans(model)
    (line,) = str(error.value).splitlines()
    assert line.startswith("parallel.cp > 1: FFN (encoder.layers.0.ffn) needs full rows")
    assert "use parallel.cp = 1 with dp_shard, tp or pp, or another part" in line


FAMILY = {
    "permutation": "xlnet", "replaced_token": "electra", "span_corruption": "t5", "ul2": "t5", "causal": "llama",
    "answers": "llama", "prefix": "llama",
}  # fmt: skip
"""Others train a BERT."""
SECTIONS = {section.model_fields["name"].default: section for section in vars(objective).values() if shipped(section)}


def small(name: str) -> Config:
    """A config that trains a model by an objective."""
    heads = {
        "span_boundary": {"boundary": {}},
        "next_sentence": {"sentence": {}},
        "sentence_order": {"sentence": {}},
        "text_classification": {"sentence": {"name": "text_classifier", "classes": 3}},
    }
    model = FAMILY_MODELS[FAMILY.get(name, "bert")]
    model = model.with_changes(
        {"extra_heads": heads.get(name, {}), "position.max_positions": 24} if name not in FAMILY else {}
    )
    return traffic_config(model, SECTIONS[name](), ParallelConfig(dp_shard=1))


# Objectives of images and of labelled texts have other models, and tests of their own.
OTHER_MODELS = {
    *IMAGE_OBJECTIVES, "answers", "contrastive", "image_to_text", "multiple_choice", "preference", "span_extraction",
}  # fmt: skip
OTHER_MODELS |= {"text_classification"}


@pytest.mark.parametrize("name", [
    name
    for name in OBJECTIVES.names()
    if OBJECTIVES.get(name).__module__.startswith("megatfm.") and name not in OTHER_MODELS
])  # fmt: skip
def test_every_objective_s_fields_are_cut_token_by_token(name: str) -> None:
    config = small(name)
    batch = {field: torch.from_numpy(values) for field, values in draw_batch(config).items()}
    with torch.device("meta"):
        model = build(config.model)
    check_context_plans(model)
    compare_cuts(batch, folded=make_zigzag_predicate(model)(config.data.sequence_length))


@pytest.mark.parametrize("model_name", ["class", "mae", "simmim"])
def test_rows_of_images_are_cut_token_by_token(model_name: str) -> None:
    compare_cuts(image_model_batch(model_name), folded=False)


def compare_cuts(batch: dict[str, torch.Tensor], *, folded: bool) -> None:
    """The parts of three ranks, put in order of their token indices, are the batch."""
    parts = [split_batch(batch, cast(ContextParallel, FakeContextParallel(rank, 3, folded))) for rank in range(3)]
    for field, values in batch.items():
        side = "encoder_" if field.startswith("encoder_") else ""
        if values.dim() == 1:
            assert all(torch.equal(part[field], values) for part in parts)
            continue
        joined = torch.cat([part[field] for part in parts], 1)
        order = torch.cat([part[f"{side}token_indices"] for part in parts]).argsort()
        assert torch.equal(joined[:, order], values), field


def test_a_field_that_is_not_one_a_token_is_refused() -> None:
    batch = {"positions": torch.arange(8).expand(2, -1), "patches": torch.zeros(2, 5, 3)}
    with pytest.raises(UsageError, match=r"'patches' \[2, 5, 3\] does not have one value for each of 8 tokens"):
        split_batch(batch, cast(ContextParallel, FakeContextParallel(0, 2, folded=False)))


@pytest.mark.parametrize("folded", [False, True])
def test_rows_are_dealt_whole_and_evenly(folded: bool) -> None:
    for length, ranks, unit in ((24, 2, 1), (25, 3, 1), (26, 3, 2), (64, 4, 4)):
        dealt = compute_token_indices(length, ranks, folded, unit)
        assert torch.equal(torch.cat(dealt).sort().values, torch.arange(length))
        sizes = [len(item) for item in dealt]
        assert max(sizes) - min(sizes) <= (1 + folded) * unit
        assert all(size % unit == 0 for size in sizes)
        pairs = [int((item + 1).sum()) for item in dealt]
        if folded and length % (2 * ranks) == 0:
            assert len(set(pairs)) == 1, "causal attention is equally much on all"


def test_rows_are_folded_where_later_tokens_see_more() -> None:
    folded = set()
    for name, sections in PATTERN_MODELS.items():
        with torch.device("meta"):
            if make_zigzag_predicate(build(ModelConfig.from_dotted(sections)))(24):
                folded.add(name)
    assert folded == {
        "alternating", "strided", "fixed", "compressed", "local, compressed and experts",
        "linformer of an encoder-decoder",
    }  # fmt: skip


def test_windows_as_wide_as_the_row_are_dealt_evenly() -> None:
    """Full attention: in runs, the last of c ranks had (2c − 1) / c of the mean."""
    base = {"vocab_size": 31, "d_model": 16, "n_layers": 1, "attention.n_heads": 2, "ffn.d_ff": 16}
    for section in ({"name": "window", "width": 256}, {"name": "chunked", "size": 256}):
        with torch.device("meta"):
            model = build(ModelConfig.from_dotted(**base, **{"attention.pattern": section}))
        assert [make_zigzag_predicate(model)(length) for length in (32, 256, 257, 512)] == [True, True, False, False]
        is_folded_at = make_zigzag_predicate(model)
        for ranks in (2, 3, 5, 8):
            pairs = {int((indices + 1).sum()) for indices in compute_token_indices(240, ranks, is_folded_at(240))}
            assert len(pairs) == 1, (section, ranks)


def test_a_row_that_is_too_short_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"a row of 3 tokens can't be cut into 4 chunks of at least 1 for parallel\.cp = 2"
    ):
        compute_token_indices(3, 2, is_zigzag=True)


@pytest.mark.parametrize("pattern", [
    Window(31, 31), Chunked(24, causal=True), BigBird(8, 2, 0, 2), BigBird(8, 1, 5, 2),
    BigBird(8, 2, 0, 2, causal=True), Longformer(16, (0, 3)),
], ids=repr)  # fmt: skip
def test_fetched_keys_do_not_grow_with_the_row(pattern: AttentionPattern) -> None:
    """Nor the number of queries that are sent; and every key that a query sees is fetched, or the query is sent."""
    sent = []
    for length in (384, 768):
        row, dealt = SequenceMetadata(torch.arange(length)[None]), compute_token_indices(length, 4, is_zigzag=False)
        wide = find_global_queries(pattern.simplify(length), row, dealt)
        fetched = [find_reachable_keys(pattern.simplify(length), row, item) for item in dealt]
        sent.append((len(wide), [len(actual) - length // 4 for actual in fetched]))
        mask = PatternMask(pattern, row, 0, 2).mask()
        assert mask is not None
        for item, actual in zip(dealt, fetched, strict=True):
            narrow = item[~torch.isin(item, wide)]
            is_fetched = mask[0][:, narrow].any(0).any(0)
            assert set(is_fetched.nonzero()[:, 0].tolist()) <= set(actual.tolist())
    assert sent[0] == sent[1]
    assert max(sent[0][1]) < 384 * 3 // 4, "less than all"


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
