"""Files that prep reads, and those it writes between stages: found in order, read strictly, whole or not at all."""

import json
import os
import socket
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from megatfm.config.prep import ReadConfig
from megatfm.data_prep.documents import Document, DocumentWriter, read_documents
from megatfm.data_prep.input_files import DocumentReader, InputFiles
from megatfm.data_prep.readers.text import read_text
from megatfm.errors import MegatfmError, UsageError
from tests.support.prep_files import write_file


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("b.txt", "a/z.txt", "a/tests/t.txt", ".git/config", "a.md", "c/d/e/f.txt"):
        write_file(tmp_path / "root" / name, name.encode())
    return tmp_path / "root"


def test_all_files_sorted_without_the_hidden(root: Path) -> None:
    assert names(root) == ["a/tests/t.txt", "a/z.txt", "a.md", "b.txt", "c/d/e/f.txt"]
    assert [file.size for file in listing(root).files] == [len(name) for name in names(root)]


def test_patterns_choose_and_leave_out(root: Path) -> None:
    actual = listing(root, include=("*.txt",), exclude=("tests",))
    assert [file.name for file in actual.files] == ["a/z.txt", "b.txt", "c/d/e/f.txt"]
    assert actual.notes == ["left out by name: 3 files or folders (.git, a/tests, a.md)"]
    assert listing(root).notes == ["left out by name: 1 file or folder (.git)"]
    many = listing(root, include=("z.txt",))
    assert many.notes == ["left out by name: 5 files or folders (.git, a/tests/t.txt, a.md, …)"]


def test_the_standard_library_without_tests_and_other_packages() -> None:
    stdlib = Path(sysconfig.get_path("stdlib"))
    expected = {
        str(path.relative_to(stdlib))
        for path in stdlib.rglob("*.py")
        if not {"test", "tests", "idle_test", "site-packages", "dist-packages"} & set(path.relative_to(stdlib).parts)
    }
    input_files = InputFiles(ReadConfig(builtin="python-stdlib"))
    assert {file.name for file in input_files.files} == expected
    assert "json/decoder.py" in expected


def test_a_folder_goes_before_a_source(root: Path) -> None:
    assert len(InputFiles(ReadConfig(builtin="python-stdlib", folder=str(root))).files) == 5


def test_links_are_followed(root: Path, tmp_path: Path) -> None:
    write_file(tmp_path / "elsewhere" / "x.txt", b"x")
    (root / "link").symlink_to(tmp_path / "elsewhere")
    (root / "y.txt").symlink_to(tmp_path / "elsewhere" / "x.txt")
    assert {"link/x.txt", "y.txt"} <= set(names(root))


def test_names_that_are_not_utf8_are_escaped(root: Path) -> None:
    (root / os.fsdecode(b"caf\xe9 #1.txt")).write_text("x")
    assert "caf\\xe9 %231.txt" in names(root)


@pytest.mark.parametrize("kind", ["loop", "self", "dangling", "fifo", "socket"])
def test_entries_that_are_no_files_are_named_or_skipped(root: Path, kind: str) -> None:
    bad = root / "c" / "bad"
    if kind == "fifo":
        os.mkfifo(bad)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(os.path.relpath(bad))
    else:
        bad.symlink_to({"loop": "..", "self": "bad", "dangling": "nowhere"}[kind])
    with pytest.raises(MegatfmError, match=f"{bad}: .*read.on_error=skip") as caught:
        listing(root)
    assert "\n" not in str(caught.value)
    actual = listing(root, on_error="skip")
    assert [item.where for item in actual.bad] == [str(bad)]
    assert len(actual.files) == 5


def test_a_folder_without_permission(tmp_path: Path, root: Path, unprivileged: None) -> None:
    (root / "a").chmod(0)
    try:
        with pytest.raises(MegatfmError, match="a: can't list this folder \\(Permission denied\\)"):
            listing(root)
        assert len(listing(root, on_error="skip").files) == 3
    finally:
        (root / "a").chmod(0o755)


