"""From a stored picture to the fields of a batch, against patches cut out one by one."""

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from megatfm.config import ImagesConfig, ModelConfig
from megatfm.config.objective import ImageClassificationObjective
from megatfm.data.packed_rows import pack_in_memory
from megatfm.data.sequences import DocumentChunk, PackingConfig
from megatfm.errors import MegatfmError, UsageError
from megatfm.models import build
from megatfm.objectives import Objective, build_objective
from megatfm.rng import ChunkKey

KEY = ChunkKey(0, 0, 0, 0)


def model(**options: Any) -> ModelConfig:
    keys = {
        "family": "encoder", "d_model": 8, "n_layers": 1, "attention.n_heads": 2, "ffn.d_ff": 8,
        "embedding.name": "patches", "embedding.patch_size": 4, "embedding.channels": 3,
        "embedding.n_class_tokens": 1, "embedding.n_register_tokens": 2, "lm_head.name": "none",
        "extra_heads.classifier": {"n_classes": 5},
    }  # fmt: skip
    return ModelConfig.from_dotted(keys | options)


def objective(rows: int = 40, size: int = 12, channels: int = 3, **images: Any) -> Objective:
    section = ImagesConfig.model_validate({"size": size, "crop_pct": 1.0, **images})
    chosen = model(
        **{
            "embedding.channels": channels,
            "embedding.mean": [0.5] * channels,
            "embedding.std": [0.5] * channels,
        }
    )
    return build_objective(ImageClassificationObjective(), chosen, None, (rows,), section)


def picture(pixels: np.ndarray, format_: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, format_, **options)
    return out.getvalue()


def noise(height: int, width: int, seed: int = 0, *channels: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, *(channels or (3,))), np.uint8)


def test_fields_are_patches_row_by_row_behind_special_tokens() -> None:
    pixels = noise(12, 12)
    chunk = DocumentChunk(np.zeros(0, np.uint16), files={"png": picture(pixels), "cls": b"3\n"})
    fields = objective().build_example(chunk, KEY)
    assert fields["patches"].shape == (12, 48)
    assert not fields["patches"][:3].any()
    for row in range(3):
        for column in range(3):
            patch = pixels[4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
            expected = [patch[p, q, c] for c in range(3) for p in range(4) for q in range(4)]
            assert fields["patches"][3 + 3 * row + column].tolist() == expected
            assert fields["grid"][3 + 3 * row + column].tolist() == [row, column, 3, 3]
    assert fields["grid"][:3].tolist() == [[-1, 0, 3, 3], [-1, 1, 3, 3], [-1, 2, 3, 3]]
    assert fields["labels"].tolist() == [3] + [-100] * 11


def test_rows_hold_images_and_padding() -> None:
    result = objective()
    how = PackingConfig(result, (40,), 0)
    files = [{"png": picture(noise(12, 12, n)), "cls": b"%d" % n} for n in range(4)]
    rows = pack_in_memory([np.zeros(0, np.uint16)] * 4, how, members=files)
    assert rows.n_rows == 2
    row = rows.row(1)
    assert row["documents"].tolist() == [0] * 12 + [-1] * 28
    assert row["labels"][[0, 1, 12]].tolist() == [3, -100, -100]
    assert row["patches"].dtype == np.uint8
    assert row["grid"].dtype == np.int32
    assert (row["grid"][12:] == [0, 0, 1, 1]).all()
    assert not row["patches"][12:].any()


def test_grey_images_have_one_channel() -> None:
    result = objective(channels=1)
    pixels = noise(12, 12, 0, 3)[..., 0]
    chunk = DocumentChunk(np.zeros(0, np.uint16), files={"png": picture(pixels), "cls": b"0"})
    fields = result.build_example(chunk, KEY)
    assert fields["patches"].shape == (12, 16)
    assert fields["patches"][3].tolist() == pixels[:4, :4].flatten().tolist()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"cls": b"1"}, r"sample 7 has 0 images \(\.cls\), not one"),
        ({"png": b"no image", "cls": b"1"}, r"sample 7 has a \.png that can't be decoded"),
        ({"png": picture(noise(4, 4))[:90], "cls": b"1"}, r"sample 7 has a \.png that can't be decoded"),
        ({"png": picture(noise(4, 4)), "cls": b"5"}, r"class '5'.* are 0 to 4"),
        ({"png": picture(noise(4, 4)), "cls": b"-1"}, r"class '-1'"),
        ({"png": picture(noise(4, 4))}, r"has no \.cls"),
    ],
)
def test_samples_that_cannot_be_used_are_named(files: dict[str, bytes], message: str) -> None:
    with pytest.raises(MegatfmError, match=message):
        pack_in_memory(
            [np.zeros(0, np.uint16)], PackingConfig(objective(), (40,), 0), first=7, members=[files]
        )


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match="choose 12 or 16"):
        objective(size=14)
    with pytest.raises(UsageError, match=r"choose data\.sequence_length=12"):
        objective(rows=11)


def test_random_chunks_are_pictures() -> None:
    result = objective()
    chunk = result.random_chunk(np.random.default_rng(1))
    assert result.build_example(chunk, KEY)["patches"][3:].any()


def test_evaluation_counts_images_whose_label_is_among_the_likeliest() -> None:
    """Against a sort in NumPy; in training there is the loss alone."""
    torch.manual_seed(0)
    network = build(model(**{"extra_heads.classifier": {"n_classes": 7}}))
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter)
    section = ImagesConfig(size=12, crop_pct=1.0)
    result = build_objective(ImageClassificationObjective(), network.config, None, (40,), section)
    measured = result.for_evaluation()
    how = PackingConfig(measured, (40,), 0)
    files = [{"png": picture(noise(12, 12, n)), "cls": b"%d" % (n % 7)} for n in range(9)]
    blocks = pack_in_memory([np.zeros(0, np.uint16)] * 9, how, members=files)
    batch = {
        name: torch.from_numpy(np.stack([blocks.row(n)[name] for n in range(blocks.n_rows)]))
        for name in blocks.row(0)
    }
    assert dict(measured.loss_weights) == {"classifier": 1.0, "top1": 0.0, "top5": 0.0}
    with torch.no_grad():
        assert result(network.train(), batch).keys() == {"classifier"}
        assert result(network.eval(), batch).keys() == {"classifier"}
        terms = measured(network, batch)
        unlabelled = {name: values for name, values in batch.items() if name != "labels"}
        logits = network(**unlabelled).predictions["classifier"].numpy()
    labels = np.array([int(file["cls"]) for file in files])
    ranks = np.array([(row > row[label]).sum() for row, label in zip(logits, labels, strict=True)])
    assert {name: int(terms[name]) for name in measured.metrics} == {
        "top1": (ranks < 1).sum(),
        "top5": (ranks < 5).sum(),
    }
    assert {int(count) for count in measured.target_counts(batch).values()} == {9}
    assert 0 < (ranks < 5).sum() < 9
