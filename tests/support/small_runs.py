"""A small real corpus, configs of small runs, run directories as training leaves them, and the report in a browser."""

import inspect
import json
import math
import random
import shutil
import textwrap
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import megatfm
from megatfm import checkpoint, data_prep
from megatfm.config import AdamWConfig, Config, DataConfig, ModelConfig, TrainConfig, load_section, to_toml
from megatfm.config.prep import PrepConfig
from megatfm.models import Decoder, build
from megatfm.report import write_report
from megatfm.tokenizers import SentencePieceTokenizer, train_sentencepiece
from tests.support.files import write_lines

PACKAGES = ("json", "email", "html", "wsgiref", "xmlrpc")
SMALL_CONFIG = """
name = "small"
model = {{ d_model = 32, n_layers = 2, attention = {{ n_heads = 2 }}, ffn = {{ d_ff = 64 }} }}
optimizer = {{ name = "muon", lr = 3e-3 }}
lr_schedule = {{ warmup_steps = 2 }}
train = {{ steps = 8, global_batch = 8, micro_batch = 4, precision = "fp32" }}
checkpoint = {{ every = 4 }}
evaluate = {{ every = 4, max_rows = 12 }}
log = {{ every = 1, sinks = [] }}
[data]
train = "{corpus}/train"
validation = {{ held-out = "{corpus}/validation", again = "{corpus}/validation" }}
tokenizer = "{corpus}/tokenizer.model"
sequence_length = 64
"""
SMALL_PREP = """
out = "{out}"
read = {{ folder = "{texts}" }}
split = {{ validation = 0.2 }}
tokenizer = {{ vocab_size = 512 }}
"""


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources of a few packages of the standard library."""
    library = Path(json.__file__).parents[1]
    texts = tmp_path_factory.mktemp("source") / "my texts"
    for package in PACKAGES:
        (texts / package).mkdir(parents=True)
        for file in (library / package).glob("*.py"):
            (texts / package / file.name).write_bytes(file.read_bytes())
    return texts


@pytest.fixture(scope="session")
def corpus(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts of the run, prepared as a corpus."""
    out = tmp_path_factory.mktemp("corpora") / "small"
    config = out.with_name("prep.toml")
    config.write_text(SMALL_PREP.format(out=out, texts=texts))
    data_prep.run(load_section(PrepConfig, config))
    return out


