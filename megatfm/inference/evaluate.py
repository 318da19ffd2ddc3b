"""Evaluate the newest checkpoint of a run on validation sets, and gzip and xz on the same text."""

import logging
import lzma
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import JsonValue

from megatfm import checkpoint
from megatfm.checkpoint.locate import refuse_adapter
from megatfm.config import Config, ParallelConfig, load_config
from megatfm.config.sources import check_is_run
from megatfm.corpus.corpus import Corpus
from megatfm.data.dataset import SizedRowDataset
from megatfm.engines.interface import Engine
from megatfm.errors import MegatfmError, UsageError
from megatfm.files import to_strict_json
from megatfm.inference.image_evaluation import ImageEvaluation, make_image_evaluation
from megatfm.object_collectives import run_on_rank_0_raising
from megatfm.objectives import Objective
from megatfm.parallel import distributed
from megatfm.parallel.mesh import build_mesh
from megatfm.registry import import_foreign_plugins
from megatfm.terminal import ProgressLog, format_counted
from megatfm.tokenizers import Tokenizer
from megatfm.tracking.run_directory import RunDirectory
from megatfm.train.build import build_engine, describe_size
from megatfm.train.corpora import Corpora, open_corpora, open_corpus, open_tokenizer
from megatfm.train.evaluation import evaluate, format_result
from megatfm.train.init_from import load_weights

log = logging.getLogger("megatfm")

Results = dict[str, Any]
Baselines = dict[str, dict[str, float]]
"""Validation set → compressor → bits per byte."""


def evaluate_run(
    run_dir: Path,
    sets: Mapping[str, str | Path],
    with_compressors: bool,
    *,
    trust_plugins: bool = False,
    n_images: int = 0,
    show: Callable[[Results, Baselines], None] = lambda results, baselines: None,
) -> tuple[Results, Baselines] | None:
    """Return the results of each set and of the compressors, which are also written into the run directory.

    sets: name → folder or URL of a further corpus. trust_plugins: import the packages that the run's config names.
    n_images: examples to draw for the report of a run on images. show: called with the results before they are written,
    which may fail. Collective; ranks other than 0 return None. Raises UsageError, MegatfmError.
    """
    config = load_run_config(run_dir, trust_plugins=trust_plugins)
    _refuse_known_names(config, sets)
    config, tokenizer = open_tokenizer(keep_validation(config, {**config.data.validation, **_make_absolute(sets)}))
    if with_compressors:
        _check_text(config, tokenizer)
    checkpoint.find_checkpoint(run_dir)  # raises before the first collective
    with distributed.distributed_session(device=config.train.device) as rank:
        source = run_on_rank_0_raising(lambda: checkpoint.find_checkpoint(run_dir))  # the run may be saving
        corpora = open_corpora(config, tokenizer)
        engine, state = open_engine(config, source, rank, format_counted(len(corpora.validation), "validation set"))
        images = make_image_evaluation(config, engine, n_images)
        results = _evaluate_sets(engine, corpora, config.train.micro_batch, images)
    if not rank.is_main:
        return None
    evaluation: Results = {"step": state["step"], "objective": config.objective.name, "sets": results}
    baselines = {}
    if with_compressors and tokenizer:
        folders = config.data.validation.items()
        log.info("compressing the text of %s by %s", ", ".join(config.data.validation), " and ".join(COMPRESSORS))
        baselines = {name: measure_compressors(open_corpus(config, folder), tokenizer) for name, folder in folders}
    show(evaluation, baselines)
    run = RunDirectory(run_dir, rank.rank)
    run.write("evaluation.json", to_strict_json(evaluation, indent=2) + "\n")
    if images:
        images.write(run_dir, evaluation["step"])
    if baselines:
        run.write("baselines.json", to_strict_json(baselines, indent=2) + "\n")
    return evaluation, baselines


def keep_validation(config: Config, sets: Mapping[str, str]) -> Config:
    """Return a config with these validation sets, and without its training corpus, which may be gone: it is not read,
    and a converted model has none."""
    changes: dict[str, Any] = {"validation": sets}
    if sets:
        changes |= {"train": next(iter(sets.values())), "mixture": {}, "quarantine": []}
    return config.model_copy(update={"data": config.data.model_copy(update=changes)})


def load_run_config(run_dir: Path, *, trust_plugins: bool) -> Config:
    """Load a run's config, for one replica on each process whatever layout the run had, and import its plugins.

    Raises UsageError for a folder that is no run.
    """
    if not (run_dir / "config.toml").is_file():
        refuse_adapter(run_dir)
    check_is_run(run_dir)
    config = load_config(run_dir / "config.toml")
    import_foreign_plugins(config.plugins, run_dir, trusted=trust_plugins)
    parallel = ParallelConfig(engine=config.parallel.engine, zero=config.parallel.zero)
    return config.model_copy(update={"parallel": parallel})


