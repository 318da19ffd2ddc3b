"""The tables of docs/internals/tested-layouts.md, model × layout, from the cases of tests/parity.

`python -m tests.support.layout_table` writes them anew.

Nothing is written down here about what works: a cell has a tick because a case of that name is run by the suite, which
fails if a gradient differs (many by `make test-all` alone); it is empty where there is no such case.
"""

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from megatfm.config import Config, ParallelConfig
from tests.parity import test_deepspeed, test_pipelines
from tests.support.context_parity import CONTEXT_LAYOUTS, CONTEXT_MODELS, CONTEXT_MODELS_BY_RANKS, context_layouts_of
from tests.support.deepspeed_runs import list_family_layouts, make_stage_cases
from tests.support.expert_parity import (
    CONTEXT_EXPERT_MODELS,
    EXPERT_CASES,
    EXPERT_CONTEXT_LAYOUTS,
    EXPERT_PIPELINE_LAYOUTS,
    EXPERT_TP_LAYOUTS,
    EXPERT_TP_MODELS,
    SCHEDULED_MODELS,
    expert_layouts_of,
)
from tests.support.image_models import LAYOUTS, is_compared
from tests.support.image_text_models import LLAVA_LAYOUTS, LLAVA_MODELS, TOWER_LAYOUTS, TOWER_MODELS
from tests.support.layouts import FAMILY_LAYOUTS
from tests.support.models import FAMILY_NAMES

PAGE = Path(__file__).parents[2] / "docs" / "internals" / "tested-layouts.md"
BEGIN, END = "<!-- made by tests/support/layout_table.py -->", "<!-- end -->"
BEGIN_CONTEXTS = "<!-- rows that are cut, made by tests/support/layout_table.py -->"
BEGIN_IMAGES = "<!-- models of images, made by tests/support/layout_table.py -->"
BEGIN_DEEPSPEED = "<!-- stages under DeepSpeed, made by tests/support/layout_table.py -->"
TICK = "✓"
IMAGE_ROWS = {
    "class": "vit, class token and a register", "mean": "vit, class token and mean pool",
    "attention": "vit, attention pool", "rotary": "vit, 2-D rotary", "mae": "masked autoencoder",
    "simmim": "vit, simmim", "simmim swin": "swin, simmim",
}  # fmt: skip
"""Model of tests/support/image_models.py → its name in the table."""
TOWER_ROWS = {name: f"two towers, {name}" for name in TOWER_MODELS}
LLAVA_ROWS = {name: f"vision-language, {name}" for name in LLAVA_MODELS}
"""Models of tests/support/image_text_models.py → their names."""
ModelsByLayout = dict[str, set[str]]
"""Layout → models."""


def layout_name(parallel: ParallelConfig) -> str:
    """Name a layout: "pp2 zbv × tp2"."""
    words = []
    if parallel.pp > 1:
        words.append(f"pp{parallel.pp} {parallel.pp_schedule}")
    if parallel.dp_replicate > 1:
        words.append("replicas")
    if parallel.ep > 1:
        words.append(
            f"ep{parallel.ep}" + (f" of {parallel.expert_mesh_size}" if parallel.expert_mesh_size > parallel.ep else "")
        )
    if parallel.dp_shard > 1:
        words.append(f"zero{parallel.zero}")
    if parallel.cp > 1:
        way = {"auto": "", "ring": " by a ring", "ulysses": " by Ulysses"}[parallel.cp_method]
        words.append(f"cp{parallel.cp}{way}")
    if parallel.tp > 1:
        way = {"by_expert": "", "by_channel": " by channels", "folded": " folded"}[parallel.expert_tp]
        words.append(f"tp{parallel.tp}{way}" + ("" if parallel.sequence_parallel else " without sequence parallel"))
    return " × ".join(words)


def list_covered_layouts() -> ModelsByLayout:
    """Layouts and models that the cases compare with one device."""
    actual: ModelsByLayout = defaultdict(set)
    for layouts in FAMILY_LAYOUTS.values():
        for parallel in layouts.values():
            actual[layout_name(parallel)] |= set(FAMILY_NAMES)
    for models, parallel in list_pipeline_cases():
        actual[layout_name(parallel)] |= set(models)
    for model, ranks in EXPERT_CASES:
        for parallel in expert_layouts_of(ranks).values():
            if parallel.grad_accumulation == "unsharded" and max(parallel.dp_shard, ranks) > 1:
                actual[layout_name(parallel)].add(f"experts, {model}")
    for model, ranks in EXPERT_TP_MODELS:
        for parallel in EXPERT_TP_LAYOUTS[ranks].values():
            actual[layout_name(parallel)].add(f"experts, {model}")
    for models, layouts in (
        (SCHEDULED_MODELS, EXPERT_PIPELINE_LAYOUTS),
        (CONTEXT_EXPERT_MODELS, EXPERT_CONTEXT_LAYOUTS),
    ):
        for parallel in layouts.values():
            actual[layout_name(parallel)] |= {f"experts, {model}" for model in models}
    return actual


def list_pipeline_cases() -> Iterator[tuple[Sequence[str], ParallelConfig]]:
    """The models and layouts that the tests of pipelines ask `check` to compare; asked of the tests themselves."""
    comparisons: list[tuple[Sequence[str], ParallelConfig]] = []

    def note(workers: object, ranks: int, models: Sequence[str], parallel: ParallelConfig, **_: Any) -> None:
        comparisons.append((models, parallel))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_pipelines, "check", note)
        for name, test in vars(test_pipelines).items():
            if name.startswith("test_") and "check" in getattr(test, "__code__", note.__code__).co_names:
                for case in list_cases(test):
                    test(None, **case)
    yield from comparisons


