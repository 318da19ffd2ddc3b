"""Files of tasks, models and tokenizers of transformers to fine-tune on them, and a small run to evaluate on them."""

import inspect
import random
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, processors

from megatfm.config import Config
from megatfm.tokenizers import train_sentencepiece
from tests.support.files import write_lines

ANIMALS = ["cat", "dog", "horse", "cow", "sheep", "goat"]
TOOLS = ["saw", "hammer", "drill", "rasp", "plane", "file"]
OTHER = ["the", "a", "old", "new", "in", "on", "by"]
TOWNS = ("Rome", "Oslo", "Kyiv", "Bern", "Lyon", "東京")
NAMES = ("Anna", "Emil", "Dora", "Gustav")
FILLERS = ("the", "old", "lamp", "was", "red", "and", "new", ".")
WORDS_OF_QUESTIONS = (*TOWNS, *NAMES, *FILLERS, "where", "was", "?")
BERT_MARKS = {
    "pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]",
}  # fmt: skip


def save_word_tokenizer(folder: Path, words: Sequence[str]) -> int:
    """Save a tokenizer of whole words that frames texts as BERT does; returns the size of its vocabulary."""
    vocabulary = {word: i for i, word in enumerate([*BERT_MARKS.values(), *dict.fromkeys(words)])}
    built = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    built.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    built.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    transformers.PreTrainedTokenizerFast(tokenizer_object=built, **BERT_MARKS).save_pretrained(folder)
    return len(vocabulary)


def save_bert(folder: Path, words: Sequence[str], **options: Any) -> None:
    """Save a BERT of two layers with random weights, and its tokenizer of whole words."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": save_word_tokenizer(folder, words), "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    transformers.BertForPreTraining(transformers.BertConfig(**(sizes | options))).save_pretrained(folder)


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a BERT that knows the words of questions."""
    folder: Path = tmp_path_factory.mktemp("bert")
    save_bert(folder, WORDS_OF_QUESTIONS)
    return folder


def make_questions(n: int, seed: int, *, no_answer: float = 0.0) -> list[dict[str, Any]]:
    """Return questions about someone's place: the one town of a text of 30 words or so, or none in a share of them."""
    draw, rows = random.Random(seed), []
    for number in range(n):
        words = [draw.choice(FILLERS + NAMES) for _ in range(draw.randint(20, 35))]
        has_answer, place = draw.random() >= no_answer, draw.randrange(len(words))
        if has_answer:
            words[place] = draw.choice(TOWNS)
        answers = [{"text": words[place], "answer_start": len(" ".join([*words[:place], ""]))}]
        question = f"where was {draw.choice(NAMES)} ?"
        row = {"id": f"q{seed}-{number}", "question": question, "context": " ".join(words)}
        rows.append(row | {"answers": answers if has_answer else []})
    return rows


CHAT_WORDS = ("user", "assistant", "rome", "oslo", "bern", "red", "old", "lamp")
ANSWERS = {"rome": "red lamp", "oslo": "old lamp", "bern": "lamp"}
MARKS = ("<|pad|>", "<|unk|>", "<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }} {{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


def save_chat_tokenizer(folder: Path, template: str | None, **roles: str) -> None:
    """A tokenizer of whole words. roles: of special tokens, as bos_token = "<|begin|>"."""
    built = tokenizers.Tokenizer(
        models.WordLevel({word: i for i, word in enumerate((*MARKS, *CHAT_WORDS))}, unk_token="<|unk|>")
    )
    built.pre_tokenizer, built.decoder = pre_tokenizers.WhitespaceSplit(), decoders.WordPiece(prefix="##")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=built, additional_special_tokens=list(MARKS), **roles)
    if template is not None:
        fast.chat_template = template
    fast.save_pretrained(folder)


def save_chat_llama(folder: Path, template: str | None = CHATML) -> None:
    """A small Llama, whose EOS is not what ends a turn, with a tokenizer of whole words."""
    roles = dict(zip(("pad_token", "unk_token", "bos_token", "eos_token"), MARKS, strict=False))
    save_chat_tokenizer(folder, template, **roles)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(MARKS) + len(CHAT_WORDS), hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=32, pad_token_id=0, bos_token_id=2, eos_token_id=3,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def conversations() -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [
        {"messages": [{"role": role, "content": text} for role, text in zip(roles, pair, strict=True)]}
        for pair in ANSWERS.items()
    ] * 4


LETTERS = "ABC"
QUESTIONS = [
    {
        "ask": f"import {'textwrap ' * (number % 4)}größer {number}",
        "a": "def wrap",
        "b": "東京" * (1 + number % 2),
        "c": "x",
        "key": LETTERS[number * 7 % 3],
    }
    for number in range(13)
]
CHOICE = """
data = "questions.jsonl"
prompt = "{{ ask }} is"
choices = ["{{ a }}", "{{ b }}", "{{ c }}"]
answer = "key"
labels = ["A", "B", "C"]
unconditional_prompt = "is"
"""
CLOZE = 'kind = "cloze"\ndata = "questions.jsonl"\nprompt = "{{ ask }}"\nanswer = "a"\n'


def write_tasks(folder: Path) -> dict[str, str]:
    """Write questions, two tasks on them and tokenizer.model; returns the tasks' files by name."""
    texts = [inspect.getsource(textwrap), "größer 東京\n" * 20]
    (folder / "tokenizer.model").write_bytes(train_sentencepiece(texts, vocab_size=400, sentinels=2))
    write_lines(folder / "questions.jsonl", QUESTIONS)
    tasks = {"choice": CHOICE, "cloze": CLOZE}
    for name, text in tasks.items():
        (folder / f"{name}.toml").write_text(text)
    return {name: str(folder / f"{name}.toml") for name in tasks}


def small_config(folder: Path, **changes: Any) -> Config:
    """Return a run of a small decoder in float64 whose logits differ clearly. changes: dotted keys with __."""
    config = Config.model_validate(
        {
            "name": "small",
            "run_dir": str(folder / "run"),
            "model": {"d_model": 16, "n_layers": 2, "attention": {"n_heads": 2}, "ffn": {"d_ff": 16},
                      "init": {"std": 0.5}},
            "data": {"train": str(folder / "nowhere"), "tokenizer": str(folder / "tokenizer.model"),
                     "sequence_length": 64},
            "optimizer": {"name": "adamw", "lr": 1e-3},
            "train": {"steps": 1, "global_batch": 1, "micro_batch": 1, "seed": 5, "precision": "fp64"},
        },
    )  # fmt: skip
    return config.with_changes({key.replace("__", "."): value for key, value in changes.items()})
