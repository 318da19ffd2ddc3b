"""Token ids that others made come out as they went in, in the layout that Megatron-LM's own code writes."""

import random
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datatrove.pipeline.tokens.megatron_tokenizer import MegatronTokenizedFile

from megatfm import data_prep, tokenizers
from megatfm.config.prep import PrepConfig, TokenizerConfig
from megatfm.corpus.corpus import Corpus
from megatfm.data_prep.tokenize import make_tokenizer_files, write_tokenizer
from megatfm.errors import MegatfmError, UsageError
from tests.support.prep_files import file_hashes, write_file

END = 2
WORDS = ["token", " ids", " of", " text", "\n", " é", " more"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    text = "".join(random.Random(0).choices(WORDS, k=3000))
    tokenizer = write_tokenizer(folder, make_tokenizer_files(TokenizerConfig(kind="byte-bpe", vocab_size=330), [text]))
    assert tokenizer.vocab_size == 330
    return folder


@pytest.fixture
def documents() -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(60, 330) for _ in range(rng.randrange(1, 40))] for _ in range(200)]


def megatron(path: Path, documents: Sequence[Sequence[int]], dtype: str = "<u2", code: int = 8) -> None:
    """Write a corpus as Megatron-LM's builder does: a document is two sequences, its last id an end of document."""
    sizes: list[int] = []
    edges = [0]
    with open(path, "wb") as file:
        for ids in documents:
            full = [*ids, END]
            for part in (full[: len(full) // 2], full[len(full) // 2 :]):
                file.write(np.array(part, dtype).tobytes())
                sizes.append(len(part))
            edges.append(len(sizes))
    pointers = np.cumsum([0, *sizes[:-1]]) * np.dtype(dtype).itemsize
    with open(path.with_suffix(".idx"), "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sizes), len(edges)))
        for values, kind in ((sizes, "<i4"), (pointers, "<i8"), (edges, "<i8")):
            file.write(np.array(values, kind).tobytes())


def with_empty_document(path: Path, documents: Sequence[Sequence[int]]) -> None:
    """Write a corpus whose last document has no sequence, as of an empty text whose sentences the builder counts."""
    megatron(path, documents)
    index = path.with_suffix(".idx")
    data = index.read_bytes()
    index.write_bytes(data[:26] + struct.pack("<Q", len(documents) + 2) + data[34:] + data[-8:])


def by_datatrove(path: Path, documents: Sequence[Sequence[int]], size: int) -> None:
    """Write a corpus as datatrove's writer does."""
    file = MegatronTokenizedFile(str(path.parent), path.stem, token_size=size)
    for ids in documents:
        file.write([*ids, END])
    file.close()


def config(folder: Path, model: Path, format_: str, out: str = "out", **read: Any) -> PrepConfig:
    read = {"folder": str(folder / "in"), "format": format_, "tokens": {"eos_id": END}, **read}
    values = {
        "out": str(folder / out), "read": read, "split": {"validation": 0.2}, "tokenizer": {"file": str(model)},
    }  # fmt: skip
    return PrepConfig.model_validate(values)


def taken(out: Path) -> dict[str, list[int]]:
    actual = {}
    for name in ("train", "validation"):
        corpus = Corpus.open(out / name)
        for sample in map(corpus.read_sample, range(corpus.n_samples)):
            actual[sample.source] = np.asarray(sample.tokens).tolist()
    return actual


@pytest.mark.parametrize(("format_", "write"), [
    ("megatron", megatron),
    ("megatron", lambda path, documents: megatron(path, documents, "<i4", 4)),
    ("megatron", with_empty_document),
    ("megatron", lambda path, documents: by_datatrove(path, documents, 2)),
    ("megatron", lambda path, documents: by_datatrove(path, documents, 4)),
    ("tokens", lambda path, documents: path.write_bytes(np.array([i for d in documents for i in (*d, END)], "<u2"))),
])  # fmt: skip
def test_ids_are_taken_over(
    tmp_path: Path, model: Path, documents: list[list[int]], format_: str, write: Callable[..., Any]
) -> None:
    (tmp_path / "in").mkdir()
    write(tmp_path / "in" / "a.bin", documents[:150])
    write(tmp_path / "in" / "b.bin", documents[150:])
    summary = data_prep.run(config(tmp_path, model, format_))
    expected = {f"a.bin#{number}": ids for number, ids in enumerate(documents[:150])}
    expected |= {f"b.bin#{number}": ids for number, ids in enumerate(documents[150:])}
    assert taken(summary.out) == expected
    result = summary.result
    assert not [note for note in result["notes"] if "left out" in note]  # an index is read with its file
    assert 0.1 < result["validation"]["documents"] / 200 < 0.3
    lengths = [len(item) for item in tokenizers.load(model).token_bytes() or []]
    text = sum(lengths[token] for ids in documents for token in ids)
    assert result["train"]["text_bytes"] + result["validation"]["text_bytes"] == text
    assert file_hashes(data_prep.run(config(tmp_path, model, format_, "again")).out) == file_hashes(summary.out)
    assert data_prep.run(config(tmp_path, model, format_)).already_done


def with_pointer(data: bytes, pointer: int) -> bytes:
    """The index with another place of its last sequence."""
    count = int.from_bytes(data[18:26], "little")
    at = 34 + 4 * count + 8 * (count - 1)
    return data[:at] + pointer.to_bytes(8, "little") + data[at + 8 :]


DAMAGE: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "rubbish": ("a.idx", lambda _: b"x" * 99, r"a\.idx is no index of Megatron-LM"),
    "cut index": ("a.idx", lambda data: data[:-3], "is cut off or damaged"),
    "cut data": ("a.bin", lambda data: data[:-3], "a sequence lies outside"),
    "huge count": ("a.idx", lambda data: data[:18] + b"\xff" * 8 + data[26:], "is cut off or damaged"),
    "a place past all numbers": ("a.idx", lambda data: with_pointer(data, 2**63 - 2), "a sequence lies outside"),
    "order": ("a.idx", lambda data: data[:-16] + data[-8:] + data[-16:-8], "its documents are not all of"),
    "type": ("a.idx", lambda data: data[:17] + b"\x06" + bytes(90), "of type 6"),
}


@pytest.mark.parametrize(("file", "damage", "reason"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_named(
    tmp_path: Path, model: Path, documents: list[list[int]], file: str, damage: Callable[[bytes], bytes], reason: str
) -> None:
    (tmp_path / "in").mkdir()
    megatron(tmp_path / "in" / "a.bin", documents)
    (tmp_path / "in" / file).write_bytes(damage((tmp_path / "in" / file).read_bytes()))
    with pytest.raises(MegatfmError, match=rf"in/a\.bin: .*{reason}"):
        data_prep.run(config(tmp_path, model, "megatron"))
    (tmp_path / "in" / "a.idx").unlink()
    with pytest.raises(MegatfmError, match=r"in/a\.bin: .*has no a\.idx beside it"):
        data_prep.run(config(tmp_path, model, "megatron"))


def test_a_damaged_file_may_be_skipped_and_the_last_document_may_lack_its_end(tmp_path: Path, model: Path) -> None:
    documents = [[60 + number, 61, 62] for number in range(40)]
    ids = np.array([i for ids in documents for i in (*ids, END)][:-1], "<u2")
    write_file(tmp_path / "in" / "a.bin", b"xyz")
    write_file(tmp_path / "in" / "b.bin", ids.tobytes())
    summary = data_prep.run(config(tmp_path, model, "tokens", on_error="skip"))
    assert taken(summary.out) == {f"b.bin#{number}": ids for number, ids in enumerate(documents)}
    (skipped,) = summary.result["skipped_files"]
    assert skipped == f"{tmp_path}/in/a.bin: has 3 bytes, which is no whole number of uint16 ids"


def test_an_id_that_ends_no_document_is_refused(tmp_path: Path, model: Path) -> None:
    (tmp_path / "in").mkdir()
    megatron(tmp_path / "in" / "a.bin", [[60, 61], [62]] * 20)
    reason = r"a\.bin: no document ends with read\.tokens\.eos_id = 60, and 40 of 40 end with 2: correct eos_id, or"
    for on_error in ("error", "skip"):
        with pytest.raises(UsageError, match=reason):
            data_prep.run(config(tmp_path, model, "megatron", tokens={"eos_id": 60}, on_error=on_error))
    unstripped = data_prep.run(config(tmp_path, model, "megatron", "kept", tokens={}))
    assert {tuple(ids) for ids in taken(unstripped.out).values()} == {(60, 61, END), (62, END)}


@pytest.mark.parametrize("ids", [[*range(60, 90)] * 9, [60]])
def test_files_without_the_end_of_a_document_are_noted(tmp_path: Path, model: Path, ids: list[int]) -> None:
    write_file(tmp_path / "in" / "empty.bin", b"")
    for number in range(9):
        end = [END] if number < 2 else []
        write_file(tmp_path / "in" / f"{number}.bin", np.array([*ids, *end], "<u2").tobytes())
    notes = data_prep.run(config(tmp_path, model, "tokens")).result["notes"]
    assert [note for note in notes if note.startswith("read.tokens.eos_id = 2 never occurs in 7 of 10 files")]
    for path in (tmp_path / "in").iterdir():
        path.write_bytes(np.array([*ids, END] * 3, "<u2").tobytes())
    assert "never occurs" not in str(data_prep.run(config(tmp_path, model, "tokens", "ended")).result["notes"])


@pytest.mark.parametrize(
    ("written", "read"), [("<u4", "uint16"), ("<i8", "uint32"), ("<i8", "int32"), ("<i8", "uint16")]
)
def test_a_type_that_is_too_narrow_is_refused(
    tmp_path: Path, model: Path, documents: list[list[int]], written: str, read: str
) -> None:
    """The upper halves of the ids would be ids of 0."""
    write_file(tmp_path / "in" / "a.bin", np.array([i for ids in documents for i in (*ids, END)], written).tobytes())
    with pytest.raises(UsageError, match=f"every second id is 0, as if wider ones were read as {read}: mend"):
        data_prep.run(config(tmp_path, model, "tokens", tokens={"eos_id": END, "dtype": read}))


def test_ids_of_another_tokenizer_are_refused(tmp_path: Path, model: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.bin").write_bytes(np.array([5, END, 400, END], "<u2").tobytes())
    with pytest.raises(MegatfmError, match="document 1 has id 400, but the tokenizer has 330"):
        data_prep.run(config(tmp_path, model, "tokens"))
    (tmp_path / "in" / "a.bin").unlink()
    megatron(tmp_path / "in" / "a.bin", [[5, -1, 3]], "<i4", 4)
    with pytest.raises(MegatfmError, match="document 0 has id -1, but the tokenizer has 330"):
        data_prep.run(config(tmp_path, model, "megatron"))
    (tmp_path / "in" / "a.idx").unlink()
    (tmp_path / "in" / "a.bin").write_bytes(b"123")
    with pytest.raises(MegatfmError, match="3 bytes, which is no whole number of uint16 ids"):
        data_prep.run(config(tmp_path, model, "tokens"))
    (tmp_path / "in" / "a.bin").write_bytes(np.array([END, END], "<u2").tobytes())
    with pytest.raises(UsageError, match=r"no document for train.*2 dropped: empty"):
        data_prep.run(config(tmp_path, model, "tokens"))


@pytest.mark.parametrize(("changes", "reason"), [
    ({"tokenizer": {}}, "set tokenizer.file"),
    ({"steps": [{"name": "html"}]}, "leave them out"),
    ({"read": {"folder": "x", "format": "tokens"}}, "set read.tokens.eos_id"),
])  # fmt: skip
def test_contradictory_options_of_take_over_are_refused(changes: dict[str, Any], reason: str) -> None:
    values = {
        "out": "o", "read": {"folder": "x", "format": "megatron"}, "tokenizer": {"file": "t"}, **changes,
    }  # fmt: skip
    with pytest.raises(ValueError, match=reason):
        PrepConfig.model_validate(values)