def list_cases(test: Any) -> Iterator[dict[str, Any]]:
    """The arguments of each case of a parametrised test."""
    choices = []
    for mark in getattr(test, "pytestmark", ()):
        if mark.name == "parametrize":
            names, values = mark.args
            names = names.split(",") if isinstance(names, str) else names
            choices.append([dict(zip(names, case_values(v, len(names)), strict=True)) for v in values])
    for item in product(*choices):
        yield {key: value for part in item for key, value in part.items()}


def case_values(case: Any, count: int) -> Sequence[Any]:
    """Return the values of a case, with or without marks."""
    return case.values if isinstance(case, ParameterSet) else case if count > 1 else (case,)


def format_table(kind: str, columns: Sequence[str], rows: Iterable[tuple[str, list[str]]]) -> str:
    """A table of Markdown whose rows are of a kind."""
    lines = [(kind, columns), *rows]
    head, *body = (f"| {name} | {' | '.join(cells)} |" for name, cells in lines)
    return "\n".join([head, "|---" * (len(columns) + 1) + "|", *body])


def mark(are_compared: Iterable[bool]) -> list[str]:
    return [TICK if is_compared else "" for is_compared in are_compared]


def make_table() -> str:
    """Rows are layouts, columns models."""
    actual = list_covered_layouts()
    models = list(dict.fromkeys([*FAMILY_NAMES, *sorted(set().union(*actual.values()))]))
    rows = ((layout, mark(model in compared for model in models)) for layout, compared in actual.items())
    return format_table("Layout", models, rows)


def make_context_table() -> str:
    """Rows are models, columns layouts whose rows are cut."""
    layouts = [(ranks, layout_name(p)) for ranks, layout_of in CONTEXT_LAYOUTS.items() for p in layout_of.values()]
    rows = []
    for model in CONTEXT_MODELS:
        layouts_of_model = {
            (ranks, layout_name(p))
            for ranks, models in CONTEXT_MODELS_BY_RANKS.items()
            for p in context_layouts_of(model, ranks).values()
            if model in models
        }
        rows.append((model, mark(layout in layouts_of_model for layout in layouts)))
    return format_table("Model", [name for _, name in layouts], rows)


def list_image_cases() -> Iterator[tuple[str, str]]:
    """Rows and layouts that the tests of models of images compare."""
    for layouts_by_ranks, rows in ((LAYOUTS, IMAGE_ROWS), (TOWER_LAYOUTS, TOWER_ROWS), (LLAVA_LAYOUTS, LLAVA_ROWS)):
        for model, row in rows.items():
            for ranks, layouts in layouts_by_ranks.items():
                for parallel in layouts.values() if ranks > 1 else ():
                    if is_compared(model, parallel):
                        yield row, layout_name(parallel)


def make_image_table() -> str:
    """Rows are models with images, columns the layouts under which any of them is compared."""
    compared = [*list_image_cases()]
    layouts = [*dict.fromkeys(layout for _, layout in compared)]
    rows = dict.fromkeys(row for row, _ in compared)
    return format_table(
        "Model", layouts, ((row, mark((row, layout) in compared for layout in layouts)) for row in rows)
    )


def list_deepspeed_cases() -> Iterator[Config]:
    """The configs whose steps under DeepSpeed are compared with one device's and the native engine's."""
    for _, cases in (test_deepspeed.SOME | test_deepspeed.EXTENDED | test_deepspeed.MORE).values():
        yield from cases
    for family, layout in list_family_layouts():
        yield from make_stage_cases(family, layout, "adamw")


def deepspeed_layout_name(parallel: ParallelConfig) -> str:
    """Name a layout without its stage: "pp2 zbv × dp2"."""
    sizes = {"pp": parallel.pp, "ep": parallel.ep, "cp": parallel.cp, "tp": parallel.tp, "dp": parallel.dp_shard}
    words = [f"{axis}{size}" for axis, size in sizes.items() if size > 1]
    schedule = f" {parallel.pp_schedule}" if parallel.pp > 1 else ""
    return " × ".join([words[0] + schedule, *words[1:]])


def make_deepspeed_table() -> str:
    """Rows are models, columns layouts, cells the stages of ZeRO that are compared."""
    stages: dict[tuple[str, str], set[int]] = defaultdict(set)
    for config in list_deepspeed_cases():
        stages[config.name, deepspeed_layout_name(config.parallel)].add(config.parallel.zero)
    layouts = [*dict.fromkeys(layout for _, layout in stages)]
    rows = dict.fromkeys(row for row, _ in stages)
    cells = {row: [", ".join(map(str, sorted(stages.get((row, name), ())))) for name in layouts] for row in rows}
    return format_table("Model", layouts, cells.items())


def renew_page(text: str) -> str:
    """The page with the tables as they should be."""
    for begin, result in (
        (BEGIN, make_table()),
        (BEGIN_CONTEXTS, make_context_table()),
        (BEGIN_IMAGES, make_image_table()),
        (BEGIN_DEEPSPEED, make_deepspeed_table()),
    ):
        before, _, old = text.partition(f"{begin}\n")
        text = f"{before}{begin}\n\n{result}\n\n{END}{old.partition(END)[2]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(renew_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.exit(0)
