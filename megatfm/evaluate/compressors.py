"""What gzip and xz need for the text of a corpus: the yardstick for bits per byte.

Python's own zlib and lzma stand for the programs: lzma gives xz's bytes, zlib up to half a percent more than gzip.
"""

import gzip
import lzma
from collections.abc import Callable, Iterator

from megatfm.data import Corpus
from megatfm.errors import MegatfmError, UsageError
from megatfm.tokenizers import Tokenizer

COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "gzip -9": lambda text: gzip.compress(text, compresslevel=9, mtime=0),
    "xz -9": lambda text: lzma.compress(text, preset=9),
}


def compressors(corpus: Corpus, tokenizer: Tokenizer) -> dict[str, float]:
    """Bits per byte of each compressor, on each document by itself and on all of them joined.

    Raises MegatfmError if the tokens don't decode to the bytes that the corpus says it was made of.
    """
    texts = list(_texts(corpus, tokenizer))
    size = sum(map(len, texts))
    if size != corpus.n_text_bytes:
        raise MegatfmError(
            f"{corpus.folder}: its tokens decode to {size} bytes, but its manifest counts {corpus.n_text_bytes}: "
            "compare nothing with this corpus; prepare it again"
        )
    if not size:
        raise UsageError(f"{corpus.folder}: has no text that could be compressed: leave out --compressors")
    result = {}
    for name, compress in COMPRESSORS.items():
        result[f"{name}, per document"] = 8 * sum(len(compress(text)) for text in texts) / size
        result[f"{name}, joined"] = 8 * len(compress(b"".join(texts))) / size
    return result


def _texts(corpus: Corpus, tokenizer: Tokenizer) -> Iterator[bytes]:
    for block in range(corpus.n_blocks):
        for _, tokens in corpus.read_block(block):
            yield tokenizer.decode(tokens.tolist()).encode()