@pytest.mark.parametrize(
    ("folder", "reason"),
    [("none", "no such folder"), ("root/b.txt", "is a file, not a folder"), ("empty", "no text files")],
)
def test_a_wrong_folder_is_a_usage_error(tmp_path: Path, root: Path, folder: str, reason: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=f"{tmp_path / folder}: {reason}"):
        listing(tmp_path / folder)
    with pytest.raises(UsageError, match=r"set read\.folder to a folder of images"):
        listing(tmp_path / "none", format="images")


def test_patterns_that_fit_nothing_are_a_usage_error(root: Path) -> None:
    with pytest.raises(UsageError, match=r"no text files here \(6 left out by name\).*read\.include"):
        listing(root, include=("*.rst",))


def listing(root: Path, **settings) -> InputFiles:
    return InputFiles(ReadConfig(folder=str(root), **settings))


def names(root: Path) -> list[str]:
    return [file.name for file in listing(root).files]


def test_a_file_is_a_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("Größe\r\n".encode())
    assert read(tmp_path)[0] == [Document("a.txt", "Größe\r\n")]


def test_blank_files_are_dropped_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"")
    (tmp_path / "b.txt").write_bytes(b" \n\t\n")
    (tmp_path / "c.txt").write_bytes(b"c")
    documents, reader = read(tmp_path)
    assert [document.id for document in documents] == ["c.txt"]
    assert (reader.counts.documents_in, reader.counts.documents_out) == (3, 1)
    assert reader.counts.dropped["empty"].examples == ["a.txt", "b.txt"]


@pytest.mark.parametrize("paragraph", ["line\n" * 50 + "\n", "line\n", "ä東🙂" * 7])
def test_a_long_file_is_cut_and_nothing_is_lost(tmp_path: Path, paragraph: str) -> None:
    text = paragraph * (20_000 // len(paragraph))
    (tmp_path / "long.txt").write_text(text)
    documents, reader = read(tmp_path, limit=1024)
    assert "".join(document.text for document in documents) == text
    assert [document.id for document in documents] == [f"long.txt#{part}" for part in range(len(documents))]
    assert all(512 <= document.text_bytes <= 1024 for document in documents[:-1])
    assert reader.counts.changed == 1
    if "\n" in paragraph:
        assert all(document.text.endswith(paragraph[-2:]) for document in documents[:-1])


@given(
    text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1),
    limit=st.integers(8, 40),
)
def test_any_text_survives_any_cut(tmp_path_factory: pytest.TempPathFactory, text: str, limit: int) -> None:
    folder = tmp_path_factory.mktemp("any")
    (folder / "a.txt").write_bytes(text.encode())
    parts = [document.text for document in read(folder, limit)[0]]
    # Parts without any letter are dropped as empty, so only those may be missing.
    remaining = text.removeprefix("\ufeff")
    for part in parts:
        before, actual, remaining = remaining.partition(part)
        assert actual
        assert not before.strip()
        assert len(part.encode()) <= limit
    assert not remaining.strip()


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffa \ufeff".encode() + b"b")
    assert read(tmp_path)[0] == [Document("a.txt", "a \ufeffb")]
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfa\xff")
    with pytest.raises(MegatfmError, match="is not valid UTF-8 at byte 4"):
        read(tmp_path)


