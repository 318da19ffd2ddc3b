"""Images and captions as fields of a batch, captions written out by hand; what is refused by name."""

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from megatfm.config import ContrastiveObjective, ImagesConfig, ModelConfig
from megatfm.data.packed_rows import pack_in_memory
from megatfm.data.sequences import DocumentChunk, PackingConfig
from megatfm.errors import MegatfmError, UsageError
from megatfm.models import build
from megatfm.objectives import Objective, SpecialTokens, build_objective
from megatfm.rng import ChunkKey
from tests.support.tower_models import TOWERS

BOS, EOS, PAD = 1, 2, 0
SPECIAL = SpecialTokens(bos=BOS, eos=EOS, pad=PAD, vocab_size=50)
KEY = ChunkKey(0, 0, 0, 0)


def objective(
    lengths: tuple[int, ...] = (10, 14), images: Mapping[str, Any] | None = None, **options: Any
) -> Objective:
    section = ImagesConfig.model_validate({"size": 8, "crop_pct": 1.0, **(images or {})})
    return build_objective(
        ContrastiveObjective(**options), ModelConfig.from_dotted(TOWERS), SPECIAL, lengths, section
    )


def png(seed: int = 0) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8)).save(out, "PNG")
    return out.getvalue()


def build_tokens(caption: list[int], **options: Any) -> list[int]:
    chunk = DocumentChunk(np.array(caption, np.uint16), files={"png": png()})
    fields = objective(**options).build_example(chunk, KEY)
    assert fields["encoder_patches"].shape == (5, 48)
    assert fields["encoder_grid"][1:].tolist() == [[0, 0, 2, 2], [0, 1, 2, 2], [1, 0, 2, 2], [1, 1, 2, 2]]
    return list(fields["tokens"].tolist())


def test_captions_stand_between_begin_and_end() -> None:
    """The table has seven positions: longer captions are cut off, and still end with the end token."""
    assert build_tokens([7, 8]) == [BOS, 7, 8, EOS]
    assert build_tokens([7, 8], begin_token=False) == [7, 8, EOS]
    assert build_tokens([*range(10, 30)]) == [BOS, 10, 11, 12, 13, 14, EOS]
    assert build_tokens([*range(10, 30)], begin_token=False) == [10, 11, 12, 13, 14, 15, EOS]
    assert build_tokens([7, 8], begin_token=False, pad_captions=True) == [7, 8, EOS, PAD, PAD, PAD, PAD]
    assert build_tokens([*range(10, 30)], lengths=(10, 4)) == [BOS, 10, 11, EOS]


@pytest.mark.parametrize("options", [{}, {"begin_token": False}, {"pad_captions": True}])
def test_lengths_are_told_before_anything_is_read(options: dict[str, Any]) -> None:
    contrastive = objective(**options)
    lengths = contrastive.sequence_lengths(np.arange(1, 12), np.zeros(11, np.uint64))
    for n, (of_image, of_text) in enumerate(lengths.tolist(), 1):
        chunk = DocumentChunk(np.full(n, 9, np.uint16), files={"png": png()})
        fields = contrastive.build_example(chunk, KEY)
        assert (len(fields["encoder_patches"]), len(fields["tokens"])) == (of_image, of_text)


def test_rows_hold_pairs_side_by_side() -> None:
    """Two images fit the one side; the third caption would fit the other, but follows its image."""
    captions = [np.full(n, 20 + n, np.uint16) for n in (2, 3, 1)]
    how = PackingConfig(objective(), (10, 14), 0)
    rows = pack_in_memory(captions, how, members=[{"png": png(n)} for n in range(3)])
    assert rows.n_rows == 2
    row = rows.build_row(0)
    assert row["encoder_documents"].tolist() == [0] * 5 + [1] * 5
    assert row["documents"].tolist() == [0] * 4 + [1] * 5 + [-1] * 5
    assert row["tokens"][:9].tolist() == [BOS, 22, 22, EOS, BOS, 23, 23, 23, EOS]
    assert rows.build_row(1)["documents"].tolist() == [0] * 3 + [-1] * 11


def test_a_batch_is_what_the_model_reads() -> None:
    """Losses and, in evaluation, found captions, of which two are the same."""
    trained = objective()
    captions = [np.array(ids, np.uint16) for ids in ([7, 8], [9], [7, 8])]
    members = [{"png": png(n)} for n in range(3)]
    model = build(ModelConfig.from_dotted(TOWERS)).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 4
    for one, terms in (
        (trained, {"contrastive"}),
        (trained.for_evaluation(), {"contrastive", "top1", "top5"}),
    ):
        rows = pack_in_memory(captions, PackingConfig(one, (10, 14), 0), members=members)
        batch = {
            name: torch.from_numpy(np.stack([rows.build_row(n)[name] for n in range(2)]))
            for name in rows.build_row(0)
        }
        losses = one(model, batch)
        assert losses.keys() == terms == one.loss_weights.keys()
        assert {int(count) for count in one.target_counts(batch).values()} == {3}
    features = one.features(model, batch)  # type: ignore[attr-defined]
    numbers = features["captions"]
    assert numbers[0] == numbers[2] != numbers[1]
    cosines = features["images"] @ features["texts"].T
    is_found = [
        all(cosines[i, j] < cosines[i, i] for j in range(3) if numbers[j] != numbers[i]) for i in range(3)
    ]
    assert losses["top1"] == sum(is_found)
    assert losses["top5"] == 3


@pytest.mark.parametrize(
    ("files", "caption", "message"),
    [
        ({"png": png()}, [], "sample 7 has no caption: give prep the tokenizer"),
        ({}, [5], "sample 7 has 0 images"),
        ({"png": png()[:60]}, [5], "sample 7 has a .png that can't be decoded"),
    ],
)
def test_samples_that_cannot_be_used_are_named(
    files: dict[str, bytes], caption: list[int], message: str
) -> None:
    how = PackingConfig(objective(), (10, 14), 0)
    with pytest.raises(MegatfmError, match=message):
        pack_in_memory([np.array(caption, np.uint16)], how, first=7, members=[files])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"images": {"mixup": 0.5}}, "a mixed image has no caption"),
        ({"images": {"size": 10}}, "data.images.size = 10 is not a multiple"),
        ({"images": {"max_patches": 4}}, "takes images of one size"),
        ({"lengths": (4, 14)}, "data.sequence_length = 4 is too short"),
        ({"lengths": (10,)}, "set data.target_length"),
        ({"lengths": (10, 2)}, "no room for a caption's begin token"),
        ({"lengths": (10, 6), "pad_captions": True}, "choose data.target_length=7"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        objective(**options)


def test_text_alone_is_no_input() -> None:
    with pytest.raises(UsageError, match=r"reads text: set data\.tokenizer"):
        build_objective(
            ContrastiveObjective(), ModelConfig.from_dotted(TOWERS), None, (10, 14), ImagesConfig()
        )
