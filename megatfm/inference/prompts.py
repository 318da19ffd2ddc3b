"""Prompts as the model's training texts: special tokens, mode tokens and sentinels, and an image's tokens."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from megatfm.config.image_text import make_image_tower
from megatfm.errors import SampleError, UsageError
from megatfm.inference.decoding import Prompts, check_makes_text, has_encoder
from megatfm.objectives.images import make_image_reader
from megatfm.rng import ChunkKey
from megatfm.tasks.chat import load_chat_template
from megatfm.tokenizers import HuggingFaceTokenizer
from megatfm.tokenizers.base import SENTINEL_PATTERN

if TYPE_CHECKING:
    from megatfm.data.images import ImageReader
    from megatfm.inference.text import TextModel

log = logging.getLogger("megatfm")

BOS = ("auto", "bos", "none")
SENTINEL = ("auto", "always", "never")


@dataclass(frozen=True)
class PromptOptions:
    """Options that put a prompt into the form of the model's training texts.

    bos: ids before a decoder's prompt: "auto" (those of its training), "bos" or "none". sentinel: whether `<extra_0>`
    is appended to a text without any, which a model of span corruption fills in: "always", "never", or "auto": for
    models that were trained so here, while converted ones may have learnt tasks. images: files, for a vision-language
    model; they replace the image tokens in the text, or precede the text. chat: the prompt is a user's message, in the
    chat template, which begins the answer. Raises UsageError for another value.
    """

    bos: str = "auto"
    sentinel: str = "auto"
    images: Sequence[str | Path] = ()
    chat: bool = False

    def __post_init__(self) -> None:
        for key, value, known in (("bos", self.bos, BOS), ("sentinel", self.sentinel, SENTINEL)):
            if value not in known:
                raise UsageError(f"{key} = {value!r}: choose one of {', '.join(known)}")
        if self.chat and self.bos != "auto":
            raise UsageError("chat: the template decides what stands before the prompt: leave bos out")


DEFAULT_OPTIONS = PromptOptions()


def build_prompts(
    loaded: "TextModel", text: str, options: PromptOptions = DEFAULT_OPTIONS, *, samples: int = 1
) -> Prompts:
    """Return a prompt in the form of the model's training texts, `samples` times.

    Raises UsageError for a model that generates no text, and for options that don't fit it.
    """
    objective, tokenizer = loaded.config.objective.name, loaded.tokenizer
    _check_options(loaded, options)
    if options.chat:
        return Prompts(_repeat_rows(_encode_chat(loaded, text), samples))
    ids = tokenizer.encode(text).tolist()
    if objective == "span_corruption":
        ids = encode_with_sentinels(loaded, text, options.sentinel)
    has_mode = objective == "ul2" and "S" in tokenizer.modes
    if has_mode:
        ids = [tokenizer.modes["S"], *ids]
    if has_encoder(loaded.model):
        encoder, decoder = [*ids, tokenizer.eos], [tokenizer.pad]
        if objective == "causal":
            encoder, decoder = [tokenizer.eos], [tokenizer.pad, *ids]
        return Prompts(_repeat_rows(decoder, samples), _repeat_rows(encoder, samples))
    prefix_ids: list[int] = []
    if not has_mode and objective != "span_corruption":
        prefix_ids = _list_prefix_ids(loaded, options.bos)
        ids = [*prefix_ids, *ids] or [tokenizer.bos]  # decoding needs at least one token
    if not options.images:
        return Prompts(_repeat_rows(ids, samples), prefix=objective in ("prefix", "span_corruption", "ul2"))
    image_fields = read_prompt_images(loaded, options.images)
    ids = insert_image_tokens(loaded, ids, image_fields, len(prefix_ids))
    rows = {name: field.repeat(samples, *[1] * (field.dim() - 1)) for name, field in image_fields.items()}
    return Prompts(_repeat_rows(ids, samples), images=rows)


def _check_options(loaded: "TextModel", options: PromptOptions) -> None:
    """Raise UsageError for a model that generates no text, or options that don't fit it."""
    check_makes_text(loaded.model)
    if loaded.config.model.lm_head.name == "none":
        raise UsageError(
            "the model has no head over the vocabulary, and makes no text: give one with its head (…ForCausalLM), or "
            "take vectors by megatfm.load(FOLDER).encode"
        )
    if options.bos != "auto" and has_encoder(loaded.model):
        raise UsageError(
            f"bos = {options.bos!r}: an encoder-decoder's prompt is its encoder's, with nothing before it: leave it out"
        )
    if options.chat and options.images:
        raise UsageError("a chat prompt with an image is not supported: leave out one of the two")


def _list_prefix_ids(loaded: "TextModel", bos: str) -> list[int]:
    """Return the ids before a decoder's prompt."""
    if bos == "none":
        return []
    if bos == "bos" or loaded.prompt_prefix_ids is None:
        return [loaded.tokenizer.bos]
    return list(loaded.prompt_prefix_ids)


def _encode_chat(loaded: "TextModel", text: str) -> list[int]:
    """Return a user's message in the chat template, with the words that begin the answer.

    Raises UsageError for a text that spells a special token, and a model without a chat template.
    """
    tokenizer, task = loaded.tokenizer, loaded.config.task
    if not isinstance(tokenizer, HuggingFaceTokenizer) or loaded.tokenizer_file is None:
        raise UsageError("chat: needs a tokenizer.json, in which special tokens are spelled: leave it out")
    if spellings := [spelling for spelling in tokenizer.reserved_spellings if spelling in text]:
        raise UsageError(f"the prompt spells the special token {spellings[0]!r}: take it out")
    template = load_chat_template(loaded.tokenizer_file, tokenizer, task.chat_template if task else None)
    rendered = template.render([{"role": "user", "content": text}], add_generation_prompt=True)
    return tokenizer.encode_with_offsets(rendered)[0].tolist()


