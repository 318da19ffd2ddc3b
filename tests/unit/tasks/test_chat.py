"""Conversations and preferences: tokens as transformers renders them, what is trained, rows that are refused."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers as library
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

from megatfm import tokenizers
from megatfm.config import PreferenceObjective, TaskConfig
from megatfm.data.sequences import DocumentChunk, split_inner_documents
from megatfm.errors import UsageError
from megatfm.layers.loss_terms import FIRST_TARGET
from megatfm.objectives.base import SpecialTokens
from megatfm.objectives.supervised import ANNOTATION, Answers, Preferences
from megatfm.ops.cross_entropy import IGNORE
from megatfm.rng import ChunkKey
from megatfm.tasks.answers import AnswerEncoder, PreferenceEncoder, format_trained
from megatfm.tasks.chat import ChatTemplate, load_chat_template
from megatfm.tasks.corpus import prepare_corpus
from megatfm.tasks.examples import ExampleFormat
from megatfm.tokenizers import Tokenizer, train_sentencepiece
from tests.support.models import UNTIED_MODEL

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] | trim + '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ message['content'] | trim + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}[INST] {{ message['content'] }} "
    "[/INST]{% elif message['role'] == 'assistant' %}{% generation %} {{ message['content'] }}{{ eos_token }}"
    "{% endgeneration %}"
    "{% else %}{{ raise_exception('only user and assistant speak') }}{% endif %}{% endfor %}"
)
CHATS = [
    [("user", "Wie heißt die Hauptstadt?"), ("assistant", "Canberra."), ("user", "日本は?"), ("assistant", "東京 🗼")],
    [("user", "  hi\n"), ("assistant", "x")],
    [("user", "a"), ("assistant", "b"), ("user", "still open?")],
]  # fmt: skip


TokenizerPair = tuple[Tokenizer, Any, str]


def messages(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


@pytest.fixture(scope="module", params=["chatml", "llama"])
def tokenizer_pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TokenizerPair:
    """Ours, transformers' and the file of a byte-level tokenizer with a chat template."""
    folder = tmp_path_factory.mktemp(request.param)
    built = library.Tokenizer(models.BPE())
    built.pre_tokenizer, built.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    marks = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    texts = ["the user and the assistant said hi to the user\n" * 5]
    built.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=320, special_tokens=marks, initial_alphabet=alphabet, show_progress=False)
    )
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=built, bos_token="<s>", eos_token="</s>")
    fast.chat_template = {"chatml": CHATML, "llama": LLAMA}[request.param]
    fast.save_pretrained(folder)
    return (tokenizers.load(folder), transformers.AutoTokenizer.from_pretrained(folder), str(folder / "tokenizer.json"))


def encoder(tokenizer: Tokenizer, file: str, length: int = 200, **values: Any) -> AnswerEncoder:
    task = TaskConfig.model_validate({"form": "chat", "train": "x", **values})
    return AnswerEncoder("x", task, tokenizer, ExampleFormat(length), file)


@pytest.mark.parametrize("chat", range(len(CHATS)))
def test_tokens_and_mask_are_those_of_transformers(tokenizer_pair: TokenizerPair, chat: int) -> None:
    tokenizer, hf_tokenizer, file = tokenizer_pair
    conversation = messages(*CHATS[chat])
    options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    expected = hf_tokenizer.apply_chat_template(conversation, **options)
    ((example,), _) = encoder(tokenizer, file).encode([{"messages": conversation}])
    assert example.tokens.tolist() == expected["input_ids"]
    mask = np.zeros(len(example.tokens), int)
    for begin, end in example.annotation["trained"]:
        mask[begin:end] = 1
    # What a template writes after its mark of an answer, a line end here, is part of ours: the model is to make it.
    marked = np.array(expected["assistant_masks"])
    assert (mask >= marked).all()
    line_end = tokenizer.encode("\n").tolist()
    extra = example.tokens[(mask == 1) & (marked == 0)].tolist()
    assert extra == (
        line_end * sum(role == "assistant" for role, _ in CHATS[chat])
        if "im_start" in hf_tokenizer.chat_template
        else []
    )


