"""The corpus that `data.py` reads: real text of this machine, the same samples for every contender.

Manuals, documentation and Python sources, and what `--places` hold besides (Debian's linux-source, unpacked, has
1.3 GB), each file once (deduplicated by hash), tokenized by a SentencePiece model that is trained on a part of it.
"""

import gzip
import importlib.machinery
import io
import json
import os
import random
import sys
import sysconfig
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import webdataset as wds
from blake3 import blake3

from megatfm.corpus.webdataset_index import index_folder
from megatfm.corpus.writer import ShardWriter

PLACES = ("/usr/share/doc", "/usr/share/man", sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"))
KINDS = {
    "", ".c", ".cpp", ".css", ".cuh", ".h", ".hpp", ".html", ".js", ".md", ".py", ".pyi", ".rst", ".toml", ".txt",
}  # fmt: skip
VOCABULARY = 8000


def iter_texts(most: int, places: list[str]) -> Iterator[str]:
    """Yield distinct texts of files, up to `most` bytes."""
    digests, total = set[bytes](), 0
    for place in (*PLACES, *places):
        for folder, folders, names in os.walk(place):
            folders.sort()
            for name in sorted(names):
                path = Path(folder, name)
                plain = name.removesuffix(".gz")
                is_manual = folder.startswith("/usr/share/man")
                if not (is_manual or Path(plain).suffix in KINDS) or path.is_symlink() or not path.is_file():
                    continue
                data = path.read_bytes()
                try:
                    text = (gzip.decompress(data) if name.endswith(".gz") else data).decode()
                except (UnicodeDecodeError, OSError, EOFError):
                    continue
                digest = blake3(text.encode()).digest()
                if digest in digests or not text.strip():  # no tokens, which Streaming does not take
                    continue
                digests.add(digest)
                total += len(text.encode())
                yield text
                if total >= most:
                    return


def tokenize(documents: list[str]) -> Iterator[np.ndarray]:
    """Yield the uint16 tokens of each document."""
    model, sample = io.BytesIO(), random.Random(0).sample(documents, min(len(documents), 300))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in sample for line in text.splitlines()[:400] if len(line) < 2000),
        model_writer=model,
        vocab_size=VOCABULARY,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
        num_threads=os.cpu_count(),
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    for start in range(0, len(documents), 512):
        for ids in processor.encode(documents[start : start + 512], num_threads=os.cpu_count()):
            yield np.array(ids, np.uint16)


def write_corpora(folder: Path, megabytes: float, places: list[str], mosaic: bool) -> None:
    """Write the same samples for every contender, and their numbers into facts.json."""
    folder.mkdir(parents=True, exist_ok=True)
    start, documents = time.perf_counter(), list(iter_texts(int(megabytes * 1e6), places))
    random.Random(0).shuffle(documents)
    size, tokens = sum(len(text.encode()) for text in documents), 0
    (folder / "tars").mkdir()
    with (
        ShardWriter(folder / "ours", tokenizer_hash="t", token_dtype="uint16", shard_bytes=2**26) as writer,
        wds.ShardWriter(str(folder / "tars/%06d.tar"), maxsize=2**26, maxcount=10**9, verbose=0) as tars,
    ):
        reference = None
        if mosaic:
            from streaming import MDSWriter

            reference = MDSWriter(out=str(folder / "mds"), columns={"tokens": "ndarray:uint16"}, size_limit=2**26)
        for i, ids in enumerate(tokenize(documents)):
            tokens += len(ids)
            writer.add(f"{i:09d}", ids, "text", len(documents[i].encode()))
            tars.write({"__key__": f"{i:09d}", "tokens.npy": ids})
            if reference is not None:
                reference.write({"tokens": ids})
        writer.finish({})
        if reference is not None:
            reference.finish()
    index_folder(folder / "tars", "t")  # for `.tar` without compression
    facts = {
        "documents": len(documents),
        "bytes": size,
        "tokens": tokens,
        "seconds": time.perf_counter() - start,
    }
    (folder / "facts.json").write_text(json.dumps(facts))


def make_mds_subset(folder: Path, shards: int) -> Path:
    """Return a folder with the first of MosaicML's shards as a data set."""
    full, part = folder / "mds", folder / f"mds-{shards}"
    if not part.exists():
        part.mkdir()
        index = json.loads((full / "index.json").read_text())
        index["shards"] = index["shards"][:shards]
        for shard in index["shards"]:
            name = shard["raw_data"]["basename"]
            (part / name).hardlink_to(full / name)
        (part / "index.json").write_text(json.dumps(index))
    return part


def import_mosaic(folder: str) -> None:
    """Let `import streaming` find the library, with stubs of torchvision, which it needs for images only."""
    sys.path.append(folder)
    names = (
        "torchvision",
        "torchvision.datasets",
        "torchvision.transforms",
        "torchvision.transforms.functional",
    )
    for name in names:
        module: Any = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.VisionDataset, module.to_tensor = object, None
        sys.modules[name] = module
