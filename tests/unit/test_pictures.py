"""Pictures in the docs are those that their script draws."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_pictures_of_patterns_are_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("draw_patterns", ROOT / "docs" / "draw_patterns.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    pictures = script.pictures()
    for name, text in pictures.items():
        path = ROOT / "docs" / "images" / name
        assert path.read_text(encoding="utf-8") == text, "due: python docs/draw_patterns.py"
    page = (ROOT / "docs" / "guide" / "attention.md").read_text(encoding="utf-8")
    assert all(f"images/{name}" in page for name in pictures)