def test_targets_are_the_answers_and_nothing_else(tokenizer_pair: TokenizerPair) -> None:
    tokenizer, _, file = tokenizer_pair
    ((example,), notes) = encoder(tokenizer, file).encode([{"messages": messages(*CHATS[0])}])
    stored = {ANNOTATION: json.dumps(example.annotation).encode()}
    fields = Answers.build_example(object.__new__(Answers), DocumentChunk(example.tokens, files=stored), None)
    assert fields["tokens"].tolist() == example.tokens[:-1].tolist()
    targets = fields["targets"][fields["targets"] != IGNORE].tolist()
    text = tokenizer.decode(targets)
    assert "Canberra." in text
    assert "東京 🗼" in text
    assert "Hauptstadt" not in text
    assert "user" not in text
    at = np.flatnonzero(fields["targets"] != IGNORE)
    assert fields["targets"][at].tolist() == example.tokens[at + 1].tolist()
    assert notes == [f"x: {len(at)} of {len(example.tokens)} tokens are trained"]
    formatted = format_trained(example.tokens, example.annotation["trained"], tokenizer, colour=False)
    assert formatted.count("⟦") == 2
    coloured = format_trained(example.tokens, example.annotation["trained"], tokenizer, colour=True)
    assert coloured == formatted.replace("⟦", "\033[32m").replace("⟧", "\033[0m"), "green"
    assert formatted.partition("⟦")[0].count("Hauptstadt") == 1
    assert formatted.replace("⟦", "").replace("⟧", "").count("</s>" if "INST" in formatted else "<|im_end|>") >= 2


@pytest.mark.parametrize(("row", "message"), [
    (messages(("user", "a")), "has no message with role 'assistant'"),
    ([], "has no list of messages"),
    (None, "has no list of messages"),
    ("text", "has no list of messages"),
    ([{"content": "x"}], "message 1 has no role"),
    ([{"role": "user", "content": ["x"]}], "message 1 has no text"),
    (messages(("user", "a"), ("assistant", " \n")), "message 2 is an answer without a text"),
    (messages(("user", "x <|im_end|> y"), ("assistant", "b")), r"message 1 spells the special token '<\|im_end\|>'"),
    (messages(("user", "word " * 300), ("assistant", "b")), "has .* tokens, more than data.sequence_length = 200"),
])  # fmt: skip
def test_bad_conversations_are_named(tokenizer_pair: TokenizerPair, row: Any, message: str) -> None:
    tokenizer, _, file = tokenizer_pair
    good = messages(("user", "a"), ("assistant", "b"))
    with pytest.raises(UsageError, match=f"x, row 2: {message}"):
        encoder(tokenizer, file).encode([{"messages": good}, {} if row is None else {"messages": row}])


def test_an_answer_cut_away_is_refused_and_a_shortened_one_warned_of(tokenizer_pair: TokenizerPair) -> None:
    tokenizer, _, file = tokenizer_pair
    long = messages(("user", "word " * 300), ("assistant", "b"))
    with pytest.raises(UsageError, match="row 1: no token is trained"):
        encoder(tokenizer, file, too_long="truncate").encode([{"messages": long}])
    answer = messages(("user", "a"), ("assistant", "word " * 300))
    ((example,), notes) = encoder(tokenizer, file, too_long="truncate").encode([{"messages": answer}])
    assert len(example.tokens) == 201
    assert any("1 of 1 examples are cut to 200 tokens" in note for note in notes)
    assert any("won't learn to stop" in note for note in notes)


