"""Shards as the webdataset library writes them, as an enemy would, and after damage that nobody thought of.

    python -m tests.support.webdatasets --minutes 10

fuzzes readers of tars, indexes, manifests and plans. Whatever is done to a valid file, a reader gives something or
raises a MegatfmError of one line; nothing else comes out, nothing beside the folder is opened, and what is accepted is
read to its end. `tests/unit/corpus/test_corpus.py` runs a little of it.
"""

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import webdataset as wds
import zstandard
from blake3 import blake3
from hypothesis import strategies as st

from megatfm.corpus.corpus import Corpus
from megatfm.corpus.inspect import check_corpus
from megatfm.corpus.manifest import Manifest
from megatfm.corpus.webdataset_index import index_folder
from megatfm.corpus.writer import ShardWriter
from megatfm.data.packing_plan import PackingPlan
from megatfm.errors import MegatfmError

HASH = "f" * 64
Member = tuple[tarfile.TarInfo, bytes]


def encode_npy(tokens: Any) -> bytes:
    """Bytes of an array as `.npy`."""
    file = io.BytesIO()
    np.save(file, np.asarray(tokens))
    return file.getvalue()


def make_member(name: str, data: bytes = b"", **changes: Any) -> Member:
    """A member of a tar, whose header may lie."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in changes.items():
        setattr(info, key, value)
    return info, data


def make_tar(*members: Member) -> bytes:
    """A tar written header by header, so that it may lie."""
    data = b"".join(info.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512) for info, data in members)
    return data + bytes(1024)


def forge_header(name: str, size: int, kind: bytes = tarfile.REGTYPE, **fields: bytes) -> bytes:
    """A tar's header that says what it likes. fields: bytes at a place (`at_482`)."""
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    for place, data in fields.items():
        start = int(place.removeprefix("at_"))
        header[start : start + len(data)] = data
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def make_sparse_tar(name: str, version: str) -> bytes:
    """A POSIX tar by GNU tar with a file that is one hole. version: of the map of holes, 0.0, 0.1 or 1.0."""
    with tempfile.TemporaryDirectory() as folder:
        with (Path(folder) / name).open("wb") as file:
            file.truncate(2**20)
        command = ["tar", "--format=posix", "--sparse", f"--sparse-version={version}", "-C", folder, "-cf", "-", name]
        return subprocess.run(command, check=True, capture_output=True).stdout


def pack_tar(files: Mapping[str, bytes]) -> bytes:
    """A tar of files by name."""
    return make_tar(*(make_member(name, data) for name, data in files.items()))


def draw_documents(n: int = 40) -> list[np.ndarray]:
    """Documents of random tokens."""
    draw = np.random.default_rng(0)
    return [draw.integers(3, 4000, draw.integers(1, 400)).astype(np.uint16) for _ in range(n)]


def write_wds(folder: Path, texts: list[np.ndarray], kind: str) -> Path:
    """Write two shards by the webdataset library: as tar, as tar.zst of several frames, or of one.

    Frames "of a pipe" don't say how many bytes they hold.
    """
    folder.mkdir()
    for number, part in enumerate((texts[:25], texts[25:])):
        path = folder / f"some-{number}.tar"
        with wds.TarWriter(str(path)) as writer:
            for i, tokens in enumerate(part):
                writer.write({"__key__": f"sub/{i:03d}", "json": {"i": i}, "tokens.npy": tokens})
        if kind == "tar":
            continue
        data, cuts = path.read_bytes(), [0]
        with tarfile.open(path) as archive:
            starts = [m.offset for m in archive.getmembers() if m.name.endswith("json")]
        cuts = [0, *starts[5::5], len(data)] if kind.startswith("frames") else [0, len(data)]
        compressor = zstandard.ZstdCompressor(write_content_size=kind != "frames of a pipe")
        frames = [compressor.compress(data[a:b]) for a, b in pairwise(cuts)]
        Path(f"{path}.zst").write_bytes(b"".join(frames))
        path.unlink()
    return folder


IDS = encode_npy(np.arange(5, dtype=np.uint16))
GOOD = make_member("0.npy", IDS)


SHARD, INDEX = "shard-000000.tar.zst", "shard-000000.index.zst"

