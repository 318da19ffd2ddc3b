"""A vocabulary, documents of it, and what objectives are made with."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from megatfm.config import Config, ModelConfig, load_config
from megatfm.data.sequences import NO_OTHER_DOCUMENTS, DocumentChunk
from megatfm.objectives import Example, Objective, SpecialTokens, build_objective
from megatfm.rng import ChunkKey, chunk_keys
from tests.support.packed_corpora import MemoryCorpus

VOCABULARY = 1000
RESERVED = 200
"""Ids below are no text."""
WORD_STARTS = np.arange(VOCABULARY) % 5 < 3
SPECIAL = SpecialTokens(
    bos=1, eos=2, pad=0, vocab_size=VOCABULARY, mask=3, cls=4, sep=5, sentinels=range(199, 39, -1),
    modes={"R": 6, "S": 7, "X": 8}, other_reserved=range(9, 40), word_starts=WORD_STARTS,
)  # fmt: skip
FAMILIES = {
    "masked": "encoder", "next_sentence": "encoder", "sentence_order": "encoder", "span_boundary": "encoder",
}  # fmt: skip
FAMILIES |= {"causal": "decoder", "prefix": "decoder", "replaced_token": "electra", "permutation": "xlnet"}
PARTS: dict[str, Any] = {
    "encoder": {"extra_heads.sentence.classes": 2, "extra_heads.boundary.name": "boundary",
                "embedding.n_segments": 2},
}  # fmt: skip
PARTS["xlnet"] = {"attention.name": "two_stream", "position.name": "transformer_xl"}
PARTS["electra"] = {"generator": {"d_model": 8, "n_heads": 1, "d_ff": 8}}


def model(family: str, **options: Any) -> ModelConfig:
    options = {"d_model": 8, "n_layers": 1, "attention.n_heads": 2, "ffn.d_ff": 8, "vocab_size": VOCABULARY} | options
    return ModelConfig.from_dotted(family=family, **(PARTS.get(family, {}) | options))


def section(name: str, **options: Any) -> Any:
    values = load_config("quickstart").model_dump() | {"objective": {"name": name, **options}}
    return Config.model_validate(values).objective


def objective(
    name: str,
    family: str | None = None,
    rows: tuple[int, ...] = (512, 256),
    special: SpecialTokens = SPECIAL,
    model_config: ModelConfig | None = None,
    **options: Any,
) -> Objective:
    chosen = model_config or model(family or FAMILIES.get(name, "encoder_decoder"))
    return build_objective(section(name, **options), chosen, special, rows)


def text(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(RESERVED, VOCABULARY, n).astype(np.uint16)


def built(
    objective: Objective, tokens: np.ndarray, sample: int = 0, epoch: int = 0, partners: Any = None, **options: Any
) -> Example:
    """A sequence, after checking that it has the planned lengths. options: of the chunk."""
    key = ChunkKey(7, epoch, sample, 0)
    fields = objective.build_example(DocumentChunk(tokens, partners or NO_OTHER_DOCUMENTS, **options), key)
    planned = objective.sequence_lengths(
        np.array([len(tokens)]), chunk_keys(7, np.array([sample]), np.array([0]))
    ).reshape(-1)
    for name, field in fields.items():
        side = next(i for i, prefix in enumerate(objective.field_prefixes) if name.startswith(prefix))
        assert len(field) == planned[side], name
        assert field.dtype.kind in "iu"
    return fields


@pytest.fixture(scope="session")
def special() -> SpecialTokens:
    return SPECIAL


@pytest.fixture(scope="session")
def make_objective() -> Callable[..., Objective]:
    return objective


@pytest.fixture(scope="session")
def make_model() -> Callable[..., ModelConfig]:
    return model


@pytest.fixture(scope="session")
def make_text() -> Callable[..., np.ndarray]:
    return text


@pytest.fixture(scope="session")
def build_one() -> Callable[..., Example]:
    return built


class TextCorpus(MemoryCorpus):
    """A corpus for `PackedDataset`, of texts in this vocabulary."""

    def make_documents(self, lengths: list[int]) -> list[np.ndarray]:
        return [text(n, seed) for seed, n in enumerate(lengths)]


@pytest.fixture(scope="session")
def memory() -> type[TextCorpus]:
    return TextCorpus
