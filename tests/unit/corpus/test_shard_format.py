"""Frames unpacked alone and together: the same bytes, and the same damage refused."""

import contextlib

import numpy as np
import pytest
import zstandard

from megatfm.corpus.shard_format import BadFrameError, decompress_frame, decompress_frames

CONTENTS = {
    "text": b"".join(b"line %d of a text\n" % i for i in range(20_000)),  # several blocks
    "one byte repeated": bytes(300_000),
    "noise": np.random.default_rng(0).bytes(200_000),  # blocks that are not compressed
    "short": b"a",
    "empty": b"",
}


def frame(data: bytes, **options: bool) -> bytes:
    return zstandard.ZstdCompressor(**{"write_checksum": True, **options}).compress(data)


@pytest.mark.parametrize("checksum", [True, False])
def test_together_gives_what_each_alone_gives(checksum: bool) -> None:
    packed = [frame(data, write_checksum=checksum) for data in CONTENTS.values()]
    sizes = list(map(len, CONTENTS.values()))
    together = [bytes(data) for data in decompress_frames(packed, sizes)]
    assert (
        together
        == [decompress_frame(*item) for item in zip(packed, sizes, strict=True)]
        == [*CONTENTS.values()]
    )


@pytest.mark.parametrize("content", [name for name in CONTENTS if name != "empty"])
@pytest.mark.parametrize("damage", ["cut", "longer", "another frame", "flipped", "nothing", "no frame"])
def test_damage_is_refused_alone_and_together(content: str, damage: str) -> None:
    data, good = CONTENTS[content], frame(CONTENTS[content])
    bad = {
        "cut": good[:-1],
        "longer": good + b"\0",
        "another frame": good + good,
        "flipped": good[:-1] + bytes([good[-1] ^ 1]),
        "nothing": b"",
        "no frame": b"no frame of zstd",
    }[damage]
    with pytest.raises(BadFrameError):
        decompress_frame(bad, len(data))
    with pytest.raises(BadFrameError):
        decompress_frames([good, bad], [len(data)] * 2)


def test_a_size_is_compared_before_memory_is_taken() -> None:
    bomb = frame(bytes(2**20))
    for size in (2**20 - 1, 2**50):
        with pytest.raises(BadFrameError, match=f"holds 1048576 bytes, the index says {size}"):
            decompress_frame(bomb, size)
        with pytest.raises(BadFrameError, match=f"holds 1048576 bytes, the index says {size}"):
            decompress_frames([bomb], [size])


@pytest.mark.parametrize("seed", range(3))
def test_no_flipped_bit_gives_other_bytes(seed: int) -> None:
    data = CONTENTS["text"][:3000]
    good, draw = frame(data), np.random.default_rng(seed)
    for bit in draw.choice(8 * len(good), 200, replace=False).tolist():
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        for way in (
            lambda bad: decompress_frame(bad, len(data)),
            lambda bad: decompress_frames([bad], [len(data)])[0],
        ):
            with contextlib.suppress(BadFrameError):  # some bits mean nothing
                assert bytes(way(bytes(bad))) == data
