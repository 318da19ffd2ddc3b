"""A prompt as a model read texts in its training: where it goes, and which reserved tokens stand around it."""

import re
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatfm.errors import UsageError
from megatfm.generate.decoding import Prompts

if TYPE_CHECKING:
    from megatfm.generate.load import Loaded

_SENTINEL = re.compile(r"<extra_(?:id_)?(\d+)>")


def prompts_of(loaded: "Loaded", text: str, samples: int = 1, begin: str = "auto") -> Prompts:
    """The prompt, `samples` times.

    begin: what a decoder reads before it: "auto", what stood there in its training, "bos", or "none".

    For a model of span corruption, `<extra_0>`, `<extra_1>`, … in the text are what is to be filled in; without any,
    it is what follows. Raises UsageError for models that make no text.
    """
    model, objective, tokenizer = loaded.config.model, loaded.config.objective.name, loaded.tokenizer
    if model.family in ("decoder", "encoder_decoder") and model.head.name == "none":
        raise UsageError(
            "the model has no head over the vocabulary, and makes no text: give one with its head (…ForCausalLM), or "
            "take vectors by megatfm.load(FOLDER).encode"
        )
    ids = tokenizer.encode(text).tolist()
    if objective == "span_corruption":
        ids = _with_sentinels(loaded, text)
    if objective == "denoisers" and "S" in tokenizer.modes:
        ids = [tokenizer.modes["S"], *ids]
    first: list[int] | None
    if model.family == "encoder_decoder":
        if objective == "causal":
            encoder, first = [tokenizer.eos], [tokenizer.pad, *ids]
        else:
            encoder, first = [*ids, tokenizer.eos], [tokenizer.pad]
        return Prompts(_rows(first, samples), _rows(encoder, samples))
    if model.family != "decoder":
        raise UsageError(
            f"model.family = {model.family!r} makes no text: give a decoder or an encoder-decoder"
        )
    bare = objective == "span_corruption" or (objective == "denoisers" and "S" in tokenizer.modes)
    prefix = objective in ("prefix", "span_corruption", "denoisers")
    if not bare:
        first = [tokenizer.bos] if begin == "bos" or loaded.begins is None else list(loaded.begins)
        first = [] if begin == "none" else first
        ids = [*first, *ids] or [tokenizer.bos]  # something must be there to go on from
    return Prompts(_rows(ids, samples), prefix=prefix)


def _with_sentinels(loaded: "Loaded", text: str) -> list[int]:
    sentinels = loaded.tokenizer.sentinels
    parts = _SENTINEL.split(text)
    if len(parts) == 1:
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
