"""A made-up run directory with everything in it, and the report as a browser sees it."""

import json
import math
import random
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from megatfm.report import write_report
from tests.support.files import write_lines

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


def corpus(folder: Path, documents: int, tokens: int) -> None:
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
    corpus(corpora / "train", 1480, 3_402_118)
    corpus(corpora / "validation", 121, 248_310)
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
