"""Images and what lies beside them come out byte for byte as they went in; what is no image is refused by name."""

import io
import json
import random
import re
import struct
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import webdataset
import zstandard
from rich.console import Console
from webdataset import tariterators

from megatfm import data_prep
from megatfm.config.prep import PrepConfig, TokenizerConfig
from megatfm.corpus.corpus import Corpus
from megatfm.corpus.inspect import check_corpus, describe_corpus
from megatfm.data_prep.import_images import write_digits
from megatfm.data_prep.tokenize import make_tokenizer_files, write_tokenizer
from megatfm.errors import MegatfmError, UsageError
from tests.support.forked_commands import run_command
from tests.support.images import encode_noise, png_chunk
from tests.support.prep_files import (
    KILLED,
    count_moments,
    file_hashes,
    hold_first_task,
    run_killed_at,
    run_task,
    stop_before_commit,
    write_file,
)
from tests.support.webdatasets import make_member, make_tar, pack_tar


def image(number: int, format_: str = "JPEG") -> bytes:
    return encode_noise(8 + number % 5, 12, seed=number, format_=format_)


def samples(count: int = 30) -> dict[str, dict[str, bytes]]:
    """Images with what may lie beside them, by name and extension."""
    actual = {}
    for number in range(count):
        kind = ("jpg", "png", "jpeg")[number % 3]
        companions = {
            "cls": b"%d" % number,
            "json": json.dumps({"text": f"of {number}", "é": [number]}).encode() + b"\n",
            "txt": f"A caption, {number} é\r\n".encode(),
        }
        image_ = image(number, "PNG" if kind == "png" else "JPEG")
        # with all, with some, with none of these
        actual[f"{number:03d}"] = {
            kind: image_,
            **{item: data for at, (item, data) in enumerate(companions.items()) if number % 8 >> at & 1},
        }
    return actual


def as_folder(root: Path, actual: Mapping[str, Mapping[str, bytes]]) -> None:
    for name, members in actual.items():
        for extension, data in members.items():
            write_file(root / f"set{int(name) % 2}" / f"{name}.{extension}", data)


def as_tar(root: Path, actual: Mapping[str, Mapping[str, bytes]]) -> None:
    root.mkdir(parents=True, exist_ok=True)
    with webdataset.TarWriter(str(root / "all.tar")) as writer:
        for name, members in actual.items():
            writer.write({"__key__": name, **members})


def config(tmp_path: Path, out: str = "out", **settings: Any) -> PrepConfig:
    read = {"folder": str(tmp_path / "in"), "format": "images", **settings.pop("read", {})}
    values = {"out": str(tmp_path / out), "read": read, "split": {"validation": 0.3}, **settings}
    return PrepConfig.model_validate(values)


def taken(out: Path) -> dict[str, Any]:
    actual = {}
    for name in ("train", "validation"):
        corpus = Corpus.open(out / name)
        check_corpus(out / name)
        for sample in map(corpus.read_sample, reversed(range(corpus.n_samples))):
            actual[sample.source] = sample
    return actual


