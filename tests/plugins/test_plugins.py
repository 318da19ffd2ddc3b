"""Plugins of the pages under Extend: files are the pages', gradients on every layout are one process's."""

import inspect
import json
import json.decoder
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatfm import checkpoint, data_prep, tokenizers
from megatfm.config import Config, load_config, load_section
from megatfm.config.prep import PrepConfig
from megatfm.corpus.corpus import Corpus
from megatfm.data_prep.readers import FORMATS
from megatfm.errors import EXIT_OK, UsageError
from megatfm.verify.rank_processes import RankPool
from megatfm.verify.verify import verify
from tests.support.documentation import PLUGIN_LAYOUTS, PLUGINS, ROOT, get_code_block, list_code_blocks, load_module
from tests.support.training_runs import train_with_plugins
from tests.support.workers import Workers


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool() as pool:
        yield pool


# -------------------------------------------------------------------------------------------- parts of blocks


BLOCK_PAGES = {"dilated": "attention.md", "gated": "attention.md", "chosen": "feed-forward.md"}
TESTS = {
    "dilated": "test_a_dilated_window",
    "gated": "test_each_head_is_gated",
    "chosen": "test_each_token_chooses_a_scale",
}


@pytest.mark.parametrize("plugin", BLOCK_PAGES)
def test_the_page_has_the_file(plugin: str) -> None:
    assert get_code_block(BLOCK_PAGES[plugin], "python", f"{plugin}.py") == (PLUGINS / f"{plugin}.py").read_text()


@pytest.mark.parametrize("plugin", BLOCK_PAGES)
def test_the_page_s_test_passes(plugin: str, tmp_path: Path) -> None:
    (tmp_path / f"test_{plugin}.py").write_text(get_code_block(BLOCK_PAGES[plugin], "python", f"test_{plugin}.py"))
    getattr(load_module(tmp_path / f"test_{plugin}.py"), TESTS[plugin])()


@pytest.mark.parametrize("layout", PLUGIN_LAYOUTS)
@pytest.mark.parametrize("plugin", BLOCK_PAGES)
def test_gradients_of_blocks_are_one_process_s(pool: RankPool, plugin: str, layout: str) -> None:
    """And every byte is sent that the plan says, no other."""
    values = tomllib.loads(get_code_block(BLOCK_PAGES[plugin], "toml", f"{plugin}.toml"))
    actual = verify(Config.model_validate({**values, "parallel": {"dp_shard": 1, **PLUGIN_LAYOUTS[layout]}}), pool=pool)
    assert not actual.wrong
    assert not actual.traffic_mismatches
    assert not actual.axes_without_closed_form
    assert all(gradient.norm > 0 for gradient in actual.gradients)


# ------------------------------------------------------------------------------- inputs, heads and objectives


PAGES = {"vectors": "data.md", "labels": "tasks.md", "looped": "models-and-engines.md"}


def values(plugin: str, **sections: dict[str, Any]) -> dict[str, Any]:
    """The page's config, with other values in some sections."""
    config_table = tomllib.loads(get_code_block(PAGES[plugin], "toml", f"{plugin}.toml"))
    for section, changes in sections.items():
        config_table[section] = {**config_table.get(section, {}), **changes}
    return config_table


@pytest.mark.parametrize("plugin", PAGES)
def test_the_page_has_the_inputs_and_heads(plugin: str) -> None:
    assert get_code_block(PAGES[plugin], "python", f"{plugin}.py") == (PLUGINS / f"{plugin}.py").read_text()


@pytest.mark.parametrize("layout", PLUGIN_LAYOUTS)
@pytest.mark.parametrize("plugin", PAGES)
def test_every_gradient_is_one_process_s(pool: RankPool, plugin: str, layout: str) -> None:
    """And every byte is sent that the plan says, no other: of frozen weights no gradient."""
    parallel = {"dp_shard": 1, **PLUGIN_LAYOUTS[layout]}
    freeze = ["decoder.embedding.*", "decoder.layers.0.*", "decoder.layers.1.attn.*"]
    more = {"init_from": None, "init_include": [], "freeze": freeze} if plugin == "labels" else {}
    actual = verify(Config.model_validate(values(plugin, parallel=parallel, train=more)), pool=pool)
    assert not actual.wrong
    assert not actual.traffic_mismatches
    assert not actual.axes_without_closed_form
    moved = {gradient.name for gradient in actual.gradients if gradient.norm > 0}
    still = {gradient.name for gradient in actual.gradients if gradient.norm == 0}
    if plugin == "labels":
        assert {name for name in still if not name.endswith("bias")} == {
            name for name in moved | still if name.startswith(tuple(pattern.rstrip("*") for pattern in freeze))
        }
        assert "topic.classifier.weight" in moved
    else:
        assert not still


