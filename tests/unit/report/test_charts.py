"""Charts of the report by hand, and the report of a run whose files are damaged or can't be written."""

import base64
import io
import json
import math
import os
import re
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import pytest
from PIL import Image

from megatfm.config import load_config
from megatfm.errors import MegatfmError, UsageError
from megatfm.report import layer_charts, write_report
from megatfm.report.charts import Line, downsample, format_number, make_chart, smooth
from megatfm.report.compare import RunComparison
from megatfm.report.run import Curve, Run
from tests.support.small_runs import replace_metrics, report_page

NAN = float("nan")


def make_curve(values: Sequence[float]) -> Curve:
    return Curve(range(1, len(values) + 1), values)


def test_a_wide_range_is_drawn_on_a_logarithmic_axis() -> None:
    wide, narrow = (
        make_chart("Norm", "", [Line("norm", make_curve(values))]) for values in ([0.01, 1, 100], [4, 2, 1])
    )
    assert wide is not None
    assert narrow is not None
    assert (wide.data["log"], narrow.data["log"]) == (True, False)
    assert narrow.summary == "norm: 4 at step 1, 1 at step 3"


def test_non_finite_values_are_null_and_counted_once() -> None:
    values = [3.0, NAN, 2.0, 1.5, float("inf"), 1.0]
    curve = make_curve(values)
    raw, smoothed = Line("loss", curve, kind="raw"), Line("loss", smooth(curve), kind="smooth")
    chart = make_chart("Loss", "", [raw, smoothed])
    assert chart is not None
    assert chart.n_nonfinite == 2
    assert [line["values"].count(None) for line in chart.data["lines"]] == [2, 2]
    json.dumps(chart.data, allow_nan=False)
    assert make_chart("Loss", "", [Line("loss", make_curve([NAN, NAN]))]) is None


def test_downsampling_keeps_spikes_ends_and_order() -> None:
    values = [math.sin(i / 500) for i in range(100_000)]
    values[31_415], values[77_777] = 9.0, -9.0
    values[0], values[-1] = values[60], values[-60]  # no extremes of their buckets
    thin = downsample(make_curve(values), 1500)
    assert len(thin.steps) <= 1500
    assert {9.0, -9.0} <= set(thin.values)
    assert list(thin.steps) == sorted(set(thin.steps))
    assert (thin.steps[0], thin.steps[-1]) == (1, 100_000), "so that all charts of a run have one x axis"
    assert all(values[step - 1] == value for step, value in zip(thin.steps, thin.values, strict=True))


def test_downsampling_keeps_gaps() -> None:
    thin = downsample(make_curve([1.0] * 5000 + [NAN] * 5000 + [1.0] * 5000), 300)
    assert any(math.isnan(value) for value in thin.values)


def test_smoothing_does_not_lag() -> None:
    ramp = make_curve([float(i) for i in range(1000)])
    assert list(smooth(ramp).values)[:980] == pytest.approx(list(ramp.values)[:980])


def test_smoothing_ignores_values_that_are_not_finite() -> None:
    values = [1.0] * 200
    values[50] = NAN
    smoothed = smooth(make_curve(values)).values
    assert math.isnan(smoothed[50])
    assert [value for value in smoothed if not math.isnan(value)] == pytest.approx([1.0] * 199)


@pytest.mark.parametrize(("value", "text"), [
    (0, "0"),
    (0.003, "0.003"),
    (3e-5, "3e-5"),
    (1.23456, "1.235"),
    (12_500, "12,500"),
    (3_210_000, "3.21 M"),
    (7e9, "7 B"),
    (999.6e6, "1 B"),
    (999.4e6, "999 M"),
    (-1500, "-1,500"),
    (NAN, "nan"),
])  # fmt: skip
def test_numbers_are_formatted_for_people(value: float, text: str) -> None:
    assert format_number(value) == text


def test_chart_data_has_the_recorded_steps_and_values() -> None:
    steps = [1, 500, 501, 700_000, 999_999, 1_000_000]
    values = [3.25, 2.3459, NAN, 2.0000004, 1e-7, 12_345.67]
    chart = make_chart("Loss", "", [Line("a", Curve(steps, values), kind="dots")])
    assert chart is not None
    (line,) = chart.data["lines"]
    assert list(accumulate(line["steps"])) == steps
    assert line["values"] == [3.25, 2.3459, None, 2.0, 1e-7, 12_345.67]


