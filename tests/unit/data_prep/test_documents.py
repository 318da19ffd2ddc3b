"""The files between stages: any text comes back, nothing half-written is taken for a whole."""

import json
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from megatfm.data_prep.documents import Document, DocumentWriter, read_documents
from megatfm.errors import MegatfmError

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
    data = bytearray(path.read_bytes())
    if damage == "cut":
        del data[len(data) // 2 :]
    else:
        data[len(data) // 2] ^= 1
    path.write_bytes(data)
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
