"""The tokenizer and the corpora of a config, checked against one another."""

from dataclasses import dataclass

from megatfm import tokenizers
from megatfm.config import Config
from megatfm.data import Corpus, PackedRows
from megatfm.errors import UsageError
from megatfm.objectives import OBJECTIVES, Objective, SpecialTokens
from megatfm.tokenizers import Tokenizer


@dataclass(frozen=True)
class Corpora:
    """What a run reads: packed rows in training order, and in stored order for each validation set."""

    tokenizer: Tokenizer
    objective: Objective
    train: PackedRows
    validation: dict[str, PackedRows]


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


def open_corpora(config: Config, tokenizer: Tokenizer) -> Corpora:
    """Open all corpora of a config. Raises UsageError or MegatfmError that names the folder and what is wrong."""
    special = SpecialTokens(bos=tokenizer.bos, eos=tokenizer.eos, pad=tokenizer.pad)
    objective = OBJECTIVES.get(config.objective.name)(special)

    def rows(folder: str, shuffle: bool) -> PackedRows:
        corpus = Corpus.open(folder)
        corpus.check_tokenizer(tokenizer.hash)
        return PackedRows(
            corpus,
            objective,
            sequence_length=config.data.sequence_length,
            seed=config.train.seed,
            streams=config.data.streams,
            shuffle=shuffle,
            attend_across_documents=config.data.attend_across_documents,
            pad_id=tokenizer.pad,
        )

    validation = {name: rows(folder, shuffle=False) for name, folder in config.data.validation.items()}
    return Corpora(tokenizer, objective, rows(config.data.train, config.data.shuffle), validation)
