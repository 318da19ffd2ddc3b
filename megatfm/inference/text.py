"""Text from a trained model: open a run or checkpoint, frame the prompt, sample or search, decode as tokens come."""

import codecs
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import JsonValue
from torch import Tensor, nn

from megatfm import checkpoint, tokenizers
from megatfm.config import Config
from megatfm.config.load import parse_stored_config
from megatfm.errors import MegatfmError, UsageError
from megatfm.inference.beam_search import beam_search, gnmt_penalty
from megatfm.inference.decoding import Sampling, stream
from megatfm.inference.prompts import DEFAULT_OPTIONS, PromptOptions, build_prompts, choose_separator, prepare_prompts
from megatfm.layers.initialisation import initialise_buffers, list_checkpoint_tensors
from megatfm.models import build
from megatfm.models.dtypes import choose_dtype, convert_loaded, find_main_dtype
from megatfm.ops.transfer import align
from megatfm.registry import import_foreign_plugins
from megatfm.tasks.chat import find_answer_end_tokens
from megatfm.tokenizers import Tokenizer
from megatfm.tokenizers.base import list_token_ids

log = logging.getLogger("megatfm")

_BROKEN = "\ufffd"
"""Replacement of bytes that are no UTF-8."""

TEMPERATURE, TOP_P = 0.8, 0.95
"""Defaults of `megatfm generate`, by which samples during training are drawn."""


@dataclass(frozen=True)
class TextModel:
    """A trained model with its tokenizer and config. run_dir: None for a checkpoint outside of a run.

    prompt_prefix_ids: ids before texts in the training of a converted model; None: `bos`. eos_token_id: ids that end a
    text. knows_objective: whether the model was trained on `config.objective`; false if it is inferred from its family.
    tokenizer_file: file beside which a chat template lies.
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


def open_text_model(
    path: str | Path,
    device: str | torch.device = "cpu",
    *,
    dtype: str | torch.dtype = "float32",
    trust_plugins: bool = False,
) -> TextModel:
    """Open the newest checkpoint of a run directory, or one checkpoint, with its tokenizer, in evaluation mode.

    dtype: of the parameters; "auto": the one that most of them are stored in, up to float32. trust_plugins: import the
    packages that its config names. Raises UsageError if there is no checkpoint or tokenizer, MegatfmError if one is
    damaged or does not fit.
    """
    source = checkpoint.find_checkpoint(path)
    return attach_tokenizer(load_model(source, device, dtype=dtype, trust_plugins=trust_plugins), source)


def attach_tokenizer(model: nn.Module, source: Path) -> TextModel:
    """Return a checkpoint's model with its tokenizer and config. Raises as `load` does."""
    state = checkpoint.read_state(source)
    config = parse_stored_config(source, state)
    run = source.absolute().parent.parent
    folder = run if (run / "config.toml").is_file() else None
    tokenizer_file = tokenizers.find_tokenizer_file(run) or config.data.tokenizer
    if tokenizer_file is None:
        raise UsageError(f"{source}: was trained on no text, and has no tokenizer: there is nothing to generate")
    tokenizer = tokenizers.load(tokenizer_file)
    if tokenizer.hash != state.get("tokenizer"):
        raise UsageError(
            f"{tokenizer_file}: not the tokenizer that {source.name} was trained with: put that one into {run}"
        )
    n_embeddings = config.model.vocab_size or 0
    if tokenizer.vocab_size > n_embeddings:
        raise MegatfmError(
            f"{source}: the model has {n_embeddings} rows, fewer than its tokenizer's "
            f"{tokenizer.vocab_size} ids: one of the two was replaced"
        )
    if type(step := state.get("step")) is not int:
        raise MegatfmError(f"{source}: not a checkpoint of a run: its state has no step")
    prefix_ids = state.get("begins")
    return TextModel(
        model,
        tokenizer,
        config,
        step,
        folder,
        tuple(int(str(token)) for token in prefix_ids) if isinstance(prefix_ids, list) else None,
        _find_stop_ids(state, config, tokenizer, tokenizer_file),
        knows_objective=not ((step == 0 and "origin" in state) or "converted_from" in state),
        tokenizer_file=Path(tokenizer_file),
    )


