"""Pages on fine-tuning, adapters, evaluation and classification: their commands, run in their order in one folder."""

import csv
import json
import random
import re
import shlex
import shutil
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import transformers
from transformers import AutoModelForCausalLM

from megatfm.config.prep import TokenizerConfig
from megatfm.data_prep.tokenize import make_tokenizer_files, write_tokenizer
from megatfm.tasks.files import read_rows
from tests.support.documentation import FENCE, ROOT
from tests.support.files import read_lines, write_lines
from tests.support.finetuning_tasks import (
    FILLERS,
    NAMES,
    TOWNS,
    WORDS_OF_QUESTIONS,
    conversations,
    make_questions,
    save_bert,
    save_chat_llama,
)
from tests.support.forked_commands import ForkedCommand, run_megatfm
from tests.support.images import encode_noise, write_captioned_images
from tests.support.prep_files import write_file
from tests.support.small_runs import SMALL_CONFIG
from tests.support.training_runs import training_curve
from tests.support.webdatasets import pack_tar

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


COMMON = ("train.steps=2", "train.global_batch=4", "train.micro_batch=2", "lr_schedule.warmup_steps=1", "log.every=1")
FEW_STEPS = ("train.steps=6", "lr_schedule.warmup_steps=1", "log.every=1")
NARROW = ("model.d_model=24", "model.n_layers=1", "model.attention.n_heads=2", "model.ffn.d_ff=48")
LESS = {
    "train quickstart-vision": FEW_STEPS,
    "train photos.toml": (*COMMON, *NARROW),
    "train vit-b16 --from": COMMON,
    "train vit-b16 name=tuned": (*COMMON, *NARROW),
    "train mae-b16": (
        *COMMON, *NARROW, "model.pixel_decoder={d_model=16,n_layers=1,n_heads=2,d_ff=32}",
    ),
    "train simmim-swin-b": (
        *COMMON, "model.d_model=8", "model.ffn.d_ff=16",
        "model.stages={n_layers=[1,1,1,1],n_heads=[1,2,4,8],grid=[48,48]}",
    ),
    "train clip-b32": COMMON,
    "train towers.toml": FEW_STEPS,
    "train captioner.toml": FEW_STEPS,
    "prep quickstart-data": ("tokenizer.vocab_size=340",),
}  # fmt: skip
"""First words of a command → settings that make it small."""


def commands_of(page: str) -> list[list[str]]:
    """The commands of a page, as words, in their order."""
    blocks = FENCE.findall((ROOT / "docs/guide" / page).read_text(encoding="utf-8"))
    lines = [line for language, _, text in blocks if language == "console" for line in text.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("megatfm ")]


def walk(page: str, folder: Path, words_of: Mapping[str, str]) -> list[str]:
    """Write the files of a page and run its commands; returns them. words_of: what stands for a word of the page."""
    for _, title, text in FENCE.findall((ROOT / "docs/guide" / page).read_text(encoding="utf-8")):
        if title:
            (folder / title).write_text(text, encoding="utf-8")
    commands = commands_of(page)
    for words in commands:
        line = " ".join(words)
        smaller = [setting for start, settings in LESS.items() if line.startswith(start) for setting in settings]
        run_megatfm(*(words_of.get(word, word) for word in words), *smaller, output=folder / "output", cwd=folder)
    return [" ".join(words) for words in commands]


def encode(number: int, kind: str = "JPEG") -> bytes:
    return encode_noise(40 + number, 44, seed=number, format_=kind)


def test_the_page_on_images(tmp_path: Path) -> None:
    for number in range(16):
        name = f"{'validation' if number % 4 == 3 else 'train'}/{('cat', 'dog')[number // 4 % 2]}/{number}.jpg"
        write_file(tmp_path / "photos" / name, encode(number))
    write_file(tmp_path / "imagenet1k/000.tar", pack_tar({"a.jpg": encode(0), "a.cls": b"3"}))
    write_file(tmp_path / "laion/000.tar", pack_tar({"a.png": encode(0, "PNG"), "a.json": b'{"label": "dog"}'}))
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    released = transformers.ViTForImageClassification(transformers.ViTConfig(
        hidden_size=24, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48, image_size=224, patch_size=16,
        id2label={0: "cat", 1: "dog"}, label2id={"cat": 0, "dog": 1},
    ))  # fmt: skip
    released.save_pretrained(tmp_path / "released")
    lines = walk("vision.md", tmp_path, {"HF_FOLDER": "released"})
    runs = ("quickstart-vision", "photos", "larger", "own-classes", "mae-b16", "tuned", "simmim-swin-b")
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {*runs}
    for run in runs:
        assert training_curve(tmp_path / "runs" / run)[-1]["step"] == (6 if run == runs[0] else 2)
    assert len(json.loads((tmp_path / "runs/photos/pictures.json").read_text())["galleries"]) == 2
    assert (tmp_path / "runs/photos/report.html").is_file()
    assert (tmp_path / "samples.png").is_file()
    assert len(lines) > 12