@pytest.mark.parametrize("lay", [as_folder, as_tar])
def test_every_byte_comes_through(tmp_path: Path, lay: Any) -> None:
    expected_samples = samples()
    lay(tmp_path / "in", expected_samples)
    result = data_prep.run(config(tmp_path, task_bytes=1024)).result
    actual = taken(tmp_path / "out")
    assert len(actual) == len(expected_samples) == result["steps"][0]["documents_out"]
    for source, sample in actual.items():
        name = source.rpartition("#")[2] if lay is as_tar else Path(source).stem
        assert dict(sample.members) == expected_samples[name]
        assert next(iter(sample.members)) in ("jpg", "jpeg", "png")
        assert (len(sample.tokens), sample.text_bytes) == (0, 0)
    assert result["tokenizer"] == {"kind": "none", "blake3": "none", "vocab_size": 0}
    assert "pillow" in result["libraries"]
    repeated = data_prep.run(config(tmp_path, task_bytes=1024))
    assert repeated.already_done
    sink = io.StringIO()
    Console(file=sink, width=200).print(repeated.to_table())
    for page in ((tmp_path / "out" / "report.html").read_text(), sink.getvalue()):
        assert "30" in page
        assert " 0 B" not in page, "images have no bytes of text"
        assert "token" not in re.sub(r"<dt>tokenizer[^<]*|no tokenizer|sentencepiece|>tokenizers<", "", page)

    # The same whatever the parts, and readable by others.
    data_prep.run(config(tmp_path, "again", task_bytes=2**20))
    first, repeated = file_hashes(tmp_path / "out" / "train"), file_hashes(tmp_path / "again" / "train")
    assert first == repeated
    with open(tmp_path / "out" / "train" / "shard-000000.tar.zst", "rb") as shard:
        unpacked = zstandard.ZstdDecompressor().stream_reader(shard, read_across_frames=True).read()
    members = tariterators.tar_file_expander([{"url": "shard", "stream": io.BytesIO(unpacked)}])
    expected = {sample["__key__"]: sample for sample in tariterators.group_by_keys(members)}
    assert len(expected) == result["train"]["documents"]
    for part in expected.values():
        meta = json.loads(part["meta.json"])
        assert {name: part[name] for name in meta["members"]} == dict(actual[meta["source"]].members)


@pytest.mark.parametrize("lay", [pytest.param(as_folder, marks=pytest.mark.slow), as_tar])
def test_killed_at_any_moment(tmp_path: Path, lay: Any) -> None:
    lay(tmp_path / "in", samples())
    small = config(tmp_path, task_bytes=1024)
    full = file_hashes(data_prep.run(small).out)
    moments = count_moments(small)
    rng = random.Random(0)
    # The last moments are those of the commits.
    for number, last in enumerate([*rng.sample(range(moments), 2), moments - 2, moments - 1]):
        killed = config(tmp_path, f"{number}", task_bytes=1024)
        assert run_killed_at(killed, last) == KILLED
        if number == 0:
            run_killed_at(killed, last // 2)  # while it goes on
        assert file_hashes(data_prep.run(killed).out) == full


OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "seed": ("split.seed", {"split": {"validation": 0.3, "seed": 4}}),
    "no validation": ("split.validation", {"split": {"validation": 0}}),
    "plain tars": ("compress", {"compress": False}),
    "classes": ("read.labels", {"read": {"labels": {"by": "folder"}}}),
    "skipped images": ("read.on_error", {"read": {"on_error": "skip"}}),
}
"""By name, settings that another config has, and the key that the refusal names."""


@pytest.mark.parametrize(("key", "settings"), OTHERS.values(), ids=OTHERS)
def test_another_config_in_a_finished_folder_is_refused(tmp_path: Path, key: str, settings: dict[str, Any]) -> None:
    as_folder(tmp_path / "in", samples(12))
    before = file_hashes(data_prep.run(config(tmp_path)).out)
    with pytest.raises(UsageError, match=rf"out: was prepared with another config \({key} was"):
        data_prep.run(config(tmp_path, **settings))
    assert file_hashes(tmp_path / "out") == before
    replaced = data_prep.run(config(tmp_path, overwrite=True, **settings))
    assert file_hashes(replaced.out) == file_hashes(data_prep.run(config(tmp_path, "fresh", **settings)).out)


@pytest.mark.parametrize(("key", "settings"), OTHERS.values(), ids=OTHERS)
def test_a_task_with_another_config_is_refused(tmp_path: Path, key: str, settings: dict[str, Any]) -> None:
    """Two tasks of an array in one folder, between which the config was edited."""
    as_folder(tmp_path / "in", samples(12))
    refusal = rf"out: other tasks are preparing it with another config \({key}"
    with hold_first_task(config(tmp_path)), pytest.raises(UsageError, match=refusal):
        run_task(config(tmp_path, **settings), 2)
    assert file_hashes(tmp_path / "out") == file_hashes(data_prep.run(config(tmp_path, "fresh")).out)


