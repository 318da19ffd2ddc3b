"""The page's engine: its file is the page's, its gradients are one process's, and it trains, resumes and refuses."""

from typing import Any

import pytest

from megatfm.config import Config, load_config
from megatfm.errors import UsageError
from megatfm.verify.verify import verify
from tests.support.documentation import PLUGINS, ROOT, fences

LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {"dp_shard": 1},
    "data parallel": {"dp_shard": 2},
    "replicas": {"dp_replicate": 2, "dp_shard": 1},
    "tp2": {"dp_shard": 1, "tp": 2},
    "data × tp": {"dp_shard": 2, "tp": 2},
}


def config(**parallel: Any) -> Config:
    overrides = ["data.tokenizer=t", "data.train=d", 'plugins=["plain_ddp"]', "parallel.engine=ddp"]
    settings = {"zero": 0, **parallel}
    return load_config(
        "quickstart", [*overrides, *(f"parallel.{key}={value}" for key, value in settings.items())]
    )


def test_the_page_has_the_file() -> None:
    pages = [text for page, title, text in fences("python") if title == "plain_ddp.py"]
    assert pages == [(PLUGINS / "plain_ddp.py").read_text(encoding="utf-8")]


def test_no_file_of_ours_knows_it() -> None:
    assert not [
        path
        for path in (ROOT / "megatfm").rglob("*.py")
        if "ddp_engine" in path.read_text() or "plain_ddp" in path.read_text()
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_gradient_is_one_process_s(layout: str) -> None:
    actual = verify(config(**LAYOUTS[layout]))
    assert actual.gradients
    assert not actual.wrong
    assert not actual.traffic_mismatches
    ranks = [size for size in LAYOUTS[layout].values() if size > 1]
    assert bool(actual.axes_without_closed_form) == bool(ranks), (
        "what a plugin's engine sends, only its author knows"
    )


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (
            {"dp_shard": 1, "pp": 2},
            r"^parallel\.pp = 2: parallel\.engine = 'ddp' does not declare 'pp' .*: set par",
        ),
        (
            {"dp_shard": 1, "cp": 2},
            r"does not declare 'cp' .* set parallel\.cp = 1, or .* = 'deepspeed' or 'native'$",
        ),
        ({"dp_shard": 2, "zero": 3}, r"^parallel\.engine = 'ddp' with .*parallel\.zero = 3"),
    ],
)
def test_what_it_can_t_carry_is_refused(parallel: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        verify(config(**parallel))
