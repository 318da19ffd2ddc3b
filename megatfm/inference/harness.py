"""Adapter to EleutherAI's lm-evaluation-harness (package `lm_eval`)."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatfm.errors import MegatfmError, UsageError
from megatfm.inference.batched_generation import TextRequest, generate_texts
from megatfm.inference.decoding import Sampling, check_makes_text, has_encoder
from megatfm.inference.likelihood import BATCH_SIZE, Continuation, encode_continuation, score
from megatfm.inference.text import TextModel
from megatfm.tasks.chat import ChatTemplate, load_chat_template
from megatfm.tasks.questions import TextPair, split_pair
from megatfm.tokenizers import HuggingFaceTokenizer

log = logging.getLogger("megatfm")

MAX_TOKENS = 256
"""Tokens of a generated text if a task sets no maximum; the harness's default."""
PASSED_OPTIONS = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"}


def harness_model(loaded: TextModel, *, batch_size: int = BATCH_SIZE) -> Any:
    """Return a model for `lm_eval.simple_evaluate(model=…)`. Raises MegatfmError without the package.

    Collective: each rank holds the model, gets all requests and computes a share; results are equal on all ranks.
    """
    try:
        from lm_eval.api.model import LM
    except ImportError:
        raise MegatfmError("lm-evaluation-harness is not installed: `pip install megatfm[harness]`") from None
    check_makes_text(loaded.model)
    requests, chat = HarnessRequests(loaded, batch_size), ChatPrompts(loaded)

    class HarnessModel(LM):  # type: ignore[misc]
        """The harness's interface. It stays rank 0 of 1, since our ranks share the requests of each call."""

        def loglikelihood(self, instances: Sequence[Any]) -> list[tuple[float, bool]]:
            return requests.loglikelihood([request.args for request in instances], chat)

        def loglikelihood_rolling(self, instances: Sequence[Any]) -> list[float]:
            return requests.loglikelihood_rolling([request.args[0] for request in instances])

        def generate_until(self, instances: Sequence[Any]) -> list[str]:
            return requests.generate_until([request.args for request in instances], chat)

        @property
        def tokenizer_name(self) -> str:
            return loaded.tokenizer.hash

        def chat_template(self, chat_template: bool | str = False) -> str | None:
            return chat.choose(chat_template)

        def apply_chat_template(
            self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
        ) -> str:
            return chat.render(chat_history, asks=add_generation_prompt)

    return HarnessModel()


class ChatPrompts:
    """Conversations as a model's chat template renders them, and their tokens.

    Special tokens that the template spells are read as such, and nothing is put before them, as in `task.form = "chat"`
    and in transformers. Other texts are never read so.
    """

    def __init__(self, loaded: TextModel) -> None:
        self._loaded = loaded
        self._template: ChatTemplate | None = None
        self._rendered: set[str] = set()

    def choose(self, name: bool | str) -> str | None:
        """Take the tokenizer's template, by its name where it has several; returns its source, None for no template.

        Raises UsageError where the model has none, or is no decoder with a tokenizer.json.
        """
        if name is False:
            return None
        loaded, task = self._loaded, self._loaded.config.task
        if has_encoder(loaded.model) or not isinstance(loaded.tokenizer, HuggingFaceTokenizer):
            raise UsageError(
                "a chat template needs a decoder with a tokenizer.json, in which special tokens are spelled: leave "
                "--chat-template out"
            )
        assert loaded.tokenizer_file is not None
        self._template = load_chat_template(
            loaded.tokenizer_file,
            loaded.tokenizer,
            task.chat_template if task else None,
            name="default" if name is True else name,
        )
        return self._template.source

    def render(self, messages: Sequence[Mapping[str, str]], *, asks: bool) -> str:
        """Return a conversation as text; asks: with the words that begin an answer, else the last message goes on."""
        if self._template is None:
            self.choose(True)
        assert self._template is not None
        template = self._template
        text = template.render(messages, add_generation_prompt=True) if asks else template.render_unfinished(messages)
        self._rendered.add(text)
        return text

    def encode(self, prompt: str) -> list[int] | None:
        """Return the tokens of a rendered conversation; None for another text."""
        return self._encode(prompt) if prompt in self._rendered else None

    def split(self, prompt: str, answer: str) -> Continuation | None:
        """Return a rendered conversation and the answer after it, tokenized as one text; None after another text.

        Its trailing spaces go to the answer, as in the harness. Raises UsageError for an answer that makes no token.
        """
        if prompt not in self._rendered:
            return None
        context, targets = split_pair(self._loaded.tokenizer, TextPair(prompt, answer), self._encode)
        if not targets:
            raise UsageError(f"the answer {answer!r:.60} makes no token: give one with text")
        return Continuation(self._encode(context), targets)

    def _encode(self, text: str) -> list[int]:
        tokenizer = self._loaded.tokenizer
        assert isinstance(tokenizer, HuggingFaceTokenizer)
        ids: list[int] = tokenizer.encode_with_offsets(text)[0].tolist()
        return ids


