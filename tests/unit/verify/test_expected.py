"""A style of a plugin says what it sends, and is held to it."""

from pathlib import Path

import pytest

from megatfm.config import Config
from megatfm.layers.feed_forward import FFNS
from megatfm.parallel.styles import STYLES
from megatfm.registry import import_plugins
from megatfm.verify.expected import explain_unpredicted_axes
from megatfm.verify.verify import verify
from tests.support.verified_config import VERIFIED_CONFIG

PLUGIN = """
from dataclasses import replace
from torch import nn
from megatfm.layers.feed_forward import FFN, FFNS
from megatfm.parallel.styles import ROWWISE, STYLES

STYLES.register("NAME")(replace(ROWWISE, name="NAME", communication=SENDS))

@FFNS.register("NAME")
class Other(FFN):
    tp_plan = (*(row for row in FFN.tp_plan if row[0] != "w_down"), ("w_down", "NAME"))
"""


@pytest.mark.parametrize(
    ("sends", "why", "misses"),
    [
        (("output summed",), "", False),
        ((), "", True),
        (None, "the style 'silent' doesn't say what it sends (`communication`)", False),
    ],
    ids=["told", "wrong", "silent"],
)
def test_a_style_of_a_plugin(
    sends: tuple[str, ...] | None,
    why: str,
    misses: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    name = request.node.callspec.id
    (tmp_path / f"style_{name}.py").write_text(PLUGIN.replace("NAME", name).replace("SENDS", repr(sends)))
    monkeypatch.syspath_prepend(tmp_path)
    model = {**VERIFIED_CONFIG["model"], "n_layers": 2, "ffn": {"name": name, "d_ff": 128}}
    parallel = {"tp": 2, "dp_shard": 1}
    config = Config.model_validate(
        {**VERIFIED_CONFIG, "model": model, "plugins": [f"style_{name}"], "parallel": parallel}
    )
    for registry in (STYLES, FFNS):
        monkeypatch.setattr(registry, "_parts", dict(registry._parts))
    import_plugins(config.plugins)
    assert explain_unpredicted_axes(config) == ({"tp": why} if why else {})
    actual = verify(config)
    assert not actual.wrong
    assert bool(actual.traffic_mismatches) == misses
