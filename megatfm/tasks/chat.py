"""Chat templates: conversations as text, as the tokenizer's own template renders them, and which of it is an answer."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatfm.errors import UsageError
from megatfm.tokenizers import HuggingFaceTokenizer, Tokenizer

TEMPLATE_FILE, CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"
ASSISTANT = "assistant"
Message = Mapping[str, Any]


class GenerationTag(Extension):
    """Transformers' `{% generation %}`, which marks answers in a template: what it holds is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Return the statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template, with the spellings of special tokens that it may use: bos_token, eos_token and so on."""

    source: str
    special_tokens: Mapping[str, str]

    @cached_property
    def _compiled(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **options: json.dumps(
            value, ensure_ascii=False, **options
        )
        environment.globals["raise_exception"] = _refuse
        try:
            return environment.from_string(self.source)
        except jinja2.TemplateError as error:
            raise UsageError(f"the chat template is no Jinja template: {error}") from None

    def render(self, messages: Sequence[Message], *, asks: bool = False) -> str:
        """Render messages; asks: with the words that begin an answer. Raises UsageError where the template refuses."""
        try:
            return self._compiled.render(
                messages=list(messages), add_generation_prompt=asks, **self.special_tokens
            )
        except jinja2.TemplateError as error:
            raise UsageError(f"the chat template refuses the messages: {error}") from None

    def render_unfinished(self, messages: Sequence[Message]) -> str:
        """Render messages up to the end of the last one's words, which then go on, as transformers'
        `continue_final_message`. Raises UsageError where the template leaves these words out."""
        text, words = self.render(messages), messages[-1]["content"]
        begin = text.rfind(words.strip())
        if begin < 0:
            raise UsageError(
                "the chat template leaves out the last message, which the answer is to go on from"
            )
        has_spaces = text.startswith(words.lstrip(), begin)
        return text[: begin + len(words.lstrip() if has_spaces else words.strip())]

    def answer_spans(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        """Return the rendered conversation, and begin and end of each answer in it.

        An answer is what a message of the assistant adds to the messages before it and the words that ask for it.
        Raises UsageError where a template changes earlier messages, so that answers can't be told from it.
        """
        text, spans = self.render(messages), []
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            before = self.render(messages[:number], asks=True)
            upto = self.render(messages[: number + 1])
            if not upto.startswith(before) or not text.startswith(upto):
                raise UsageError(
                    f"the chat template renders the messages before message {number + 1} otherwise once that is there, "
                    "so that its answer can't be told from them: split the conversation there, or use a template that "
                    "adds to what it has"
                )
            spans.append((len(before), len(upto)))
        return text, spans


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def load_chat_template(
    tokenizer_file: str | Path, tokenizer: Tokenizer, given: str | None, *, name: str = "default"
) -> ChatTemplate:
    """Return the template in the file `given`, or that beside a tokenizer. Raises UsageError if there is none.

    name: of the template, where the tokenizer has several.
    """
    folder = Path(tokenizer_file)
    folder = folder if folder.is_dir() else folder.parent
    about = _read_json(folder / CONFIG_FILE)
    if given is not None:
        try:
            source: Any = Path(given).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"task.chat_template = {given}: can't read it: {error}") from None
    elif (folder / TEMPLATE_FILE).is_file():
        source = (folder / TEMPLATE_FILE).read_text(encoding="utf-8")
    else:
        source = about.get("chat_template")
    if isinstance(source, list):  # several by name
        templates = {str(entry.get("name")): entry.get("template") for entry in source}
        if name not in templates:
            raise UsageError(
                f"{folder}: the tokenizer has no chat template {name!r}: choose one of {', '.join(templates)}"
            )
        source = templates[name]
    if not isinstance(source, str):
        raise UsageError(
            f"{folder}: the tokenizer has no chat template ({TEMPLATE_FILE}, or chat_template in {CONFIG_FILE}): give "
            "a Jinja file as task.chat_template"
        )
    roles = {
        f"{role}_token": getattr(tokenizer, role)
        for role in ("bos", "eos", "pad", "unk", "cls", "sep", "mask")
    }
    spellings = {name: tokenizer.id_to_piece(token) for name, token in roles.items() if token is not None}
    return ChatTemplate(source, spellings)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    loaded = json.loads(path.read_text(encoding="utf-8"))
    return loaded if isinstance(loaded, dict) else {}


def check_messages(messages: Any, tokenizer: HuggingFaceTokenizer) -> str | None:
    """Return what is wrong with a row's messages, or None."""
    if not isinstance(messages, list) or not messages:
        return "has no list of messages"
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            return f"message {number} has no role"
        content = message.get("content")
        if not isinstance(content, str):
            return f"message {number} has no text as its content"
        if spelled := [mark for mark in tokenizer.reserved_spellings if mark in content]:
            return f"message {number} spells the special token {spelled[0]!r}, and would be read as one: take it out"
    if all(message["role"] != ASSISTANT for message in messages):
        return f"has no message with role {ASSISTANT!r}, so that no token is trained"
    return None
