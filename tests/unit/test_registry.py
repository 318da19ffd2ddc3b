"""Parts by name, and plugins that add to them."""

import sys
from pathlib import Path

import pytest
import torch

from megatfm.config import ModelConfig, find_config, load_config
from megatfm.errors import UsageError
from megatfm.layers.norm import NORMS
from megatfm.models import build
from megatfm.objectives import OBJECTIVES
from megatfm.optim.lr_schedules import SCHEDULES
from megatfm.optim.parameters import OPTIMIZERS
from megatfm.registry import Registry, did_you_mean, import_plugins


def test_a_part_is_found_by_its_name() -> None:
    colours = Registry[int]("colour")
    assert colours.register("red")(1) == 1
    colours.register("blue")(2)
    assert (colours.get("red"), colours.names()) == (1, ["blue", "red"])
    colours.register("red")(1)  # the same part again: a plugin that is imported twice
    with pytest.raises(
        UsageError, match=r"^colour 'red' is registered twice: give one of them another name$"
    ):
        colours.register("red")(3)
    assert colours.get("red") == 1
    with pytest.raises(
        UsageError, match=r"^unknown colour 'rad' \(did you mean 'red'\?\); there are: blue, red$"
    ):
        colours.get("rad")
    with pytest.raises(UsageError, match=r"^unknown colour 'x'; there are: blue, red$"):
        colours.get("x")


def test_the_nearest_word() -> None:
    assert did_you_mean("stesp", ["steps", "seed"]) == " (did you mean 'steps'?)"
    assert did_you_mean("Layer-Norm", ["rms_norm", "layer_norm"]) == " (did you mean 'layer_norm'?)"
    assert did_you_mean("llama", ["llama3-70b", "llama3-8b"]) == " (did you mean 'llama3-8b'?)"
    assert did_you_mean("gelu_new", ["geglu", "gelu"]) == " (did you mean 'gelu'?)"
    assert did_you_mean("lr_max", ["lr", "eps"]) == "", "two letters are no beginning"
    assert did_you_mean("zzz", ["steps", "seed"]) == did_you_mean("", []) == ""


def test_the_parts_that_ship() -> None:
    """Names are what configs and checkpoints hold, so one can be added but none renamed."""
    assert {"rms_norm"} <= set(NORMS.names())
    assert {"causal"} <= set(OBJECTIVES.names())
    assert {"adamw", "muon"} <= set(OPTIMIZERS.names())
    assert {"constant", "cosine", "linear"} <= set(SCHEDULES.names())


PLUGIN = """
from torch import nn
from megatfm.layers.norm import NORMS
from megatfm.layers.initialisation import Constant

@NORMS.register("plain_layer_norm")
class PlainLayerNorm(nn.LayerNorm):
    def __init__(self, d_model, eps):
        super().__init__(d_model, eps, bias=False)
        self.initial = {"weight": Constant(1.0)}
"""


def test_a_plugin_s_norm_is_used_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NORMS, "_parts", dict(NORMS._parts))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_parts_of_a_test").mkdir()
    (tmp_path / "my_parts_of_a_test" / "__init__.py").write_text(PLUGIN, encoding="utf-8")
    config = load_config(
        "quickstart",
        ['plugins=["my_parts_of_a_test"]', "model.norm.name=plain_layer_norm", "model.vocab_size=11"],
    )
    with (
        torch.device("meta"),
        pytest.raises(UsageError, match=r"unknown norm 'plain_layer_norm' .*; there are: "),
    ):
        build(config.model)
    import_plugins(config.plugins)
    model = build(config.model)
    for norm in (model.decoder.layers["0"].attn_residual.norm, model.decoder.norm):
        assert type(norm).__name__ == "PlainLayerNorm"
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    assert model(torch.arange(5)[None]).logits.shape == (1, 5, 11)
    del sys.modules["my_parts_of_a_test"]


@pytest.mark.parametrize("place", ["beside the config", "current directory"])
@pytest.mark.parametrize("kind", ["file", "package"])
def test_a_plugin_is_found_without_being_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, kind: str
) -> None:
    name = f"found_{kind}_{place.replace(' ', '_')}"
    monkeypatch.setattr(NORMS, "_parts", dict(NORMS._parts))
    monkeypatch.setattr(sys, "path", list(sys.path))
    configs, elsewhere = tmp_path / "configs", tmp_path / "elsewhere"
    for folder in (configs, elsewhere):
        folder.mkdir()
    home = configs if place == "beside the config" else elsewhere
    monkeypatch.chdir(elsewhere)
    text = PLUGIN.replace("plain_layer_norm", name)
    if kind == "package":
        (home / name).mkdir()
        (home / name / "__init__.py").write_text(text)
    else:
        (home / f"{name}.py").write_text(text)
    (configs / "mine.toml").write_text(find_config("quickstart")[0].read_text())
    before = list(sys.path)
    config = load_config(configs / "mine.toml", [f"plugins={name}", f"model.norm.name={name}"])
    import_plugins(config.plugins)
    assert name in NORMS.names()
    assert sys.path == [*before, str(home)], "it comes last, and hides nothing"
    del sys.modules[name]


def test_a_plugin_of_the_current_directory_is_found_for_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint's config is read from its state: there is no file of it beside which to look."""
    monkeypatch.setattr(NORMS, "_parts", dict(NORMS._parts))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "found_for_a_run.py").write_text(PLUGIN.replace("plain_layer_norm", "found_for_a_run"))
    import_plugins(["found_for_a_run"])
    assert "found_for_a_run" in NORMS.names()
    del sys.modules["found_for_a_run"]


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("x = 1\n1 / 0", r"broken_plugin.py:2 with ZeroDivisionError: division by zero"),
        ("def f(:", r"broken_plugin.py:1 with SyntaxError"),
        (
            "\nimport nothing_of_that_name",
            r"broken_plugin.py:2 with ModuleNotFoundError: .*nothing_of_that_name",
        ),
        ("raise SystemExit(0)", r"broken_plugin.py:1 with SystemExit: 0"),
        ("from megatfm.errors import UsageError\nraise UsageError('mine')", "^mine$"),
    ],
)
def test_a_plugin_that_fails_is_named_with_its_line(
    code: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_plugin.py").write_text(code)
    with pytest.raises(UsageError, match=why):
        import_plugins(["broken_plugin"])


def test_a_plugin_that_is_not_there() -> None:
    with pytest.raises(
        UsageError, match=r"^plugins: can't import 'no_such_parts' .*beside the config .*PYTHONPATH$"
    ):
        import_plugins(["no_such_parts"])


@pytest.mark.parametrize(
    ("field", "kind"),
    [
        ("norm.name", "norm"),
        ("ffn.activation", "activation"),
        ("position.name", "position"),
        ("norm.placement", "norm position"),
    ],
)
def test_an_unknown_part_is_named(field: str, kind: str) -> None:
    config = ModelConfig.from_dotted(
        {
            "vocab_size": 7,
            "d_model": 8,
            "n_layers": 1,
            "attention.n_heads": 2,
            "ffn.d_ff": 8,
            field: "nothing",
        }
    )
    with pytest.raises(UsageError, match=rf"^unknown {kind} 'nothing'; there are: \w+"):
        build(config)
