"""A vocabulary, documents and objectives of it; odd texts and options for tokenizers."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from megatfm.config import Config, ModelConfig, load_config
from megatfm.data.sequences import NO_OTHER_DOCUMENTS, DocumentChunk
from megatfm.objectives import Example, Objective, SpecialTokens, build_objective
from megatfm.rng import ChunkKey, chunk_keys

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


def make_model(family: str, **options: Any) -> ModelConfig:
    options = {"d_model": 8, "n_layers": 1, "attention.n_heads": 2, "ffn.d_ff": 8, "vocab_size": VOCABULARY} | options
    return ModelConfig.from_dotted(family=family, **(PARTS.get(family, {}) | options))


QUICKSTART = load_config("quickstart").model_dump()


def make_section(name: str, **options: Any) -> Any:
    return Config.model_validate(QUICKSTART | {"objective": {"name": name, **options}}).objective


def make_objective(
    name: str,
    family: str | None = None,
    rows: tuple[int, ...] = (512, 256),
    special: SpecialTokens = SPECIAL,
    model_config: ModelConfig | None = None,
    **options: Any,
) -> Objective:
    chosen = model_config or make_model(family or FAMILIES.get(name, "encoder_decoder"))
    return build_objective(make_section(name, **options), chosen, special, rows)


def make_text(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(RESERVED, VOCABULARY, n).astype(np.uint16)


def build_fields(
    objective: Objective, tokens: np.ndarray, sample: int = 0, epoch: int = 0, partners: Any = None, **options: Any
) -> Example:
    """A sequence; the first of a series are checked to have the planned lengths. options: of the chunk."""
    key = ChunkKey(7, epoch, sample, 0)
    fields = objective.build_example(DocumentChunk(tokens, partners or NO_OTHER_DOCUMENTS, **options), key)
    if sample < 100:
        keys = chunk_keys(7, np.array([sample]), np.array([0]))
        planned = objective.sequence_lengths(np.array([len(tokens)]), keys).reshape(-1)
        for name, field in fields.items():
            side = next(i for i, prefix in enumerate(objective.field_prefixes) if name.startswith(prefix))
            assert len(field) == planned[side], name
            assert field.dtype.kind in "iu"
    return fields


@dataclass
class OtherDocuments:
    """Documents of a block other than the chunk's."""

    documents: list[np.ndarray]

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(document) for document in self.documents], np.int64)

    def tokens(self, number: int) -> np.ndarray:
        return self.documents[number]


# What one or another tokenizer treats in a special way: marks of spaces and of unknown characters, names of reserved
# pieces, what Unicode's normal forms change, what has no width, what takes several bytes.
ODD_TEXTS = [
    *("\ue009", "\ue020", "\u2581", "\u2585", "\u2047", "\ufffd", "Ġ", "Ċ", "##", "\ufeff", "\u200b", "\u00a0"),
    *("\t", "\0", "\r", " ", "  ", "   ", "\n", "\n\n", "\u3000", "\u2028", "\x85"),
    *("<s>", "</s>", "<unk>", "<mask>", "<0x41>", "[MASK]", "[UNK]", "<|endoftext|>", "<extra_0>", "<extra_id_0>"),
    *("ﬁ", "１２", "e\u0301", "é", "İ", "ß", "한국어", "中文 字", "🗼", "\U0001f469\u200d\U0001f680", "don't", "I'LL"),
]  # fmt: skip
OWN_KINDS = ("sentencepiece", "sentencepiece-unigram", "byte-bpe", "llama3", "wordpiece")
LOSSLESS_KINDS = OWN_KINDS[:-1]
T5_PIECES = {"model_type": "unigram", "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
LLAMA2_PIECES = {
    "model_type": "bpe", "vocab_size": 700, "byte_fallback": True, "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False, "split_digits": True,
}  # fmt: skip
