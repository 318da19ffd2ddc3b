import math
import re
from itertools import accumulate

import pytest

from megatfm.report.chart import Level, Line, chart, format_number, smooth, thin_out
from megatfm.report.run import Curve

NAN = float("nan")


def curve(values: list[float]) -> Curve:
    return Curve(range(1, len(values) + 1), values)


def points(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.-]+),([\d.-]+)", path)]


def test_points_and_ticks_lie_on_the_same_axes() -> None:
    drawing = chart("Loss", "nats", [Line("train", Curve([0, 50, 100], [4.0, 2.0, 1.0]))])
    assert drawing is not None
    ticks = {float(tick.label): tick.at * 10 for tick in drawing.y_ticks}
    (x0, y0), (x1, y1), (x2, y2) = points(drawing.paths[0].d)
    assert (x0, x1, x2) == (0, 500, 1000)
    assert (y0, y1, y2) == pytest.approx((ticks[4], ticks[2], ticks[1]), abs=0.1)
    assert [tick.label for tick in drawing.x_ticks] == ["0", "20", "40", "60", "80", "100"]
    assert drawing.summary == "train: 4 at step 0, 1 at step 100"


def test_a_wide_range_is_drawn_on_a_logarithmic_axis() -> None:
    drawing = chart("Norm", "", [Line("norm", curve([0.01, 1, 100]))])
    assert drawing is not None
    assert drawing.log
    assert [tick.label for tick in drawing.y_ticks] == ["0.01", "0.1", "1", "10", "100"]
    gaps = [b.at - a.at for a, b in zip(drawing.y_ticks, drawing.y_ticks[1:], strict=False)]
    assert gaps == pytest.approx([gaps[0]] * 4)


def test_levels_that_lie_together_share_a_label() -> None:
    levels = [Level("a", 1.0), Level("b", 2.00), Level("c", 2.01)]
    drawing = chart("Bits", "", [Line("a", curve([2.0, 1.5]))], levels=levels)
    assert drawing is not None
    assert [level.label for level in drawing.levels] == ["c 2.01 · b 2", "", "a 1"]


def test_the_axis_covers_the_levels_to_compare_with() -> None:
    drawing = chart("Bits", "", [Line("a", curve([2.0, 1.5]))], levels=[Level("gzip", 3.0)])
    assert drawing is not None
    assert 0 <= drawing.levels[0].at < points(drawing.paths[0].d)[0][1] / 10


def test_what_is_not_finite_breaks_the_line_and_is_counted() -> None:
    values = [3.0, NAN, 2.0, 1.5, float("inf"), 1.0]
    raw, smoothed = (
        Line("loss", curve(values), kind="thin"),
        Line("loss", smooth(curve(values)), kind="smooth"),
    )
    drawing = chart("Loss", "", [raw, smoothed])
    assert drawing is not None
    assert drawing.broken == 2
    assert [path.d.count("M") for path in drawing.paths] == [3, 3]
    assert chart("Loss", "", [Line("loss", curve([NAN, NAN]))]) is None


@pytest.mark.parametrize("values", [[2.0], [2.0, 2.0], [0.0, 0.0], [-1.0, 1e-12], [1e38, 1e-30]])
def test_odd_ranges_are_drawn_inside_the_box(values: list[float]) -> None:
    drawing = chart("x", "", [Line("x", curve(values))])
    assert drawing is not None
    assert all(0 <= x <= 1000 and 0 <= y <= 1000 for x, y in points(drawing.paths[0].d))


def test_thinning_keeps_the_spikes_the_ends_and_the_order() -> None:
    values = [math.sin(i / 500) for i in range(100_000)]
    values[31_415], values[77_777] = 9.0, -9.0
    thin = thin_out(curve(values), 1500)
    assert len(thin.steps) <= 1500
    assert {9.0, -9.0} <= set(thin.values)
    assert list(thin.steps) == sorted(set(thin.steps))
    assert thin.steps[0] < 200
    assert thin.steps[-1] > 99_800
    assert all(values[step - 1] == value for step, value in zip(thin.steps, thin.values, strict=True))


def test_thinning_keeps_the_gaps() -> None:
    thin = thin_out(curve([1.0] * 5000 + [NAN] * 5000 + [1.0] * 5000), 300)
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
    """Not what the rounded coordinates of a curve of a million steps say."""
    steps = [1, 500, 501, 700_000, 999_999, 1_000_000]
    drawing = chart(
        "Loss", "", [Line("a", Curve(steps, [3.25, 2.3459, NAN, 2.0000004, 1e-7, 12_345.67]), kind="dots")]
    )
    assert drawing is not None
    (path,) = drawing.paths
    gaps = [int(gap) for gap in path.steps.split()]
    assert list(accumulate(gaps)) == [step for step in steps if step != 501]
    assert [float(value) for value in path.values.split()] == [3.25, 2.3459, 2.0, 1e-7, 12_345.67]
    assert len(points(path.d)) == len(points(path.marks)) == len(gaps)
