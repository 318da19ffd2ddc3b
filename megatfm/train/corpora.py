"""Opens the corpora and the tokenizer of a config and checks them against one another; finds the corpus of a row."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatfm import tokenizers
from megatfm.checkpoint.directory import list_checkpoints
from megatfm.config import Config
from megatfm.config.objective import ImageClassificationObjective, ImageObjective
from megatfm.config.world_size import round_to_multiple
from megatfm.corpus.corpus import Corpus
from megatfm.corpus.manifest import NO_TOKENIZER
from megatfm.corpus.storage import ShardCacheConfig
from megatfm.data.dataset import PackedDataset, RowDataset, SizedRowDataset
from megatfm.data.documents import Quarantine
from megatfm.data.loader import DataLoader, DataRank
from megatfm.data.mixture import Mixture, Phase, list_sources, make_source_seed
from megatfm.data.order import BatchSchedule, BatchStage, Interleave, choose_interleave
from megatfm.data.sequences import PackingConfig
from megatfm.engines.interface import RowSources
from megatfm.engines.registry import ENGINES
from megatfm.errors import UsageError
from megatfm.objectives import Objective, SpecialTokens, build_objective, reads_text
from megatfm.objectives.images import HEAD, get_n_classes
from megatfm.parallel.mesh import Mesh
from megatfm.terminal import format_counted, join_first
from megatfm.tokenizers import Tokenizer
from megatfm.tracking.run_directory import CHECKPOINTS
from megatfm.version import __version__

MIN_STREAMS = 16
"""Smallest number of read streams that mixes the documents of a batch well."""


@dataclass(frozen=True)
class Corpora:
    """Datasets of a run: training rows in training order, and rows of each validation set in stored order.

    tokenizer: None if the rows are not text. stored_rows: the training rows before the objective prepares them.
    """

    tokenizer: Tokenizer | None
    objective: Objective
    stored_rows: SizedRowDataset | Mixture
    train: RowDataset
    batch_schedule: BatchSchedule
    validation: dict[str, SizedRowDataset]
    notes: tuple[str, ...] = ()

    @property
    def tokenizer_hash(self) -> str:
        """Hash of the tokenizer, which checkpoints store; "none" without a tokenizer."""
        return self.tokenizer.hash if self.tokenizer else NO_TOKENIZER

    @property
    def byte_lengths(self) -> NDArray[np.int64] | None:
        """Bytes of text of each token id [vocabulary]; None without a tokenizer, or if it doesn't know them."""
        return self.tokenizer.byte_lengths() if self.tokenizer else None

    @property
    def warnings(self) -> list[str]:
        """Notes for the log on data that is left out or truncated."""
        notes = [note for rows in (self.train, *self.validation.values()) for note in rows.warnings]
        return [*notes, *self.notes]

    def train_loader(self, config: Config, mesh: Mesh, step: int, position: int) -> DataLoader:
        """Return the loader of a rank's batches after `step`, which starts at `position` in the training rows."""
        return DataLoader(
            self.train,
            global_batch=self.batch_schedule,
            micro_batch=config.train.micro_batch,
            data_rank=DataRank(mesh.data_rank, mesh.data_ranks, mesh.row_readers),
            position=position,
            step=step,
            workers=config.data.workers,
        )


def open_tokenizer(config: Config) -> tuple[Config, Tokenizer | None]:
    """Load the config's tokenizer, if any; return the config with `model.vocab_size` filled in, and the tokenizer.

    Raises UsageError if `model.vocab_size` is too small, or if the objective reads text and there is no tokenizer.
    """
    if config.data.tokenizer is None:
        if reads_text(config.objective.name):
            raise UsageError(
                f"data.tokenizer is missing, and objective.name = {config.objective.name!r} reads text: give the "
                "tokenizer beside the corpus"
            )
        return config, None
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


def get_special_tokens(tokenizer: Tokenizer) -> SpecialTokens:
    """Return a tokenizer's special tokens in the form that objectives use."""
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
        other_reserved=sorted(tokenizer.special.reserved),
        word_starts=tokenizer.word_starts(),
    )