@pytest.fixture(scope="module")
def file(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config on the small corpus."""
    path = tmp_path_factory.mktemp("api") / "small.toml"
    path.write_text(SMALL_CONFIG.format(corpus=corpus))
    return path


@pytest.fixture(scope="module")
def run(file: Path) -> Path:
    """A run of two steps."""
    return megatfm.fit(file, f"run_dir={file.parent / 'run'}", "train.steps=2", "train.micro_batch=8")


VERIFIED_CONFIG = {
    "name": "small",
    "model": {"vocab_size": 512, "d_model": 64, "n_layers": 6, "attention": {"n_heads": 8, "n_kv_heads": 4},
              "ffn": {"d_ff": 128}},
    "data": {"train": "nowhere/train", "tokenizer": "nowhere/tokenizer.model", "sequence_length": 64},
    "optimizer": {"name": "adamw", "lr": 1e-3},
    "train": {"steps": 5, "global_batch": 8, "micro_batch": 4},
}  # fmt: skip


SMALL_DECODER = ModelConfig.from_dotted({
    "vocab_size": 400, "d_model": 32, "n_layers": 2, "attention.n_heads": 4, "attention.n_kv_heads": 2, "ffn.d_ff": 48,
    "embedding.tied": False,
})  # fmt: skip


def random_model(config: ModelConfig, dtype: torch.dtype = torch.float64) -> Any:
    """Every parameter random, norms too, and large enough that logits differ clearly."""
    random = torch.Generator().manual_seed(1)
    model = build(config).to(dtype).eval()
    for parameter in model.parameters():
        parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3, generator=random)
    return model


@pytest.fixture(scope="session")
def tokenizer_model() -> bytes:
    """A SentencePiece model of 400 pieces."""
    texts = [inspect.getsource(textwrap), "Größe, naïve, 東京\n" * 20]
    return train_sentencepiece(texts, vocab_size=400, sentinels=4)


def padded_decoder() -> ModelConfig:
    """A model with tied embeddings and more rows than the tokenizer has ids."""
    return SMALL_DECODER.with_changes({"vocab_size": 420, "embedding.tied": True})


def write_trained_run(folder: Path, tokenizer_model: bytes, model: Decoder, objective: str = "causal") -> Path:
    """Write a run at step 30; returns its folder."""
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(tokenizer_model)
    length = min(24, model.config.max_row_length[0] or 24)
    config = Config(
        name="small", model=model.config,
        data=DataConfig(train="nowhere", tokenizer="nowhere/tokenizer.model", sequence_length=length),
        optimizer=AdamWConfig(lr=1e-3), train=TrainConfig(steps=30, global_batch=2, micro_batch=2),
    ).with_changes({"objective": {"name": objective}})  # fmt: skip
    (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
    tensors = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    state: dict[str, Any] = {
        "step": 30,
        "tokenizer": SentencePieceTokenizer(tokenizer_model).hash,
        "config": config.model_dump(mode="json"),
    }
    checkpoint.save(folder / "checkpoints", 30, tensors, state)
    return folder


def write_next_checkpoint(run: Path, state: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None) -> None:
    """A newer checkpoint, with some of its state and tensors changed."""
    old = run / "checkpoints" / "step-00000030"
    full = {**checkpoint.read_tensors(old), **(tensors or {})}
    checkpoint.save(run / "checkpoints", 31, full, {**checkpoint.read_state(old), **state})


CONFIG = """
name = "synthetic"
parallel = {{ dp_shard = 2, tp = 1 }}
lr_schedule = {{ name = "cosine", warmup_steps = 20, min_lr_factor = 0.05 }}
train = {{ steps = 1000, global_batch = 32, micro_batch = 16, seed = 0, precision = "bf16" }}
checkpoint = {{ every = 100, keep = 2 }}
[model]
family = "decoder"
d_model = 256
n_layers = 4
attention = {{ n_heads = 4 }}
ffn = {{ d_ff = 768, activation = "swiglu" }}
norm = {{ name = "rms_norm" }}
position = {{ name = "rope" }}
embedding = {{ tied = false }}
[data]
train = "{corpora}/train"
validation = {{ stdlib = "{corpora}/validation" }}
tokenizer = "{corpora}/tokenizer.model"
sequence_length = 512
[optimizer]
name = "muon"
lr = 3e-3
matrix_lr = 0.02
betas = [0.9, 0.95]
weight_decay = 0.1
max_grad_norm = 1.0
"""
PLAN = """\
mesh  dp_replicate 1 × dp_shard 2 × tp 1

modules                     style                   parameters
embedding                   vocabulary embedding    1 × [4096, 256]
layers.*.norm[12]           sequence                8 × [256]
layers.*.attn               enter
layers.*.attn.w[qkv]        column                  12 × [256, 256]
layers.*.attn.wo            row                     4 × [256, 256]
layers.*.ffn                enter
layers.*.ffn.w_gate         column                  4 × [768, 256]
layers.*.ffn.w_up           column                  4 × [768, 256]
layers.*.ffn.w_down         row                     4 × [256, 768]
norm                        sequence                1 × [256]
head                        vocabulary head         1 × [4096, 256]
"""
PROMPT = "def "
SAMPLE = """read_lines(path, encoding="utf-8"):
    \"\"\"Return the lines of a file.\"\"\"
    with open(path, encoding=encoding) as file:
        if "<script>alert('x')</script>" in file.name:
            raise ValueError("no & never")
        return file.read().splitlines()
"""


def make_record(step: int, noise: random.Random, steps: int = 1000) -> dict[str, object]:
    """A training record with a believable curve."""
    loss = 2.35 + 6.0 * math.exp(-step / 60) + 1.2 * math.exp(-step / 400) + noise.gauss(0, 0.06)
    seconds = 0.42 + abs(noise.gauss(0, 0.02))
    warm = min(1.0, step / 20)
    line: dict[str, object] = {
        "step": step, "tokens": step * 32 * 512, "loss": loss,
        "lr": 3e-3 * warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps))),
        "grad_norm": 0.4 + 3 * math.exp(-step / 50) + abs(noise.gauss(0, 0.08)) + (6 if step == 480 else 0),
        "tokens_per_second": 32 * 512 / seconds, "data_wait_seconds": abs(noise.gauss(0, 0.003)),
        "step_seconds": seconds, "memory_bytes": int(1.31e9 + 2e7 * (step % 100 == 0)),
        "time": 1_795_257_000 + step * 0.43,
    }  # fmt: skip
    if step % 100 == 0:
        nats = loss + 0.12 - noise.gauss(0, 0.02)
        line["evaluation"] = {
            "stdlib": {"loss": nats, "bits_per_byte": nats / math.log(2) / 3.2, "tokens": 98_304, "bytes": 314_573},
        }  # fmt: skip
    return line


def write_corpus_manifest(folder: Path, documents: int, tokens: int) -> None:
    """A corpus folder's manifest (no shards)."""
    folder.mkdir(parents=True)
    shard = {
        "file": "shard-000000.tar.zst", "bytes": tokens * 1, "blake3": "0" * 64, "samples": documents,
        "tokens": tokens, "text_bytes": int(tokens * 3.21),
        "index": {"file": "shard-000000.index.zst", "bytes": 10, "blake3": "0" * 64},
    }  # fmt: skip
    manifest = {
        "schema_version": 1, "token_dtype": "uint16", "tokenizer_hash": "1" * 64, "shards": [shard], "provenance": {},
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest))


