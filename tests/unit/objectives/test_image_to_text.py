"""Images among the tokens of a text, written out by hand; texts and rows that don't fit are refused by name."""

from typing import Any

import numpy as np
import pytest

from megatfm.config import ImagesConfig, ImageToTextObjective, ModelConfig
from megatfm.data.packed_rows import pack_in_memory
from megatfm.data.sequences import DocumentChunk, PackingConfig
from megatfm.errors import SampleError, UsageError
from megatfm.objectives import Objective, SpecialTokens, build_objective
from megatfm.rng import ChunkKey
from tests.support.image_text_models import IMAGE_TOKEN, LLAVA, VOCABULARY
from tests.support.images import encode_noise

BOS, EOS, PAD, IMG, NONE = 1, 2, 0, IMAGE_TOKEN, -100
SPECIAL = SpecialTokens(bos=BOS, eos=EOS, pad=PAD, vocab_size=VOCABULARY)
KEY = ChunkKey(0, 0, 0, 0)


def objective(lengths: tuple[int, ...] = (10, 30), images: Any = None, **options: Any) -> Objective:
    """Build the objective for images of 8 × 8 pixels, with a class token and 4 patches."""
    section = ImagesConfig.model_validate({"size": 8, "crop_pct": 1.0, **(images or {})})
    return build_objective(ImageToTextObjective(**options), ModelConfig.from_dotted(LLAVA), SPECIAL, lengths, section)


def chunk(text: list[int]) -> DocumentChunk:
    return DocumentChunk(np.array(text, np.uint16), files={"png": encode_noise()})


def build(text: list[int], **options: Any) -> tuple[list[int], list[int]]:
    fields = objective(**options).build_example(chunk(text), KEY)
    assert fields["encoder_patches"].shape == (5, 48)
    return fields["tokens"].tolist(), fields["targets"].tolist()


def test_the_image_stands_before_the_text_or_where_the_text_says() -> None:
    """A target is the next token of text, also behind the last patch; patches are never predicted."""
    image, none = [IMG] * 4, [NONE] * 4
    assert build([7, 8]) == ([BOS, *image, 7, 8], [*none, 7, 8, EOS])
    assert build([7, 8], begin_token=False) == ([*image, 7, 8], [*none[1:], 7, 8, EOS])
    in_text = {"image_placement": "in_text"}
    assert build([7, IMG, 8], **in_text) == ([BOS, 7, *image, 8], [7, *none, 8, EOS])
    assert build([7, IMG], **in_text) == ([BOS, 7, *image], [7, *none, EOS])
    assert build([IMG], **in_text, begin_token=False) == (image, [*none[1:], EOS])


def test_a_prompt_has_no_loss() -> None:
    """Nor has the token that ends it; the first token of the answer is predicted from there."""
    image, none, end = [IMG] * 4, [NONE] * 4, 9
    assert build([7, end, 8], prompt_end_token_id=end) == ([BOS, *image, 7, end, 8], [*none, NONE, NONE, 8, EOS])
    in_text = {"image_placement": "in_text", "prompt_end_token_id": end}
    assert build([7, IMG, end, 8], **in_text) == ([BOS, 7, *image, end, 8], [NONE, *none, NONE, 8, EOS])
    assert build([IMG, 7, end], **in_text) == ([BOS, *image, 7, end], [*none, NONE, NONE, EOS])


@pytest.mark.parametrize("placement", ["before_text", "in_text"])
def test_random_texts_have_one_prompt_end(placement: str) -> None:
    random = np.random.default_rng(0)
    objective_ = objective(image_placement=placement, prompt_end_token_id=9)
    for _ in range(200):
        fields = objective_.build_example(objective_.random_chunk(random), KEY)
        assert (fields["tokens"] == 9).sum() == 1


@pytest.mark.parametrize("role", ["bos", "eos", "pad"])
def test_an_image_token_that_pads_begins_or_ends_is_refused(role: str) -> None:
    roles = SpecialTokens(**({"bos": BOS, "eos": EOS, "pad": PAD, "vocab_size": VOCABULARY} | {role: IMG}))
    with pytest.raises(UsageError, match=f"image_token_id = {IMG} is the tokenizer's begin, end or padding token"):
        build_objective(ImageToTextObjective(), ModelConfig.from_dotted(LLAVA), roles, (10, 40), ImagesConfig(size=8))


