"""Images to the fields of a batch: patches cut out one by one, masked squares, captions by hand, refusals."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from megatfm.config import ContrastiveObjective, ImagesConfig, ModelConfig, SimMIMObjective
from megatfm.config.objective import ImageClassificationObjective
from megatfm.data.packed_rows import PackedBlock, pack_in_memory
from megatfm.data.sequences import DocumentChunk, PackingConfig
from megatfm.errors import MegatfmError, UsageError
from megatfm.layers.classifier import count_topk_correct
from megatfm.models import build
from megatfm.objectives import Objective, SpecialTokens, build_objective
from megatfm.rng import ChunkKey
from tests.support.image_text_models import TOWERS
from tests.support.images import encode_image, encode_noise

KEY = ChunkKey(0, 0, 0, 0)
NO_TEXT = np.zeros(0, np.uint16)
ENCODER = {
    "family": "encoder", "d_model": 8, "n_layers": 1, "attention.n_heads": 2, "ffn.d_ff": 8, "lm_head.name": "none",
    "embedding.name": "patches", "embedding.patch_size": 4,
}  # fmt: skip
CLASSIFIER = ENCODER | {
    "embedding.n_class_tokens": 1, "embedding.n_register_tokens": 2, "extra_heads.classifier": {"n_classes": 5},
}  # fmt: skip


def objective(rows: int = 40, size: int = 12, **options: Any) -> Objective:
    section = ImagesConfig.model_validate({"size": size, "crop_pct": 1.0})
    config = ModelConfig.from_dotted(CLASSIFIER | options)
    return build_objective(ImageClassificationObjective(), config, None, (rows,), section)


def labelled_images(count: int) -> list[dict[str, bytes]]:
    return [{"png": encode_noise(12, 12, seed=n), "cls": b"%d" % n} for n in range(count)]


def read_batch(rows: PackedBlock) -> dict[str, torch.Tensor]:
    samples = [rows.build_row(n) for n in range(rows.n_rows)]
    return {name: torch.from_numpy(np.stack([sample[name] for sample in samples])) for name in samples[0]}


def test_fields_are_patches_row_by_row_behind_special_tokens() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (12, 12, 3), np.uint8)
    chunk = DocumentChunk(NO_TEXT, files={"png": encode_image(pixels), "cls": b"3\n"})
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
    rows = pack_in_memory([NO_TEXT] * 4, PackingConfig(objective(), (40,), 0), members=labelled_images(4))
    assert rows.n_rows == 2
    row = rows.build_row(1)
    assert row["documents"].tolist() == [0] * 12 + [-1] * 28
    assert row["labels"][[0, 1, 12]].tolist() == [3, -100, -100]
    assert row["patches"].dtype == np.uint8
    assert row["grid"].dtype == np.int32
    assert (row["grid"][12:] == [0, 0, 1, 1]).all()
    assert not row["patches"][12:].any()


def test_grey_images_have_one_channel() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (12, 12), np.uint8)
    chunk = DocumentChunk(NO_TEXT, files={"png": encode_image(pixels), "cls": b"0"})
    grey = {"embedding.channels": 1, "embedding.mean": [0.5], "embedding.std": [0.5]}
    fields = objective(**grey).build_example(chunk, KEY)
    assert fields["patches"].shape == (12, 16)
    assert fields["patches"][3].tolist() == pixels[:4, :4].flatten().tolist()


@pytest.mark.parametrize(("files", "message"), [
    ({"cls": b"1"}, r"sample 7 has 0 images \(\.cls\), not one"),
    ({"png": b"no image", "cls": b"1"}, r"sample 7 has a \.png that can't be decoded"),
    ({"png": encode_noise(4, 4)[:90], "cls": b"1"}, r"sample 7 has a \.png that can't be decoded"),
    ({"png": encode_noise(4, 4), "cls": b"5"}, r"class '5'.* are 0 to 4"),
    ({"png": encode_noise(4, 4), "cls": b"-1"}, r"class '-1'"),
    ({"png": encode_noise(4, 4), "cls": b"7" * 5000}, r"class '77777777777777777777'.* are 0 to 4"),
    ({"png": encode_noise(4, 4)}, r"has no \.cls"),
])  # fmt: skip
def test_samples_that_cannot_be_used_are_named(files: dict[str, bytes], message: str) -> None:
    with pytest.raises(MegatfmError, match=message):
        pack_in_memory([NO_TEXT], PackingConfig(objective(), (40,), 0), first=7, members=[files])


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match="choose 12 or 16"):
        objective(size=14)
    with pytest.raises(UsageError, match=r"choose data\.sequence_length=12"):
        objective(rows=11)


def test_random_chunks_are_pictures() -> None:
    chunk = objective().random_chunk(np.random.default_rng(1))
    assert objective().build_example(chunk, KEY)["patches"][3:].any()


def test_evaluation_counts_images_whose_label_is_among_the_likeliest() -> None:
    torch.manual_seed(0)
    options = {"extra_heads.classifier": {"n_classes": 9}}
    network = build(ModelConfig.from_dotted(CLASSIFIER | options))
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter)
    trained = objective(**options)
    evaluated = trained.for_evaluation()
    batch = read_batch(pack_in_memory([NO_TEXT] * 9, PackingConfig(evaluated, (40,), 0), members=labelled_images(9)))
    assert dict(evaluated.loss_weights) == {"classifier": 1.0, "top1": 0.0, "top5": 0.0}
    with torch.no_grad():
        assert trained(network.train(), batch).keys() == {"classifier"}
        assert trained(network.eval(), batch).keys() == {"classifier"}
        terms = evaluated(network, batch)
        unlabelled = {name: values for name, values in batch.items() if name != "labels"}
        logits = network(**unlabelled).predictions["classifier"].numpy()
    ranks = np.array([(row > row[label]).sum() for label, row in enumerate(logits)])
    counts = {name: int(terms[name]) for name in evaluated.metrics}
    assert counts == {"top1": (ranks < 1).sum(), "top5": (ranks < 5).sum()}
    assert {int(count) for count in evaluated.target_counts(batch).values()} == {9}
    assert 0 < (ranks < 5).sum() < 9


def test_no_class_of_nan_is_right() -> None:
    """Sorting puts NaN first, in the order of the classes."""
    logits = torch.full((3, 7), torch.nan)
    logits[0] = torch.arange(7.0)
    counts = count_topk_correct(logits, torch.tensor([6, 0, 0]))
    assert {name: int(count) for name, count in counts.items()} == {"top1": 1, "top5": 1}


# ----------------------------------------------------------------------------------------------------- SimMIM


SIMMIM = ENCODER | {"embedding.mask_token": True, "extra_heads.pixels": {"stride": 4}}
PIXELS = np.random.default_rng(0).integers(1, 256, (40, 40, 3), np.uint8)
PICTURE = DocumentChunk(NO_TEXT, files={"png": encode_image(PIXELS)})
"""No value is 0, as masked ones are."""


def simmim_objective(config: Mapping[str, Any] = SIMMIM, **options: Any) -> Objective:
    section = SimMIMObjective.model_validate({"mask_size": 8, **options})
    return build_objective(section, ModelConfig.from_dotted(config), None, (101,), ImagesConfig(size=40, crop_pct=1.0))


@pytest.mark.parametrize(("ratio", "n_masked"), [(0.6, 15), (0.5, 13), (0.01, 1), (0.96, 24)])
def test_complete_squares_are_masked(ratio: float, n_masked: int) -> None:
    """The masked share of 25 squares is rounded up; a class token is none."""
    fields = simmim_objective(mask_ratio=ratio).build_example(PICTURE, KEY)
    masked = fields["masked"]
    assert masked[0] == 0
    squares = masked[1:].reshape(5, 2, 5, 2)
    assert (squares == squares[:, :1, :, :1]).all()
    assert squares[:, 0, :, 0].sum() == n_masked
    assert (fields["target_patches"][1:] > 0).all()
    np.testing.assert_array_equal(
        fields["patches"] == 0, np.where(masked[:, None], True, fields["target_patches"] == 0)
    )
    visible = masked == 0
    np.testing.assert_array_equal(fields["patches"][visible], fields["target_patches"][visible])


def test_masks_follow_from_the_key() -> None:
    simmim = simmim_objective()
    keys = [KEY, ChunkKey(0, 1, 0, 0), ChunkKey(0, 0, 7, 0), ChunkKey(3, 0, 0, 0)]
    masks = [simmim.build_example(PICTURE, key)["masked"] for key in keys]
    assert len({mask.tobytes() for mask in masks}) == len(keys)
    np.testing.assert_array_equal(simmim_objective().build_example(PICTURE, keys[1])["masked"], masks[1])


@pytest.mark.parametrize(("model", "options", "message"), [
    (SIMMIM, {"mask_size": 6}, "mask_size = 6: masked squares are whole patches of 4"),
    (SIMMIM, {"mask_size": 16}, "mask_size = 16: masked squares"),
    (SIMMIM, {"mask_ratio": 0.99}, "masks all 25 squares"),
    (SIMMIM | {"embedding.mask_token": False}, {}, "a mask token and a head for pixels"),
    (ENCODER | {"embedding.mask_token": True}, {}, "a mask token and a head for pixels"),
    (SIMMIM | {"extra_heads.pixels": {"stride": 8}}, {}, r"choose model\.extra_heads\.pixels\.stride = 4"),
])  # fmt: skip
def test_impossible_options_of_simmim_are_refused(model: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        simmim_objective(model, **options)


# ---------------------------------------------------------------------------------------- images and captions


BOS, EOS, PAD = 1, 2, 0
SPECIAL = SpecialTokens(bos=BOS, eos=EOS, pad=PAD, vocab_size=50)


def contrastive_objective(
    lengths: tuple[int, ...] = (10, 14), images: Mapping[str, Any] | None = None, **options: Any
) -> Objective:
    section = ImagesConfig.model_validate({"size": 8, "crop_pct": 1.0, **(images or {})})
    return build_objective(ContrastiveObjective(**options), ModelConfig.from_dotted(TOWERS), SPECIAL, lengths, section)


def build_tokens(caption: list[int], **options: Any) -> list[int]:
    chunk = DocumentChunk(np.array(caption, np.uint16), files={"png": encode_noise()})
    fields = contrastive_objective(**options).build_example(chunk, KEY)
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
def test_lengths_are_computed_before_files_are_read(options: dict[str, Any]) -> None:
    contrastive = contrastive_objective(**options)
    lengths = contrastive.sequence_lengths(np.arange(1, 12), np.zeros(11, np.uint64))
    for n, (of_image, of_text) in enumerate(lengths.tolist(), 1):
        chunk = DocumentChunk(np.full(n, 9, np.uint16), files={"png": encode_noise()})
        fields = contrastive.build_example(chunk, KEY)
        assert (len(fields["encoder_patches"]), len(fields["tokens"])) == (of_image, of_text)
        is_truncated = (fields["tokens"] == 9).sum() < n
        assert getattr(contrastive, "count_truncated")(np.array([n]), None) == is_truncated  # noqa: B009


def test_rows_hold_pairs_side_by_side() -> None:
    """Two images fit the one side; the third caption would fit the other, but follows its image."""
    captions = [np.full(n, 20 + n, np.uint16) for n in (2, 3, 1)]
    how = PackingConfig(contrastive_objective(), (10, 14), 0)
    rows = pack_in_memory(captions, how, members=[{"png": encode_noise(seed=n)} for n in range(3)])
    assert rows.n_rows == 2
    row = rows.build_row(0)
    assert row["encoder_documents"].tolist() == [0] * 5 + [1] * 5
    assert row["documents"].tolist() == [0] * 4 + [1] * 5 + [-1] * 5
    assert row["tokens"][:9].tolist() == [BOS, 22, 22, EOS, BOS, 23, 23, 23, EOS]
    assert rows.build_row(1)["documents"].tolist() == [0] * 3 + [-1] * 11


def test_a_batch_is_what_the_model_reads() -> None:
    """Losses, and in evaluation how many captions are right; two are the same."""
    trained = contrastive_objective()
    captions = [np.array(ids, np.uint16) for ids in ([7, 8], [9], [7, 8])]
    members = [{"png": encode_noise(seed=n)} for n in range(3)]
    model = build(ModelConfig.from_dotted(TOWERS)).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 4
    for objective, terms in ((trained, {"contrastive"}), (trained.for_evaluation(), {"contrastive", "top1", "top5"})):
        batch = read_batch(pack_in_memory(captions, PackingConfig(objective, (10, 14), 0), members=members))
        losses = objective(model, batch)
        assert losses.keys() == terms == objective.loss_weights.keys()
        assert {int(count) for count in objective.target_counts(batch).values()} == {3}
    features = objective.features(model, batch)  # type: ignore[attr-defined]
    numbers = features["captions"]
    assert numbers[0] == numbers[2] != numbers[1]
    cosines = features["images"] @ features["texts"].T
    is_right = [all(cosines[i, j] < cosines[i, i] for j in range(3) if numbers[j] != numbers[i]) for i in range(3)]
    assert losses["top1"] == sum(is_right)
    assert losses["top5"] == 3


@pytest.mark.parametrize(("files", "caption", "message"), [
    ({"png": encode_noise()}, [], "sample 7 has no caption: give prep the tokenizer"),
    ({}, [5], "sample 7 has 0 images"),
    ({"png": encode_noise()[:60]}, [5], "sample 7 has a .png that can't be decoded"),
])  # fmt: skip
def test_pairs_that_cannot_be_used_are_named(files: dict[str, bytes], caption: list[int], message: str) -> None:
    how = PackingConfig(contrastive_objective(), (10, 14), 0)
    with pytest.raises(MegatfmError, match=message):
        pack_in_memory([np.array(caption, np.uint16)], how, first=7, members=[files])


@pytest.mark.parametrize(("options", "message"), [
    ({"images": {"mixup": 0.5}}, "a mixed image has no caption"),
    ({"images": {"size": 10}}, "data.images.size = 10 is not a multiple"),
    ({"images": {"max_patches": 4}}, "takes images of one size"),
    ({"lengths": (4, 14)}, "data.sequence_length = 4 is too short"),
    ({"lengths": (10,)}, "set data.target_length"),
    ({"lengths": (10, 2)}, "no room for a caption's begin token"),
    ({"lengths": (10, 6), "pad_captions": True}, "choose data.target_length=7"),
])  # fmt: skip
def test_contradictory_options_of_contrastive_learning_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        contrastive_objective(**options)


def test_text_alone_is_no_input() -> None:
    with pytest.raises(UsageError, match=r"reads text: set data\.tokenizer"):
        build_objective(ContrastiveObjective(), ModelConfig.from_dotted(TOWERS), None, (10, 14), ImagesConfig())