def write_reported_run(folder: Path, last_step: int = 1000) -> Path:
    """A run of 1,000 steps that has come to `last_step`, with its corpora beside it."""
    run, corpora, noise = folder / "runs" / "synthetic", folder / "corpora", random.Random(7)
    run.mkdir(parents=True)
    write_corpus_manifest(corpora / "train", 1480, 3_402_118)
    write_corpus_manifest(corpora / "validation", 121, 248_310)
    read = {"step": "read", "documents_out": 1702, "bytes_out": 12_911_402, "changed": 0, "dropped": {}}
    drops = {"same text": {"documents": 31, "bytes": 9120, "examples": ["a.py = b.py"]}}
    exact = read | {"step": "exact duplicates", "documents_out": 1671, "dropped": drops}
    prep = {"steps": [read, exact], "notes": ["190 files were left out by their names"], "skipped_files": []}
    (corpora / "prep.json").write_text(json.dumps(prep))
    (run / "config.toml").write_text(CONFIG.format(corpora=corpora))
    (run / "plan.txt").write_text(PLAN)
    records = [make_record(step, noise) for step in range(1, last_step + 1)]
    write_lines(run / "metrics.jsonl", records)
    events = [
        {"time": 1_795_257_000.0, "event": "started", "detail": "on 2 processes"},
        {"time": 1_795_257_222.5, "event": "stopped", "step": 510, "detail": "SIGUSR1: saved, exit 75"},
        {"time": 1_795_257_230.1, "event": "resumed", "step": 510, "detail": "on 2 processes"},
    ]
    write_lines(run / "events.jsonl", events)
    samples = [{"prompt": PROMPT, "text": SAMPLE, "step": 1000}]
    write_lines(run / "samples.jsonl", samples)
    (run / "environment.json").write_text(json.dumps({"megatfm": "0.1.0", "torch": "2.13.0+cpu", "python": "3.11.7"}))
    baselines = {"gzip -9, per document": 2.41, "xz -9, joined": 1.93}
    (run / "baselines.json").write_text(json.dumps({"stdlib": baselines}))
    return run


class Page(HTMLParser):
    """A page as a browser sees it: tags, attributes and text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)

    def charts(self) -> list[str]:
        """Words of the charts to a screen reader."""
        return [str(attributes["aria-label"]) for tag, attributes in self.tags if tag == "svg"]

    def data(self) -> list[dict[str, Any]]:
        """Data of the charts for the page's script."""
        return [json.loads(str(a["data-chart"])) for _, a in self.tags if "data-chart" in a]

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """Lines of one kind in all charts."""
        return [line for chart in self.data() for line in chart["lines"] if line["kind"] == kind]


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def report_page(run: Path) -> Page:
    path = write_report(run)
    assert path == run / "report.html"
    assert [file.name for file in run.iterdir() if file.name.endswith(".partial")] == []
    return Page(path)


def replace_metrics(run: Path, records: list[dict[str, object]]) -> None:
    write_lines(run / "metrics.jsonl", records)