@pytest.mark.parametrize("stage", ["import.00001", "import"])
@pytest.mark.parametrize("settings", [settings for _, settings in OTHERS.values()], ids=OTHERS)
def test_stopped_and_resumed_with_another_config(tmp_path: Path, settings: dict[str, Any], stage: str) -> None:
    as_folder(tmp_path / "in", samples())
    for out in ("on", "back"):
        for changes in ({}, settings):
            with stop_before_commit(stage):
                data_prep.run(config(tmp_path, out, task_bytes=2048, **changes))
        last = settings if out == "on" else {}
        fresh = data_prep.run(config(tmp_path, f"fresh-{out}", **last)).out
        assert file_hashes(data_prep.run(config(tmp_path, out, task_bytes=2048, **last)).out) == file_hashes(fresh)


def test_captions_become_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = ["A caption of many images, 0123456789 é " * 40]
    known = write_tokenizer(tmp_path, make_tokenizer_files(TokenizerConfig(kind="byte-bpe", vocab_size=320), text))
    as_folder(tmp_path / "in", samples())
    data_prep.run(config(tmp_path, tokenizer={"file": str(tmp_path)}))
    captioned = 0
    for sample in taken(tmp_path / "out").values():
        output = json.loads(sample.members.get("json", b"{}")).get("text", "")
        caption = sample.members["txt"].decode() if "txt" in sample.members else output
        assert known.decode(sample.tokens.tolist()) == caption
        assert sample.text_bytes == len(caption.encode())
        captioned += bool(caption)
    assert captioned > 15
    displayed = describe_corpus(tmp_path / "out" / "train", 0)
    page = (tmp_path / "out" / "report.html").read_text()
    assert all(item in page for item in ("<h1>30 images</h1>", "<dt>Captions</dt>", "<dt>Tokens</dt>"))
    assert ".png" in displayed or ".jp" in displayed
    assert "bytes of text" in displayed
    assert run_command("data", "show", str(tmp_path / "out" / "train"), "--sample", "1") == 0
    assert " bytes" in capsys.readouterr().out


def header_bomb() -> bytes:
    """A PNG of 60,000 × 60,000 pixels in a few bytes."""
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    end = png_chunk(b"IDAT", zlib.compress(b"")) + png_chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + end


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


BAD = {
    "a bomb": ({"png": header_bomb()}, "claims over 67,108,864 pixels"),
    "no image": ({"txt": b"only words"}, "no image"),
    "two images": ({"png": image(1, "PNG"), "jpg": image(1)}, "several images without numbers: .* and "),
    "another format": ({"jpg": image(1, "PNG")}, "a .jpg that is PNG by its content: give it"),
    "a format that is not read": ({"png": image(1, "ICO")}, "a .png that is ICO by its content: convert it"),
    "garbage": ({"jpg": b"\xff\xd8" + b"x" * 300}, "a .jpg that is no whole JPEG"),
    "empty": ({"png": b""}, "a .png that is no whole PNG"),
    "a PNG cut off": ({"png": image(1, "PNG")[:-30]}, "a .png that is no whole PNG"),
    "a damaged PNG": ({"png": flipped(image(1, "PNG"))}, "a .png that is no whole PNG"),
    "a JPEG cut off": ({"jpg": image(1)[:-40]}, "cut off: a JPEG without its end"),
    "a class in words": ({"jpg": image(1), "cls": b"cat"}, "no number of a class"),
    "broken JSON": ({"jpg": image(1), "json": b"{"}, "a .json that is not JSON"),
    "a caption in Latin-1": ({"jpg": image(1), "txt": b"caf\xe9"}, "not valid UTF-8: byte 3"),
}