def test_vectors_are_learned_and_evaluated(tmp_path: Path, workers: Workers) -> None:
    """A run learns a rotation, whose next vector is a linear function of the last, without a tokenizer."""
    written: dict[str, Any] = {}
    exec(get_code_block("data.md", "python", "write_vectors.py"), written)
    random = np.random.default_rng(0)
    turn, _ = np.linalg.qr(random.standard_normal((6, 6)))

    def rotated(n: int) -> np.ndarray:
        vectors = [random.standard_normal(6)]
        for _ in range(n - 1):
            vectors.append(turn @ vectors[-1])
        return np.array(vectors)

    for name in ("train", "held-out"):
        written["write"](tmp_path / name, [rotated(int(n)) for n in random.integers(3, 60, 80)])
    data = {"train": str(tmp_path / "train"), "sequence_length": 64, "validation": {"held": str(tmp_path / "held-out")}}
    config = values("vectors", data=data, train={"steps": 20, "micro_batch": 4, "precision": "fp32"}, log={"sinks": []})
    config["run_dir"] = str(tmp_path / "run")
    assert workers.run(train_with_plugins, 2, Config.model_validate({**config, "parallel": {"dp_shard": 2}})) == [
        EXIT_OK,
        EXIT_OK,
    ]
    state = checkpoint.read_state(tmp_path / "run/checkpoints/step-00000020")
    assert state["tokenizer"] == "none"
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["evaluation"]["held"]["loss"] < 0.7 * lines[0]["loss"]
    assert "bits_per_byte" not in lines[-1]["evaluation"]["held"]


