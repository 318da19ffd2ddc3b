import json
import math
from itertools import accumulate

import pytest

from megatfm.report.charts import Line, chart, downsample, format_number, smooth
from megatfm.report.run import Curve

NAN = float("nan")


def curve(values: list[float]) -> Curve:
    return Curve(range(1, len(values) + 1), values)


def test_a_wide_range_is_drawn_on_a_logarithmic_axis() -> None:
    wide, narrow = (
        chart("Norm", "", [Line("norm", curve(values))]) for values in ([0.01, 1, 100], [4, 2, 1])
    )
    assert wide is not None
    assert narrow is not None
    assert (wide.data["log"], narrow.data["log"]) == (True, False)
    assert narrow.summary == "norm: 4 at step 1, 1 at step 3"


def test_what_is_not_finite_is_null_and_counted_once() -> None:
    values = [3.0, NAN, 2.0, 1.5, float("inf"), 1.0]
    raw, smoothed = (
        Line("loss", curve(values), kind="raw"),
        Line("loss", smooth(curve(values)), kind="smooth"),
    )
    drawing = chart("Loss", "", [raw, smoothed])
    assert drawing is not None
    assert drawing.n_nonfinite == 2
    assert [line["values"].count(None) for line in drawing.data["lines"]] == [2, 2]
    json.dumps(drawing.data, allow_nan=False)
    assert chart("Loss", "", [Line("loss", curve([NAN, NAN]))]) is None


def test_thinning_keeps_the_spikes_the_ends_and_the_order() -> None:
    values = [math.sin(i / 500) for i in range(100_000)]
    values[31_415], values[77_777] = 9.0, -9.0
    thin = downsample(curve(values), 1500)
    assert len(thin.steps) <= 1500
    assert {9.0, -9.0} <= set(thin.values)
    assert list(thin.steps) == sorted(set(thin.steps))
    assert thin.steps[0] < 200
    assert thin.steps[-1] > 99_800
    assert all(values[step - 1] == value for step, value in zip(thin.steps, thin.values, strict=True))


def test_thinning_keeps_the_gaps() -> None:
    thin = downsample(curve([1.0] * 5000 + [NAN] * 5000 + [1.0] * 5000), 300)
    assert any(math.isnan(value) for value in thin.values)


def test_smoothing_does_not_lag() -> None:
    ramp = curve([float(i) for i in range(1000)])
    assert list(smooth(ramp).values)[:980] == pytest.approx(list(ramp.values)[:980])


def test_smoothing_steps_over_what_is_not_finite() -> None:
    values = [1.0] * 200
    values[50] = NAN
    smoothed = smooth(curve(values)).values
    assert math.isnan(smoothed[50])
    assert [value for value in smoothed if not math.isnan(value)] == pytest.approx([1.0] * 199)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.003, "0.003"),
        (3e-5, "3e-5"),
        (1.23456, "1.235"),
        (12_500, "12,500"),
        (3_210_000, "3.21 M"),
        (7e9, "7 B"),
        (-1500, "-1,500"),
        (NAN, "nan"),
    ],
)
def test_numbers_read_as_people_write_them(value: float, text: str) -> None:
    assert format_number(value) == text


def test_the_page_s_script_gets_steps_and_values_as_they_were_recorded() -> None:
    steps = [1, 500, 501, 700_000, 999_999, 1_000_000]
    values = [3.25, 2.3459, NAN, 2.0000004, 1e-7, 12_345.67]
    drawing = chart("Loss", "", [Line("a", Curve(steps, values), kind="dots")])
    assert drawing is not None
    (line,) = drawing.data["lines"]
    assert list(accumulate(line["steps"])) == steps
    assert line["values"] == [3.25, 2.3459, None, 2.0, 1e-7, 12_345.67]