def test_the_page_on_images_and_text(tmp_path: Path) -> None:
    write_captioned_images(tmp_path / "photos", tmp_path / "captions", 120)
    shutil.copy(tmp_path / "photos/validation/0005.png", tmp_path / "photos/validation/2.png")
    shutil.copy(tmp_path / "photos/validation/0005.txt", tmp_path / "photos/validation/2.txt")
    released = transformers.CLIPModel(transformers.CLIPConfig(
        vision_config={
            "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48,
            "image_size": 64, "patch_size": 32,
        },
        text_config={
            "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
            "vocab_size": 512, "max_position_embeddings": 77, "eos_token_id": 2,
        },
        projection_dim=16,
    ))  # fmt: skip
    released.save_pretrained(tmp_path / "released")
    captions = [path.read_text() for path in (tmp_path / "captions").iterdir()]
    kind = TokenizerConfig(kind="byte-bpe", vocab_size=340)
    write_tokenizer(tmp_path / "released", make_tokenizer_files(kind, captions))
    walk("image-text.md", tmp_path, {"HF_FOLDER": "released", "tokenizer.file=HF_FOLDER": "tokenizer.file=released"})
    transformers.CLIPModel.from_pretrained(tmp_path / "out")
    for run in ("towers", "tuned", "captioner", "connector", "both"):
        assert training_curve(tmp_path / "runs" / run)
    assert (tmp_path / "seen.png").is_file()


PAGE = ROOT / "docs" / "tutorials" / "classify-texts.md"
TUTORIAL_BLOCKS = FENCE.findall(PAGE.read_text(encoding="utf-8"))
LESS_OF_TUTORIAL = {"finetune": ("task.epochs=4", "data.sequence_length=64")}
"""Fewer epochs than the page says for a model that has learnt nothing, and shorter texts."""


@pytest.fixture(scope="module")
def tutorial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tutorial in which every block before the server was run, in the page's order."""
    tutorial = tmp_path_factory.mktemp("tutorial")
    for language, title, text in TUTORIAL_BLOCKS:
        if title:
            (tutorial / title).write_text(text, encoding="utf-8")
        if language == "python" and title != "serve.py":
            run = ForkedCommand([], tutorial / f"{title}.out", tutorial, program=str(tutorial / title))
            assert run.wait() == 0, run.output
        if language == "console":
            for line in text.splitlines():
                words = line.split()[1:]
                run_megatfm(*words, *LESS_OF_TUTORIAL.get(words[0], ()), output=tutorial / "output", cwd=tutorial)
    return tutorial


def predictions(tutorial: Path) -> list[dict]:
    return read_lines(tutorial / "new.predictions.jsonl")


def test_the_model_beats_the_largest_class_on_unseen_texts(tutorial: Path) -> None:
    result = json.loads((tutorial / "runs/packages/task.json").read_text())["sets"]["test"]
    rows = read_rows(tutorial / "packages.test.csv")
    labels = Counter(row["package"] for row in rows)
    assert result["examples"] == len(rows) > 50
    assert result["metrics"]["accuracy"] > max(labels.values()) / len(rows) + 0.1
    assert (tutorial / "runs/packages/report.html").is_file()


def test_the_tables_share_no_text(tutorial: Path) -> None:
    train, validation, test = (
        {row["text"] for row in read_rows(tutorial / f"packages.{name}.csv")}
        for name in ("train", "validation", "test")
    )
    assert not train & test
    assert not train & validation
    assert not validation & test


def test_the_exported_model_predicts_what_the_run_predicts(tutorial: Path) -> None:
    label, probability = (tutorial / "predict.py.out").read_text().splitlines()[-1].split()
    expected = predictions(tutorial)[0]
    assert label == expected["label"]
    assert float(probability) == pytest.approx(expected["probabilities"][label], abs=6e-4)


@pytest.fixture
def address(tutorial: Path) -> Iterator[str]:
    """Address of the page's server, on a port that the system chooses."""
    server = ForkedCommand(["0"], tutorial / "serve.out", tutorial, program=str(tutorial / "serve.py"))
    try:
        while not (announcement := re.search(r"^serving on (\S+)\n", server.output, re.MULTILINE)):
            assert server.process.is_alive(), server.output
            time.sleep(0.05)
        yield announcement[1]
    finally:
        server.end()


def post(address: str, body: bytes) -> dict:
    with urllib.request.urlopen(urllib.request.Request(address, data=body), timeout=60) as response:
        return json.load(response)


def test_the_server_answers_with_the_same_label_and_refuses_bad_requests(tutorial: Path, address: str) -> None:
    for row, expected in zip(read_rows(tutorial / "new.csv"), predictions(tutorial), strict=True):
        answer = post(address, json.dumps({"text": row["text"]}).encode())
        assert answer["label"] == expected["label"]
        assert answer["score"] == pytest.approx(
            expected["probabilities"][answer["label"]], abs=5e-3
        )  # the run predicts in bfloat16 where a CPU has it
    for body in (b"", b"not JSON", b"[]", b'{"text": 3}', b'{"text": " "}', b'{"other": "words"}'):
        with pytest.raises(urllib.error.HTTPError) as refused:
            post(address, body)
        assert refused.value.code == 400
        refused.value.close()
    assert post(address, '{"text": "文字 слова"}'.encode())["label"], "it goes on after refusals"
