"""Pages on fine-tuning, adapters and evaluation: their commands, run in their order in one folder."""

import csv
import json
import random
import shlex
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.support.documentation import FENCE, ROOT
from tests.support.finetuning_tasks import (
    FILLERS,
    NAMES,
    TOWNS,
    WORDS_OF_QUESTIONS,
    conversations,
    make_questions,
    read_lines,
    save_bert,
    save_chat_llama,
    write_lines,
)
from tests.support.forked_commands import ForkedCommand, run_megatfm
from tests.support.small_runs import SMALL_CONFIG

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
PAGES = ("finetuning.md", "adapters.md", "evaluation.md")
BLOCKS = {page: FENCE.findall((ROOT / "docs" / "guide" / page).read_text(encoding="utf-8")) for page in PAGES}
LEFT_OUT = ("pip install", "torchrun", "--harness", "downloads/gpt2", "runs/my-t5", "step-00002000")
"""Words of commands that other tests run, or that read what is not in the folder."""


def write_table(path: Path, n: int, seed: int) -> None:
    """Write texts, labelled by whether they name a town or a person."""
    draw = random.Random(seed)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for _ in range(n):
            label = draw.choice(["town", "person"])
            word = draw.choice(TOWNS if label == "town" else NAMES)
            writer.writerow([" ".join([*draw.sample(FILLERS, 4), word]), label])


def write_articles(path: Path, n: int, seed: int) -> None:
    """Write questions as SQuAD 2.0 has them, some without an answer."""
    paragraphs = [
        {
            "context": row["context"],
            "qas": [{key: row[key] for key in ("id", "question", "answers")} | {"is_impossible": not row["answers"]}],
        }
        for row in make_questions(n, seed, no_answer=0.3)
    ]
    path.write_text(json.dumps({"version": "v2.0", "data": [{"title": "towns", "paragraphs": paragraphs}]}))


def write_peft_adapter(folder: Path, base: Path) -> None:
    """Write an adapter of queries and values, as PEFT does."""
    from peft import LoraConfig, get_peft_model

    model = AutoModelForCausalLM.from_pretrained(base)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    adapted.save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that the pages take for granted, and those that they show."""
    folder = tmp_path_factory.mktemp("guides")
    save_bert(folder / "runs" / "bert", WORDS_OF_QUESTIONS, max_position_embeddings=512)
    save_chat_llama(folder / "llama")
    write_peft_adapter(folder / "peft-adapter", folder / "llama")
    for number, name in enumerate(("topics.train", "topics.validation", "topics.test", "new")):
        write_table(folder / f"{name}.csv", 48, number)
    write_articles(folder / "train-v2.0.json", 12, 0)
    write_articles(folder / "dev-v2.0.json", 6, 1)
    write_lines(folder / "chats.jsonl", conversations())
    write_lines(folder / "pairs.jsonl", [{"prompt": "rome", "chosen": "red lamp", "rejected": "lamp"}] * 4)
    answers = [{"question": "which key", "a": "def", "b": "class", "c": "import", "key": key} for key in "ABC"]
    for name in ("questions", "train"):
        write_lines(folder / f"{name}.jsonl", answers * 2)
    (folder / "corpora" / "drafts").mkdir(parents=True)
    (folder / "corpora" / "drafts" / "validation").symlink_to(corpus / "validation")
    for blocks in BLOCKS.values():
        for _, title, text in blocks:
            if title:
                (folder / title).write_text(text, encoding="utf-8")
    (folder / "mine.toml").write_text(SMALL_CONFIG.format(corpus=corpus))
    run_megatfm("train", "mine.toml", "name=mine", "train.steps=2", output=folder / "output", cwd=folder)
    return folder


@pytest.mark.parametrize("page", PAGES)
def test_commands_run_in_the_order_of_the_pages(page: str, folder: Path) -> None:
    """In the order of the file, too: later pages go on with earlier runs."""
    lines = [
        line
        for language, _, text in BLOCKS[page]
        if language == "console"
        for line in text.splitlines()
        if not any(words in line for words in LEFT_OUT)
    ]
    assert lines
    for line in lines:
        run_megatfm(*shlex.split(line, comments=True)[1:], output=folder / "output", cwd=folder)


def test_python_of_the_page_on_evaluation_runs(folder: Path) -> None:
    """Its blocks, one after the other."""
    program, output = folder / "page.py", folder / "output"
    blocks = [text for language, _, text in BLOCKS["evaluation.md"] if language == "python"]
    assert blocks
    program.write_text("\n".join(blocks), encoding="utf-8")
    command = ForkedCommand([], output, folder, program=str(program))
    try:
        assert command.wait() == 0, command.output
    finally:
        command.end()


def test_a_table_s_run_holds_what_the_page_says(folder: Path) -> None:
    result = json.loads((folder / "runs/topics/task.json").read_text())["sets"]
    assert {"validation", "test"} <= result.keys()
    assert (folder / "topics-hf" / "config.json").is_file()
    assert len(read_lines(folder / "new.predictions.jsonl")) == 48
