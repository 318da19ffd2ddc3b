"""The table of proven layouts on the page is the one that the parity tests' cases give."""

from tests.support.layout_table import PAGE, cases, page, pipelines, proven, table, test_pipelines
from tests.support.layouts import PIPELINE_SCHEDULES


def test_the_page_is_in_step() -> None:
    """Else: `python -m tests.support.layout_table`."""
    text = PAGE.read_text(encoding="utf-8")
    assert table() in text
    assert page(text) == text


def test_what_is_proven_is_what_the_tests_compare() -> None:
    actual = proven()
    assert {"zero0", "zero1", "zero2", "zero3", "tp2", "tp4", "replicas × zero3", "pp4 zbv"} <= actual.keys()
    assert "xlnet" in actual["zero1"] & actual["tp2"] & actual["pp2 1f1b"]
    assert "albert" not in actual["pp4 zbv"], "there is no such case"


def test_the_cases_are_those_of_the_parameters() -> None:
    schedules = [case["schedule"] for case in cases(test_pipelines.test_two_ranks)]
    assert set(schedules) == set(PIPELINE_SCHEDULES)
    assert {parallel.pp_schedule for _, parallel in pipelines() if parallel.pp == 4} == set(schedules)
