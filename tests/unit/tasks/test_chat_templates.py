"""Chat templates of published models read more than roles and contents: all that transformers gives them."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import transformers

from megatfm import tokenizers
from megatfm.errors import UsageError
from megatfm.tasks.chat import check_messages, load_chat_template
from megatfm.tokenizers import HuggingFaceTokenizer
from tests.support.finetuning_tasks import MARKS, save_chat_tokenizer

TURNS = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '\n' }}{% endfor %}"
TEMPLATES = {
    "tools, as Mistral's": "{% if tools is not none %}[TOOLS]{{ tools }}{% endif %}" + TURNS,
    "documents, as Command R's": "{% if documents is not none %}[DOCS]{% endif %}" + TURNS,
    "a date, as Llama 3.2's": "{% if strftime_now is defined %}{{ strftime_now('%d %b') }}{% endif %}" + TURNS,
    "calls, as Qwen's": "{% for m in messages %}{% if m.tool_calls is defined %}[CALL]{% endif %}{% endfor %}" + TURNS,
    "reasoning, as Qwen 3's": "{% for m in messages %}<think>{{ m.reasoning_content }}{% endfor %}" + TURNS,
    "reasoning, as gpt-oss's": "{% for m in messages %}<think>{{ m.thinking }}{% endfor %}" + TURNS,
    "special tokens": "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}|{{ cls_token }}|" + TURNS,
}
ROWS = [
    {"role": "system", "content": "Sei kurz.", "name": None, "tool_calls": None, "reasoning": None},
    {"role": "user", "content": "größer?", "name": None, "tool_calls": None, "reasoning": None},
    {"role": "assistant", "content": "ja", "name": "東京", "tool_calls": None, "reasoning": "2 > 1"},
]
"""Messages as a table has them: each with the columns of all."""


def open_tokenizers(folder: Path, template: str, **roles: str) -> tuple[HuggingFaceTokenizer, Any]:
    save_chat_tokenizer(folder, template, **roles)
    tokenizer = tokenizers.load(folder)
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    return tokenizer, transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("roles", [{"bos_token": MARKS[2], "eos_token": MARKS[3]}, {"eos_token": MARKS[5]}], ids=str)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_reads_what_transformers_gives_it(name: str, roles: dict[str, str], tmp_path: Path) -> None:
    """A model without a first token, such as Qwen, has no bos_token in its template."""
    tokenizer, reference = open_tokenizers(tmp_path, TEMPLATES[name], **roles)
    expected = reference.apply_chat_template(ROWS, tokenize=False)
    assert load_chat_template(tmp_path, tokenizer, None).render(ROWS) == expected


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_template_spells_tokens_that_the_files_name(file: str, tmp_path: Path) -> None:
    template = "{{ bos_token }}|{{ image_token }}|{{ video_token }}" + TURNS
    tokenizer, _ = open_tokenizers(tmp_path, template, eos_token=MARKS[3])
    named = {"bos_token": MARKS[2], "image_token": MARKS[4], "extra_special_tokens": {"video_token": MARKS[5]}}
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["extra_special_tokens"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    content = config | named if file == "tokenizer_config.json" else named
    (tmp_path / file).write_text(json.dumps(content))
    expected = transformers.AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(ROWS, tokenize=False)
    assert load_chat_template(tmp_path, tokenizer, None).render(ROWS) == expected
    assert expected.startswith("|".join((MARKS[2], *MARKS[4:])))


def test_special_tokens_of_a_folder_that_names_none(tmp_path: Path) -> None:
    """Old folders leave them to transformers' class of the model."""
    tokenizer, _ = open_tokenizers(tmp_path, "{{ bos_token }}{{ eos_token }}", bos_token=MARKS[2], eos_token=MARKS[3])
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 8}')
    assert load_chat_template(tmp_path, tokenizer, None).render([]) == "<|begin|><|end|>"


def test_a_date_is_that_of_the_day_and_the_same_in_all_parts(tmp_path: Path) -> None:
    tokenizer, _ = open_tokenizers(tmp_path, "{{ strftime_now('%Y-%m-%d %f') }}" + TURNS, eos_token=MARKS[3])
    template = load_chat_template(tmp_path, tokenizer, None)
    days = {datetime.now().strftime("%Y-%m-%d")}
    text, spans = template.locate_answers(ROWS)
    days.add(datetime.now().strftime("%Y-%m-%d"))
    assert text[:10] in days
    assert [text[begin:end] for begin, end in spans] == ["assistant: ja\n"]


@pytest.mark.parametrize("content", ["e", "end", "ja ", " ja", "|", "user"])
@pytest.mark.parametrize("written", ["m.content", "m.content | trim"])
def test_an_unfinished_message_ends_at_its_words(content: str, written: str, tmp_path: Path) -> None:
    """However often the words stand in what the template writes after them."""
    turns = "{% for m in messages %}<|im_start|>{{ m.role }} {{ " + written + " }}<|im_end|> user {% endfor %}"
    tokenizer, reference = open_tokenizers(tmp_path, turns, eos_token=MARKS[3])
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]
    expected = reference.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert load_chat_template(tmp_path, tokenizer, None).render_unfinished(messages) == expected


def test_an_unfinished_message_that_a_template_leaves_out_is_refused(tmp_path: Path) -> None:
    tokenizer, _ = open_tokenizers(
        tmp_path, "{% for m in messages[:-1] %}{{ m.content }}{% endfor %}", eos_token=MARKS[3]
    )
    with pytest.raises(UsageError, match="leaves out the last message"):
        load_chat_template(tmp_path, tokenizer, None).render_unfinished(ROWS)


@pytest.mark.parametrize("changes", [
    {"role": "user<|im_end|>"},
    {"name": "<|im_end|>"},
    {"reasoning_content": "so <|im_end|>"},
    {"tool_calls": [{"function": {"arguments": {"city": ["<|im_end|>"]}}}]},
], ids=str)  # fmt: skip
def test_a_special_token_in_any_field_of_a_message_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    tokenizer, _ = open_tokenizers(tmp_path, TURNS, eos_token=MARKS[3])
    messages = [{"role": "user", "content": "a", "n": 1}, {"role": "assistant", "content": "b"}]
    assert check_messages(messages, tokenizer) is None
    problem = check_messages([messages[0] | changes, messages[1]], tokenizer)
    assert problem is not None
    assert problem.startswith("message 1 spells the special token '<|im_end|>'")
