"""Recall of near duplicates and evaluation texts in languages with and without spaces, where some characters
of a text are others: `python benchmarks/language_recall.py --out benchmarks/results`.

Texts are drawn from the characters of a language, as words where it has spaces. The exact similarity is that of the
sets of runs of five words by white space, in Chinese and Japanese of five characters, in Thai of twenty.
"""

import platform
import random
import tempfile
from pathlib import Path

import common
import numpy as np

from megatfm.config.prep_steps import DecontaminateConfig
from megatfm.data_prep.dedup.hashing import compute_signatures
from megatfm.data_prep.documents import Document, StepStats
from megatfm.data_prep.filters.selection import Decontaminate

LETTERS = {
    "Chinese": "".join(map(chr, range(0x4E00, 0x5200))),
    "Japanese": "".join(map(chr, [*range(0x3042, 0x3094), *range(0x30A2, 0x30F4), *range(0x65E0, 0x6660)])),
    "Thai": "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์สิทธิต่างเหตุผลมโนธรรมควรปฏิบัติด้วยเจตนารมณ์แห่ง",
    "Hindi": "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता समानता प्राप्त है उन्हें बुद्धि की देन",
    "Arabic": "يولد جميع الناس أحرارا متساوين في الكرامة والحقوق وقد وهبوا عقلا وضميرا وعليهم أن يعامل بعضهم",
    "German": "alle Menschen sind frei und gleich an Würde und Rechten geboren sie sind mit Vernunft begabt",
}
UNSPACED = ("Chinese", "Japanese", "Thai")
SHARES = (0.002, 0.005, 0.01, 0.02, 0.03)
CHARACTERS, ROUNDS = 3000, 40
EVALUATION = 120
"""Characters of an evaluation text."""


def main() -> None:
    parser = common.make_parser(__doc__)
    parser.add_argument("--out", type=common.make_output_folder, help="folder for DATE-language-recall.md")
    args = parser.parse_args()
    lines = [
        f"# Near duplicates and evaluation texts by language, {common.today()}",
        "",
        f"Python {platform.python_version()}, `python benchmarks/language_recall.py`: {ROUNDS} texts of {CHARACTERS:,} "
        f"random characters of the language, evaluation texts of {EVALUATION} characters in the middle of others; a "
        "share of the characters is replaced by others.",
        "",
        "| Language | Characters that differ | Similarity: exact | estimated | taken for near, at 0.75 | evaluation "
        "texts found |",
        "|---|---|---|---|---|---|",
    ]
    for language in LETTERS:
        for share in SHARES:
            exact, estimated, near, share_found = measure_row(language, share)
            lines.append(
                f"| {language} | {share:.1%} | {exact:.2f} | {estimated:.2f} | {near:.0%} | {share_found:.0%} |"
            )
    report = "\n".join(lines) + "\n"
    print(report)
    common.write_text(common.make_dated_path(args.out, "language-recall.md"), report)


def measure_row(language: str, share: float) -> tuple[float, ...]:
    """Return means over rounds: exact and estimated similarity, shares of near texts and found evaluation texts."""
    results = []
    for seed in range(ROUNDS):
        text = draw_text(language, CHARACTERS, seed)
        other = edit(text, share, seed)
        a, b = compute_signatures([text, other], 5, 112)
        estimated = float((a == b).mean())
        results.append(
            (compute_similarity(language, text, other), estimated, estimated >= 0.75, is_found(language, share, seed))
        )
    return tuple(np.mean(results, axis=0).tolist())


def is_found(language: str, share: float, seed: int) -> bool:
    """Return whether an evaluation text with replaced characters is found in a document."""
    text = draw_text(language, EVALUATION, seed + 1000)
    gap = "" if language in UNSPACED else " "
    around = [draw_text(language, 500, seed + at) for at in (2000, 3000)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "set.txt"
        path.write_text(text, encoding="utf-8")
        rule = Decontaminate(DecontaminateConfig(name="decontaminate", files=(str(path),)))
        document = gap.join((around[0], edit(text, share, seed), around[1]))
        return isinstance(rule.apply(Document("x", document), StepStats("x")), str)


def draw_text(language: str, characters: int, seed: int) -> str:
    rng, letters = random.Random(seed), sorted(set(LETTERS[language]) - {" "})
    words = ["".join(rng.choices(letters, k=rng.randrange(2, 9))) for _ in range(characters // 5)]
    return ("" if language in UNSPACED else " ").join(words)[:characters]


def edit(text: str, share: float, seed: int) -> str:
    rng, letters = random.Random(seed), [*text]
    for at in rng.sample(range(len(letters)), round(share * len(letters))):
        letters[at] = rng.choice(text)
    return "".join(letters)


def compute_similarity(language: str, text: str, other: str) -> float:
    length = 20 if language == "Thai" else 5
    first, second = (
        {tuple(units[at : at + length]) for at in range(len(units) - length + 1)}
        for units in ((text, other) if language in UNSPACED else (text.split(), other.split()))
    )
    return len(first & second) / len(first | second)


if __name__ == "__main__":
    main()
