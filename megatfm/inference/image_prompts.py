"""Prompts with an image, for vision-language models: the image's fields, and its tokens among the text's."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatfm.config.image_text import image_tower
from megatfm.errors import SampleError, UsageError
from megatfm.objectives.images import image_reader
from megatfm.rng import PieceKey

if TYPE_CHECKING:
    from megatfm.inference.text import TextModel


def read_prompt_image(loaded: "TextModel", path: str | Path) -> dict[str, Tensor]:
    """Return an image's fields [1, S, …] as `forward` takes them, resized and cropped as in evaluation.

    Raises UsageError for a model that reads no images, or a file that holds none.
    """
    model, data = loaded.config.model, loaded.config.data
    if model.vision_tower is None:
        raise UsageError(f"model.family = {model.family!r} reads no image beside a prompt: leave it out")
    file = Path(path)
    if not file.is_file():
        raise UsageError(f"{path}: there is no such image")
    reader = image_reader(
        data.images, image_tower(model), "image_to_text", data.sequence_length, training=False
    )
    try:
        fields = reader.build(
            {file.suffix.lower().removeprefix("."): file.read_bytes()}, PieceKey(0, 0, 0, 0)
        )
    except SampleError as error:
        raise UsageError(f"{path}: {error}") from None
    batch = {f"encoder_{name}": torch.tensor(values)[None] for name, values in fields.items()}
    n_tokens = batch["encoder_patches"].shape[1]
    batch["encoder_positions"] = torch.arange(n_tokens)[None]
    batch["encoder_documents"] = torch.zeros(1, n_tokens, dtype=torch.int64)
    return batch


def insert_image_tokens(
    loaded: "TextModel", ids: Sequence[int], image: dict[str, Tensor], begin: int
) -> list[int]:
    """Return a prompt's ids with one image token for each patch: where the prompt has one, else after `begin` ids.

    Raises UsageError for a prompt that names the image several times.
    """
    connector, tower = loaded.config.model.connector, loaded.config.model.vision_tower
    assert connector is not None  # as there is a vision tower
    assert tower is not None
    token, n_special = connector.image_token_id, tower.embedding.n_special_tokens
    count = list(ids).count(token)
    if count > 1:
        raise UsageError(f"the prompt names {count} images (token {token}), and one is given: name it once")
    patches = [token] * (image["encoder_patches"].shape[1] - n_special)
    place = list(ids).index(token) if count else begin
    return [*ids[:place], *patches, *ids[place + count :]]
