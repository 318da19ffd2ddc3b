"""Pages are true: commands parse, configs load, links lead somewhere, and the examples run."""

import argparse
import importlib
import importlib.util
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import tomli_w

from megatfm.config import Config, EvaluationTaskConfig, ParallelConfig, find_config, list_presets, load_section
from megatfm.config.foreign_keys import FOREIGN_KEYS
from megatfm.config.prep import READ_FORMATS, PrepConfig
from megatfm.config.section import list_sections
from megatfm.config.sources import list_model_presets
from megatfm.config.validation_errors import find_keys
from megatfm.layers.moe import ROUTERS
from tests.support.documentation import FENCE, PAGES, ROOT, list_code_blocks, load_module

OFF_SITE = {"LOG.md"}
"""Kept in the repository, and no page of the manual."""
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
GENERATED = {"config.md": Config, "prep.md": PrepConfig}
COMMANDS_PAGE = "commands.md"
PYTHON_PAGE, PARTS_PAGE = "python.md", "parts.md"
MADE = (*GENERATED, COMMANDS_PAGE, PYTHON_PAGE, PARTS_PAGE)
"""Pages of the reference that say where to look in the repository, and are complete in the manual."""


def commands(program: str) -> list[Any]:
    """The lines of console blocks that run a program; a line that is cut short goes on in the next."""
    lines = []
    for page, _, text in list_code_blocks("console"):
        for line in text.replace("\\\n", " ").replace("\n-", " -").splitlines():
            if line.split()[:1] == [program]:
                lines.append(pytest.param(line, id=f"{page.name}: {line}"))
    return lines


def inline_commands() -> list[Any]:
    """Whole commands in running text, such as `megatfm launch quickstart --slurm`."""
    actual = []
    for page in PAGES:
        prose = FENCE.sub("", page.read_text(encoding="utf-8"))
        for line in (" ".join(text.split()) for text in re.findall(r"`(megatfm [a-z]+ [^`]+)`", prose)):
            # Those with placeholders such as CONFIG or N, or short of arguments, only name a command.
            if not re.search(r"\b[A-Z]+\b|…", line) and len(line.split()) > 3:
                actual.append(pytest.param(line, id=f"{page.name}: {line}"))
    return actual


@cache
def build_parser() -> argparse.ArgumentParser:
    """The command line, built once."""
    return importlib.import_module("megatfm.cli").build_parser()


@pytest.mark.parametrize("line", commands("megatfm") + inline_commands())
def test_commands_parse(line: str) -> None:
    arguments = build_parser().parse_args(shlex.split(line, comments=True)[1:])
    if overrides := getattr(arguments, "overrides", ()):
        kind, preset = (PrepConfig, "quickstart-data") if " prep " in line else (Config, "quickstart")
        named = getattr(arguments, "config", "")
        load_section(kind, named if named in list_presets() else preset, overrides)


