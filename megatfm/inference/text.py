"""Text from a trained model: open a run or checkpoint, frame the prompt, sample or search, decode as tokens come."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import JsonValue, ValidationError
from torch import Tensor, nn

from megatfm import checkpoint, tokenizers
from megatfm.config import Config
from megatfm.config.key_migrations import migrate
from megatfm.errors import MegatfmError, UsageError
from megatfm.inference.beam_search import beam_search, gnmt_penalty
from megatfm.inference.decoding import Prompts, Sampling, check_makes_text, has_encoder, stream
from megatfm.inference.detokenizer import IncrementalDetokenizer
from megatfm.inference.image_prompts import insert_image_tokens, read_prompt_image
from megatfm.layers.initialisation import checkpoint_tensors, initialise_buffers
from megatfm.models import build
from megatfm.models.base import take, working_dtype
from megatfm.ops.transfer import aligned
from megatfm.registry import import_foreign_plugins
from megatfm.tokenizers import Tokenizer
from megatfm.tokenizers.base import SENTINEL_PATTERN

log = logging.getLogger("megatfm")

BEGIN = ("auto", "bos", "none")
SENTINEL = ("auto", "always", "never")


@dataclass(frozen=True)
class TextModel:
    """A trained model and what belongs to it. `run_dir` is None for a checkpoint on its own.

    prompt_prefix_ids: what stood before texts in the training of a model from elsewhere; None: `bos`, as here.
    eos_token_id: the ids of which each ends a text. knows_objective: whether `config.objective` is what it was trained
    for, not a guess from its kind. tokenizer_file: beside which a chat template lies.
    """

    model: nn.Module
    tokenizer: Tokenizer
    config: Config
    step: int
    run_dir: Path | None
    prompt_prefix_ids: tuple[int, ...] | None = None
    eos_token_id: tuple[int, ...] = ()
    knows_objective: bool = True
    tokenizer_file: Path | None = None


def load(
    path: str | Path,
    device: str | torch.device = "cpu",
    *,
    dtype: str | torch.dtype = "float32",
    trust_plugins: bool = False,
) -> TextModel:
    """Open the newest checkpoint of a run directory, or one checkpoint, with its tokenizer, in evaluation mode.

    dtype: of the parameters; "auto": what most of them are stored in, up to float32. trust_plugins: import the packages
    that its config names. Raises UsageError where nothing can be opened, MegatfmError where something is damaged or
    does not fit.
    """
    source = checkpoint.find_checkpoint(path)
    return attach_tokenizer(load_model(source, device, dtype=dtype, trust_plugins=trust_plugins), source)


def attach_tokenizer(model: nn.Module, source: Path) -> TextModel:
    """Return the model of a checkpoint with what belongs to it. Raises as `load` does."""
    state, config = _state(source)
    run = source.absolute().parent.parent
    folder = run if (run / "config.toml").is_file() else None
    where = tokenizers.find_tokenizer_file(run) or config.data.tokenizer
    if where is None:
        raise UsageError(
            f"{source}: was trained on no text, and has no tokenizer: there is nothing to generate"
        )
    tokenizer = tokenizers.load(where)
    if tokenizer.hash != state.get("tokenizer"):
        raise UsageError(
            f"{where}: not the tokenizer that {source.name} was trained with: put that one into {run}"
        )
    rows = config.model.vocab_size or 0
    if tokenizer.vocab_size > rows:
        raise MegatfmError(
            f"{source}: the model has {rows} rows, fewer than its tokenizer's "
            f"{tokenizer.vocab_size} ids: one of the two was replaced"
        )
    if type(step := state.get("step")) is not int:
        raise MegatfmError(f"{source}: not a checkpoint of a run: its state has no step")
    begins, stop = state.get("begins"), state.get("stop")
    return TextModel(
        model,
        tokenizer,
        config,
        step,
        folder,
        tuple(int(str(token)) for token in begins) if isinstance(begins, list) else None,
        # One number in older checkpoints.
        tuple(int(str(token)) for token in stop)
        if isinstance(stop, list)
        else (stop if isinstance(stop, int) else tokenizer.eos,),
        knows_objective=not ((step == 0 and "origin" in state) or "converted_from" in state),
        tokenizer_file=Path(where),
    )


def load_model(
    path: str | Path,
    device: str | torch.device = "cpu",
    *,
    dtype: str | torch.dtype = "float32",
    trust_plugins: bool = False,
) -> nn.Module:
    """The model of a run directory or checkpoint, in evaluation mode; no tokenizer is needed.

    Call it with `tokens` [batch, sequence]; it returns `.logits` and `.hidden`. Raises as `load` does.
    """
    source = checkpoint.find_checkpoint(path)
    _, config = _state(source)
    import_foreign_plugins(config.plugins, source, trusted=trust_plugins)
    model = build(config.model)
    initialise_buffers(model)
    stored = checkpoint.read_tensors(source, "model.")
    sizes = Counter[torch.dtype]()
    for tensor in stored.values():
        sizes[tensor.dtype] += tensor.numel()
    working = working_dtype(dtype, max(sizes, key=sizes.__getitem__, default=torch.float32))
    tensors = {f"model.{name}": tensor for name, tensor in checkpoint_tensors(model).items()}
    if stored.keys() != tensors.keys():
        name = min(stored.keys() ^ tensors.keys())
        raise MegatfmError(
            f"{source}: {name} is {'not ' * (name not in stored)}in the checkpoint, but {'not ' * (name in stored)}"
            "in the model that its config describes: open it with the version and plugins that wrote it"
        )
    for name, tensor in tensors.items():
        if stored[name].shape != tensor.shape:
            raise MegatfmError(
                f"{source}: {name} is {list(stored[name].shape)}, but {list(tensor.shape)} in the model that its "
                "config describes: open it with the version and plugins that wrote it"
            )
        # In place, so that tied modules keep sharing it.
        tensor.data = aligned(take(tensor, stored.pop(name), working))
    return model.eval().to(device)


def _state(source: Path) -> tuple[Mapping[str, JsonValue], Config]:
    """The state of a checkpoint and the config that it was saved under, which unlike RUN/config.toml can't change."""
    state = checkpoint.read_state(source)
    try:
        return state, Config.model_validate(migrate(state.get("config")))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"])) or "config"
        raise MegatfmError(
            f"{source}: this version of megatfm can't read its config ({key}: {first['msg']}): open it with the one "
            f"that wrote it, {state.get('megatfm', 'which it does not name')}"
        ) from None