@pytest.mark.parametrize(("members", "message"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("lay", [as_folder, as_tar])
def test_bad_samples_are_named_or_skipped(tmp_path: Path, lay: Any, members: dict[str, bytes], message: str) -> None:
    lay(tmp_path / "in", {**samples(12), "500": members})
    with pytest.raises(MegatfmError, match=rf"in/(set0/500\.[a-z]+|all\.tar#500): has .*{message}"):
        data_prep.run(config(tmp_path))
    result = data_prep.run(config(tmp_path, read={"on_error": "skip"})).result
    assert len(taken(tmp_path / "out")) == 12
    assert len(result["skipped_files"]) == 1
    assert "500" in result["skipped_files"][0]


def test_halves_of_surrogate_pairs_go_from_captions_and_labels(tmp_path: Path) -> None:
    """JSON may spell them; neither a tokenizer nor a manifest can take them."""
    tokenizer = make_tokenizer_files(TokenizerConfig(kind="byte-bpe", vocab_size=297), ["a caption of words"])
    (tmp_path / "model").mkdir()
    model = write_tokenizer(tmp_path / "model", tokenizer)
    rows = []
    for number in range(12):
        write_file(tmp_path / "in" / f"{number}.jpg", image(number))
        write_file(tmp_path / "in" / f"{number}.json", b'{"text": "a \\ud800 b"}')
        rows.append(json.dumps({"file": f"{number}.jpg", "label": f"\udc00{number % 2}"}))
    write_file(tmp_path / "labels.jsonl", "\n".join(rows).encode())
    labels = {"by": "table", "table": str(tmp_path / "labels.jsonl")}
    data_prep.run(config(tmp_path, read={"labels": labels}, tokenizer={"file": str(tmp_path / "model")}))
    assert {model.decode(sample.tokens) for sample in taken(tmp_path / "out").values()} == {"a \ufffd b"}
    assert Corpus.open(tmp_path / "out" / "train").manifest.class_names == ["\ufffd0", "\ufffd1"]


def test_files_that_are_left_out_are_counted(tmp_path: Path) -> None:
    as_folder(tmp_path / "in", samples(12))
    for name in ("a.gif", "b.tiff"):
        write_file(tmp_path / "in" / name, image(1))
    assert "left out by name: 2 files or folders (a.gif, b.tiff)" in data_prep.run(config(tmp_path)).result["notes"]
    read = {"folder": str(tmp_path / "in"), "exclude": ["*.jp*", "*.png", "*.[cjt]*"]}
    without_images = config(tmp_path, "none", read=read)
    for folder, reason in (("missing", "no such folder"), ("in/a.gif", "is a file")):
        with pytest.raises(UsageError, match=rf"{reason}.*: set read\.folder to .*(images, or tars of them|holds it)$"):
            data_prep.run(config(tmp_path, "none", read={"folder": str(tmp_path / folder)}))
    with pytest.raises(UsageError, match=r"in: no images, and no tars of them, here \([0-9]+ left out by name\)"):
        data_prep.run(without_images)


def test_hostile_tars_are_refused(tmp_path: Path) -> None:
    path, first = tmp_path / "in" / "all.tar", make_member("a.jpg", image(1))
    for members, message in (
        ([make_member("a.jpg", type=tarfile.SYMTYPE, linkname="/etc/passwd")], "a link or device: a.jpg"),
        ([first, make_member("a.jpg", image(2))], "a .jpg twice"),
        ([first, make_member("a.pickle", b"x")], "neither an image nor .*: a.pickle"),
    ):
        write_file(path, make_tar(*members))
        with pytest.raises(MegatfmError, match=message):
            data_prep.run(config(tmp_path))
    path.write_bytes(pack_tar({f"../{number}.jpg": image(number) for number in range(20)}))  # a name is only a name
    data_prep.run(config(tmp_path))
    assert len(taken(tmp_path / "out")) == 20
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(MegatfmError, match=r"all\.tar: is no whole tar"):
        data_prep.run(config(tmp_path, "cut"))


def test_settings_that_images_have_no_use_for(tmp_path: Path) -> None:
    for settings, message in (
        ({"steps": [{"name": "normalize"}]}, "no text for steps"),
        ({"tokenizer": {"vocab_size": 500}}, "no tokenizer is trained on captions"),
    ):
        with pytest.raises(ValueError, match=message):
            config(tmp_path, **settings)


def test_too_few_to_split(tmp_path: Path) -> None:
    as_folder(tmp_path / "in", samples(1))
    with pytest.raises(UsageError, match="no document for"):
        data_prep.run(config(tmp_path))


def test_digits_that_can_not_be_written_name_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(MegatfmError, match=r"can't write .*file/digits: Not a directory: make room or choose"):
        write_digits(tmp_path / "file" / "digits")