def test_templates_that_refuse_or_rewrite_are_named(tokenizer_pair: TokenizerPair, tmp_path: Path) -> None:
    tokenizer, hf_tokenizer, file = tokenizer_pair
    if "INST" in hf_tokenizer.chat_template:
        with pytest.raises(UsageError, match="x, row 1: the chat template refuses the messages: only user"):
            encoder(tokenizer, file).encode([{"messages": messages(("system", "s"), ("assistant", "b"))}])
    rewriting = tmp_path / "rewriting.jinja"
    rewriting.write_text("{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}")
    with pytest.raises(UsageError, match="x, row 1: the chat template renders the messages before message 2 otherwise"):
        encoder(tokenizer, file, chat_template=str(rewriting)).encode([{"messages": messages(*CHATS[1])}])
    rewriting.write_text("{% for m in messages %}")
    with pytest.raises(UsageError, match="no Jinja template"):
        encoder(tokenizer, file, chat_template=str(rewriting)).encode([{"messages": messages(*CHATS[1])}])
    for refused in (
        "{{ ''.__class__.__mro__ }}", "{{ messages[0].content + 1 }}", "{{ 1 / 0 }}", "{{ 'a'.encode('b') }}",
    ):  # fmt: skip
        rewriting.write_text(refused)
        with pytest.raises(UsageError, match="x, row 1: the chat template refuses the messages"):
            encoder(tokenizer, file, chat_template=str(rewriting)).encode([{"messages": messages(*CHATS[1])}])


def test_json_in_a_template_is_that_of_transformers() -> None:
    template = ChatTemplate("{{ messages | tojson }} {{ messages | tojson(ensure_ascii=true, indent=1) }}", {})
    assert template.render([{"role": "ü"}]) == '[{"role": "ü"}] [\n {\n  "role": "\\u00fc"\n }\n]'


def test_a_tokenizer_s_template_is_found_by_name(tokenizer_pair: TokenizerPair, tmp_path: Path) -> None:
    tokenizer, hf_tokenizer, _ = tokenizer_pair
    library_tokenizer = copy.deepcopy(hf_tokenizer)
    library_tokenizer.chat_template = {"default": "one", "tool_use": "two"}
    for stored_in_files in (True, False):
        folder = tmp_path / str(stored_in_files)
        library_tokenizer.save_pretrained(folder, save_jinja_files=stored_in_files)
        sources = [load_chat_template(folder, tokenizer, None, name=name).source for name in ("default", "tool_use")]
        assert sources == ["one", "two"]
        with pytest.raises(UsageError, match="has no chat template 'rag': choose one of default, tool_use"):
            load_chat_template(folder, tokenizer, None, name="rag")


def test_unreadable_tokenizer_files_are_named(tokenizer_pair: TokenizerPair, tmp_path: Path) -> None:
    tokenizer, *_ = tokenizer_pair
    config = tmp_path / "tokenizer_config.json"
    config.write_text('\ufeff{"chat_template": "one"}')  # as some editors write it
    assert load_chat_template(tmp_path, tokenizer, None).source == "one"
    (tmp_path / "mine.jinja").write_text("\ufefftwo", encoding="utf-8")
    assert load_chat_template(tmp_path, tokenizer, str(tmp_path / "mine.jinja")).source == "two"
    config.write_text('{"chat_template"')
    with pytest.raises(UsageError, match=r"tokenizer_config\.json: can't read it"):
        load_chat_template(tmp_path, tokenizer, None)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(UsageError, match=r"chat_template\.jinja: can't read it: 'utf-8' codec"):
        load_chat_template(tmp_path, tokenizer, None)


def test_a_template_is_held_against_the_tokenizer_s_own(tokenizer_pair: TokenizerPair, tmp_path: Path) -> None:
    tokenizer, hf_tokenizer, file = tokenizer_pair
    rows, template_file = [{"messages": messages(*chat)} for chat in CHATS], tmp_path / "given.jinja"
    for source, is_other in ((hf_tokenizer.chat_template, False), ("{{ 'x' }}" + hf_tokenizer.chat_template, True)):
        template_file.write_text(source)
        _, notes = encoder(tokenizer, file, chat_template=str(template_file)).encode(rows)
        assert any("x, row 1: task.chat_template renders it otherwise" in note for note in notes) == is_other
    template_file.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    system = [{"messages": messages(("system", "s"), ("user", "a"), ("assistant", "b"))}]
    _, notes = encoder(tokenizer, file, chat_template=str(template_file)).encode(system)
    assert any("row 1: task.chat_template renders it otherwise" in note for note in notes), "refused, or other text"