def _find_stop_ids(
    state: Mapping[str, JsonValue], config: Config, tokenizer: Tokenizer, tokenizer_file: str | Path
) -> tuple[int, ...]:
    """Return the ids that end a text: those of a converted model, or EOS, what the model at the start of the run had in
    its generation_config.json, and what ends an answer in a fine-tuning run's chat template, with a warning."""
    stored = state.get("stop")
    if isinstance(stored, list):
        return tuple(int(str(token)) for token in stored)
    if isinstance(stored, int):  # older checkpoints store a single id
        return (stored,)
    origin = state.get("origin")
    generation = origin.get("generation") if isinstance(origin, dict) else None
    ids = generation.get("eos_token_id") if isinstance(generation, dict) else None
    listed = list_token_ids(ids)
    answer_ends = find_answer_end_tokens(config.task, tokenizer_file, tokenizer)
    for token in answer_ends:
        log.warning("an answer ends at %s, the chat template's end of a turn, or at EOS", tokenizer.id_to_piece(token))
    return tuple(dict.fromkeys([tokenizer.eos, *listed, *answer_ends]))


def load_model(
    path: str | Path,
    device: str | torch.device = "cpu",
    *,
    dtype: str | torch.dtype = "float32",
    trust_plugins: bool = False,
) -> nn.Module:
    """Return the model of a run directory or checkpoint, in evaluation mode, without a tokenizer.

    Call it with `tokens` [batch, sequence]; it returns `.logits` and `.hidden`. Raises as `load` does.
    """
    source = checkpoint.find_checkpoint(path)
    config = parse_stored_config(source, checkpoint.read_state(source))
    import_foreign_plugins(config.plugins, source, trusted=trust_plugins)
    model = build(config.model)
    initialise_buffers(model)
    stored = checkpoint.read_tensors(source, "model.")
    working = choose_dtype(dtype, find_main_dtype(stored.values()))
    tensors = {f"model.{name}": tensor for name, tensor in list_checkpoint_tensors(model).items()}
    checkpoint.check_tensor_names(source, stored, tensors)
    for name, tensor in tensors.items():
        if stored[name].shape != tensor.shape:
            raise MegatfmError(
                f"{source}: {name} is {list(stored[name].shape)}, but {list(tensor.shape)} in the model that its "
                "config describes: open it with the version and plugins that wrote it"
            )
        # In place, so that tied modules keep sharing it.
        tensor.data = align(convert_loaded(tensor, stored.pop(name), working))
    return model.eval().to(device)


class IncrementalDetokenizer:
    """Decodes ids that arrive one by one. Bytes of an incomplete character are held back.

    prompt_ids: ids of the prompt, which precede the text and are not returned.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Iterable[int] = ()) -> None:
        token_bytes = tokenizer.token_bytes()
        self._stream = (
            ContextDetokenizer(tokenizer, prompt_ids)
            if token_bytes is None
            else ByteDetokenizer(tokenizer, token_bytes)
        )

    def add(self, ids: Iterable[int]) -> str:
        """Return the text that these ids complete. Bytes that are no UTF-8 become U+FFFD; reserved ids give none."""
        return "".join(self._stream.add(int(token)) for token in ids)

    def end(self) -> str:
        """Return the rest: U+FFFD for an incomplete character, else nothing."""
        return self._stream.end()


class GrowingText:
    """A text that grows by tokens until one of `end_tokens`, or a stop text, ends it.

    prompt_ids: ids of the prompt, which precede the text and are not part of it.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Iterable[int], end_tokens: Iterable[int], stop: Sequence[str] = ()
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids)
        self._end_tokens, self._stop = frozenset(end_tokens), stop
        self.text, self.is_done = "", False

    def add(self, token: int) -> str:
        """Append and return a token's text; nothing if the text is done."""
        if self.is_done:
            return ""
        new_text = self._detokenizer.add([token])
        self.text += new_text
        self.is_done = token in self._end_tokens or any(stop_text in self.text for stop_text in self._stop)
        return new_text

    def end(self) -> str:
        """Return the text up to the first stop text."""
        has_stop = any(stop_text in self.text for stop_text in self._stop)
        text = self.text if has_stop else self.text + self._detokenizer.end()
        positions = [position for stop_text in self._stop if (position := text.find(stop_text)) >= 0]
        return text[: min(positions, default=len(text))]


class ByteDetokenizer:
    """Detokenizer for tokenizers whose ids have fixed bytes, whatever precedes them."""

    def __init__(self, tokenizer: Tokenizer, token_bytes: list[bytes]) -> None:
        self._token_bytes = token_bytes
        if tokenizer.unk is not None:
            token_bytes[tokenizer.unk] = tokenizer.decode([tokenizer.unk]).encode()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        """Return the text that is sure after this id."""
        return self._decoder.decode(self._token_bytes[token])

    def end(self) -> str:
        """Return the text that was held back."""
        return self._decoder.decode(b"", final=True)