# Where (as a part of the file), what to do there, and with which bytes.
one_damage = st.tuples(
    st.floats(0, 1, exclude_max=True),
    st.sampled_from(["overwrite", "insert", "delete", "repeat", "cut", "swap"]),
    st.one_of(
        st.binary(min_size=1, max_size=12),
        st.sampled_from([b"\0" * 512, b"\xff" * 8, b"77777777777\0", b"\x80" + b"\xff" * 11, b"../", b"NaN", b"1e999",
                         b"i24", b"|O", b"(2, 3)", b"-1"]),
    ),
)  # fmt: skip
damages = st.lists(one_damage, min_size=1, max_size=6)
Damages = list[tuple[float, str, bytes]]


def apply_damage(data: bytes, todo: Damages) -> bytes:
    """The data with some damage."""
    out = bytearray(data)
    for where, kind, with_ in todo:
        at = int(where * max(len(out), 1))
        if kind == "overwrite":
            out[at : at + len(with_)] = with_
        elif kind == "insert":
            out[at:at] = with_
        elif kind == "delete":
            del out[at : at + len(with_)]
        elif kind == "repeat":
            out[at:at] = out[at : at + 64 * len(with_)]
        elif kind == "cut":
            del out[at:]
        else:
            n = len(with_)
            out[at : at + n], out[:n] = out[:n], out[at : at + n]
    return bytes(out)


def is_refused(read: Callable[[], object]) -> bool:
    """Whether a reader refuses, as it should: in one line."""
    output = ""
    try:
        read()
    except MegatfmError as error:
        output = str(error)
    assert "\n" not in output, output
    return bool(output)


class CorpusFuzzer:
    """Valid files, and what to do with damaged copies of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.good = folder / "good"
        draw = np.random.default_rng(0)
        with ShardWriter(self.good, tokenizer_hash="t", token_dtype="uint16", frame_bytes=4096) as writer:
            for i in range(9):
                # Those with a file have members of their own, the others share some.
                files = {"cls": b"1"} if 3 <= i < 6 else {}
                tokens = draw.integers(0, 500, 40 * i).astype(np.uint16)
                writer.add(f"k{i}", tokens, f"source {i}", i, files)
            writer.finish({"a": [1, {"b": None}]})
        self.manifest = (self.good / "manifest.json").read_bytes()
        self.shard, self.index = (self.good / SHARD).read_bytes(), (self.good / INDEX).read_bytes()
        self.tars = {kind: _tar(kind) for kind in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)}
        self.npy = encode_npy(np.arange(9, dtype=np.uint16))

    def fuzz_manifest(self, todo: Damages) -> None:
        """The file `manifest.json`."""
        text = apply_damage(self.manifest, todo)
        if not is_refused(lambda: Manifest.parse(text, "manifest.json")):
            self._check_damaged_corpus(self.shard, self.index, lambda _: None, text)

    def fuzz_index(self, todo: Damages, packed: bool) -> None:
        """An index, damaged before or after it was compressed, and a manifest that agrees with it."""
        data = apply_damage(self.index if packed else zstandard.decompress(self.index), todo)
        data = data if packed else zstandard.compress(data)
        facts = {"file": INDEX, "bytes": len(data), "blake3": blake3(data).hexdigest()}
        self._check_damaged_corpus(self.shard, data, lambda entry: entry.update(index=facts))

    def fuzz_shard(self, todo: Damages, packed: bool) -> None:
        """A shard, damaged before or after it was compressed, and a manifest that agrees with it."""
        if packed:
            data = apply_damage(self.shard, todo)
        else:
            index = Corpus.open(self.good).indexes[0]
            end = int(index.offsets[1])
            first = apply_damage(zstandard.decompress(self.shard[:end]), todo)
            data = zstandard.compress(first) + self.shard[end:]
        facts = {"bytes": len(data), "blake3": blake3(data).hexdigest()}
        self._check_damaged_corpus(data, self.index, lambda entry: entry.update(facts))

    def fuzz_foreign_tar(self, todo: Damages, kind: int, packed: bool, npy: bool) -> None:
        """A tar of others, plain or compressed; or only the array in it."""
        data = _tar(kind, apply_damage(self.npy, todo)) if npy else apply_damage(self.tars[kind], todo)
        expected, actual = self.folder / "theirs", self.folder / "ours"
        for folder in (expected, actual):
            shutil.rmtree(folder, ignore_errors=True)
        expected.mkdir()
        (expected / f"a.tar{'.zst' * packed}").write_bytes(zstandard.compress(data) if packed else data)
        if not is_refused(lambda: index_folder(expected, "t")):
            check_corpus(expected)
        if not is_refused(lambda: index_folder(expected, "t", actual)):
            check_corpus(actual)

    def fuzz_foreign_zst(self, todo: Damages) -> None:
        """A tar of somebody else's, as zstd compresses it."""
        expected = self.folder / "theirs"
        shutil.rmtree(expected, ignore_errors=True)
        expected.mkdir()
        (expected / "a.tar.zst").write_bytes(apply_damage(zstandard.compress(self.tars[tarfile.USTAR_FORMAT]), todo))
        if not is_refused(lambda: index_folder(expected, "t")):
            check_corpus(expected)

    def fuzz_plan(self, todo: Damages) -> None:
        """A stored plan: made again unless it is whole."""
        full = PackingPlan(np.arange(5), np.arange(6), 0.5, ("a note",)).encode("key")
        try:
            plan = PackingPlan.decode(apply_damage(full, todo), "key")
        except (ValueError, KeyError, TypeError):
            return
        assert plan.sizes.tolist() == [0, 1, 2, 3, 4]

    def _check_damaged_corpus(
        self, shard: bytes, index: bytes, edit: Callable[[dict[str, Any]], object], text: bytes | None = None
    ) -> None:
        folder = self.folder / "bad"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / SHARD).write_bytes(shard)
        (folder / INDEX).write_bytes(index)
        if text is None:
            manifest = json.loads(self.manifest)
            edit(manifest["shards"][0])
            text = json.dumps(manifest).encode()
        (folder / "manifest.json").write_bytes(text)
        if is_refused(lambda: check_corpus(folder)):
            is_refused(lambda: [Corpus.open(folder).read_block(0)])