def encode_with_sentinels(loaded: "TextModel", text: str, sentinel: str) -> list[int]:
    """Tokenize text with sentinels `<extra_N>`; append one to a text without any, by `PromptOptions.sentinel`.

    Raises UsageError for a sentinel that the tokenizer lacks.
    """
    sentinels = loaded.tokenizer.sentinels
    segments = SENTINEL_PATTERN.split(text)
    if len(segments) == 1 and sentinel == "auto" and not loaded.knows_objective:
        log.warning(
            "the prompt is read as it is, for the objective of a converted model is not known: put <extra_0> where "
            "text is to be filled in, or give --sentinel always (never: without this line)"
        )
    elif len(segments) == 1 and sentinel != "never":
        segments += ["0", ""]
    ids: list[int] = []
    for index, segment in enumerate(segments):
        if index % 2 == 0:
            ids += loaded.tokenizer.encode(segment).tolist() if segment else []
        elif int(segment) < len(sentinels):
            ids.append(sentinels[int(segment)])
        else:
            raise UsageError(f"<extra_{segment}>: the tokenizer has {len(sentinels)} sentinels, from 0 on")
    return ids


def choose_separator(loaded: "TextModel", options: PromptOptions) -> str:
    """Return what is printed between a prompt and the model's text: a line end if the text does not continue it.

    It does not as an answer in a chat or of an encoder-decoder, or where it fills in sentinels.
    """
    objective = loaded.config.objective.name
    is_answer = objective == "answers" and has_encoder(loaded.model)
    return "\n" if is_answer or options.chat or objective == "span_corruption" else ""


def _repeat_rows(ids: list[int], samples: int) -> list[Tensor]:
    return [torch.tensor(ids)] * samples


def prepare_prompts(
    loaded: "TextModel", prompt: str, max_tokens: int, options: PromptOptions, *, samples: int = 1
) -> tuple[Prompts, int]:
    """Return the prompts on the model's device, and `max_tokens` reduced to the model's positions, with a warning."""
    device = next(loaded.model.parameters()).device
    prompts = build_prompts(loaded, prompt, options, samples=samples).to(device)
    length, model, data = len(prompts.tokens[0]), loaded.config.model, loaded.config.data
    has_two_rows = prompts.encoder is not None or prompts.images is not None
    trained = data.target_length if has_two_rows and data.target_length else data.sequence_length
    if length + max_tokens > trained:
        log.warning(
            "the text may reach %d tokens, and the model was trained on %d at a time", length + max_tokens, trained
        )
    if model.position.limit is not None and length + max_tokens - 1 > model.position.limit >= length:
        max_tokens = model.position.limit + 1 - length
        log.warning(
            "the model makes %d tokens at most, for model.position.max_positions = %d", max_tokens, model.position.limit
        )
    return prompts, max_tokens


def read_prompt_images(loaded: "TextModel", paths: Sequence[str | Path]) -> dict[str, Tensor]:
    """Return the fields [1, S, …] of images for `forward`, in one row, resized and cropped as in evaluation.

    Raises UsageError for a model that reads no images, or a file without one.
    """
    model, data = loaded.config.model, loaded.config.data
    if model.vision_tower is None:
        raise UsageError(f"model.family = {model.family!r} reads no image beside a prompt: leave it out")
    reader = make_image_reader(
        data.images, make_image_tower(model), "image_to_text", data.sequence_length, training=False
    )
    fields = [_read_image(reader, Path(path)) for path in paths]
    batch = {f"encoder_{name}": torch.cat([torch.tensor(image[name]) for image in fields])[None] for name in fields[0]}
    lengths = torch.tensor([len(image["grid"]) for image in fields])
    batch["encoder_positions"] = torch.cat([torch.arange(n) for n in lengths.tolist()])[None]
    batch["encoder_documents"] = torch.arange(len(fields)).repeat_interleave(lengths)[None]
    return batch


def _read_image(reader: "ImageReader", file: Path) -> dict[str, NDArray[Any]]:
    if not file.is_file():
        raise UsageError(f"{file}: there is no such image")
    try:
        return reader.build({file.suffix.lower().removeprefix("."): file.read_bytes()}, ChunkKey(0, 0, 0, 0))
    except SampleError as error:
        raise UsageError(f"{file}: {error}") from None


def insert_image_tokens(loaded: "TextModel", ids: Sequence[int], images: dict[str, Tensor], begin: int) -> list[int]:
    """Return a prompt's ids with an image token for each patch, in place of its image tokens or else after `begin` ids.

    Raises UsageError for a prompt with image tokens, but not one for each image.
    """
    connector, tower = loaded.config.model.connector, loaded.config.model.vision_tower
    assert connector is not None  # as there is a vision tower
    assert tower is not None
    token, n_special = connector.image_token_id, tower.embedding.n_special_tokens
    n_images = int(images["encoder_documents"].max()) + 1
    patches = [token] * (images["encoder_patches"].shape[1] // n_images - n_special)
    count = list(ids).count(token)
    if count not in (0, n_images):
        raise UsageError(
            f"the prompt names {count} images (token {token}), and the number of images that are given is {n_images}: "
            "name each once, or none, for images before the text"
        )
    if count:
        return [part for number in ids for part in (patches if number == token else [number])]
    return [*ids[:begin], *patches * n_images, *ids[begin:]]