def test_a_head_is_trained_on_weights_that_stay_to_the_bit(tmp_path: Path, workers: Workers) -> None:
    texts = [f"{['ab', 'cd', 'ef', 'gh', 'ij'][n % 5]} " * (3 + n % 40) for n in range(200)]
    (tmp_path / "tokenizer.model").write_bytes(
        tokenizers.train_sentencepiece([inspect.getsource(json.decoder), *texts], vocab_size=400)
    )
    written: dict[str, Any] = {}
    exec(get_code_block("tasks.md", "python", "write_topics.py"), written)
    written["write"](tmp_path / "topics", tmp_path / "tokenizer.model", [(text, n % 5) for n, text in enumerate(texts)])
    data = {"train": str(tmp_path / "topics"), "tokenizer": str(tmp_path / "tokenizer.model"), "sequence_length": 64}
    common = {"data": data, "log": {"sinks": []}, "parallel": {"dp_shard": 2}}
    before = values(
        "labels", **common, train={"steps": 2, "micro_batch": 4, "init_from": None, "init_include": [], "freeze": []}
    )
    del before["model"]["lm_head"], before["model"]["extra_heads"]
    before |= {"objective": {"name": "causal"}, "run_dir": str(tmp_path / "before"), "plugins": []}
    assert workers.run(train_with_plugins, 2, Config.model_validate(before)) == [EXIT_OK, EXIT_OK]
    after = values("labels", **common, train={"steps": 12, "micro_batch": 4, "init_from": str(tmp_path / "before")})
    after["run_dir"] = str(tmp_path / "after")
    assert workers.run(train_with_plugins, 2, Config.model_validate(after)) == [EXIT_OK, EXIT_OK]
    old = checkpoint.read_tensors(tmp_path / "before/checkpoints/step-00000002")
    new = checkpoint.read_tensors(tmp_path / "after/checkpoints/step-00000012")
    frozen = [name for name in new if name.startswith(("model.decoder.embedding.", "model.decoder.layers."))]
    assert len(frozen) > 10
    assert all(torch.equal(new[name], old[name]) for name in frozen)
    assert not torch.equal(new["model.decoder.norm.weight"], old["model.decoder.norm.weight"])
    with_state = {name.split(".", 1)[1].rpartition(".")[0] for name in new if name.startswith("optimizer.")}
    assert with_state == {"decoder.norm.weight", "topic.classifier.weight", "topic.classifier.bias"}
    log = (tmp_path / "after/logs/rank-0.log").read_text()
    assert "initialized  2 tensors, 325 parameters: topic.classifier.weight [5, 64]" in log
    lines = [json.loads(line) for line in (tmp_path / "after/metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < lines[0]["loss"]


# -------------------------------------------------------------------------------------------------- an engine


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
    return load_config("quickstart", [*overrides, *(f"parallel.{key}={value}" for key, value in settings.items())])


def test_the_page_has_the_engine() -> None:
    pages = [text for page, title, text in list_code_blocks("python") if title == "plain_ddp.py"]
    assert pages == [(PLUGINS / "plain_ddp.py").read_text(encoding="utf-8")]


def test_no_file_of_the_package_mentions_it() -> None:
    assert not [
        path
        for path in (ROOT / "megatfm").rglob("*.py")
        if "ddp_engine" in path.read_text() or "plain_ddp" in path.read_text()
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_under_the_engine_are_one_process_s(pool: RankPool, layout: str) -> None:
    actual = verify(config(**LAYOUTS[layout]), pool=pool)
    assert actual.gradients
    assert not actual.wrong
    assert not actual.traffic_mismatches
    ranks = [size for size in LAYOUTS[layout].values() if size > 1]
    assert bool(actual.axes_without_closed_form) == bool(ranks), "what a plugin's engine sends, only its author knows"


@pytest.mark.parametrize(("parallel", "message"), [
    ({"dp_shard": 1, "pp": 2}, r"^parallel\.pp = 2: parallel\.engine = 'ddp' does not declare 'pp' .*: set par"),
    ({"dp_shard": 1, "cp": 2}, r"does not declare 'cp' .* set parallel\.cp = 1, or .* = 'deepspeed' or 'native'$"),
    ({"dp_shard": 2, "zero": 3}, r"^parallel\.engine = 'ddp' with .*parallel\.zero = 3"),
])  # fmt: skip
def test_a_layout_that_a_plugin_s_engine_can_t_carry_is_refused(parallel: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        verify(config(**parallel))


# ------------------------------------------------------------------------------- a cleaning step and a format


PAGE = "data.md"


def test_the_page_s_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, "fortune", ())
    (tmp_path / "loudness.py").write_text(get_code_block(PAGE, "python", "loudness.py"))
    (tmp_path / "prep.toml").write_text(get_code_block(PAGE, "toml", "prep.toml"))
    output = [f"This is saying number {n}, and a Wise one it is." for n in range(90)]
    output[3], output[5] = "BUY NOW! ALL OF THIS!", "nothing but small letters in here"
    (tmp_path / "sayings").mkdir()
    (tmp_path / "sayings" / "a.fortune").write_text("\n%%\n".join(output))
    small = [
        "tokenizer.kind=byte-bpe", "tokenizer.vocab_size=270", "tokenizer.sentinels=0", "tokenizer.ul2_modes=false",
    ]  # fmt: skip
    summary = data_prep.run(load_section(PrepConfig, tmp_path / "prep.toml", small))
    steps = {item["step"]: item for item in summary.result["steps"]}
    assert {name: step["documents"] for name, step in steps["loudness"]["dropped"].items()} == {"too_loud": 1}
    assert steps["loudness"]["found"] == {"all small": 1, "with capitals": 88}
    assert steps["metadata filter: loudness"]["documents_out"] == 88
    corpus = Corpus.open(tmp_path / "corpora" / "sayings" / "train")
    assert corpus.read_sample(0).source.startswith("a.fortune#")
    assert corpus.read_sample(0).metadata == {"loudness": pytest.approx(0.06, abs=0.01)}
    (tmp_path / "test_loudness.py").write_text(get_code_block(PAGE, "python", "test_loudness.py"))
    load_module(tmp_path / "test_loudness.py").test_loud_documents_go()
    values = {**tomllib.loads(get_code_block(PAGE, "toml", "prep.toml")), "out": str(tmp_path / "x")}
    values["read"]["folder"] = str(tmp_path / "sayings")
    with pytest.raises(UsageError, match=r"lacks the key 'at_most', which a part reads: give it at_most"):
        data_prep.run(PrepConfig.model_validate({**values, "steps": [{"name": "loudness"}]}))
    with pytest.raises(
        UsageError, match=r"^steps\[0\].name = 'lowdness': unknown \(did you mean 'loudness'\?\); there"
    ):
        data_prep.run(PrepConfig.model_validate({**values, "steps": [{"name": "lowdness"}]}))
    values["read"]["format"] = "fortunes"
    with pytest.raises(
        UsageError, match=r"^read.format = 'fortunes': unknown \(did you mean 'fortune'\?\); there are: text"
    ):
        data_prep.run(PrepConfig.model_validate(values))
