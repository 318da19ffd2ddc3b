"""The tokenizer and the corpora of a config, checked against one another."""

from dataclasses import dataclass

from megatfm import tokenizers
from megatfm.config import Config
from megatfm.data import Corpus, PackedRows
from megatfm.errors import UsageError
from megatfm.objectives import Objective, SpecialTokens, make
from megatfm.tokenizers import Tokenizer


@dataclass(frozen=True)
class Corpora:
    """What a run reads: packed rows in training order, and in stored order for each validation set."""

    tokenizer: Tokenizer
    objective: Objective
    train: PackedRows
    validation: dict[str, PackedRows]

    @property
    def notes(self) -> list[str]:
        """What of the corpora is not read as one would think, in lines for the log."""
        return [note for rows in (self.train, *self.validation.values()) for note in rows.notes]


def open_tokenizer(config: Config) -> tuple[Config, Tokenizer]:
    """The tokenizer, and the config with `model.vocab_size` filled in. Raises UsageError if it is too small."""
    tokenizer = tokenizers.load(config.data.tokenizer)
    size = config.model.vocab_size
    if size is None:
        model = config.model.model_copy(update={"vocab_size": tokenizer.vocab_size})
        return config.model_copy(update={"model": model}), tokenizer
    if size < tokenizer.vocab_size:
        raise UsageError(
            f"model.vocab_size = {size} is smaller than the tokenizer's {tokenizer.vocab_size} ids: leave it out, or "
            f"choose at least {tokenizer.vocab_size}"
        )
    return config, tokenizer


def special_tokens(tokenizer: Tokenizer) -> SpecialTokens:
    """What objectives need to know of a tokenizer."""
    return SpecialTokens(
        bos=tokenizer.bos,
        eos=tokenizer.eos,
        pad=tokenizer.pad,
        vocab_size=tokenizer.vocab_size,
        mask=tokenizer.mask,
        cls=tokenizer.cls,
        sep=tokenizer.sep,
        sentinels=tokenizer.sentinels,
        modes=tokenizer.modes,
        others=sorted(tokenizer.special.reserved),
        word_starts=tokenizer.word_starts(),
    )


def open_corpora(config: Config, tokenizer: Tokenizer) -> Corpora:
    """Open all corpora of a config. Raises UsageError or MegatfmError that names the folder and what is wrong."""
    data = config.data
    row_lengths = tuple(n for n in (data.sequence_length, data.target_length) if n is not None)
    objective = make(config.objective, config.model, special_tokens(tokenizer), row_lengths)
    if data.attend_across_documents and not objective.crosses_documents:
        raise UsageError(
            f"data.attend_across_documents: with objective.name = {config.objective.name!r} a document's targets would "
            "be seen from another: leave it out"
        )

    def rows(folder: str, shuffle: bool) -> PackedRows:
        corpus = Corpus.open(folder)
        corpus.check_tokenizer(tokenizer.hash)
        return PackedRows(
            corpus,
            objective,
            sequence_length=data.sequence_length,
            target_length=data.target_length,
            seed=config.train.seed,
            streams=data.streams,
            shuffle=shuffle,
            attend_across_documents=data.attend_across_documents,
            pad_id=tokenizer.pad,
        )

    validation = {name: rows(folder, shuffle=False) for name, folder in data.validation.items()}
    return Corpora(tokenizer, objective, rows(data.train, data.shuffle), validation)
