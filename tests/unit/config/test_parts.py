"""Names that configs know against the registries, and keys of plugins' sections that nothing reads."""

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import megatfm
from megatfm.config import Config, ModelConfig, load_section
from megatfm.config.parts import PartName, find_unread_key, list_variant_names
from megatfm.config.prep import READ_FORMATS, PrepConfig
from megatfm.config.section import get_item_type, list_variants
from megatfm.data_prep.filters.base import _MODULES
from megatfm.data_prep.readers import FORMATS, READERS
from megatfm.errors import UsageError
from megatfm.models import build
from tests.plugins import plugin
from tests.support.documentation import ROOT, load_module
from tests.support.prep_files import build_step
from tests.support.small_runs import corpus, file, texts

__all__ = ["corpus", "file", "texts"]  # fixtures


def iter_known_names(section: type[Any], siblings: list[str], seen: set[type[Any]]) -> Iterator[tuple[str, set[str]]]:
    """Kind and names of every key that holds a part's name, in a class of sections and all below it."""
    if section in seen:
        return
    seen.add(section)
    for field in section.model_fields.values():
        for part in field.metadata:
            if isinstance(part, PartName):
                yield part.kind, set(part.names or siblings)
        for variant in list_variants(get_item_type(field.annotation) or field.annotation):
            yield from iter_known_names(variant, list_variant_names(field.annotation), seen)


def test_the_names_of_configs_are_those_of_the_registries() -> None:
    """Only attentions may have more: some families have one that is not registered."""
    registered = {
        registry.kind: registry._parts.keys() - registry._places.keys()
        for registry in load_module(ROOT / "docs" / "gen_parts.py").PARTS.values()
    }
    registered |= {"cleaning step": {name for names in _MODULES.values() for name in names}}
    registered |= {"format": {"text", *FORMATS, "images", "megatron", "tokens"} - set(READERS.names())}
    known = dict(iter_known_names(Config, [], set())) | dict(iter_known_names(PrepConfig, [], set()))
    assert registered["attention"] < known.pop("attention")
    del registered["attention"]
    assert known == registered
    assert set(READ_FORMATS) == known["format"]


MODEL = {"vocab_size": 8, "d_model": 8, "n_layers": 1, "attention.n_heads": 2, "ffn.d_ff": 8}


def test_a_key_that_no_part_has_asked_for_is_found() -> None:
    """A copy of a section is read by the same part; a part's optional keys are suggestions."""
    config = ModelConfig.from_dotted(MODEL | {"ffn.name": "of this test", "ffn.rate": 1, "ffn.raet": 2})
    error = find_unread_key(config, "model.")
    assert error is not None
    assert error.startswith("model.ffn.rate: nothing reads this key of name = 'of this test': correct it or leave it")
    assert config.with_changes({"ffn.rate": 3}).ffn.rate == 3
    assert str(find_unread_key(config)).startswith(
        "ffn.raet: nothing reads this key of name = 'of this test' (did you "
    )
    assert "(did you mean 'rate'?)" in str(find_unread_key(config))
    assert getattr(config.ffn, "choices", 2) == 2
    longer = ModelConfig.from_dotted(MODEL | {"ffn.name": "of this test", "ffn.rate": 1, "ffn.choises": 2})
    assert "ffn.choises: nothing reads this key of name = 'of this test' (did you mean 'choices'?)" in str(
        find_unread_key(longer)
    )
    assert longer.ffn.model_extra == {"rate": 1, "choises": 2}
    assert find_unread_key(longer) is None


PLUGIN = """
import torch
from torch import nn
from megatfm.layers.initialisation import Constant
from megatfm.layers.norm import NORMS
from megatfm.optim.lr_schedules import SCHEDULES


@SCHEDULES.register("late_keys")
def late(config, step, steps):
    return config.floor if step > 0.9 * steps else 1.0


@NORMS.register("strict_norm")
class Norm(nn.Module):
    def __init__(self, d_model, eps, scale=1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_model))
        self.initial = {"weight": Constant(scale)}

    def forward(self, x):
        return x * self.weight
"""


