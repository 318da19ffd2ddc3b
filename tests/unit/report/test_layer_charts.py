"""Charts of layers' norms, of experts' loads and of the loss's terms."""

import base64
import io
import re
from pathlib import Path

from PIL import Image

from megatfm.report import run_charts
from megatfm.report.run import Run
from tests.support.reported_runs import replace_metrics, report_page


def test_terms_of_the_loss_have_a_chart_where_there_are_several(run: Path) -> None:
    terms = {"masked": 6.5, "sentence": 0.7}
    sets = {"code": {"loss": 7.0, "terms": terms, "tokens": 10, "rows": 1}}
    replace_metrics(run, [{"step": n, "loss": 7.2, "terms": terms, "evaluation": sets} for n in (1, 2)])
    page = report_page(run)
    assert [label.split(",")[0] for label in page.charts()] == ["Loss", "Terms of the loss"]
    assert "masked: 6.5 at step 1" in page.charts()[1]
    assert "sentence: 0.7 at step 1" in page.charts()[1]
    assert "Bits per byte" not in page.text


def with_norms(layers: int, steps: int = 40) -> list[dict[str, object]]:
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
        for step in range(1, steps + 1)
    ]


def test_norms_of_layers_have_a_chart_for_each_kind(run: Path) -> None:
    replace_metrics(run, with_norms(layers=3))
    page = report_page(run)
    titles = [label.split(",")[0] for label in page.charts()]
    assert titles == ["Loss", "Gradients by layer", "Activations by layer", "Weights by layer"]
    weights = page.charts()[3]
    shown = ["decoder.embedding: 1 ", "decoder 0: 2 ", "decoder 1: 3 ", "decoder 2: 4 ", "head: 5 "]
    assert [weights.index(text) for text in shown] == sorted(weights.index(text) for text in shown)
    assert "decoder.embedding" not in page.charts()[2], "only blocks have an output in the residual stream"
    assert "decoder 2: 1 at step 1, 40 at step 40" in page.charts()[2]


def test_of_many_layers_some_are_drawn_in_order_and_few_named(run: Path) -> None:
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
                f"decoder.layers.{i}": {
                    "load": [1 + (load - 1) * step / 40 for load in loads],
                    "load_max": 2.0,
                }
                for i in range(layers)
            },
        }
        for step in range(1, 41)
    ]


def test_loads_of_experts_are_maps(run: Path) -> None:
    """Each pixel is the load of an expert at a step; the words name the extremes."""
    loads = [0.0, 1.0, 2.5, 0.5]
    replace_metrics(run, with_loads(3, loads))
    page = report_page(run)
    maps = [a for tag, a in page.tags if tag == "img"]
    assert [str(a["alt"]).split(",")[:2] for a in maps] == [
        ["Load of experts", f" decoder {i}"] for i in range(3)
    ]
    assert str(maps[0]["alt"]).endswith(
        "Busiest: expert 2 with 2.5 at step 40; idlest: expert 0 with 0 at step 40"
    )
    picture = base64.b64decode(str(maps[0]["src"]).removeprefix("data:image/png;base64,"))
    with Image.open(io.BytesIO(picture)) as image:
        assert image.size == (40, 4)
        for expert, load in enumerate(loads):
            assert image.getpixel((39, expert)) == run_charts.colour(load)
            assert image.getpixel((0, expert)) == run_charts.colour(1 + (load - 1) / 40)


def test_many_steps_share_columns_and_many_layers_are_told(run: Path) -> None:
    lines = [
        {
            "step": step,
            "loss": 3.0,
            "norms": {f"decoder.layers.{i}": {"load": [step % 2 * 2.0]} for i in range(30)},
        }
        for step in range(1, 321)
    ]
    replace_metrics(
        run, [*lines, {"step": 321, "loss": 3.0, "norms": {"decoder.layers.0": {"load": ["NaN"]}}}]
    )
    page = report_page(run)
    maps = [str(a["alt"]) for tag, a in page.tags if tag == "img"]
    assert len(maps) == 12
    assert all(" · 12 of 30 layers. Busiest" in alt for alt in maps)
    picture = run_charts.expert_load_maps(Run(run))[1].picture.removeprefix("data:image/png;base64,")
    with Image.open(io.BytesIO(base64.b64decode(picture))) as image:
        assert image.size == (run_charts.COLUMNS, 1)
        assert image.getpixel((80, 0)) == run_charts.colour(1.0), "the mean of a busy and an idle step"