def open_corpora(config: Config, tokenizer: Tokenizer | None) -> Corpora:
    """Open all corpora of a config. Raises UsageError or MegatfmError that names the corpus and the fault."""
    data = config.data
    row_lengths = tuple(n for n in (data.sequence_length, data.target_length) if n is not None)
    special = get_special_tokens(tokenizer) if tokenizer else None
    objective = build_objective(config.objective, config.model, special, row_lengths, data.images)
    if data.attend_across_documents and not objective.allows_cross_document_attention:
        raise UsageError(
            f"data.attend_across_documents: with objective.name = {config.objective.name!r}, a document could attend "
            "to another's targets: leave it out"
        )

    opener = _CorpusOpener(config, tokenizer, objective)
    validation: dict[str, SizedRowDataset] = {
        name: opener.open_rows(path, shuffle=False, objective=opener.objective.for_evaluation())
        for name, path in data.validation.items()
    }
    for name, rows in validation.items():
        if not len(rows):
            raise UsageError(
                f"data.validation.{name} = {data.validation[name]}: has no row to evaluate: leave it out, or give "
                "another corpus"
            )
    stored_rows = opener.open_train()
    sources = list_sources(stored_rows).values()
    notes = [note_few_streams(config), check_class_names(config, [*sources, *validation.values()])]
    train = objective.prepare_rows(stored_rows, opener.streams.turn)
    schedule = make_batch_schedule(config)
    return Corpora(tokenizer, objective, stored_rows, train, schedule, validation, tuple(filter(None, notes)))


def check_class_names(config: Config, datasets: Iterable[RowDataset]) -> str:
    """Return a note for the log if images have other numbers of classes than the model; else "".

    Raises UsageError if a corpus names more classes than the model of a new run has, or two corpora give one number to
    two names. A run with checkpoints has read such a corpus: it goes on, and stops at an image of a further class.
    """
    if not isinstance(config.objective, ImageClassificationObjective):
        return ""
    key, n_classes = f"model.extra_heads.{HEAD}.n_classes", get_n_classes(config.model)
    names_by_folder: dict[str, list[str]] = {}
    for corpus in (rows.corpus for rows in datasets if isinstance(rows, PackedDataset)):
        if names := corpus.manifest.class_names:
            names_by_folder[str(corpus.folder)] = names
    has_begun = bool(list_checkpoints(config.run_folder / CHECKPOINTS))
    longest = max(names_by_folder, key=lambda folder: len(names_by_folder[folder]), default="")
    for folder, names in names_by_folder.items():
        excess = f"{folder}: has {len(names):,} classes ({join_first(names, 3)}), and {key} = {n_classes:,}"
        if len(names) > n_classes and not has_begun:
            raise UsageError(f"{excess}: choose {key}={len(names)}")
        for number, (name, other_name) in enumerate(zip(names, names_by_folder[longest], strict=False)):
            if name != other_name:
                raise UsageError(
                    f"{folder}: class {number} is {name!r}, and in {longest} it is {other_name!r}: prepare both with "
                    "one file of names (read.labels.classes, or data index --classes)"
                )
    count = len(names_by_folder.get(longest, ()))
    if count > n_classes:
        return f"{longest}: names {count:,} classes, and {key} = {n_classes:,}: an image of a further one is an error"
    if longest and count < n_classes:
        classes = format_counted(count, "class", "classes")
        return f"{key} = {n_classes:,}, and {longest} has {classes}: the other outputs only learn to be small"
    return ""


def note_few_streams(config: Config) -> str:
    """Return a note for the log if the global batch has no divisor that is a good number of read streams; else ""."""
    batch, streams = config.train.global_batch, choose_interleave(config.train.global_batch).streams
    if config.data.read_streams or streams >= MIN_STREAMS:
        return ""
    candidates = (n for distance in range(batch) for n in (batch - distance, batch + distance))
    usable = (
        n for n in candidates if n % config.train.micro_batch == 0 and choose_interleave(n).streams >= MIN_STREAMS
    )
    near = next(usable, None)  # none if the micro-batch itself has few divisors
    advice = "set data.read_streams = 64" if near is None else f"choose {near}, or set data.read_streams = 64"
    return (
        f"train.global_batch = {batch} has few divisors, so {streams} stream{'s' * (streams > 1)} read the corpus, "
        f"and neighbouring documents get into the same batch: {advice}"
    )


def open_corpus(config: Config, path: str) -> Corpus:
    """Open one corpus with the config's cache. Raises UsageError or MegatfmError that names the fault."""
    data = config.data
    folder = Path(data.cache_dir) if data.cache_dir else ShardCacheConfig().folder
    return Corpus.open(path, ShardCacheConfig(folder, data.cache_bytes))