def build_prompts(
    loaded: TextModel,
    text: str,
    samples: int = 1,
    begin: str = "auto",
    sentinel: str = "auto",
    image: str | Path | None = None,
) -> Prompts:
    """Return the prompt as the model read texts in its training, `samples` times.

    begin: what a decoder reads before it: "auto", what stood there in its training, "bos", or "none".

    For a model of span corruption, `<extra_0>`, `<extra_1>`, … in the text are what is to be filled in. sentinel:
    whether `<extra_0>` is added to a text without any: "always", "never", or "auto": for models that were trained so
    here, while those from elsewhere may have learnt tasks. image: a file, for a vision-language model; it stands where
    the text has the image's token, else before it. Raises UsageError for models that make no text.
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
    first = []
    if not bare:
        first = (
            [tokenizer.bos]
            if begin == "bos" or loaded.prompt_prefix_ids is None
            else list(loaded.prompt_prefix_ids)
        )
        first = [] if begin == "none" else first
        ids = [*first, *ids] or [tokenizer.bos]  # something must be there to go on from
    if image is None:
        return Prompts(_rows(ids, samples), prefix=prefix)
    fields = read_prompt_image(loaded, image)
    ids = insert_image_tokens(loaded, ids, fields, len(first))
    images = {name: field.repeat(samples, *[1] * (field.dim() - 1)) for name, field in fields.items()}
    return Prompts(_rows(ids, samples), images=images)


def encode_with_sentinels(loaded: TextModel, text: str, sentinel: str) -> list[int]:
    """Tokenize text in which `<extra_N>` stand for what is to be filled in; one is added at its end where none is."""
    sentinels = loaded.tokenizer.sentinels
    parts = SENTINEL_PATTERN.split(text)
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


def generate_text(
    loaded: TextModel,
    prompt: str,
    sampling: Sampling,
    max_tokens: int,
    samples: int,
    on_text: Callable[[str], None] = lambda _: None,
    begin: str = "auto",
    sentinel: str = "auto",
    image: str | Path | None = None,
) -> list[str]:
    """Return continuations of a prompt; `on_text` receives prompt and first continuation piece by piece.

    The prompt stands where texts stood in training (see `build_prompts`); an id of `loaded.eos_token_id` ends a text.
    """
    tokenizer = loaded.tokenizer
    prompts, max_tokens = prepare_prompts(loaded, prompt, max_tokens, samples, begin, sentinel, image)
    decoders = [IncrementalDetokenizer(tokenizer, prompt_ids=row.tolist()) for row in prompts.tokens]
    texts = [""] * samples
    ended = [False] * samples
    on_text(prompt)
    for tokens in stream(
        loaded.model, prompts, sampling, max_tokens=max_tokens, stop_token=loaded.eos_token_id
    ):
        for row, token in enumerate(tokens.tolist()):
            piece = "" if ended[row] else decoders[row].add([token])
            ended[row] = ended[row] or token in loaded.eos_token_id
            texts[row] += piece
            if row == 0:
                on_text(piece)
    ends = [decoder.end() for decoder in decoders]
    on_text(ends[0])
    return [text + end for text, end in zip(texts, ends, strict=True)]


def generate_text_beam(
    loaded: TextModel,
    prompt: str,
    max_tokens: int,
    beams: int,
    length_penalty: float,
    begin: str = "auto",
    sentinel: str = "auto",
    image: str | Path | None = None,
) -> str:
    """Return the continuation of a prompt that beam search finds."""
    tokenizer = loaded.tokenizer
    prompts, max_tokens = prepare_prompts(loaded, prompt, max_tokens, 1, begin, sentinel, image)
    (result,) = beam_search(
        loaded.model,
        prompts,
        beams=beams,
        max_tokens=max_tokens,
        stop_token=loaded.eos_token_id,
        penalty=gnmt_penalty(length_penalty),
        vocab_size=tokenizer.vocab_size,
    )
    decoder = IncrementalDetokenizer(tokenizer, prompt_ids=prompts.tokens[0].tolist())
    return decoder.add(result.tokens.tolist()) + decoder.end()


def prepare_prompts(
    loaded: TextModel,
    prompt: str,
    max_tokens: int,
    samples: int,
    begin: str,
    sentinel: str,
    image: str | Path | None = None,
) -> tuple[Prompts, int]:
    """Return the prompts on the model's device, and how many tokens there is room for."""
    prompts = build_prompts(loaded, prompt, samples, begin, sentinel, image).to(
        next(loaded.model.parameters()).device
    )
    length, model, data = len(prompts.tokens[0]), loaded.config.model, loaded.config.data
    has_two_rows = prompts.encoder is not None or prompts.images is not None
    trained = data.target_length if has_two_rows and data.target_length else data.sequence_length
    if length + max_tokens > trained:
        log.warning(
            "note: up to %d tokens, while this model was trained on %d at a time",
            length + max_tokens,
            trained,
        )
    if model.position.limit is not None and length + max_tokens - 1 > model.position.limit >= length:
        max_tokens = model.position.limit + 1 - length
        log.warning(
            "note: at most %d tokens are made: model.position.max_positions = %d",
            max_tokens,
            model.position.limit,
        )
    return prompts, max_tokens
