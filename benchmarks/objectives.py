"""How fast sequences are made, planned and packed, and how full rows are, for each objective.

    python benchmarks/objectives.py > benchmarks/results/DATE-objectives.md

Documents of random tokens with log-normal lengths (median 403, as long as 60,000), in blocks of 160, so about as
large as a corpus's; rows of 512 tokens, of 512 and 128 for encoder-decoders. CPU time of one thread, best of three.
"""

import platform
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from megatfm.config import Config, ModelConfig, load_config
from megatfm.data import PackedRows, Piece
from megatfm.keyed import PieceKey
from megatfm.objectives import Objective, SpecialTokens, make

VOCABULARY, DOCUMENTS, PER_BLOCK, BLOCKS = 32_128, 64_000, 160, 4
SPECIAL = SpecialTokens(
    bos=1,
    eos=2,
    pad=0,
    vocab_size=VOCABULARY,
    mask=3,
    cls=4,
    sep=5,
    sentinels=range(VOCABULARY - 1, VOCABULARY - 129, -1),
    word_starts=np.random.default_rng(1).random(VOCABULARY) < 0.6,
)
CASES = {
    "causal": ("decoder", "encoder_decoder"),
    "prefix": ("decoder", "encoder_decoder"),
    "masked": ("encoder",),
    "next_sentence": ("encoder",),
    "sentence_order": ("encoder",),
    "span_boundary": ("encoder",),
    "span_corruption": ("encoder_decoder", "decoder"),
    "denoisers": ("encoder_decoder", "decoder"),
    "replaced_token": ("electra",),
}


class Documents:
    """A corpus in memory."""

    folder = fingerprint = "random"

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self._lengths = np.minimum(random.lognormal(6, 1.2, DOCUMENTS).astype(np.int64) + 1, 60_000)
        self.n_samples, self.blocks = DOCUMENTS, np.arange(0, DOCUMENTS + 1, PER_BLOCK)
        drawn = (
            random.integers(200, 30_000, n).astype(np.uint16) for n in self._lengths[: BLOCKS * PER_BLOCK]
        )
        self._documents = list(drawn)

    def lengths(self) -> NDArray[np.int64]:
        return self._lengths

    def block(self, number: int) -> list[tuple[int, NDArray[np.uint16]]]:
        return [(i, self._documents[i]) for i in range(*self.blocks[number : number + 2])]


class Partners:
    """As many other documents as a block has."""

    def __init__(self, documents: list[NDArray[np.uint16]]) -> None:
        self.documents, self.lengths = documents, np.array([len(document) for document in documents])

    def tokens(self, number: int) -> NDArray[np.uint16]:
        return self.documents[number]


def objective(name: str, family: str, rows: tuple[int, ...]) -> Objective:
    values = load_config("quickstart").model_dump() | {"objective": {"name": name}}
    parts = {
        "encoder": {"heads.sentence.classes": 2, "heads.boundary.name": "boundary", "embedding.n_segments": 2}
    }
    parts["electra"] = {"generator": {"d_model": 8, "n_heads": 1, "d_ff": 8}}
    model = ModelConfig.of(
        family=family,
        d_model=8,
        n_layers=1,
        **{"attention.n_heads": 2, "ffn.d_ff": 8},
        **parts.get(family, {}),
    )
    return make(Config.model_validate(values).objective, model, SPECIAL, rows)


def seconds(run: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        run()
        best = min(best, time.process_time() - start)
    return best


def row(corpus: Documents, name: str, family: str) -> str:
    rows = (512, 128) if family == "encoder_decoder" else (512,)
    made = objective(name, family, rows)
    n = min(made.max_tokens or 512, 512)
    text, partners = np.resize(corpus.block(0)[0][1], n), Partners([tokens for _, tokens in corpus.block(0)])

    def build() -> None:
        for sample in range(500):
            made.build(Piece(text, partners), PieceKey(0, 0, sample, 0))

    def plan() -> PackedRows:
        return PackedRows(corpus, made, sequence_length=rows[0], target_length=rows[-1], seed=0)  # type: ignore[arg-type]

    def pack() -> None:
        packed = plan()
        for block in range(BLOCKS):
            packed._pack(0, block)

    packed = plan()
    planning = seconds(plan)
    sequences = sum(-(-corpus.lengths() // made.max_tokens)) if made.max_tokens else DOCUMENTS
    tokens = corpus.lengths()[: BLOCKS * PER_BLOCK].sum()
    packing = tokens / (seconds(pack) - planning)
    blocks = [packed._pack(0, block) for block in range(BLOCKS)]
    read = [blocks[b].row(r) for b in range(BLOCKS) for r in range(packed._rows_of_block[b])]
    fill = [np.mean([(row[f"{side}documents"] >= 0).mean() for row in read]) for side in made.sides]
    return (
        f"| {name} | {family} | {500 * n / seconds(build) / 1e6:.1f} | {packing / 1e6:.1f} | "
        f"{planning / sequences * 1e6:.1f} | {', '.join(f'{share:.1%}' for share in fill)} |"
    )


def main() -> None:
    corpus = Documents()
    print(f"# Objectives, {time.strftime('%Y-%m-%d')}\n")
    print(
        f"`python benchmarks/objectives.py`, {platform.processor() or platform.machine()}, NumPy {np.__version__}.\n"
    )
    print(
        "| Objective | Family | `build`, M tokens/s | packed, M tokens/s | plan, µs a sequence | filled, by side |"
    )
    print("|---|---|---|---|---|---|")
    for name, families in CASES.items():
        for family in families:
            print(row(corpus, name, family), flush=True)


if __name__ == "__main__":
    main()