BAD = {
    "latin-1": ("naïve".encode("latin-1"), "is not valid UTF-8 at byte 2"),
    "surrogate": (b"ab\xed\xa0\x80", "is not valid UTF-8 at byte 2"),
    "late": (b"x" * 5000 + b"\xff", "is not valid UTF-8 at byte 5000"),
    "truncated": (("x" * 2000 + "東").encode()[:-1], "is not valid UTF-8 at byte 2000"),
    "binary": (b"\x7fELF\0\0", "is a binary file, with a zero at byte 4"),
    "late zero": (b"x" * 3000 + b"\0", "is a binary file, with a zero at byte 3000"),
    "utf-16": ("text".encode("utf-16"), "is UTF-16, not UTF-8"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_no_text(tmp_path: Path, name: str) -> None:
    data, reason = BAD[name]
    (tmp_path / "bad.txt").write_bytes(data)
    (tmp_path / "good.txt").write_bytes(b"good")
    with pytest.raises(MegatfmError, match=f"{tmp_path}/bad.txt: {reason}.*read.on_error=skip"):
        read(tmp_path, limit=1024)
    documents, reader = read(tmp_path, limit=1024, on_error="skip")
    assert documents == [Document("good.txt", "good")]
    assert reader.counts.documents_in == reader.counts.documents_out + 1
    assert [dropped.documents for dropped in reader.counts.dropped.values()] == [1]


def test_a_file_without_permission(tmp_path: Path, unprivileged: None) -> None:
    (tmp_path / "closed.txt").write_bytes(b"x")
    (tmp_path / "closed.txt").chmod(0)
    with pytest.raises(MegatfmError, match=r"closed\.txt: can't be read \(Permission denied\)"):
        read(tmp_path)
    assert read(tmp_path, on_error="skip")[0] == []


def test_a_file_that_vanishes_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x")
    listing = InputFiles(ReadConfig(folder=str(tmp_path)))
    (tmp_path / "a.txt").unlink()
    with pytest.raises(MegatfmError, match=r"a\.txt: can't be read \(No such file"):
        list(DocumentReader(listing, 1024).iter_documents(lambda _: None))


def read(folder: Path, limit: int = 2**20, **settings) -> tuple[list[Document], DocumentReader]:
    reader = DocumentReader(InputFiles(ReadConfig(folder=str(folder), **settings)), limit)
    done: list[int] = []
    documents = list(reader.iter_documents(done.append))
    assert sum(done) == sum(path.stat().st_size for path in folder.iterdir())
    return documents, reader


# --------------------------------------------------------------------------------------- files between stages


texts = st.text(st.characters(exclude_categories=["Cs"]))


@given(texts=st.lists(texts))
def test_documents_come_back(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    path = tmp_path_factory.mktemp("documents") / "d.jsonl.zst"
    documents = [Document(f"{number}", text) for number, text in enumerate(texts)]
    save(path, documents)
    assert list(read_documents(path)) == documents
    assert all(document.text_bytes == len(document.text.encode()) for document in documents)


def test_document_files_are_zstd_over_json_lines(tmp_path: Path) -> None:
    save(tmp_path / "d.jsonl.zst", [Document("a", "x\ny")])
    data = zstandard.ZstdDecompressor().decompressobj().decompress((tmp_path / "d.jsonl.zst").read_bytes())
    assert json.loads(data) == ["a", "x\ny"]


def test_nothing_appears_without_a_commit(tmp_path: Path) -> None:
    with DocumentWriter(tmp_path / "d.jsonl.zst") as writer:
        writer.add(Document("a", "x"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["cut", "flip", "gone"])
def test_damage_is_one_clear_line(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "d.jsonl.zst"
    save(path, [Document(f"{number}", f"text {number * number}") for number in range(5000)])
    data = path.read_bytes()
    half, rest = data[: len(data) // 2], data[len(data) // 2 :]
    path.write_bytes(half if damage == "cut" else half + bytes([rest[0] ^ 1]) + rest[1:])
    if damage == "gone":
        path.unlink()
    with pytest.raises(MegatfmError, match=f"{path}: can't be read back") as caught:
        list(read_documents(path))
    assert "\n" not in str(caught.value)


def test_the_entry_and_the_file_of_a_document() -> None:
    document = Document("package/sub/module.py#3", "")
    assert (document.top_level, document.file) == ("package", "package/sub/module.py")
    assert Document("module.py", "").top_level == "module.py"


def save(path: Path, documents: list[Document]) -> None:
    with DocumentWriter(path) as writer:
        for document in documents:
            writer.add(document)
        writer.commit()


@pytest.mark.parametrize("size", [1, 5000])
def test_texts_that_grow_while_read_are_refused(tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parts are counted first; two documents of one name, or parts of two versions, would be in the corpus."""
    path = write_file(tmp_path / "in" / "a.txt", b"x" * size)
    inputs = InputFiles(ReadConfig(folder=str(path.parent)))

    def read_and_grow(path: Path, limit: int) -> Iterator[str]:
        yield from read_text(path, limit)
        with open(path, "ab") as file:
            file.write(b"y" * 3000)

    monkeypatch.setattr("megatfm.data_prep.input_files.read_text", read_and_grow)
    with pytest.raises(MegatfmError, match=r"a\.txt: changed while it was read"):
        list(DocumentReader(inputs, 1024).iter_documents(lambda _: None))
