"""Chat templates: conversations rendered by the tokenizer's template, and the spans of the assistant's answers."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatfm.config import TaskConfig
from megatfm.errors import UsageError
from megatfm.tokenizers import (
    CHAT_TEMPLATE,
    HuggingFaceTokenizer,
    Tokenizer,
    list_chat_templates,
    read_tokenizer_config,
)
from megatfm.tokenizers.base import ROLES, name_special_tokens, parse_tokenizer_config
from megatfm.tokenizers.loading import TOKENIZER_JSON

CONFIG_FILE = "tokenizer_config.json"
DEFAULT_TEMPLATE = "default"
ASSISTANT = "assistant"
TEMPLATE_ERRORS = (
    jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
)  # fmt: skip
"""Errors that rendering a template may raise: those of Jinja, and of Python in the template's expressions."""
log = logging.getLogger("megatfm")
CHAT_FORMS = ("chat", "preference")
"""Forms of tasks whose answers a chat template ends."""
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names under which data sets keep what an assistant thinks; templates read the first or the second one."""
CONTINUATION_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
"""Stands for the rest of an unfinished message while a template renders it. Its space shows whether spaces are kept."""
Message = Mapping[str, Any]


class GenerationTag(Extension):
    """Transformers' `{% generation %}`, which marks answers in a template. Its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Return the statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template and the special tokens it may spell: bos_token, eos_token and so on → their text."""

    source: str
    special_tokens: Mapping[str, str]

    @cached_property
    def _compiled(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _dump_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = datetime.now().strftime  # one time, lest a conversation span midnight
        try:
            return environment.from_string(self.source)
        except jinja2.TemplateError as error:
            raise UsageError(f"the chat template is no Jinja template: {error}") from None

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """Render messages as text, as transformers' `apply_chat_template` does without tools and documents.

        add_generation_prompt: end with the words that begin an answer. Raises UsageError where the template refuses
        the messages.
        """
        context = {"messages": list(map(_normalise_message, messages)), "tools": None, "documents": None}
        try:
            return self._compiled.render(**context, add_generation_prompt=add_generation_prompt, **self.special_tokens)
        except TEMPLATE_ERRORS as error:
            raise UsageError(f"the chat template refuses the messages: {error}") from None

    def render_unfinished(self, messages: Sequence[Message]) -> str:
        """Render messages up to the end of the last one's words, which then go on, as transformers'
        `continue_final_message`. Raises UsageError where the template leaves these words out."""
        last = messages[-1]
        text = self.render([*messages[:-1], {**last, "content": last["content"] + CONTINUATION_MARK}])
        end = text.rfind(CONTINUATION_MARK.strip())
        if end < 0 or last["content"].strip() not in text[:end]:
            raise UsageError("the chat template leaves out the last message, which the answer is to go on from")
        return text[:end] if text.startswith(CONTINUATION_MARK, end) else text[:end].rstrip()

    def locate_answers(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        """Return the rendered conversation, and [begin, end) of each answer in characters.

        An answer is the text that an assistant's message adds after the generation prompt. Raises UsageError where a
        template changes earlier messages, so that an answer has no fixed place.
        """
        text, spans = self.render(messages), []
        for index, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            prompt = self.render(messages[:index], add_generation_prompt=True)
            with_answer = self.render(messages[: index + 1])
            if not with_answer.startswith(prompt) or not text.startswith(with_answer):
                raise UsageError(
                    f"the chat template renders the messages before message {index + 1} otherwise once that is there, "
                    "so that its answer can't be told from them: split the conversation there, or use a template that "
                    "only adds text"
                )
            spans.append((len(prompt), len(with_answer)))
        return text, spans

    def find_end_of_turn(self, tokenizer: HuggingFaceTokenizer) -> int | None:
        """Return the special token that ends an answer; None if the template puts none behind it."""
        conversation = [{"role": "user", "content": "question"}, {"role": ASSISTANT, "content": "answer"}]
        try:
            ending = self.render(conversation).removeprefix(self.render_unfinished(conversation))
        except UsageError:  # a template that wants other roles
            return None
        tokens = tokenizer.encode_with_offsets(ending)[0].tolist()
        return next((token for token in tokens if token in tokenizer.special.reserved), None)


def _normalise_message(message: Message) -> Message:
    """Return a message without empty fields, as tables have them, and with its reasoning under both common names."""
    filled = {key: value for key, value in message.items() if value is not None}
    reasoning = next((filled[field] for field in REASONING_FIELDS if field in filled), None)
    return filled if reasoning is None else {"thinking": reasoning, **filled, "reasoning_content": reasoning}


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _dump_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Return a value as JSON: the filter `tojson` as transformers defines it, without Jinja's escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def load_chat_template(
    tokenizer_file: str | Path, tokenizer: Tokenizer, template_file: str | None, *, name: str = DEFAULT_TEMPLATE
) -> ChatTemplate:
    """Return the template in `template_file`, or the one beside the tokenizer. Raises UsageError if there is none.

    name: of the template, where the tokenizer has several.
    """
    path = Path(tokenizer_file)
    folder = path if path.is_dir() else path.parent
    if template_file is not None:
        source = _read_template(Path(template_file), f"task.chat_template = {template_file}")
    else:
        source = _find_template(folder, name)
    return ChatTemplate(source, _spell_special_tokens(folder, tokenizer))


def _spell_special_tokens(folder: Path, tokenizer: Tokenizer) -> dict[str, str]:
    """Return the special tokens that a template may spell, such as bos_token: those that the tokenizer's config names.

    Our tokenizer has an id for each role, and puts another one where the model has none. That is for a config without
    any role. Raises UsageError if the config is no JSON object.
    """
    file = folder / TOKENIZER_JSON
    named = name_special_tokens(parse_tokenizer_config(read_tokenizer_config(file), str(file)))
    if any(f"{role}_token" in named for role in ROLES):
        return named
    ids = {f"{role}_token": getattr(tokenizer, role) for role in ROLES}
    return named | {name: tokenizer.id_to_piece(token) for name, token in ids.items() if token is not None}


def find_answer_end_tokens(
    task: TaskConfig | None, tokenizer_file: str | Path, tokenizer: Tokenizer
) -> tuple[int, ...]:
    """Return the token that ends an answer of a model fine-tuned on conversations; none for other models."""
    if task is None or task.form not in CHAT_FORMS or not isinstance(tokenizer, HuggingFaceTokenizer):
        return ()
    try:
        template = load_chat_template(tokenizer_file, tokenizer, task.chat_template)
    except UsageError as error:
        if task.form == "chat":  # preferences between plain texts need none
            log.warning("an answer ends at EOS alone, for the chat template can't be read: %s", error)
        return ()
    token = template.find_end_of_turn(tokenizer)
    return () if token is None else (token,)


def _find_template(folder: Path, name: str) -> str:
    """Return a tokenizer's template: from a Jinja file of its own, or from tokenizer_config.json. Raises UsageError."""
    paths = {file: folder / file for file in list_chat_templates(folder)}
    files = {DEFAULT_TEMPLATE if file == CHAT_TEMPLATE else path.stem: path for file, path in paths.items()}
    if name in files:
        return _read_template(files[name], str(files[name]))
    config_file = folder / CONFIG_FILE
    stored = _parse_config(config_file).get("chat_template") if config_file.is_file() else None
    entries = stored if isinstance(stored, list) else [{"name": DEFAULT_TEMPLATE, "template": stored}]
    templates = {
        str(entry.get("name")): source
        for entry in entries
        if isinstance(entry, Mapping) and isinstance(source := entry.get("template"), str)
    }
    names = sorted({*files, *templates})
    if not names:
        raise UsageError(
            f"{folder}: the tokenizer has no chat template ({CHAT_TEMPLATE}, or chat_template in {CONFIG_FILE}): give "
            "a Jinja file as task.chat_template"
        )
    if name not in templates:
        raise UsageError(f"{folder}: the tokenizer has no chat template {name!r}: choose one of {', '.join(names)}")
    return templates[name]


def _read_template(path: Path, place: str) -> str:
    """Return a file's text. place: names the file in an error. Raises UsageError."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{place}: can't read it: {error}") from None


def _parse_config(path: Path) -> Mapping[str, Any]:
    """Return the content of a tokenizer_config.json. Raises UsageError if it is no JSON object."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: can't read it: {error}") from None
    if not isinstance(content, Mapping):
        raise UsageError(f"{path}: is no JSON object: mend it, or take it away")
    return content


def check_messages(messages: Any, tokenizer: HuggingFaceTokenizer) -> str | None:
    """Return what is wrong with a row's messages; None if nothing is."""
    if not isinstance(messages, list) or not messages:
        return "has no list of messages"
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            return f"message {number} has no role"
        content = message.get("content")
        if not isinstance(content, str):
            return f"message {number} has no text as its content"
        if message["role"] == ASSISTANT and not content.strip():
            return f"message {number} is an answer without a text, of which its end alone would be trained: take it out"
        texts = list(_iter_texts(message))
        reserved = [spelling for spelling in tokenizer.reserved_spellings if any(spelling in text for text in texts)]
        if reserved:
            return f"message {number} spells the special token {reserved[0]!r}, and would be read as one: take it out"
    if all(message["role"] != ASSISTANT for message in messages):
        return f"has no message with role {ASSISTANT!r}, so that no token is trained"
    return None


def _iter_texts(value: Any) -> Iterator[str]:
    """Iterate over the texts of a message, its role, reasoning and calls of tools too, which templates may write."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _iter_texts(part)