def test_a_long_text_is_cut_off_at_the_row() -> None:
    assert build([7, 8, 9, 10], lengths=(10, 7)) == ([BOS, *[IMG] * 4, 7, 8], [*[NONE] * 4, 7, 8, 9])


@pytest.mark.parametrize("options", [{}, {"begin_token": False}, {"image_placement": "in_text"}])
@pytest.mark.parametrize("length", [7, 30])
def test_lengths_are_known_before_anything_is_read(options: dict[str, Any], length: int) -> None:
    image_to_text = objective(lengths=(10, length), **options)
    lengths = image_to_text.sequence_lengths(np.arange(1, 12), np.zeros(11, np.uint64))
    for n, (image_length, text_length) in enumerate(lengths.tolist(), 1):
        text = [IMG] * (options.get("image_placement") == "in_text") + [9] * 12
        fields = image_to_text.build_example(chunk(text[:n]), KEY)
        assert (len(fields["encoder_patches"]), len(fields["tokens"])) == (image_length, text_length)
        assert len(fields["targets"]) == text_length


def test_rows_hold_samples_side_by_side() -> None:
    texts = [np.full(n, 20 + n, np.uint16) for n in (2, 3, 1)]
    packing = PackingConfig(objective(), (10, 30), 0)
    rows = pack_in_memory(texts, packing, members=[{"png": encode_noise()}] * 3)
    assert rows.n_rows == 2
    row, image = rows.build_row(0), [IMG] * 4
    assert row["encoder_documents"].tolist() == [0] * 5 + [1] * 5
    assert row["documents"].tolist() == [0] * 7 + [1] * 8 + [-1] * 15
    assert row["tokens"][:15].tolist() == [BOS, *image, 22, 22, BOS, *image, 23, 23, 23]
    assert row["targets"].tolist() == [*[NONE] * 4, 22, 22, EOS, *[NONE] * 4, 23, 23, 23, EOS, *[NONE] * 15]


@pytest.mark.parametrize(("text", "options", "message"), [
    ([7, IMG], {}, "names its image 1 times .* 'before_text' wants 0"),
    ([7, 8], {"image_placement": "in_text"}, "names its image 0 times .* 'in_text' wants 1"),
    ([IMG, 7, IMG], {"image_placement": "in_text"}, "names its image 2 times"),
    ([7, 8], {"prompt_end_token_id": 9}, "has 0 prompt ends .* wants 1"),
    ([9, 8, 9], {"prompt_end_token_id": 9}, "has 2 prompt ends"),
    ([7] * 8 + [9], {"prompt_end_token_id": 9, "lengths": (10, 12)}, "has a prompt of 14 tokens"),
    ([7] * 9 + [IMG], {"image_placement": "in_text", "lengths": (10, 12)}, "has 9 tokens before its image of 4"),
])  # fmt: skip
def test_samples_are_refused(text: list[int], options: dict[str, Any], message: str) -> None:
    with pytest.raises(SampleError, match=message):
        build(text, **options)


@pytest.mark.parametrize(("options", "message"), [
    ({"prompt_end_token_id": IMG}, "prompt_end_token_id = 55 is the image's token or the begin token"),
    ({"lengths": (10, 5)}, r"data\.target_length = 5 is too short for an image, which takes 4 tokens"),
    ({"lengths": (4, 30)}, r"data\.sequence_length = 4 is too short for an image"),
    ({"images": {"mixup": 0.5}}, "a mixed image has no text"),
    ({"images": {"size": 9}}, r"data\.images\.size = 9 .* model\.vision_tower\.embedding\.patch_size = 4"),
])  # fmt: skip
def test_options_that_contradict_rows_images_or_tokens_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        objective(**options)


@pytest.mark.parametrize(("changes", "message"), [
    ({"connector": None}, "needs the sections vision_tower and connector"),
    ({"vision_tower": None}, "needs the sections vision_tower and connector"),
    ({"connector.image_token_id": 60}, "image_token_id = 60 is outside the vocabulary of vocab_size = 60"),
    ({"vision_tower.n_heads": 5}, r"vision_tower\.n_heads = 5 does not divide vision_tower\.d_model = 12"),
    ({"family": "decoder"}, "vision_tower has no meaning with family = 'decoder'"),
])  # fmt: skip
def test_parts_that_do_not_go_together_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dotted(LLAVA).with_changes(changes)
