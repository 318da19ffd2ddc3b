"""Steps of data_prep as configs ask for them, and what they do with a text."""

import random
from collections.abc import Iterator
from typing import Any

from pydantic import TypeAdapter

from megatfm.config.prep_steps import StepConfig
from megatfm.data_prep.documents import Document
from megatfm.data_prep.filters.base import PipelineStep, make_filter


def rule(name: str, **settings: Any) -> PipelineStep:
    """A step by its name."""
    return make_filter(TypeAdapter(StepConfig).validate_python({"name": name, **settings}))


def rule_outcome(step: PipelineStep, text: str, url: str = "") -> tuple[str | None, str]:
    """Text that a step leaves, or None, and the reason for that."""
    result = step(Document("x", text, url))
    return (result.text if result else None), next(iter(step.counts.dropped), "")


WORDS = [
    "the", "of", "and", "a", "cat", "sat", "on", "mat", "with", "that", "have", "be", "to", "it's", "über",
    "naïve", "3", "14", "x9", "#tag", "wait…", "so...", "quick", "brown",
]  # fmt: skip
SENTENCE_ENDS = (
    ".", "!", "?", '"', "'", "", "", "...", "…", ",", "。", "؟", "।",
)  # fmt: skip


def random_pages(count: int, seed: int = 0) -> Iterator[str]:
    """Bad texts: repeated words, lines and paragraphs, bullets, fragments, mixed with good ones."""
    rng = random.Random(seed)
    for _ in range(count):
        words = rng.sample(WORDS, rng.randrange(3, len(WORDS)))
        lines: list[str] = []
        for _ in range(rng.randrange(1, 25)):
            if lines and rng.random() < rng.choice((0, 0.2, 0.5)):
                lines.append(rng.choice(lines))
                continue
            line = " ".join(rng.choices(words, k=rng.choice((1, 3, 8, 20))))
            bullet = rng.choice(("", "", "", "• ", "- "))
            lines.append(bullet + line + rng.choice(SENTENCE_ENDS))
        yield "".join(line + rng.choice(("\n", "\n\n")) for line in lines).strip()