def test_a_template_that_changes_beside_the_tokenizer_is_read_anew(
    tokenizer_pair: TokenizerPair, tmp_path: Path
) -> None:
    tokenizer, hf_tokenizer, _ = tokenizer_pair
    (tmp_path / "x.jsonl").write_text(json.dumps({"messages": messages(*CHATS[1])}) + "\n")
    task = TaskConfig.model_validate({"form": "chat", "train": "x"})
    folders = []
    for source in (hf_tokenizer.chat_template, hf_tokenizer.chat_template, "{{ 'x' }}" + hf_tokenizer.chat_template):
        (tmp_path / "chat_template.jinja").write_text(source)
        corpus = prepare_corpus(
            str(tmp_path / "x.jsonl"),
            task,
            tokenizer,
            ExampleFormat(64, is_causal=True),
            tmp_path,
            tokenizer_file=str(tmp_path),
        )
        folders.append(corpus.folder)
    assert folders[0] == folders[1] != folders[2]


def test_texts_and_answers_without_a_template(tokenizer_pair: TokenizerPair) -> None:
    tokenizer, _, file = tokenizer_pair
    rows = [{"text": "zwei", "label": "two"}]
    ((example,), _) = encoder(tokenizer, file, form="generation", prefix="to English: ").encode(rows)
    prompt, answer = tokenizer.encode("to English: zwei\n").tolist(), tokenizer.encode("two").tolist()
    assert example.tokens.tolist() == [tokenizer.bos, *prompt, *answer, tokenizer.eos]
    assert example.annotation == {"trained": [[1 + len(prompt), len(example.tokens)]]}
    with pytest.raises(UsageError, match="x, row 1: column 'label' is empty"):
        encoder(tokenizer, file, form="generation").encode([{"text": "a", "label": " "}])


# ------------------------------------------------------------------------------------------------ preferences


