"""Tables and pictures of the manual are those that their code makes."""

from tests.support.documentation import ROOT, load_module
from tests.support.image_models import IMAGE_MODELS
from tests.support.layout_table import (
    IMAGE_ROWS,
    PAGE,
    cases,
    covered_layouts,
    image_cases,
    page,
    pipelines,
    table,
    test_pipelines,
)
from tests.support.layouts import PIPELINE_SCHEDULES


def test_the_page_has_the_tables_of_the_parity_cases() -> None:
    """Else: `python -m tests.support.layout_table`."""
    text = PAGE.read_text(encoding="utf-8")
    assert table() in text
    assert page(text) == text


def test_tested_layouts_are_those_that_parity_tests_compare() -> None:
    actual = covered_layouts()
    assert {"zero0", "zero1", "zero2", "zero3", "tp2", "tp4", "replicas × zero3", "pp4 zbv"} <= actual.keys()
    assert "xlnet" in actual["zero1"] & actual["tp2"] & actual["pp2 1f1b"]
    assert "albert" not in actual["pp4 zbv"], "there is no such case"


def test_every_model_with_images_has_a_row() -> None:
    compared = [*image_cases()]
    assert IMAGE_ROWS.keys() == IMAGE_MODELS.keys()
    assert {("two towers, softmax", "zero3"), ("vision-language, mlp", "pp2 1f1b × tp2")} <= {*compared}
    assert ("swin, simmim", "cp2") not in compared


def test_cases_follow_the_parametrization() -> None:
    schedules = [case["schedule"] for case in cases(test_pipelines.test_two_ranks)]
    assert set(schedules) == set(PIPELINE_SCHEDULES)
    assert {parallel.pp_schedule for _, parallel in pipelines() if parallel.pp == 4} == set(schedules)


def test_the_figure_of_results_is_up_to_date() -> None:
    script = load_module(ROOT / "docs" / "draw_results.py")
    assert script.FIGURE.read_text(encoding="utf-8") == script.draw(), "due: python docs/draw_results.py"
    page = (ROOT / "docs" / "guide" / "finetuning.md").read_text(encoding="utf-8")
    assert f"images/{script.FIGURE.name}" in page


def test_pictures_of_patterns_are_up_to_date() -> None:
    pictures = load_module(ROOT / "docs" / "draw_patterns.py").pictures()
    for name, text in pictures.items():
        path = ROOT / "docs" / "images" / name
        assert path.read_text(encoding="utf-8") == text, "due: python docs/draw_patterns.py"
    page = (ROOT / "docs" / "guide" / "attention.md").read_text(encoding="utf-8")
    assert all(f"images/{name}" in page for name in pictures)
