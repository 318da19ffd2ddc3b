"""Pages under Extend are true: their examples run, and their methods are those of the interfaces."""

import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megatfm.config import Config, load_section
from megatfm.config.prep import PrepConfig
from megatfm.data.sequences import DocumentChunk
from megatfm.engines.interface import Engine
from megatfm.layers.attention.patterns.pattern import AttentionPattern, BlockBounds
from megatfm.layers.initialisation import initialise
from megatfm.layers.loss_terms import BlockOutput
from megatfm.layers.position import PositionEncoding
from megatfm.models import Model, build
from megatfm.objectives import Objective
from megatfm.registry import import_plugins
from megatfm.tracking.metrics import MetricsLog, RunInfo
from megatfm.verify.shrink import draw_batch, objective_for
from tests.support.documentation import FENCE, ROOT, list_code_blocks, load_module


def follow(page: str, folder: Path) -> None:
    """Write the files of a page."""
    for path, title, text in list_code_blocks("python"):
        if path.name == page and title:
            (folder / title).write_text(text, encoding="utf-8")


@pytest.mark.parametrize(("part", "option", "test", "kind", "count"), [
    ("norm", "scale_norm", "test_scale_norm_is_its_formula", "ScaleNorm", 3),
    ("position", "kerple", "test_kerple_is_its_formula", "Kerple", 1),
])  # fmt: skip
def test_adding_a_part_works_as_its_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, option: str, test: str, kind: str, count: int
) -> None:
    """Its own test passes, and a model of the quickstart has it and learns its parameters."""
    follow("layers.md", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    options = [
        f'plugins=["my_{part}"]', f"model.{part}.name={option}", "model.vocab_size=32", "model.n_layers=1",
    ]  # fmt: skip
    config = load_section(Config, "quickstart", options)
    import_plugins(config.plugins)
    getattr(load_module(tmp_path / f"test_my_{part}.py"), test)()
    model = build(config.model)
    initialise(model, seed=0)
    parts = [module for module in model.modules() if type(module).__name__ == kind]
    assert len(parts) == count
    tokens = torch.arange(8).view(1, 8)
    model(tokens, targets=tokens.roll(-1, 1)).losses["causal"].backward()
    grads = [parameter.grad for part in parts for parameter in part.parameters()]
    assert all(grad is not None and grad.abs().sum() > 0 for grad in grads)


def test_adding_an_objective_works_as_its_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    follow("tasks.md", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    options = ["model.vocab_size=96", "model.n_layers=1", "data.sequence_length=32"]
    config = load_section(
        Config, "quickstart", [*options, 'plugins=["fill_in"]', "objective.name=fill_in", "objective.rate=0.9"]
    )
    import_plugins(config.plugins)
    load_module(tmp_path / "test_fill_in.py").test_the_middle_comes_last_in_its_share_of_texts()
    objective, arrays = objective_for(config), draw_batch(config)
    assert vars(objective)["rate"] == 0.9
    batch = {name: torch.from_numpy(values) for name, values in arrays.items()}
    marked = (batch["tokens"] >= 64).sum()
    assert marked > 0
    model = build(config.model)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    (loss,) = objective(model, batch).values()
    loss.backward()
    assert float(loss.detach()) / int(objective.target_counts(batch)["causal"]) == pytest.approx(4.56, abs=0.2), (
        "log(96)"
    )


def test_the_log_sink_of_the_questions_works(tmp_path: Path) -> None:
    follow("faq.md", tmp_path)
    load_module(tmp_path / "my_sink.py")
    with MetricsLog(RunInfo(tmp_path), ["mine"]) as metrics:
        metrics.write({"step": 1, "tokens": 8, "loss": 2.5})
        metrics.sync()
        assert (tmp_path / "mine.jsonl").read_text() == '{"step": 1, "loss": 2.5}\n'


def test_a_part_without_a_required_method_names_it() -> None:
    class Lacking(Objective):
        pass

    @dataclass(frozen=True)
    class LackingPattern(AttentionPattern):
        pass

    none: Any = None
    for call, missing in (
        (lambda: Lacking().build_example(none, none), r"^Lacking lacks build_example\(chunk, key\)$"),
        (lambda: Lacking().sequence_lengths(none, none), r"^Lacking lacks sequence_lengths\(n_tokens, keys\)$"),
        (lambda: LackingPattern().mask_mod(none, none, none), r"^LackingPattern lacks mask_mod\(q, k, heads\)$"),
    ):
        with pytest.raises(NotImplementedError, match=missing):
            call()


MEMBER_OF_LIST = re.compile(r"^(?:- |\| )(?:\*\*[^*]+\*\*:? )?((?:`[^`]+`(?:, | and | or | )?)+)", re.M)


def members_of_lists(text: str) -> set[str]:
    """Names of methods and attributes with which list items and table rows of a page on extending begin."""
    prose = FENCE.sub("", text)
    spans = [span for start in MEMBER_OF_LIST.findall(prose) for span in re.findall(r"`([^`]+)`", start)]
    names = (re.fullmatch(r"([a-z_]+)(?:\(.*\)| = .*)?", span) for span in spans)
    return {name[1] for name in names if name}


def test_members_on_the_pages_on_extending_are_those_of_the_interfaces() -> None:
    """A renamed method leaves no old name there: it is one of an interface, of the page's own example, or a key."""
    interfaces = (
        AttentionPattern, BlockBounds, Objective, DocumentChunk, Model, PositionEncoding, Engine, BlockOutput,
    )  # fmt: skip
    members = {name for kind in interfaces for name in (*dir(kind), *inspect.get_annotations(kind))}
    n_members = 0
    for page in sorted((ROOT / "docs" / "extend").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        example = set(re.findall(r"\w+", "\n".join(fence[0] for fence in FENCE.finditer(text))))
        names = members_of_lists(text)
        n_members += len(names)
        unknown = sorted(names - members - example - PrepConfig.model_fields.keys())
        assert not unknown, f"{page.name}: {unknown}"
    assert n_members > 30
    assert members_of_lists("| `sees(q, k)` | x |\n- `plan` holds\n- **State.** `keep`, `x = 1`") == {
        "sees", "plan", "keep", "x"
    }  # fmt: skip
