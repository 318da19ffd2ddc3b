"""A prompt as a model read texts in its training: where it goes, and which reserved tokens stand around it."""

import logging
import re
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatfm.errors import UsageError
from megatfm.generate.decoding import Prompts, check_makes_text, has_encoder

if TYPE_CHECKING:
    from megatfm.generate.load import TextModel

log = logging.getLogger("megatfm")

BEGIN = ("auto", "bos", "none")
SENTINEL = ("auto", "always", "never")
_SENTINEL = re.compile(r"<extra_(?:id_)?(\d+)>")


def build_prompts(
    loaded: "TextModel", text: str, samples: int = 1, begin: str = "auto", sentinel: str = "auto"
) -> Prompts:
    """The prompt, `samples` times.

    begin: what a decoder reads before it: "auto", what stood there in its training, "bos", or "none".

    For a model of span corruption, `<extra_0>`, `<extra_1>`, … in the text are what is to be filled in. sentinel:
    whether `<extra_0>` is added to a text without any: "always", "never", or "auto": for models that were trained so
    here, while those from elsewhere may have learnt tasks. Raises UsageError for models that make no text.
    """
    model, objective, tokenizer = loaded.config.model, loaded.config.objective.name, loaded.tokenizer
    check_makes_text(loaded.model)
    if model.lm_head.name == "none":
        raise UsageError(
            "the model has no head over the vocabulary, and makes no text: give one with its head (…ForCausalLM), or "
            "take vectors by megatfm.load(FOLDER).encode"
        )
    if begin != "auto" and has_encoder(loaded.model):
        raise UsageError(
            f"begin = {begin!r}: an encoder-decoder's prompt is its encoder's, with nothing before it: leave it out"
        )
    ids = tokenizer.encode(text).tolist()
    if objective == "span_corruption":
        ids = encode_with_sentinels(loaded, text, sentinel)
    if objective == "ul2" and "S" in tokenizer.modes:
        ids = [tokenizer.modes["S"], *ids]
    first: list[int] | None
    if has_encoder(loaded.model):
        if objective == "causal":
            encoder, first = [tokenizer.eos], [tokenizer.pad, *ids]
        else:
            encoder, first = [*ids, tokenizer.eos], [tokenizer.pad]
        return Prompts(_rows(first, samples), _rows(encoder, samples))
    bare = objective == "span_corruption" or (objective == "ul2" and "S" in tokenizer.modes)
    prefix = objective in ("prefix", "span_corruption", "ul2")
    if not bare:
        first = (
            [tokenizer.bos]
            if begin == "bos" or loaded.prompt_prefix_ids is None
            else list(loaded.prompt_prefix_ids)
        )
        first = [] if begin == "none" else first
        ids = [*first, *ids] or [tokenizer.bos]  # something must be there to go on from
    return Prompts(_rows(ids, samples), prefix=prefix)


def encode_with_sentinels(loaded: "TextModel", text: str, sentinel: str) -> list[int]:
    """Tokenize text in which `<extra_N>` stand for what is to be filled in; one is added at its end where none is."""
    sentinels = loaded.tokenizer.sentinels
    parts = _SENTINEL.split(text)
    if len(parts) == 1 and sentinel == "auto" and not loaded.knows_objective:
        log.warning(
            "the prompt is read as it is, for the objective of a converted model is not known: put <extra_0> where "
            "text is to be filled in, or give --sentinel always (never: without this line)"
        )
    elif len(parts) == 1 and sentinel != "never":
        parts += ["0", ""]
    ids: list[int] = []
    for place, part in enumerate(parts):
        if place % 2 == 0:
            ids += loaded.tokenizer.encode(part).tolist() if part else []
        elif int(part) < len(sentinels):
            ids.append(sentinels[int(part)])
        else:
            raise UsageError(f"<extra_{part}>: the tokenizer has {len(sentinels)} sentinels, from 0 on")
    return ids


def _rows(ids: list[int], samples: int) -> list[Tensor]:
    return [torch.tensor(ids)] * samples