class HarnessRequests:
    """The three request types of the harness, on texts."""

    def __init__(self, loaded: TextModel, batch_size: int) -> None:
        self._loaded, self._batch_size = loaded, batch_size
        config = loaded.config
        self._limit: int | None = config.model.position.limit
        self._window = self._limit or config.data.sequence_length

    def loglikelihood(
        self, pairs: Iterable[tuple[str, str]], chat: "ChatPrompts | None" = None
    ) -> list[tuple[float, bool]]:
        """Return log p(continuation | context) in nats, and whether the continuation is greedy, of each pair."""
        encoded = [(chat and chat.split(*pair)) or encode_continuation(self._loaded, *pair) for pair in pairs]
        truncated = [self._cut_context(continuation) for continuation in encoded]
        n_cut = sum(len(after.tokens) < len(before.tokens) for after, before in zip(truncated, encoded, strict=True))
        if n_cut:
            log.warning("%d of %d contexts are cut at their start to %d tokens", n_cut, len(encoded), self._limit)
        scored = score(self._loaded.model, truncated, batch_size=self._batch_size)
        return [(likelihood.log_probability, bool(likelihood.is_greedy)) for likelihood in scored]

    def _cut_context(self, continuation: Continuation) -> Continuation:
        """Cut a context at its start so that the model's positions suffice. Raises UsageError if no context is left."""
        surplus = len(continuation.tokens) - (self._limit or len(continuation.tokens))
        if surplus <= 0:
            return continuation
        if surplus >= len(continuation.context):
            raise UsageError(
                f"an answer of {len(continuation.targets)} tokens, but model.position.max_positions = {self._limit}"
            )
        return replace(continuation, context=continuation.context[surplus:])

    def loglikelihood_rolling(self, texts: Iterable[str]) -> list[float]:
        """Return log p(text) in nats: windows predict each token once, after as much context as fits."""
        if has_encoder(self._loaded.model):
            raise UsageError(
                "model.family = 'encoder_decoder' has no likelihood of a text from its beginning: leave out tasks of "
                "perplexity"
            )
        windows = [self._split_windows(text) for text in texts]
        all_windows = [window for windows_of_text in windows for window in windows_of_text]
        scored = iter(score(self._loaded.model, all_windows, batch_size=self._batch_size))
        return [sum(next(scored).log_probability for _ in windows_of_text) for windows_of_text in windows]

    def _split_windows(self, text: str) -> list[Continuation]:
        """Cut a text into windows of the model's length; the last one has as much context as fits."""
        tokenizer, window = self._loaded.tokenizer, self._window
        tokens = [tokenizer.bos, *tokenizer.encode(text).tolist()]
        windows, start = [], 1
        while start < len(tokens):
            end = min(start + window, len(tokens))
            windows.append(Continuation(tokens[max(end - window - 1, 0) : start], tokens[start:end]))
            start = end
        return windows

    def generate_until(
        self, requests: Iterable[tuple[str, Mapping[str, Any]]], chat: "ChatPrompts | None" = None
    ) -> list[str]:
        """Return each prompt's continuation, up to the first of its stop texts."""
        text_requests = [
            TextRequest((chat and chat.encode(prompt)) or prompt, *_parse_options(options))
            for prompt, options in requests
        ]
        return generate_texts(self._loaded, text_requests, batch_size=self._batch_size, cut_prompts=True)


def _parse_options(options: Mapping[str, Any]) -> tuple[int, tuple[str, ...], Sampling]:
    """Return maximal tokens, stop texts and sampling. Raises UsageError for an unsupported option."""
    if unknown := sorted(set(options) - PASSED_OPTIONS):
        raise UsageError(
            f"generation_kwargs: {unknown[0]} is none of {', '.join(sorted(PASSED_OPTIONS))}: leave it out of the task"
        )
    until = options.get("until") or []
    # The harness has no end before an empty text.
    stop = tuple(text for text in ([until] if isinstance(until, str) else until) if text)
    temperature = float(options.get("temperature") or 0.0)
    is_greedy = not options.get("do_sample", temperature > 0)
    sampling = Sampling(
        0.0 if is_greedy else temperature or 1.0, int(options.get("top_k") or 0), float(options.get("top_p") or 1.0)
    )
    return int(options.get("max_gen_toks", MAX_TOKENS)), stop, sampling


def run_harness(
    loaded: TextModel,
    tasks: Sequence[str],
    *,
    include_path: str | None = None,
    shots: int | None = None,
    limit: int = 0,
    batch_size: int = BATCH_SIZE,
    chat_template: bool = False,
) -> dict[str, dict[str, float]]:
    """Evaluate a model on tasks of the harness; return task → metric → value.

    include_path: folder with YAML files of further tasks. shots: number of solved examples; None: the task's.
    chat_template: render questions by the model's chat template, with solved examples as earlier turns. Raises
    MegatfmError without the package or the task's data, UsageError for an unknown task.
    """
    model = harness_model(loaded, batch_size=batch_size)
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=include_path)
    if unknown := [name for name in tasks if not manager.match_tasks([name])]:
        raise UsageError(
            f"--harness {unknown[0]}: the harness has no task of this name: see `lm-eval ls tasks`, or name the "
            "folder of its YAML file by --harness-path"
        )
    try:
        results = simple_evaluate(
            model=model, tasks=list(tasks), num_fewshot=shots, limit=limit or None, task_manager=manager,
            log_samples=False, bootstrap_iters=0, apply_chat_template=chat_template, fewshot_as_multiturn=True,
        )  # fmt: skip
    except OSError as error:  # the harness downloads its data
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise MegatfmError(
            f"--harness {' '.join(tasks)}: the task's data can't be had: {reason}: the harness downloads them from the "
            "Hugging Face Hub; without a network, run it once elsewhere, and copy the folder that HF_HOME names"
        ) from error
    except OverflowError:  # the harness's own exp
        raise MegatfmError(
            f"--harness {' '.join(tasks)}: a perplexity is beyond the range of numbers, so the model predicts nothing: "
            "train it further, or leave tasks of perplexity out"
        ) from None
    return {name: _select_metrics(values) for name, values in results["results"].items()}


def _select_metrics(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numeric results of a task, without the suffix of the harness's default filter."""
    return {
        metric.removesuffix(",none"): value
        for metric, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