def _tar(kind: int, npy: bytes = encode_npy(np.arange(9, dtype=np.uint16))) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=kind) as archive:
        for name in ("0.npy", "0.json", "1.npy", "2" + "x" * 120 + "/ä.npy"):
            info = tarfile.TarInfo(name)
            data = npy if name.endswith("npy") else b"{}"
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


ARGUMENTS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "fuzz_manifest": {}, "fuzz_index": {"packed": st.booleans()}, "fuzz_shard": {"packed": st.booleans()},
    "fuzz_foreign_tar": {"kind": st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
                      "packed": st.booleans(), "npy": st.booleans()},
    "fuzz_foreign_zst": {}, "fuzz_plan": {},
}  # fmt: skip


def record_files_opened_outside(folder: Path) -> list[str]:
    """From here on, the files outside `folder` that are opened for writing, or that lie in no library."""
    actual: list[str] = []
    allowed = (str(folder), sys.prefix, sys.base_prefix, "/usr/lib", "/proc", "/dev/null", str(Path.cwd()))

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
            path = os.path.abspath(os.fsdecode(arguments[0]))  # noqa: PTH100 (it opens nothing)
            if not path.startswith(allowed):
                actual.append(path)
        elif event in ("os.system", "subprocess.Popen", "pickle.find_class", "os.symlink", "os.link"):
            actual.append(f"{event} {arguments}")

    sys.addaudithook(hook)
    return actual


def run_examples(name: str, fuzz: CorpusFuzzer, examples: int, seed: int | None = None) -> None:
    """Some examples of one kind."""
    settings = hypothesis.settings(
        max_examples=examples, deadline=None, database=None, derandomize=seed is None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    test = hypothesis.given(todo=damages, **ARGUMENTS[name])(lambda **inputs: getattr(fuzz, name)(**inputs))
    test = settings(test)
    (hypothesis.seed(seed)(test) if seed is not None else test)()


def main() -> None:
    """Fuzz for some minutes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    warnings.simplefilter("error")
    end, n, seed = time.monotonic() + 60 * options.minutes, 0, options.seed
    with tempfile.TemporaryDirectory() as folder:
        fuzz, outside = CorpusFuzzer(Path(folder)), record_files_opened_outside(Path(folder))
        while time.monotonic() < end:
            for name in ARGUMENTS:
                run_examples(name, fuzz, 300, seed)
                assert not outside, outside
                n += 300
            seed += 1
    print(f"{n:,} examples of {len(ARGUMENTS)} kinds from seed {options.seed}: nothing found")


if __name__ == "__main__":
    main()