@pytest.mark.parametrize(("overrides", "message"), [
    (["lr_schedule={name='late_keys', floor=0.1, flor=0.2}"],
     r"^lr_schedule\.flor: nothing reads this key of name = 'late_keys' \(did you mean 'floor'\?\): correct it"),
    (["lr_schedule={name='late_keys', flor=0.2}"], r"^a section with name = 'late_keys' lacks the key 'floor'"),
    (["lr_schedule={name='late_keys', floor=0.1}", "model.attention.pattern={name='dilated', width=3, stpe=2}"],
     r"^model\.attention\.pattern\.stpe: nothing reads this key of name = 'dilated' \(did you mean 'step'\?\)"),
    (["model.norm={name='strict_norm', scael=2.0}"],
     r"^model\.norm\.scael: nothing reads this key of name = 'strict_norm' \(did you mean 'scale'\?\): correct it"),
    (["model.norm={name='strict_nrm', scale=2.0}"],
     r"^model\.norm\.name = 'strict_nrm': unknown \(did you mean 'strict_norm'\?\); there are: rms_norm, layer_norm, "),
    (["log.sinks=[tensorbord]"], r"^log\.sinks = 'tensorbord': unknown \(did you mean 'tensorboard'\?\); there are"),
])  # fmt: skip
def test_a_run_is_refused_for_a_key_that_nothing_reads(
    overrides: list[str], message: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin("dilated")
    folder = tmp_path_of_plugin(file)
    monkeypatch.syspath_prepend(folder)
    run = f"run_dir={tmp_path / 'run'}"
    with pytest.raises(UsageError, match=message):
        megatfm.fit(file, "plugins=[keys_of_a_test, dilated]", "train.steps=4", run, *overrides)
    assert not (tmp_path / "run").exists()


def tmp_path_of_plugin(file: Path) -> Path:
    """The folder of the plugin, written once: under another path its parts would be registered twice."""
    path = file.parent / "keys_of_a_test.py"
    if not path.exists():
        path.write_text(PLUGIN)
    return path.parent


def test_a_step_is_refused_for_a_key_that_it_does_not_read(tmp_path: Path) -> None:
    from megatfm.data_prep.filters.base import STEPS

    class Shouts:
        title = "shouts"

        def __init__(self, config: Any) -> None:
            self.share = getattr(config, "share", 0.5)

    STEPS.register("shouts_of_a_test")(Shouts)  # type: ignore[arg-type]
    build_step("shouts_of_a_test", share=0.4)
    with pytest.raises(UsageError, match=r"^steps: shaer: nothing reads .* 'shouts_of_a_test' \(did you mean 'share'"):
        build_step("shouts_of_a_test", shaer=0.4)
    values = [f"out={tmp_path}/out", f"read.folder={tmp_path}", "steps=[{name='shouts_of_a_tst'}]"]
    with pytest.raises(UsageError, match=r"steps\[0\]\.name = 'shouts_of_a_tst': unknown \(did you mean 'shouts_of_a_"):
        load_section(PrepConfig, "quickstart-data", values)
    with pytest.raises(UsageError, match=r"read\.format = 'jsnol': unknown \(did you mean 'jsonl'\?\); there are"):
        load_section(PrepConfig, "quickstart-data", [*values[:2], "read.format=jsnol"])


def test_a_part_that_reads_a_key_which_its_section_lacks() -> None:
    """A plugin's pattern without its width; optional keys are asked for as ever, and private names are no keys."""
    plugin("dilated")
    config = ModelConfig.from_dotted(
        {"vocab_size": 8, "d_model": 8, "n_layers": 1, "attention.n_heads": 2, "ffn.d_ff": 8}
        | {"attention.pattern": {"name": "dilated", "step": 3}}
    )
    with pytest.raises(UsageError, match=r"^a section with name = 'dilated' lacks the key 'width', .*: give it width$"):
        build(config)
    with pytest.raises(UsageError, match=r"name = 'dense' lacks the key 'choices', .*: choose another part$"):
        config.ffn.choices  # noqa: B018
    assert getattr(config.attention.pattern, "step", 2) == 3
    assert getattr(config.attention.pattern, "far", 2) == 2
    assert not hasattr(config, "far")
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config