def make_batch_schedule(config: Config) -> BatchSchedule:
    """Return the number of rows of each step, from `data.rampup` and `train.global_batch`.

    Raises UsageError if a stage's batch is not a multiple of the micro-batch, or its row length not one of `tp` under
    sequence parallelism.
    """
    data, train, stages = config.data, config.train, []
    for number, stage in enumerate(data.rampup):
        batch = stage.global_batch or train.global_batch
        length = stage.sequence_length or data.sequence_length
        if batch % train.micro_batch:
            raise UsageError(
                f"data.rampup[{number}].global_batch = {batch} is not a multiple of train.micro_batch = "
                f"{train.micro_batch}: the nearest that is one is {round_to_multiple(batch, train.micro_batch)}"
            )
        if config.parallel.sequence_parallel and length % config.parallel.tp:
            raise UsageError(
                f"data.rampup[{number}].sequence_length = {length} does not divide into parallel.tp = "
                f"{config.parallel.tp} shards of the sequence: choose a multiple of it, or "
                "parallel.sequence_parallel=false"
            )
        stages.append(BatchStage(stage.steps, batch, data.sequence_length // length))
    return BatchSchedule(train.global_batch, tuple(stages))


@dataclass(frozen=True)
class _CorpusOpener:
    """Opens corpora with the settings of a config."""

    config: Config
    tokenizer: Tokenizer | None
    objective: Objective

    def open_rows(
        self,
        path: str,
        *,
        shuffle: bool,
        objective: Objective | None = None,
        seed: int | None = None,
        quarantine: Sequence[str] = (),
        turn: int = 1,
    ) -> PackedDataset:
        """Open one corpus as packed rows. turn: see `Interleave`."""
        config, data = self.config, self.config.data
        corpus = open_corpus(config, path)
        if self.tokenizer:
            corpus.check_tokenizer(self.tokenizer.hash)
        objective = objective or self.objective
        row_lengths = (data.sequence_length, data.target_length or data.sequence_length)
        packing = PackingConfig(
            objective,
            row_lengths[: len(objective.field_prefixes)],
            seed=config.train.seed if seed is None else seed,
            pad_id=self.tokenizer.pad if self.tokenizer else 0,
            attend_across_documents=data.attend_across_documents,
        )
        return PackedDataset(
            corpus,
            packing,
            streams=Interleave(self.streams.streams, turn),
            shuffle=shuffle,
            plan_cache_key=self._plan_cache_key(),
            quarantine=Quarantine.parse(quarantine, corpus.n_samples),
        )

    def open_train(self) -> PackedDataset | Mixture:
        """Open the training corpus, or the mixture of several."""
        data, seed = self.config.data, self.config.train.seed
        if data.train is not None:
            turn = self.streams.turn
            return self.open_rows(data.train, shuffle=data.shuffle, quarantine=data.quarantine, turn=turn)
        sources = {
            name: self.open_rows(
                source.path, shuffle=data.shuffle, seed=make_source_seed(seed, name), quarantine=source.quarantine
            )
            for name, source in data.mixture.items()
        }
        row_tokens = next(iter(sources.values())).row_tokens
        phases = [Phase(0, {name: source.weight for name, source in data.mixture.items()})]
        phases += [Phase(-(-change.tokens // row_tokens), change.weights) for change in data.mixture_schedule]
        streams, turn = self.streams
        return Mixture(sources, phases, seed=seed, streams=streams, turn=turn, block=data.mixture_block_rows)

    @property
    def streams(self) -> Interleave:
        return choose_interleave(self.config.train.global_batch, self.config.data.read_streams)

    def _plan_cache_key(self) -> str | None:
        """Return the part of the packing plan's cache key that depends on the config; corpus, row lengths and seed are
        added elsewhere. None (no caching) with plugins, whose code may change."""
        config = self.config
        if config.plugins:
            return None
        objective = config.objective.model_dump(mode="json")
        tokenizer = self.tokenizer.hash if self.tokenizer else NO_TOKENIZER
        inputs = (
            [config.data.images.model_dump(mode="json"), config.model.embedding.model_dump(mode="json")]
            if isinstance(config.objective, ImageObjective)
            else []
        )
        return json.dumps([__version__, config.model.family, objective, tokenizer, *inputs])


class MixtureSources:
    """Looks up the corpus of each row of a step, for `log.loss_by_source`.

    note: for the log, why this is impossible; "" if it is possible or off.
    """

    def __init__(self, config: Config, corpora: Corpora) -> None:
        self._mixture = corpora.train if isinstance(corpora.train, Mixture) else None
        self.note = ""
        if not config.log.loss_by_source:
            self._mixture = None
        if self._mixture and (reason := _find_source_conflict(config, corpora)):
            self._mixture = None
            self.note = f"log.loss_by_source: the loss can't be split by corpus, since {reason}"

    def look_up(self, loader: DataLoader) -> RowSources | None:
        """Return the corpus of each row in the loader's last batch; None if this is off or impossible."""
        if not self._mixture:
            return None
        sources = [self._mixture.find_source_indices(positions) for positions in loader.row_positions]
        return RowSources(list(self._mixture.sources), sources)


def _find_source_conflict(config: Config, corpora: Corpora) -> str:
    """Return why losses can't be split by rows; "" if they can."""
    engine = config.parallel.engine
    if not corpora.objective.predicts_tokens:
        return f"objective.name = {config.objective.name!r} doesn't predict tokens by the head over the vocabulary"
    if config.train.cuda_graphs:
        return "train.cuda_graphs = true replays recorded passes"
    if not ENGINES.has(engine, "loss_by_source"):
        return f"parallel.engine = {engine!r} does not declare it among its features"
    return ""
