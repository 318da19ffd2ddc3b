"""The page's cleaning step and format: the page's own test passes, and a prep uses them as its config says."""

import sys
import tomllib
from pathlib import Path

import pytest

from megatfm import data_prep
from megatfm.config import load
from megatfm.config.prep import PrepConfig
from megatfm.corpus.corpus import Corpus
from megatfm.data_prep.filters.base import STEPS
from megatfm.data_prep.readers import FORMATS, READERS
from megatfm.errors import UsageError
from tests.support.documentation import block_on_page, load_module

PAGE = "data.md"


def test_the_page_s_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in (STEPS, READERS):
        monkeypatch.setattr(registry, "_parts", dict(registry._parts))
    monkeypatch.setitem(FORMATS, "fortune", ())
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "loudness.py").write_text(block_on_page(PAGE, "python", "loudness.py"))
    (tmp_path / "prep.toml").write_text(block_on_page(PAGE, "toml", "prep.toml"))
    output = [f"This is saying number {n}, and a Wise one it is." for n in range(90)]
    output[3], output[5] = "BUY NOW! ALL OF THIS!", "nothing but small letters in here"
    (tmp_path / "sayings").mkdir()
    (tmp_path / "sayings" / "a.fortune").write_text("\n%%\n".join(output))
    small = [
        "tokenizer.kind=byte-bpe",
        "tokenizer.vocab_size=270",
        "tokenizer.sentinels=0",
        "tokenizer.ul2_modes=false",
    ]
    summary = data_prep.run(load(PrepConfig, tmp_path / "prep.toml", small))
    steps = {item["step"]: item for item in summary.result["steps"]}
    assert {name: step["documents"] for name, step in steps["loudness"]["dropped"].items()} == {"too_loud": 1}
    assert steps["loudness"]["found"] == {"all small": 1, "with capitals": 88}
    assert steps["metadata filter: loudness"]["documents_out"] == 88
    corpus = Corpus.open(tmp_path / "corpora" / "sayings" / "train")
    assert corpus.read_sample(0).source.startswith("a.fortune#")
    assert corpus.read_sample(0).metadata == {"loudness": pytest.approx(0.06, abs=0.01)}
    (tmp_path / "test_loudness.py").write_text(block_on_page(PAGE, "python", "test_loudness.py"))
    load_module(tmp_path / "test_loudness.py").test_loud_documents_go()
    values = {**tomllib.loads(block_on_page(PAGE, "toml", "prep.toml")), "out": str(tmp_path / "x")}
    values["read"]["folder"] = str(tmp_path / "sayings")
    with pytest.raises(UsageError, match=r"lacks the key 'at_most', which a part reads: give it at_most"):
        data_prep.run(PrepConfig.model_validate({**values, "steps": [{"name": "loudness"}]}))
    with pytest.raises(UsageError, match=r"unknown cleaning step 'lowdness' \(did you mean 'loudness'\?\)"):
        data_prep.run(PrepConfig.model_validate({**values, "steps": [{"name": "lowdness"}]}))
    values["read"]["format"] = "fortunes"
    with pytest.raises(
        UsageError, match=r"read.format = 'fortunes' is no format \(did you mean 'fortune'\?\)"
    ):
        data_prep.run(PrepConfig.model_validate(values))
    sys.modules.pop("loudness")
