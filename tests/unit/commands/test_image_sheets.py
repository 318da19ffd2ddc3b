"""data show --images draws the first images of training on a sheet, and refuses what it can't draw."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from megatfm.config import Config
from megatfm.corpus.corpus import Corpus
from megatfm.data.contact_sheet import CaptionedImage, draw_contact_sheet
from megatfm.train import corpora
from tests.support.forked_commands import run_command


class RowsWithoutImages:
    """Three rows of texts alone, as a corpus of images and texts may have them."""

    def epoch(self, position: int) -> int:
        return position // 3

    def read_rows(self, positions: list[int]) -> dict[str, np.ndarray]:
        assert positions[0] < 3, "begins the next epoch"
        return {
            "encoder_patches": np.zeros((1, 4, 12), np.uint8),
            "encoder_grid": np.zeros((1, 4, 4), np.int32),
            "encoder_documents": np.full((1, 4), -1),
        }


class RowsOfOneImage(RowsWithoutImages):
    """Rows of one image of 2 × 2 patches of 16 pixels."""

    def read_rows(self, positions: list[int]) -> dict[str, np.ndarray]:
        return {
            "encoder_patches": np.zeros((1, 4, 3 * 16 * 16), np.uint8),
            "encoder_grid": np.full((1, 4, 4), 2),
            "encoder_documents": np.zeros((1, 4), int),
        }


class RowsOfTwoImages(RowsOfOneImage):
    """Row N has images 2 N and 2 N + 1, each of one patch, of the classes 1 and 0."""

    @staticmethod
    def draw(number: int) -> np.ndarray:
        """Return the pixels [16, 16, 3] of an image: shades that differ along each dim."""
        return (10 * number + np.arange(3) + 5 * np.arange(16)[:, None] + np.arange(16)[:, None, None]).astype(np.uint8)

    def read_rows(self, positions: list[int]) -> dict[str, np.ndarray]:
        (position,) = positions
        images = np.stack([self.draw(2 * position), self.draw(2 * position + 1)])
        return {
            "encoder_patches": images.transpose(0, 3, 1, 2).reshape(1, 2, 3 * 16 * 16),
            "encoder_grid": np.array([[[0, 0, 1, 1], [0, 0, 1, 1]]]),
            "encoder_documents": np.array([[0, 1]]),
            "labels": np.array([[1, 0]]),
        }


def test_the_first_images_of_training_are_drawn_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class_names, opened = ["cat", "dog"], list[str]()
    monkeypatch.setattr(corpora, "open_tokenizer", lambda config: (config, None))
    monkeypatch.setattr(Corpus, "open", lambda _: SimpleNamespace(manifest=SimpleNamespace(class_names=class_names)))

    def open_training_rows(config: Config, _: object) -> SimpleNamespace:
        opened.extend([config.data.train, str(config.data.validation)])
        return SimpleNamespace(train=RowsOfTwoImages())

    monkeypatch.setattr(corpora, "open_corpora", open_training_rows)
    sheet = tmp_path / "sheet.png"
    words = ["data", "show", str(tmp_path), "--config", "vit-b16", "--images", str(sheet), "--count", "5"]
    assert run_command(*words) == 0
    assert f"{sheet}: 5 images of 3 rows of training" in capfd.readouterr().out
    assert opened == [str(tmp_path), "{}"]
    images = [CaptionedImage(RowsOfTwoImages.draw(n), ("dog", "cat")[n % 2]) for n in range(5)]
    assert Image.open(sheet).tobytes() == draw_contact_sheet(images).tobytes()


@pytest.mark.parametrize(("words", "message"), [
    (["--images", "a.png"], "--images needs --config, the training config"),
    (["--images", "a.jpg", "--config", "vit-b16"], "--images a.jpg --count 32: give a name that ends in .png"),
    (["--images", "a.png", "--config", "vit-b16", "--count", "0"], "--images a.png --count 0: give a name that"),
    (["--images", "a.png", "--config", "vit-b16", "--sample", "0"], "--images draws what training reads: leave"),
    (["--count", "3"], "--count is for --images"),
    (["--config", "vit-b16", "--sample", "0"], "--config is for --images"),
])  # fmt: skip
def test_a_sheet_with_other_options_than_it_needs_is_refused(
    words: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_command("data", "show", "corpora/texts", *words) == 2
    assert f"error: {message}" in capfd.readouterr().err


def test_images_that_cannot_be_drawn_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A corpus without images is not searched for ever, also where images are mixed, whose rows have no length."""
    monkeypatch.setattr(corpora, "open_tokenizer", lambda config: (config, None))
    monkeypatch.setattr(Corpus, "open", lambda _: SimpleNamespace(manifest=SimpleNamespace(class_names=[])))
    sheet = tmp_path / "missing" / "sheet.png"
    for rows, code, message in (
        (RowsWithoutImages(), 2, "error: --images: no sample of corpora/texts has an image"),
        (RowsOfOneImage(), 1, f"error: can't write {sheet}: No such file or directory: make room or choose"),
    ):
        monkeypatch.setattr(corpora, "open_corpora", lambda *_, rows=rows: SimpleNamespace(train=rows))
        words = ["data", "show", "corpora/texts", "--config", "vit-b16", "--images", str(sheet)]
        assert run_command(*words) == code
        assert message in capfd.readouterr().err
    sheet.parent.mkdir()
    assert run_command(*words) == 0
    assert sheet.is_file()
