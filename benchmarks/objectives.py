"""Speed of making, planning and packing sequences, and how full rows are, for each objective.

    python benchmarks/objectives.py --out benchmarks/results

Documents of random tokens with log-normal lengths (median 403, as long as 60,000), in blocks of 160, so about as
large as a corpus's; rows of 512 tokens, of 512 and 128 for encoder-decoders, the first ones in stored order. CPU
time of one thread, best of three; "packed" counts what is in the rows, by the time in which they are read.
"""

import time
from collections.abc import Callable

import common
import numpy as np
from numpy.typing import NDArray

from megatfm.config import Config, ModelConfig, load_config
from megatfm.data.dataset import PackedDataset
from megatfm.data.sequences import DocumentChunk
from megatfm.objectives import Objective, SpecialTokens, build_objective
from megatfm.rng import ChunkKey

VOCABULARY, DRAWN, PER_BLOCK, BUILT = 32_128, 3_200, 160, 500
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
    "ul2": ("encoder_decoder", "decoder"),
    "replaced_token": ("electra",),
}


class CorpusStub:
    """A corpus in memory that repeats the same documents."""

    folder = fingerprint = "random"

    def __init__(self, count: int) -> None:
        random = np.random.default_rng(0)
        drawn = np.minimum(random.lognormal(6, 1.2, DRAWN).astype(np.int64) + 1, 60_000)
        self._lengths = np.resize(drawn, count)
        self.n_samples, self.blocks = count, np.arange(0, count + 1, PER_BLOCK)
        self._documents = [random.integers(200, 30_000, n).astype(np.uint16) for n in drawn]

    def lengths(self, begin: int = 0, end: int | None = None) -> NDArray[np.int64]:
        return self._lengths[self.blocks[begin] : self.blocks[-1 if end is None else end]]

    def read_block(self, number: int) -> list[tuple[int, NDArray[np.uint16]]]:
        return [(i, self._documents[i % DRAWN]) for i in range(*self.blocks[number : number + 2])]


class Partners:
    """Other documents of the block."""

    def __init__(self, documents: list[NDArray[np.uint16]]) -> None:
        self.documents, self.lengths = documents, np.array([len(document) for document in documents])

    def tokens(self, number: int) -> NDArray[np.uint16]:
        return self.documents[number]


def make_objective(name: str, family: str, rows: tuple[int, ...]) -> Objective:
    values = load_config("quickstart").model_dump() | {"objective": {"name": name}}
    parts = {
        "encoder": {
            "extra_heads.sentence.classes": 2,
            "extra_heads.boundary.name": "boundary",
            "embedding.n_segments": 2,
        }
    }
    parts["electra"] = {"generator": {"d_model": 8, "n_heads": 1, "d_ff": 8}}
    model = ModelConfig.from_dotted(
        family=family,
        d_model=8,
        n_layers=1,
        **{"attention.n_heads": 2, "ffn.d_ff": 8},
        **parts.get(family, {}),
    )
    return build_objective(Config.model_validate(values).objective, model, SPECIAL, rows)


def time_best_of_three(run: Callable[[], object]) -> float:
    """Return the CPU seconds of the fastest of three calls."""
    return min(common.time_call(run, time.process_time) for _ in range(3))


def measure_row(corpus: CorpusStub, name: str, family: str, n_rows: int) -> str:
    rows = (512, 128) if family == "encoder_decoder" else (512,)
    task = make_objective(name, family, rows)
    n = min(task.max_tokens or 512, 512)
    text, partners = (
        np.resize(corpus.read_block(0)[0][1], n),
        Partners([tokens for _, tokens in corpus.read_block(0)]),
    )

    def build() -> None:
        for sample in range(BUILT):
            task.build_example(DocumentChunk(text, partners), ChunkKey(0, 0, sample, 0))

    def plan() -> PackedDataset:
        return PackedDataset(
            corpus,  # type: ignore[arg-type]
            task,
            sequence_length=rows[0],
            target_length=rows[-1],
            seed=0,
            shuffle=False,
        )

    def pack() -> None:
        plan().read_rows(range(n_rows))

    planning = time_best_of_three(plan)
    sequences = sum(-(-corpus.lengths() // task.max_tokens)) if task.max_tokens else corpus.n_samples
    read = plan().read_rows(range(n_rows))
    real = [read[f"{side}documents"] >= 0 for side in task.field_prefixes]
    packing, fill = (
        sum(map(np.sum, real)) / (time_best_of_three(pack) - planning),
        [np.mean(side) for side in real],
    )
    return (
        f"| {name} | {family} | {BUILT * n / time_best_of_three(build) / 1e6:.1f} | {packing / 1e6:.1f} | "
        f"{planning / sequences * 1e6:.1f} | {', '.join(f'{share:.1%}' for share in fill)} |"
    )


def main() -> None:
    """Print a table, and write it where asked to."""
    parser = common.make_parser(__doc__)
    parser.add_argument("--documents", type=int, default=64_000)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--out", type=common.make_output_folder, help="folder for DATE-objectives.md")
    args = parser.parse_args()
    corpus = CorpusStub(args.documents)
    page = common.Page(
        common.make_dated_path(args.out, "objectives.md"),
        f"# Objectives, {common.today()}",
        "",
        f"`python benchmarks/objectives.py`, {common.get_cpu_name(instructions=True)}, NumPy {np.__version__}, "
        f"{args.documents:,} documents, {args.rows:,} rows.",
        "",
        "| Objective | Family | `build`, M tokens/s | packed, M tokens/s | plan, µs a sequence | filled, by side |",
        "|---|---|---|---|---|---|",
    )
    for name, families in CASES.items():
        for family in families:
            page.add(measure_row(corpus, name, family, args.rows))


if __name__ == "__main__":
    main()
