"""The pages' parts of blocks: the files here are the pages', and every layout has one process's gradients."""

import tomllib
from pathlib import Path

import pytest

from megatfm.config import Config
from megatfm.verify.verify import verify
from tests.plugins.test_inputs_and_heads import HERE, LAYOUTS, importable, on_page
from tests.unit.test_docs import module

PAGES = {"dilated": "blocks.md", "chosen": "blocks.md"}
TESTS = {"dilated": "test_a_dilated_window", "chosen": "test_each_token_chooses_a_scale"}

__all__ = ["importable"]  # a fixture for all tests here


@pytest.mark.parametrize("plugin", PAGES)
def test_the_page_has_the_file(plugin: str) -> None:
    assert on_page(PAGES[plugin], "python", f"{plugin}.py") == (HERE / f"{plugin}.py").read_text()


@pytest.mark.parametrize("plugin", PAGES)
def test_the_page_s_test_passes(plugin: str, tmp_path: Path) -> None:
    (tmp_path / f"test_{plugin}.py").write_text(on_page(PAGES[plugin], "python", f"test_{plugin}.py"))
    getattr(module(tmp_path / f"test_{plugin}.py"), TESTS[plugin])()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("plugin", PAGES)
def test_every_gradient_is_one_process_s(plugin: str, layout: str) -> None:
    """And every byte is sent that the plan says, no other."""
    values = tomllib.loads(on_page(PAGES[plugin], "toml", f"{plugin}.toml"))
    actual = verify(Config.model_validate({**values, "parallel": {"dp_shard": 1, **LAYOUTS[layout]}}))
    assert not actual.wrong
    assert not actual.traffic_mismatches
    assert not actual.axes_without_closed_form
    assert all(one.norm > 0 for one in actual.gradients)
