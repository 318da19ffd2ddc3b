"""The pages' parts of blocks: the files here are the pages', and every layout has one process's gradients."""

import tomllib
from pathlib import Path

import pytest

from megatfm.config import Config
from megatfm.verify.verify import verify
from tests.support.documentation import PLUGIN_LAYOUTS, PLUGINS, block_on_page, load_module

PAGES = {"dilated": "blocks.md", "chosen": "blocks.md"}
TESTS = {"dilated": "test_a_dilated_window", "chosen": "test_each_token_chooses_a_scale"}


@pytest.mark.parametrize("plugin", PAGES)
def test_the_page_has_the_file(plugin: str) -> None:
    assert block_on_page(PAGES[plugin], "python", f"{plugin}.py") == (PLUGINS / f"{plugin}.py").read_text()


@pytest.mark.parametrize("plugin", PAGES)
def test_the_page_s_test_passes(plugin: str, tmp_path: Path) -> None:
    (tmp_path / f"test_{plugin}.py").write_text(block_on_page(PAGES[plugin], "python", f"test_{plugin}.py"))
    getattr(load_module(tmp_path / f"test_{plugin}.py"), TESTS[plugin])()


@pytest.mark.parametrize("layout", PLUGIN_LAYOUTS)
@pytest.mark.parametrize("plugin", PAGES)
def test_every_gradient_is_one_process_s(plugin: str, layout: str) -> None:
    """And every byte is sent that the plan says, no other."""
    values = tomllib.loads(block_on_page(PAGES[plugin], "toml", f"{plugin}.toml"))
    actual = verify(Config.model_validate({**values, "parallel": {"dp_shard": 1, **PLUGIN_LAYOUTS[layout]}}))
    assert not actual.wrong
    assert not actual.traffic_mismatches
    assert not actual.axes_without_closed_form
    assert all(one.norm > 0 for one in actual.gradients)