@pytest.mark.parametrize("line", commands("make"))
def test_make_targets_in_docs_exist(line: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^{re.escape(line.split()[1])}:", makefile, re.MULTILINE)


def overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """One config file laid over another."""
    tables = {key: value for key, value in below.items() if isinstance(value, Mapping) and key in above}
    return {**below, **above, **{key: overlay(value, above[key]) for key, value in tables.items()}}


CONFIGS = [
    pytest.param(page, text, id=f"{page.name}: {text[:30]!r}")
    for page, title, text in list_code_blocks("toml")
    if not title
]


@pytest.mark.parametrize(("page", "text"), CONFIGS)
def test_configs_load(page: Path, text: str, tmp_path: Path) -> None:
    values = tomllib.loads(text)
    is_prep = set(values) <= set(PrepConfig.model_fields)
    kind, preset = (PrepConfig, "quickstart-data") if is_prep else (Config, "quickstart")
    if "name" not in values and "out" not in values:
        values = overlay(tomllib.loads(find_config(preset)[0].read_text(encoding="utf-8")), values)
    path = tmp_path / "config.toml"
    path.write_text(tomli_w.dumps(values))
    load_section(kind, path)


def test_the_files_of_a_site_and_of_a_task_load(tmp_path: Path) -> None:
    blocks = {title: text for _, title, text in list_code_blocks("toml")}
    for title, path in (("slurm/site.toml", tmp_path / "site.toml"), ("questions.toml", tmp_path / "task.toml")):
        path.write_text(blocks[title])
    site = importlib.import_module("megatfm.launchers.slurm")
    assert site.load_site(tmp_path / "site.toml", {}).partition == "gpu"
    assert load_section(EvaluationTaskConfig, tmp_path / "task.toml").shots == 3


@cache
def anchors(page: Path) -> set[str]:
    """The headings of a page as the docs' theme and code hosts spell them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for match in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        target, _, anchor = (match[0] or match[1]).partition("#")
        if "://" in target:
            continue
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{page.name} links to {target}"
        result = path.parent.name == "reference" and path.name in MADE
        assert result or not anchor or anchor in anchors(path), f"{page.name} links to {target}#{anchor}"


@pytest.mark.parametrize("kind", GENERATED.values())
def test_the_reference_explains_every_key(kind: type[Config]) -> None:
    generator = load_module(ROOT / "docs" / "gen_reference.py")
    rows = [line.split(" | ") for line in generator.page("x", kind).splitlines() if line.startswith("| `")]
    keys = {row[0].removeprefix("| `").removesuffix("`") for row in rows}
    for name, field in kind.model_fields.items():
        sections = generator.sections(field)
        assert {name} <= keys or {key for section in sections for key in section.model_fields} <= keys
    for row in rows:
        assert len(row) == 4
        assert row[0] == "| `name`" or len(row[3]) > 10, f"{row[0]} says nothing"
        assert not re.search(r"<class|typing|annotation|Pydantic", row[1] + row[2]), row


def test_the_reference_spells_types_and_defaults() -> None:
    text = load_module(ROOT / "docs" / "gen_reference.py").page("x", Config)
    assert text.count('### `model.attention.pattern` with `name = "window"`') == 1, "once, whichever attention has it"
    anchors_of_page = re.findall(r"\{#([^}]+)\}", text)
    assert len(set(anchors_of_page)) == len(anchors_of_page)
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= set(anchors_of_page)
    for row in (
        "| `d_model` | integer > 0 ≤ 16,777,216 | required, e.g. `256` | Width of the residual stream. |",
        '| `tokenizer` | path | not set, e.g. `"corpora/quickstart/tokenizer.model"` |',
        "| `compile` | `true` or `false` or ",
        "| `min_lr_factor` | number ≥ 0 ≤ 1 | `0.1` |",
        '| `precision` | `"auto"` or `"fp32"` or `"bf16"` or `"fp16"` or `"fp64"` or `"fp8"` or ',
        '| `sinks` | list of text | `["tensorboard"]` |',
        '## `[optimizer]` with `name = "muon"`',
    ):
        assert row in text


def test_every_command_and_flag_is_explained() -> None:
    cli = importlib.import_module("megatfm.cli")
    text = load_module(ROOT / "docs" / "gen_commands.py").page(build_parser())
    headings = re.findall(r"^## `megatfm ([\w -]+)`\n\n\S", text, re.MULTILINE)
    assert {heading.split()[0] for heading in headings} == set(cli.COMMANDS)
    assert {"data check", "data show", "config show", "config schema"} <= set(headings)
    assert "\n\nWith `--slurm`:\n\n| Argument" in text, "options have their group's title"
    for row in (
        "| `--nproc N` | processes here",
        "| `--to {hf,megatfm,peft,moe}` |",
        "| `--dry-run` | print what",
        "| `key=value …` | for example",
    ):
        assert row in text
    assert not re.search(r"\| \|$|None|SUPPRESS", text, re.MULTILINE), "an argument says nothing"


def test_every_offer_of_the_package_is_in_the_reference() -> None:
    import megatfm

    text = load_module(ROOT / "docs" / "gen_python.py").page()
    for name in megatfm.__all__:
        assert name == "__version__" or f"## `megatfm.{name}`\n\n" in text
    for line in (
        "### `Model.generate`",
        "fit(config: Config | str | Path, *overrides: str)",
        "Train or resume a run in this process, as `megatfm train` does; return its run directory.",
    ):
        assert line in text


def test_every_registered_part_is_in_the_reference() -> None:
    module = load_module(ROOT / "docs" / "gen_parts.py")
    text = module.page()
    for key, registry in module.PARTS.items():
        rows = text.partition(f"## `{key}`")[2].partition("\n## ")[0]
        for name in registry._parts.keys() - registry._places.keys():  # plugins of other tests may be loaded, too
            assert re.search(rf"\| `{name}` \| \S.*\S \|", rows), (key, name)
        sections: list[Any] = [Config]
        for part in key.removesuffix(".NAME").split("."):
            sections = [section for section in sections if part in section.model_fields]
            assert sections, key
            sections = [variant for section in sections for variant in list_sections(section, part)]


def test_the_readme_counts_what_there_is() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    steps = importlib.import_module("megatfm.data_prep.filters.base")
    counts = {
        "presets": len(list_model_presets()),
        "input formats": len(READ_FORMATS),
        "cleaning steps": sum(map(len, steps._MODULES.values())),
        "routers": len(ROUTERS.names()),
    }
    assert {name: int(re.findall(rf"(\d+) {name}", text)[0]) for name in counts} == counts
    schedules = get_args(ParallelConfig.model_fields["pp_schedule"].annotation)
    assert ("(six schedules)" in text, len(schedules)) == (True, 6)


def test_the_page_on_mixtures_lists_their_presets() -> None:
    page = (ROOT / "docs/guide/moe.md").read_text(encoding="utf-8")
    listed = re.findall(r"`([\w.-]+)`", page.partition("\nPresets: ")[2].partition("[The glossary]")[0])
    files = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "megatfm/presets").glob("*.toml")}
    mixtures = {name for name, text in files.items() if re.search(r'(?m)^name = "moe"$', text)}
    mixtures |= {name for name, text in files.items() if set(re.findall(r'^extends = "(.*)"', text, re.M)) & mixtures}
    assert sorted(listed) == sorted(mixtures)


INTERNAL_REGISTRIES = {"ARCHITECTURES", "STYLES"}
"""Registries without a key of the config: formats of Hugging Face, and styles of a plan."""


def test_every_registry_is_among_those_that_a_plugin_can_use() -> None:
    """The table names each with its module, beside the key that the parts of the reference have."""
    page = (ROOT / "docs/extend/layers.md").read_text(encoding="utf-8")
    table = page.partition("## What a plugin can add")[2].partition("\n\nA component")[0]
    rows = re.findall(r"^\| `([\w.]+)`[^|]* \| `([\w.]+)\.([A-Z]+)` \|", table, re.MULTILINE)
    assert len(rows) == table.count("\n| `")
    by_key = {key: getattr(importlib.import_module(module), name) for key, module, name in rows}
    parts = load_module(ROOT / "docs/gen_parts.py").PARTS
    assert {key.removesuffix(".name"): registry for key, registry in parts.items()}.items() <= {
        key.removesuffix(".name"): registry for key, registry in by_key.items()
    }.items()
    defined = re.compile(r"^([A-Z]+)(?:: Registry\b.*)? = (?:Registry|EngineRegistry)\b", re.MULTILINE)
    files = [path for room in ("megatfm", "data_prep") for path in (ROOT / room).rglob("*.py")]
    registries = {name for path in files for name in defined.findall(path.read_text(encoding="utf-8"))}
    assert len(registries) > 15
    assert registries == {name for _, _, name in rows} | INTERNAL_REGISTRIES


NOT_KEYS = {"model.module", "model.layers.61", "tokenizer.model", "data.corpus"}
"""An attribute, weights, a file, and what the command line spells out."""
FOREIGN_PAGES = {"glossary.md", "deepspeed.md", "LOG.md", "CHANGELOG.md"}
"""Pages that name keys of other frameworks, or of the past."""


def key_paths(kind: type[Any], above: tuple[type[Any], ...] = ()) -> Iterator[str]:
    """Every path to a key or section, whichever variant has it."""
    for name in kind.model_fields:
        yield name
        for section in list_sections(kind, name):
            if section not in above:
                yield from (f"{name}.{path}" for path in key_paths(section, (*above, section)))


def test_keys_on_the_pages_are_keys() -> None:
    """Whole paths in backticks, alone or with a value; below `[model.extra_heads]` names are the user's."""
    known = {*key_paths(Config), *key_paths(PrepConfig)}
    sections = {path.partition(".")[0] for path in known}
    assert {"model.attention.pattern.width", "parallel.tp", "split.near_duplicates.n_grams"} <= known
    unknown = set()
    for page in PAGES:
        for key in re.findall(
            r"`\[{0,2}([a-z_]+(?:\.[a-z_0-9]+)+)\]{0,2}(?: ?=[^`]*)?`", page.read_text(encoding="utf-8")
        ):
            is_ours = key.partition(".")[0] in sections and page.name not in FOREIGN_PAGES
            if is_ours and key not in known | NOT_KEYS and not key.startswith("model.extra_heads."):
                unknown.add((page.name, key))
    assert not {(page, key) for page, key in unknown if not re.search(r"\.(py|toml|jsonl?|md|html)$", key)}


WORDS = {
    "gradient accumulation": ("guide/faq.md", "train.global_batch"),
    "batch size": ("guide/faq.md", "train.micro_batch"),
    "mixed precision": ("guide/parallelism.md", "train.precision"),
    "activation checkpointing": ("guide/parallelism.md", "train.recompute"),
    "gradient checkpointing": ("guide/parallelism.md", "train.recompute"),
    "flash attention": ("guide/faq.md", "scaled_dot_product_attention"),
    "ddp": ("guide/slurm.md", "parallel.zero=0"),
    "fsdp": ("guide/faq.md", "parallel.dp_shard"),
    "perplexity": ("guide/evaluation.md", "exp"),
    "mfu": ("guide/monitoring.md", "mfu_causal"),
    "fine-tuning": ("guide/hugging-face.md", "megatfm train --from"),
    "sweep": ("guide/monitoring.md", "megatfm compare"),
    "hyperparameter": ("guide/monitoring.md", "optimizer.lr"),
    "tensorboard": ("guide/faq.md", "pip install tensorboard"),
}


@pytest.mark.parametrize("word", WORDS)
def test_words_that_people_search_for_stand_where_they_are_answered(word: str) -> None:
    page, answer = WORDS[word]
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    paragraph = r"[^\n]*(?:\n[^\n]+)*\n*[^\n]*(?:\n[^\n]+)*"  # the word's, and the one after
    actual = [match[0] for match in re.finditer(rf"(?i){re.escape(word)}{paragraph}", text)]
    assert any(answer in item for item in actual) or (actual and answer in text), (word, page)


NAMES_OF_SEVERAL_THINGS = {
    "batch_size", "cp", "finetune", "from_pretrained", "load", "output", "resume_from_checkpoint", "rope", "save",
    "spec", "stage",
}  # fmt: skip
"""Names in the glossary's tables of keys for which an error can't tell the one key that is meant."""


def test_an_error_answers_every_key_of_the_glossary_with_ours() -> None:
    text = (ROOT / "docs" / "reference" / "glossary.md").read_text(encoding="utf-8")
    terms = text.partition("## Terms of the config")[2].partition("### Words of the log")[0]
    keys = text.partition("### Keys")[2].partition("### Differences")[0]
    our_keys_by_name: dict[str, set[str]] = {}
    for table, column in ((terms, 0), (keys, -1)):
        for line in table.splitlines():
            cells = line.strip("| ").split(" | ")
            our_keys = set(re.findall(r"`([a-z_]+(?:\.[a-z_]+)*)`", cells.pop(column))) if len(cells) > 3 else set()
            for word in re.findall(r"`(?:--)?([a-z0-9_-]+)[` ]", " ".join(cells)) if our_keys else ():
                our_keys_by_name.setdefault(word.replace("-", "_"), set()).update(our_keys)
    assert len(our_keys_by_name) > 150, "the tables were read"
    assert not [name for name in FOREIGN_KEYS if name not in text.replace("-", "_")]
    assert set().union(*our_keys_by_name.values()) >= set(FOREIGN_KEYS.values())
    for name, our_keys in our_keys_by_name.items():
        if name not in NAMES_OF_SEVERAL_THINGS and not any(key.rpartition(".")[2] == name for key in our_keys):
            assert our_keys.intersection(find_keys(name)), (name, our_keys, find_keys(name))


def test_the_extras_are_those_of_the_package() -> None:
    text = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    table = text.partition("## Extras")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(extras)


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    written = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert {f"reference/{name}" for name in MADE} <= written
    assert listed == written - OFF_SITE


def test_the_stations_of_a_batch_are_where_the_page_says() -> None:
    text = (ROOT / "docs" / "guide" / "concepts.md").read_text(encoding="utf-8")
    stations = re.findall(r"`(megatfm/[\w/]+\.py)`(?: `([\w.]+)`)?", text)
    assert len(stations) > 20
    for file, name in stations:
        target: Any = importlib.import_module(file.removesuffix(".py").replace("/", "."))
        for part in name.split(".") if name else []:
            target = getattr(target, part)


DEFINITION = re.compile(r"^(?: *(?:async )?(?:class|def) )?(\w+)(?:\[.*\])?(?:\(| = |:)", re.MULTILINE)
"""A class, a function, or an alias of a type."""


def glossary_terms(text: str) -> list[str]:
    """The code in the first two columns of the glossary's tables: what the package is said to have."""
    rows = [line.split(" | ")[:2] for line in text.splitlines() if line.startswith("| ")]
    return [name for row in rows for cell in row for name in re.findall(r"`([A-Z]\w+)`", cell)]


def test_names_in_the_glossary_exist() -> None:
    terms = glossary_terms((ROOT / "docs" / "reference" / "glossary.md").read_text(encoding="utf-8"))
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "megatfm").rglob("*.py")]
    defined = {name for source in sources for name in DEFINITION.findall(source)}
    assert len(terms) > 20
    assert not set(terms) - defined
    assert glossary_terms("| `Judge`, plan | as `Verdict` says | `DeviceMesh` |") == ["Judge", "Verdict"]
    assert not {"Judge", "Verdict"} & defined


def test_the_log_of_experiments_has_the_newest_first() -> None:
    log = (ROOT / "docs/LOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"(?m)^## (.*)", log)
    dates = [heading[:10] for heading in headings]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", date) for date in dates), headings
    assert dates == sorted(dates, reverse=True)


def test_percentages_are_spelled_with_a_space() -> None:
    """`24.3 %`, as in config values and on all pages, never Python's `24.3%`."""
    spelled = re.compile(r"\{[^{}]*:[^{}]*%\}|\}%")
    rooms = ("megatfm", "data_prep", "launchers", "slurm", "benchmarks")
    files = [path for room in rooms for path in (ROOT / room).rglob("*.py")]
    assert spelled.search('f"{share:<13.1%}"')
    assert not [path for path in files if spelled.search(path.read_text(encoding="utf-8"))]
    assert not [page for page in PAGES if re.search(r"\d%", page.read_text(encoding="utf-8"))]
