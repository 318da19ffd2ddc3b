"""Bits per byte of a tiny corpus against a computation by hand, whatever the batches and ranks."""

import inspect
import json.decoder
import json.encoder
import json.scanner
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatfm import cli, tokenizers
from megatfm.config import Config, load_config
from megatfm.corpus.corpus import Corpus
from megatfm.corpus.webdataset_images import LabelRule, index_images
from megatfm.corpus.writer import ShardWriter
from megatfm.errors import UsageError
from megatfm.inference import evaluate as inference
from megatfm.inference.evaluate import _make_absolute
from megatfm.parallel.mesh import build_mesh
from megatfm.train.build import build_engine, choose_precision
from megatfm.train.corpora import note_few_streams, open_corpora, open_tokenizer
from megatfm.train.evaluation import compute_loss_by_position, evaluate, format_result
from tests.support.finetuning_tasks import small_config
from tests.support.images import encode_noise
from tests.support.parity import one_device
from tests.support.webdatasets import pack_tar
from tests.support.workers import Workers

LENGTH = 48
TEXTS = [
    *(inspect.getsource(module)[:n] for module, n in ((json.scanner, 700), (json.encoder, 900))),
    "",  # an empty document has an end to predict, and no bytes
    "Größe, naïve, 東京 \N{GRINNING FACE}\t\ttabs\r\n\u2581 and a mark",
    "x",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tokenizer.model and a corpus of several frames, so of several blocks of rows."""
    folder = tmp_path_factory.mktemp("corpus")
    model = tokenizers.train_sentencepiece([inspect.getsource(json.decoder), *TEXTS], vocab_size=400, sentinels=2)
    (folder / "tokenizer.model").write_bytes(model)
    tokenizer = tokenizers.SentencePieceTokenizer(model)
    with ShardWriter(
        folder / "validation", tokenizer_hash=tokenizer.hash, token_dtype="uint16", frame_bytes=512
    ) as writer:
        for number, text in enumerate(TEXTS):
            writer.add(f"{number}", tokenizer.encode(text), "by hand", len(text.encode()))
        writer.finish({})
    assert Corpus.open(folder / "validation").n_blocks > 1
    return folder


def config(folder: Path, **parallel: Any) -> Config:
    corpus = str(folder / "validation")
    data = {"data.train": corpus, "data.validation": {"all": corpus}, "data.sequence_length": LENGTH}
    return small_config(folder, model__n_layers=1, parallel=parallel).with_changes(data)


def open_engine(settings: Config) -> tuple[Any, Any, Any]:
    settings, tokenizer = open_tokenizer(settings)
    mesh = build_mesh(settings.parallel, dist.get_world_size(), "cpu")
    return build_engine(settings, mesh, torch.device("cpu"), "fp64"), open_corpora(settings, tokenizer), tokenizer


def evaluated(folder: Path, parallel: dict[str, Any], micro_batch: int, max_rows: int) -> dict[str, Any]:
    engine, corpora, tokenizer = open_engine(config(folder, **parallel))
    return evaluate(
        engine, corpora.validation["all"], corpora.objective, tokenizer.byte_lengths(), micro_batch=micro_batch,
        max_rows=max_rows,
    )  # fmt: skip


@cache
def model_of(folder: Path) -> nn.Module:
    settings, _ = open_tokenizer(config(folder))
    return one_device(settings.model, settings.train.seed).eval()


def by_hand(folder: Path, by_place: dict[int, list[float]] | None = None) -> tuple[float, int]:
    """Nats and targets: each document between its marks, one after the other, cut wherever a row ends.

    by_place: gets the nats of each target under its place in the row.
    """
    tokenizer = tokenizers.load(folder / "tokenizer.model")
    corpus, model = Corpus.open(folder / "validation"), model_of(folder)
    nats, count, place = 0.0, 0, 0
    for block in range(corpus.n_blocks):
        for _, tokens in corpus.read_block(block):
            framed = [tokenizer.bos, *tokens.tolist(), tokenizer.eos]
            start = 0
            while start < len(framed) - 1:
                end = min(start + LENGTH - place % LENGTH, len(framed) - 1)
                with torch.no_grad():
                    logits = model(torch.tensor([framed[start:end]])).logits[0]
                targets = torch.tensor(framed[start + 1 : end + 1])
                item = -logits.log_softmax(-1)[torch.arange(len(targets)), targets]
                nats += float(item.sum())
                for offset, value in enumerate(item.tolist() if by_place is not None else []):
                    by_place[place % LENGTH + offset].append(value)  # type: ignore[index]
                count += len(targets)
                place += end - start
                start = end
    return nats, count


def by_position(folder: Path, parallel: dict[str, Any], n_buckets: int) -> list[float]:
    engine, corpora, _ = open_engine(config(folder, **parallel))
    rows = corpora.validation["all"]
    return compute_loss_by_position(
        engine, rows, corpora.objective, n_buckets=n_buckets, n_rows=len(rows), micro_batch=2
    )


@pytest.mark.parametrize(
    ("ranks", "parallel", "n_buckets"),
    [(1, {}, 1), (1, {}, 5), (2, {"cp": 2}, 3), (2, {"pp": 2}, 4), (2, {"dp_shard": 2}, 4),
     pytest.param(1, {}, LENGTH + 1, marks=pytest.mark.extended)],
)  # fmt: skip
def test_loss_by_position_is_that_of_the_places(
    workers: Workers, folder: Path, ranks: int, parallel: dict[str, Any], n_buckets: int
) -> None:
    nats: dict[int, list[float]] = {place: [] for place in range(LENGTH)}
    by_hand(folder, nats)
    buckets: list[list[float]] = [[] for _ in range(n_buckets)]
    for place, values in nats.items():
        buckets[place * n_buckets // LENGTH] += values
    expected = [float(np.mean(bucket)) if bucket else math.nan for bucket in buckets]
    for losses in workers.run(by_position, ranks, folder, parallel, n_buckets):
        assert losses == pytest.approx(expected, rel=1e-11, nan_ok=True)


CASES = [
    *((ranks, {"dp_shard": ranks}, micro_batch) for ranks in (1, 2, 3) for micro_batch in (1, 7, 32)),
    (1, {}, 50),  # one batch, mostly rows of padding
    (2, {"dp_shard": 2}, 20),  # the second rank sees nothing but padding
    (2, {"tp": 2}, 2),
]


@pytest.mark.parametrize(("ranks", "parallel", "micro_batch"), CASES)
def test_bits_per_byte(workers: Workers, folder: Path, ranks: int, parallel: dict[str, Any], micro_batch: int) -> None:
    nats, count = by_hand(folder)
    n_bytes = sum(len(text.encode()) for text in TEXTS)
    assert n_bytes == Corpus.open(folder / "validation").n_text_bytes
    results = workers.run(evaluated, ranks, folder, parallel, micro_batch, 0)
    assert all(result == results[0] for result in results)
    result = results[0]
    assert result["bytes"] == n_bytes
    assert result["tokens"] == count
    assert result["loss"] == pytest.approx(nats / count, rel=1e-11)
    assert result["bits_per_byte"] == pytest.approx(nats / math.log(2) / n_bytes, rel=1e-11)


def test_the_first_rows_alone(workers: Workers, folder: Path) -> None:
    everything = workers.run(evaluated, 1, folder, {}, 2, 0)[0]
    first = workers.run(evaluated, 1, folder, {}, 2, 3)[0]
    assert first["rows"] == 3 < everything["rows"]
    assert 0 < first["bytes"] < everything["bytes"]
    shared = workers.run(evaluated, 2, folder, {}, 1, 3)[0]
    assert shared.keys() == first.keys()
    assert all(shared[key] == pytest.approx(value, rel=1e-12) for key, value in first.items())
    assert workers.run(evaluated, 1, folder, {}, 2, 10**6)[0] == everything


def test_the_loss_of_uniform_predictions_is_the_logarithm_of_the_vocabulary(workers: Workers, folder: Path) -> None:
    result = workers.run(evaluated_uniform, 1, folder)[0]
    assert result["loss"] == pytest.approx(math.log(400), rel=1e-12)
    expected = result["tokens"] * math.log2(400) / sum(len(text.encode()) for text in TEXTS)
    assert result["bits_per_byte"] == pytest.approx(expected, rel=1e-12)


def evaluated_terms(folder: Path, name: str, classes: int = 0) -> dict[str, Any]:
    values = config(folder).model_dump()
    values["objective"] = {"name": name}
    heads = {"sentence": {"classes": classes}} if classes else {}
    values["model"] |= {"family": "encoder", "extra_heads": heads}
    return evaluated_zeros(Config.model_validate(values))


def evaluated_zeros(settings: Config) -> dict[str, Any]:
    """The evaluation of a model whose weights are all zero."""
    engine, corpora, tokenizer = open_engine(settings)
    for tensor in engine.local.values():
        tensor.zero_()
    rows = corpora.validation["all"]
    return evaluate(engine, rows, corpora.objective, tokenizer.byte_lengths(), micro_batch=4)


def test_other_objectives_give_their_terms_and_no_bits_per_byte(workers: Workers, folder: Path) -> None:
    (masked,) = workers.run(evaluated_terms, 1, folder, "masked")
    assert masked.keys() == {"loss", "tokens", "rows"}
    assert masked["loss"] == pytest.approx(math.log(400), rel=1e-12)
    (result,) = workers.run(evaluated_terms, 1, folder, "next_sentence", 2)
    assert result.keys() == {"loss", "terms", "tokens", "rows"}
    assert result["terms"] == pytest.approx({"masked": math.log(400), "sentence": math.log(2)}, rel=1e-12)
    assert result["loss"] == pytest.approx(math.log(800), rel=1e-12)
    assert format_result(result) == f"loss {math.log(800):.4f}, masked {math.log(400):.4f}, sentence {math.log(2):.4f}"


def evaluated_uniform(folder: Path) -> dict[str, Any]:
    return evaluated_zeros(config(folder))


def chosen(expected: str) -> str:
    return choose_precision(expected, torch.device("cpu"))


def test_all_ranks_choose_the_same_precision(workers: Workers) -> None:
    assert workers.run(chosen, 2, "fp64") == ["fp64"] * 2
    (choice,) = set(workers.run(chosen, 2, "auto"))
    assert choice in ("bf16", "fp32")


@pytest.mark.parametrize(("capability", "choice"), [((9, 0), "bf16"), ((8, 0), "bf16"), ((7, 5), "fp32")])
def test_on_a_gpu_the_precision_is_not_left_to_a_race(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], choice: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr("megatfm.train.build.measure_bf16_speedup", lambda *_: pytest.fail("tried"))
    assert choose_precision("auto", torch.device("cuda")) == choice


def test_every_token_stands_for_its_bytes(folder: Path) -> None:
    tokenizer = tokenizers.load(folder / "tokenizer.model")
    lengths = tokenizer.byte_lengths()
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert int(lengths[ids].sum()) == len(text.encode())
    assert np.all(lengths[[tokenizer.bos, tokenizer.eos, tokenizer.pad]] == 0)


def test_a_corpus_behind_a_url_is_no_folder_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sets = {"web": "https://host/corpus", "bucket": "s3://bucket/corpus"}
    assert _make_absolute({**sets, "here": "corpus"}) == {**sets, "here": str(tmp_path / "corpus")}


def test_a_micro_batch_with_few_divisors_has_streams_as_its_only_advice(folder: Path) -> None:
    result = config(folder)
    train = result.train.model_copy(update={"global_batch": 257, "micro_batch": 257})
    assert note_few_streams(result.model_copy(update={"train": train})).endswith(": set data.read_streams = 64")


@pytest.mark.parametrize(
    ("batch", "few"), [(8, False), (96, False), (256, False), (257, True), (269, True), (514, True), (7919, True)]
)
def test_a_batch_with_few_divisors_is_refused_with_a_better_one(folder: Path, batch: int, few: bool) -> None:
    result = config(folder)
    train = result.train.model_copy(update={"global_batch": batch, "micro_batch": 2})
    note = note_few_streams(result.model_copy(update={"train": train}))
    assert few == bool(note)
    if note:
        match = re.search(r"choose (\d+), or set data\.read_streams = 64$", note)
        assert match
        near = int(match[1])
        assert near % 2 == 0
        assert abs(near - batch) < 8
        assert max(d for d in range(1, 257) if near % d == 0) >= 16
    data = result.data.model_copy(update={"read_streams": 64})
    assert note_few_streams(result.model_copy(update={"train": train, "data": data})) == ""


def index_classes(folder: Path, *names: str) -> str:
    """A corpus with an image of each class, which are numbered in alphabetical order."""
    folder.mkdir()
    files = {f"{name}.txt": name.encode() for name in names} | {f"{name}.png": encode_noise() for name in names}
    (folder / "0.tar").write_bytes(pack_tar(dict(sorted(files.items()))))
    index_images(folder, LabelRule.parse("txt"))
    return str(folder)


def test_a_loss_that_is_no_likelihood_has_no_empty_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    photos: dict[str, Any] = {"loss": 4.5}
    results = {"step": 3, "objective": "image_to_text", "sets": {"photos": photos}}
    monkeypatch.setattr(inference, "evaluate_run", lambda *_, show, **__: show(results, {}))
    for has_likelihood in (False, True):
        photos |= {"bits_per_byte": 1.25, "bytes": 10} if has_likelihood else {}
        arguments = cli.build_parser().parse_args(["evaluate", "runs/captioner"])
        assert arguments.run(arguments) == 0
        table = capsys.readouterr().out
        assert "4.5000" in table
        assert ("bits per byte" in table) == ("1.250" in table) == has_likelihood


@pytest.mark.parametrize("experts", ["", "model.ffn={name='moe', d_ff=8, n_experts=2, top_k=1}"])
def test_the_classes_of_corpora_agree_with_one_another_and_with_the_model(tmp_path: Path, experts: str) -> None:
    pets = index_classes(tmp_path / "pets", "cat", "dog", "emu")
    same, fewer = index_classes(tmp_path / "same", "cat", "dog"), index_classes(tmp_path / "fewer", "cat", "emu")
    words = [
        "model.embedding.channels=3", "model.embedding.mean=[0,0,0]", "model.embedding.std=[1,1,1]",
        "train.global_batch=1", "train.micro_batch=1", "data.shuffle=false", *filter(None, [experts]),
    ]  # fmt: skip

    def open_notes(n_classes: int, *settings: str) -> list[str]:
        classes = f"model.extra_heads.classifier.n_classes={n_classes}"
        train = [] if "data.train=" in settings else [f"data.train={pets}"]
        loaded = load_config("quickstart-vision", [*words, *train, "data.validation={}", classes, *settings])
        loaded = loaded.model_copy(update={"run_dir": str(tmp_path / "run")})
        return [note for note in open_corpora(loaded, None).warnings if "n_classes" in note]

    assert open_notes(3, f"data.validation.same={same}") == []
    note = f"model.extra_heads.classifier.n_classes = 10, and {pets} has 3 classes: the other outputs only learn"
    assert open_notes(10) == [f"{note} to be small"]
    with pytest.raises(UsageError, match=r"has 3 classes \(cat, dog, emu\).* choose .*n_classes=3$"):
        open_notes(2)
    with pytest.raises(UsageError, match=r"fewer: class 1 is 'emu', and in \S+pets it is 'dog': .*read.labels.classes"):
        open_notes(3, f"data.validation.fewer={fewer}")
    mixture = [f"data.mixture.{name}={{path='{path}', weight=1}}" for name, path in (("a", pets), ("b", fewer))]
    with pytest.raises(UsageError, match="fewer: class 1 is 'emu'"):
        open_notes(3, "data.train=", *mixture)
    (tmp_path / "run" / "checkpoints" / "step-00000002").mkdir(parents=True)
    note = f"{pets}: names 3 classes, and model.extra_heads.classifier.n_classes = 2: an image of a further one"
    assert open_notes(2) == [f"{note} is an error"], "a run that has trained goes on"
    with pytest.raises(UsageError, match="fewer: class 1 is 'emu'"):
        open_notes(3, f"data.validation.fewer={fewer}")