def test_several_loss_terms_have_a_chart(run: Path) -> None:
    terms = {"masked": 6.5, "sentence": 0.7}
    sets = {"code": {"loss": 7.0, "terms": terms, "tokens": 10, "rows": 1}}
    replace_metrics(run, [{"step": n, "loss": 7.2, "terms": terms, "evaluation": sets} for n in (1, 2)])
    page = report_page(run)
    assert [label.split(",")[0] for label in page.charts()] == ["Loss", "Terms of the loss"]
    assert "masked: 6.5 at step 1" in page.charts()[1]
    assert "sentence: 0.7 at step 1" in page.charts()[1]
    assert "Bits per byte" not in page.text


def with_norms(layers: int) -> list[dict[str, object]]:
    """Records of a run with `log.layer_stats_every = 1`; a block's weight is its number."""
    names = ["decoder.embedding", *(f"decoder.layers.{i}" for i in range(layers)), "head"]
    return [
        {
            "step": step,
            "loss": 3.0,
            "norms": {
                name: {"weight": float(i + 1), "gradient": 0.1 / step}
                | ({"activation": float(step)} if ".layers." in name else {})
                for i, name in enumerate(names)
            },
        }
        for step in range(1, 41)
    ]


def test_layer_statistics_have_a_chart_for_each_kind(run: Path) -> None:
    replace_metrics(run, with_norms(layers=3))
    page = report_page(run)
    titles = [label.split(",")[0] for label in page.charts()]
    assert titles == ["Loss", "Gradients by layer", "Activations by layer", "Weights by layer"]
    weights = page.charts()[3]
    expected = ["decoder.embedding: 1 ", "decoder 0: 2 ", "decoder 1: 3 ", "decoder 2: 4 ", "head: 5 "]
    assert [weights.index(text) for text in expected] == sorted(weights.index(text) for text in expected)
    assert "decoder.embedding" not in page.charts()[2], "only blocks have an output in the residual stream"
    assert "decoder 2: 1 at step 1, 40 at step 40" in page.charts()[2]


def test_charts_of_many_layers_show_a_few_of_them(run: Path) -> None:
    replace_metrics(run, with_norms(layers=48))
    page = report_page(run)
    weights = page.charts()[3]
    named = [int(value) for value in re.findall(r": (\d+) at step 1,", weights)]
    assert (len(named), named[0], named[-1]) == (6, 1, 50)
    assert named == sorted(named), "block 10 comes after block 2"
    assert "root mean square, 12 of 50 layers" in page.text
    assert len(page.lines("raw")) == 1 + 6 + 6 + 6, "of the loss, and of each kind"


def with_loads(layers: int, loads: list[float]) -> list[dict[str, object]]:
    """Records of a run with experts, which are chosen alike at first and as `loads` says at last."""
    return [
        {
            "step": step,
            "loss": 3.0,
            "norms": {
                f"decoder.layers.{i}": {"load": [1 + (load - 1) * step / 40 for load in loads], "load_max": 2.0}
                for i in range(layers)
            },
        }
        for step in range(1, 41)
    ]


def test_expert_loads_are_heat_maps(run: Path) -> None:
    loads = [0.0, 1.0, 2.5, 0.5]
    replace_metrics(run, with_loads(3, loads))
    page = report_page(run)
    maps = [a for tag, a in page.tags if tag == "img"]
    assert [str(a["alt"]).split(",")[:2] for a in maps] == [["Load of experts", f" decoder {i}"] for i in range(3)]
    assert str(maps[0]["alt"]).endswith("Busiest: expert 2 with 2.5 at step 40; idlest: expert 0 with 0 at step 40")
    picture = base64.b64decode(str(maps[0]["src"]).removeprefix("data:image/png;base64,"))
    with Image.open(io.BytesIO(picture)) as image:
        assert image.size == (40, 4)
        for expert, load in enumerate(loads):
            assert image.getpixel((39, expert)) == layer_charts.choose_colour(load)
            assert image.getpixel((0, expert)) == layer_charts.choose_colour(1 + (load - 1) / 40)


def test_heat_maps_have_few_columns_and_layers(run: Path) -> None:
    lines = [
        {"step": step, "loss": 3.0, "norms": {f"decoder.layers.{i}": {"load": [step % 2 * 2.0]} for i in range(30)}}
        for step in range(1, 321)
    ]
    replace_metrics(run, [*lines, {"step": 321, "loss": 3.0, "norms": {"decoder.layers.0": {"load": ["NaN"]}}}])
    page = report_page(run)
    maps = [str(a["alt"]) for tag, a in page.tags if tag == "img"]
    assert len(maps) == 12
    assert all(" · 12 of 30 layers. Busiest" in alt for alt in maps)
    picture = layer_charts.make_expert_load_maps(Run(run))[1].picture.removeprefix("data:image/png;base64,")
    with Image.open(io.BytesIO(base64.b64decode(picture))) as image:
        assert image.size == (layer_charts.COLUMNS, 1)
        assert image.getpixel((80, 0)) == layer_charts.choose_colour(1.0), "the mean of a busy and an idle step"