class ContextDetokenizer:
    """Detokenizer for all others, where the space before an id depends on the ids before it.

    An id's text is what `decode` returns beyond the text of the ids before it. Only the last ids that gave text are
    decoded again.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._emitted = list(prompt_ids)  # the last ids that gave text
        self._pending: list[int] = []  # ids since then

    def add(self, token: int) -> str:
        """Return the text that is sure after this id."""
        self._pending.append(token)
        text = self._decode_new_text()
        if not text or text.endswith(_BROKEN):
            return ""
        self._emitted, self._pending = self._pending, []
        return text

    def end(self) -> str:
        """Return the text that was held back."""
        return self._decode_new_text()

    def _decode_new_text(self) -> str:
        decode = self._tokenizer.decode
        return decode([*self._emitted, *self._pending])[len(decode(self._emitted)) :]


def generate_text(
    loaded: TextModel,
    prompt: str,
    sampling: Sampling,
    max_tokens: int,
    samples: int,
    options: PromptOptions = DEFAULT_OPTIONS,
    on_text: Callable[[str], None] = lambda _: None,
) -> list[str]:
    """Return `samples` continuations of a prompt, each up to an id of `loaded.eos_token_id`.

    on_text: receives the prompt, with a line end if the text is no continuation of it, then the first text as it grows.
    """
    prompts, max_tokens = prepare_prompts(loaded, prompt, max_tokens, options, samples=samples)
    rows = [GrowingText(loaded.tokenizer, row.tolist(), loaded.eos_token_id) for row in prompts.tokens]
    on_text(f"{prompt}{choose_separator(loaded, options)}")
    for tokens in stream(loaded.model, prompts, sampling, max_tokens=max_tokens, stop_token=loaded.eos_token_id):
        new_texts = [row.add(token) for row, token in zip(rows, tokens.tolist(), strict=True)]
        on_text(new_texts[0])
    texts = [row.end() for row in rows]
    on_text(texts[0].removeprefix(rows[0].text))
    return texts


def generate_text_beam(
    loaded: TextModel,
    prompt: str,
    max_tokens: int,
    beams: int,
    length_penalty: float,
    options: PromptOptions = DEFAULT_OPTIONS,
) -> str:
    """Return the continuation of a prompt by beam search."""
    tokenizer = loaded.tokenizer
    prompts, max_tokens = prepare_prompts(loaded, prompt, max_tokens, options)
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


@dataclass(frozen=True)
class LockstepSampling(Sampling):
    """Sampling by ranks that run the model together: all take rank 0's token, so that all run equally many steps.

    on_token: called for each token, on all ranks alike.
    """

    on_token: Callable[[], None] = lambda: None

    def sample(self, logits_BV: Tensor, position: object) -> Tensor:
        """Return the next token [B] of each row. Collective if there is a process group."""
        self.on_token()
        token_B = super().sample(logits_BV, position)  # type: ignore[arg-type]
        if dist.is_initialized():
            dist.broadcast(token_B, 0)
        return token_B


class PromptSampler:
    """Continues `evaluate.sample_prompts` with the model in training, by the same draws at each evaluation."""

    def check(self, model: nn.Module, tokenizer: Tokenizer | None, config: Config) -> None:
        """Raise UsageError for a prompt that the model can't continue."""
        loaded = _make_text_model(model, tokenizer, config)
        limit, n_tokens = config.model.position.limit, config.evaluate.sample_tokens
        for prompt in config.evaluate.sample_prompts:
            length = len(build_prompts(loaded, prompt).tokens[0])
            if limit is not None and length + n_tokens - 1 > limit:
                raise UsageError(
                    f"evaluate.sample_tokens = {n_tokens}: the prompt {prompt[:40]!r} has {length} tokens, and "
                    f"model.position.max_positions = {limit}: set at most {max(0, limit + 1 - length)}, or a shorter "
                    "prompt"
                )

    @torch.no_grad()
    def generate(
        self, model: nn.Module, tokenizer: Tokenizer | None, config: Config, step: int, on_token: Callable[[], None]
    ) -> list[str]:
        """Return the continuation of each prompt. on_token: called for each token. Collective."""
        loaded = _make_text_model(model, tokenizer, config, step)
        n_ids = loaded.tokenizer.vocab_size
        sampling = LockstepSampling(TEMPERATURE, top_p=TOP_P, vocab_size=n_ids, on_token=on_token)
        n_tokens = config.evaluate.sample_tokens
        return [generate_text(loaded, prompt, sampling, n_tokens, 1)[0] for prompt in config.evaluate.sample_prompts]


def _make_text_model(model: nn.Module, tokenizer: Tokenizer | None, config: Config, step: int = 0) -> TextModel:
    if tokenizer is None:
        raise UsageError("evaluate.sample_prompts: the run reads no text: leave them out")
    return TextModel(model, tokenizer, config, step, None, eos_token_id=(tokenizer.eos,))