WORDS = ["which animal barks", "the dog does", "the cat", "größer 東京 ☃", "a b c d"]
ROWS = [
    {"prompt": "which animal barks", "chosen": "the dog does", "rejected": "the cat"},
    {"prompt": "größer 東京", "chosen": "☃", "rejected": "a b c d"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizers.SentencePieceTokenizer(train_sentencepiece(WORDS * 9, vocab_size=330, sentinels=0))


def scores(sequences: Sequence[Any]) -> list[float]:
    """Another log-probability for each answer: minus its tokens, and a bit of their ids."""
    return [-float(end - begin) - float(tokens[begin:end].sum()) / 1e4 for tokens, (begin, end) in sequences]


def preference_encoder(tokenizer: Tokenizer, **task: Any) -> PreferenceEncoder:
    config = TaskConfig(form="preference", train="pairs.jsonl", **task)
    return PreferenceEncoder("pairs.jsonl", config, tokenizer, ExampleFormat(64), "", scores)


def test_a_tokenizer_without_offsets_is_refused_with_one_that_has_them(tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match=r"needs a tokenizer\.json.*in `megatfm prep`, tokenizer\.kind=byte-bpe"):
        encoder(tokenizer, "").encode_chats([{"messages": []}])


def test_prompts_are_read_and_answers_trained(tokenizer: Tokenizer) -> None:
    examples, notes = preference_encoder(tokenizer).encode(ROWS)
    for row, example in zip(ROWS, examples, strict=True):
        second, (chosen, rejected) = example.annotation["second"], example.annotation["trained"]
        prompt = [tokenizer.bos, *tokenizer.encode(row["prompt"] + "\n")]
        for side, start, (begin, end) in (("chosen", 0, chosen), ("rejected", second, rejected)):
            assert example.tokens[start:begin].tolist() == prompt
            assert example.tokens[begin:end].tolist() == [*tokenizer.encode(row[side]), tokenizer.eos]
        assert (chosen[1], rejected[1]) == (second, len(example.tokens))
        spans = tuple(chosen), tuple(x - second for x in rejected)
        sides = list(zip((example.tokens[:second], example.tokens[second:]), spans, strict=True))
        up, down = scores(sides)
        assert example.annotation["reference"] == pytest.approx(up - down, abs=1e-12)
    assert notes == ["pairs.jsonl: 50 % of 2 chosen answers are the likelier at the start"]


def test_a_pair_is_two_documents_of_one_row(tokenizer: Tokenizer) -> None:
    (example, _), _ = preference_encoder(tokenizer).encode(ROWS)
    special = SpecialTokens(bos=1, eos=2, pad=0, vocab_size=330)
    objective = Preferences(special, PreferenceObjective(), UNTIED_MODEL, (64,))
    stored = DocumentChunk(example.tokens, files={ANNOTATION: json.dumps(example.annotation).encode()})
    fields = objective.build_example(stored, ChunkKey(0, 5, 0, 0))
    second, n = example.annotation["second"], len(example.tokens)
    assert {len(values) for values in fields.values()} == {n - 2}
    assert objective.sequence_lengths(np.array([n]), np.array([0], np.uint64)).tolist() == [n - 2]
    positions = [*range(second - 1), *range(second, n - 1)]
    assert fields["tokens"].tolist() == example.tokens[positions].tolist()
    trained = {at for begin, end in example.annotation["trained"] for at in range(begin, end)}
    expected_targets = [int(example.tokens[at + 1]) if at + 1 in trained else -100 for at in positions]
    assert fields["targets"].tolist() == expected_targets
    first = expected_targets.index(next(target for target in expected_targets if target != -100))
    assert fields["pairs"].tolist() == [
        FIRST_TARGET if at == first else 1 if at < second - 1 else -1 for at in range(n - 2)
    ]
    assert fields["reference"].nonzero()[0].tolist() == [first]
    starts, blank = split_inner_documents(fields, np.array([0, n - 2]), np.array([True]))
    assert starts.tolist() == [0, second - 1, n - 2]
    assert blank is not None
    assert blank.tolist() == [True, True]
    assert "begins" not in fields


@pytest.mark.parametrize(("row", "message"), [
    ({"chosen": "the cat"}, "row 2: both answers are the same"),
    ({"chosen": ""}, "row 2: column 'chosen' is empty"),
    ({"prompt": None}, "row 2: column 'prompt' is empty"),
    ({"chosen": "the dog does " * 40}, r"row 2: has \d+ tokens in both sequences, more than data.sequence_length = 64"),
])  # fmt: skip
def test_rows_that_are_no_pair_are_refused(tokenizer: Tokenizer, row: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        preference_encoder(tokenizer).encode([ROWS[0], {**ROWS[0], **row}])


def test_a_prompt_that_messages_would_leave_out_is_refused(tokenizer_pair: TokenizerPair) -> None:
    """Answers as messages, and the prompt as a text; a conversation that has the prompt in itself is fine."""
    tokenizer, _, file = tokenizer_pair
    row = {"prompt": "a", "chosen": messages(("assistant", "b")), "rejected": messages(("assistant", "c"))}
    config = TaskConfig(form="preference", train="pairs.jsonl")
    pairs = PreferenceEncoder("pairs.jsonl", config, tokenizer, ExampleFormat(64), file, scores)
    with pytest.raises(UsageError, match=r"row 1: column 'prompt' is a text, and column 'chosen' a list with the"):
        pairs.encode([row])
    user = messages(("user", "a"))
    conversations = {side: [*user, *row[side]] for side in ("chosen", "rejected")}
    (first,), _ = pairs.encode([{**row, **conversations}])
    (second,), _ = pairs.encode([{**row, "prompt": user}])
    with pytest.raises(UsageError, match=r"row 1: column 'chosen' begins with the messages of column 'prompt', which"):
        pairs.encode([{**row, "prompt": user, **conversations}])
    other = [*messages(("user", "A")), *row["rejected"]]
    with pytest.raises(UsageError, match=r"row 1: columns 'chosen' and 'rejected' differ before their last messages"):
        pairs.encode([{**row, **conversations, "rejected": other}])
    assert first.tokens.tolist() == second.tokens.tolist()


def test_missing_columns_are_named(tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match=r"has no column 'better', which task\.chosen names"):
        preference_encoder(tokenizer, chosen="better").encode(ROWS)