def test_damaged_side_files_are_notes_not_failures(run: Path) -> None:
    (run / "environment.json").write_text("{")
    (run / "baselines.json").write_text("[]")
    (run / "events.jsonl").write_text("7\n")
    page = report_page(run)
    for name in ("environment.json", "baselines.json", "events.jsonl"):
        assert name in page.text
    assert len(page.charts()) == 7


@pytest.mark.parametrize(("name", "content", "note"), [
    ("metrics.jsonl", {"step": 10**30, "loss": 1.0}, "metrics.jsonl: 1 line(s) left out that have no valid step"),
    ("metrics.jsonl", {"step": "7", "loss": 1.0}, "metrics.jsonl: 1 line(s) left out that have no valid step"),
    ("metrics.jsonl", {"step": 1, "loss": 10**400}, "step 1 of 1,000"),
    ("metrics.jsonl", {"step": 1, "loss": 1.0, "tasks": 5, "terms": [1], "loss_by_source": 2}, "step 1 of 1,000"),
    ("metrics.jsonl", {"step": 1, "loss": 1.0, "norms": {"layer": {"load": {"x": 1}}}}, "step 1 of 1,000"),
    ("events.jsonl", {"time": 1e300, "event": "stopped"}, "stopped"),
    ("events.jsonl", {"time": math.inf, "event": "stopped"}, "stopped"),
    ("baselines.json", {"stdlib": {"gzip": "a third", "xz": None, "zstd": 10**400, "bz2": 2.5}}, "bz2: 2.50"),
    ("../../corpora/prep.json", {"steps": [{"step": "read"}]}, "prep.json of train is not shown"),
    ("../../corpora/prep.json", {"steps": [], "notes": 7}, "prep.json of train is not shown"),
    ("config.toml", "train = 3", "finished"),
    ("config.toml", '[train]\nsteps = "many"', "finished"),
    ("config.toml", "data = [3]", "Corpus"),
    ("config.toml", 'objective = "causal"', "nats per token"),
    ("config.toml", '[objective]\nname = "contrastive"', "mean over pairs"),
    ("config.toml", '[objective]\nname = "preference"', "nats per pair"),
    ("config.toml", '[data]\ntrain = "pipe:cat corpus"', "a corpus has no commands to run"),
    ("config.toml", '[data.mixture]\ncode = { path = "a", weight = 0 }', "the mixture's weights are not shown"),
    ("config.toml", '[data.mixture]\ncode = { path = "a" }', "the mixture's weights are not shown"),
])  # fmt: skip
def test_impossible_values_do_not_stop_the_report(run: Path, name: str, content: object, note: str) -> None:
    (run / name).write_text(f"{content if name == 'config.toml' else json.dumps(content)}\n")
    assert note in report_page(run).text


def test_settings_of_another_type_stop_neither_report_nor_comparison(run: Path) -> None:
    record = {"step": 1, "mfu": 0.5, "evaluation": {"stdlib": {"loss": 1.0, "loss_by_position": [1.0, 2.0]}}}
    (run / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    (run / "config.toml").write_text('[data]\nsequence_length = "long"\n')
    (run / "environment.json").write_text('{"peak": ["H100"]}')
    assert "Held-out loss" in report_page(run).text
    assert RunComparison.read([run, run]).collect_results().rows[0][-3] == "50 %"


def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"not a run directory \(it has no config.toml\)"):
        write_report(tmp_path)
    (tmp_path / "launch.json").write_text("{}")
    for refuse in (write_report, load_config):
        with pytest.raises(UsageError, match=r"the run has not begun to train: `megatfm status .*` says why"):
            refuse(tmp_path)


def test_a_broken_config_is_one_line(run: Path) -> None:
    (run / "config.toml").write_text("name = \n")
    with pytest.raises(MegatfmError, match=r"config.toml: can't read the run's config") as caught:
        write_report(run)
    assert "\n" not in str(caught.value)


def test_a_failed_write_leaves_the_old_page(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_report(run)
    old = (run / "report.html").read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MegatfmError, match=r"report.html: No space left on device"):
        write_report(run)
    assert (run / "report.html").read_bytes() == old
    assert not list(run.glob(".*"))