def open_engine(
    config: Config, source: Path, rank: distributed.ProcessInfo, work: str
) -> tuple[Engine, dict[str, JsonValue]]:
    """Return a run's engine with the weights of a checkpoint, and the checkpoint's state. Collective.

    work: what it is to evaluate, for the log. Raises MegatfmError for a checkpoint of no run.
    """
    state = run_on_rank_0_raising(lambda: dict(checkpoint.read_state(source)))
    precision = state.get("precision", "fp32" if "origin" in state else None)  # a converted model was not trained here
    if type(state.get("step")) is not int or not isinstance(precision, str):
        raise MegatfmError(f"{source}: not a checkpoint of a run: its state has no step or precision")
    mesh = build_mesh(config.parallel, rank.world_size, rank.device.type)
    engine = build_engine(config, mesh, rank.device, precision)
    load_weights(engine, source)
    log.info("%s: %s, %s, %s", source.parent.parent, source.name, work, describe_size(engine))
    return engine, state


def evaluate_set(
    engine: Engine,
    name: str,
    rows: SizedRowDataset,
    objective: Objective,
    byte_lengths: NDArray[np.int64] | None,
    micro_batch: int,
) -> dict[str, Any]:
    """Return the results of a set, with a log of the progress. Collective."""
    progress = ProgressLog(name, len(rows), "row")
    on_batch = partial(progress.advance, micro_batch * engine.mesh.data_ranks)
    return evaluate(engine, rows, objective, byte_lengths, micro_batch=micro_batch, on_batch=on_batch)


def _evaluate_sets(
    engine: Engine, corpora: Corpora, micro_batch: int, images: ImageEvaluation | None
) -> dict[str, dict[str, Any]]:
    """Return the results of each validation set. Collective."""
    results = {}
    for name, rows in corpora.validation.items():
        objective = corpora.objective.for_evaluation()
        with images.collect_set(name, rows) if images else nullcontext():
            results[name] = evaluate_set(engine, name, rows, objective, corpora.byte_lengths, micro_batch)
        log.info("%s: %s", name, format_result(results[name]))
    return results


def _check_text(config: Config, tokenizer: Tokenizer | None) -> None:
    """Raise UsageError if the text of a run's corpora can't be restored, for compressors."""
    if not config.reads_text:
        raise UsageError(f"--baselines: objective.name = {config.objective.name!r} reads no text: leave it out")
    if not (tokenizer and tokenizer.lossless):
        raise UsageError(
            f"--baselines: {config.data.tokenizer} does not keep every text as it is, so nothing compares: leave it out"
        )


def _refuse_known_names(config: Config, sets: Mapping[str, str | Path]) -> None:
    """Raise UsageError for a further set with the name of one of the run's own."""
    run_sets = config.data.validation
    for name in sorted(sets.keys() & run_sets.keys()):
        raise UsageError(
            f"--validation {name}={sets[name]}: the run's own data.validation.{name} is {run_sets[name]}: "
            "give another name"
        )


def _make_absolute(sets: Mapping[str, str | Path]) -> dict[str, str]:
    """Make folders absolute, as a run's paths are. URLs are kept."""
    return {
        name: str(location) if "://" in str(location) else str(Path(location).expanduser().resolve())
        for name, location in sets.items()
    }


class Compressor(Protocol):
    """A compressor of a stream, as zlib and lzma offer them."""

    def compress(self, data: bytes, /) -> bytes: ...

    def flush(self) -> bytes: ...


COMPRESSORS: dict[str, Callable[[], Compressor]] = {
    "gzip -9": lambda: zlib.compressobj(9, wbits=zlib.MAX_WBITS | 16),
    "xz -9": lambda: lzma.LZMACompressor(preset=9),
}


def measure_compressors(corpus: Corpus, tokenizer: Tokenizer) -> dict[str, float]:
    """Return the bits per byte of each compressor, on single documents and on all of them joined.

    Python's zlib and lzma replace the programs: lzma gives xz's bytes, zlib up to half a percent more than gzip.
    Raises MegatfmError if the decoded tokens differ in size from the corpus's text, UsageError for an empty corpus.
    """
    size = 0
    single, joined = Counter[str](), Counter[str]()
    streams = {name: start() for name, start in COMPRESSORS.items()}
    for text in _iter_texts(corpus, tokenizer):
        size += len(text)
        for name, start in COMPRESSORS.items():
            compressor = start()
            single[name] += len(compressor.compress(text)) + len(compressor.flush())
            joined[name] += len(streams[name].compress(text))
    if size != corpus.n_text_bytes:
        raise MegatfmError(
            f"{corpus.folder}: its tokens decode to {size} bytes, but its manifest counts {corpus.n_text_bytes}: "
            "compare nothing with this corpus; prepare it again"
        )
    if not size:
        raise UsageError(f"{corpus.folder}: has no text that could be compressed: leave out --baselines")
    result = {}
    for name, stream in streams.items():
        result[f"{name}, per document"] = 8 * single[name] / size
        result[f"{name}, joined"] = 8 * (joined[name] + len(stream.flush())) / size
    return result


def _iter_texts(corpus: Corpus, tokenizer: Tokenizer) -> Iterator[bytes]:
    for block in range(corpus.n_blocks):
        for _, tokens in corpus.read_block(block):
            yield tokenizer.decode(tokens.tolist()).encode()
