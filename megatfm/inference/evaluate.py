"""Evaluate the newest checkpoint of a run on validation sets, beside what gzip and xz need for the same text."""

import gzip
import json
import lzma
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from megatfm import checkpoint
from megatfm.checkpoint.directory import refuse_adapter
from megatfm.config import ParallelConfig, load_config
from megatfm.corpus.corpus import Corpus
from megatfm.errors import MegatfmError, UsageError
from megatfm.inference.image_evaluation import image_evaluation
from megatfm.object_collectives import run_on_rank_0_raising
from megatfm.parallel import distributed
from megatfm.parallel.mesh import build_mesh
from megatfm.registry import import_foreign_plugins
from megatfm.tokenizers import Tokenizer
from megatfm.tracking.run_directory import RunDirectory
from megatfm.train.build import build_engine
from megatfm.train.corpora import open_corpora, open_corpus, open_tokenizer
from megatfm.train.evaluation import evaluate
from megatfm.train.init_from import load_weights


def evaluate_run(
    run_dir: Path,
    sets: Mapping[str, str | Path],
    with_compressors: bool,
    *,
    trust_plugins: bool = False,
    n_images: int = 0,
) -> tuple[dict[str, Any], dict[str, dict[str, float]]] | None:
    """Return the results of each set, and of the compressors; both are written into the run directory as well.

    sets: folders or URLs of corpora besides the run's own, by name. trust_plugins: import the packages that the run's
    config names. n_images: of a run on images, how many examples to draw for its report.
    Under several processes all take part, and rank 0 has the results.
    """
    if not (run_dir / "config.toml").is_file():
        refuse_adapter(run_dir)
        raise UsageError(
            f"{run_dir}: no run directory (config.toml is missing): give one, for example runs/quickstart"
        )
    config = load_config(run_dir / "config.toml")
    import_foreign_plugins(config.plugins, run_dir, trusted=trust_plugins)
    data = config.data.model_copy(update={"validation": {**config.data.validation, **_absolute(sets)}})
    # Only the engine of the layout counts: all processes share rows, whatever the run was laid over.
    parallel = ParallelConfig(engine=config.parallel.engine, zero=config.parallel.zero)
    config, tokenizer = open_tokenizer(config.model_copy(update={"data": data, "parallel": parallel}))
    if with_compressors and not (tokenizer and tokenizer.lossless):
        raise UsageError(
            f"--baselines: {config.data.tokenizer} does not keep every text as it is, so nothing compares: "
            "leave it out"
        )
    checkpoint.find_checkpoint(run_dir)  # raises before the others are met
    with distributed.distributed_session(device=config.train.device) as rank:
        source, state = run_on_rank_0_raising(lambda: _newest(run_dir))  # the run there may save meanwhile
        mesh = build_mesh(config.parallel, rank.world_size, rank.device.type)
        corpora = open_corpora(config, tokenizer)
        engine = build_engine(config, mesh, rank.device, str(state["precision"]))
        load_weights(engine, source)
        images, results = image_evaluation(config, engine, n_images), {}
        for name, rows in corpora.validation.items():
            with images.of_set(name, rows) if images else nullcontext():
                results[name] = evaluate(
                    engine,
                    rows,
                    corpora.objective.for_evaluation(),
                    corpora.byte_lengths,
                    micro_batch=config.train.micro_batch,
                )
    if not rank.is_main:
        return None
    evaluation = {"step": state["step"], "objective": config.objective.name, "sets": results}
    baselines = {}
    if with_compressors and tokenizer:
        folders = config.data.validation.items()
        baselines = {name: compressors(open_corpus(config, folder), tokenizer) for name, folder in folders}
    run = RunDirectory(run_dir, rank.rank)
    run.write("evaluation.json", json.dumps(evaluation, indent=2) + "\n")
    if images:
        images.write(run_dir, int(state["step"]))
    if baselines:
        run.write("baselines.json", json.dumps(baselines, indent=2) + "\n")
    return evaluation, baselines


def _newest(run_dir: Path) -> tuple[Path, dict[str, Any]]:
    """Return a run's newest checkpoint and its state. Raises UsageError, MegatfmError."""
    source = checkpoint.find_checkpoint(run_dir)
    state = checkpoint.read_state(source)
    if type(state.get("step")) is not int or not isinstance(state.get("precision"), str):
        raise MegatfmError(f"{source}: not a checkpoint of a run: its state has no step or precision")
    return source, dict(state)


def _absolute(sets: Mapping[str, str | Path]) -> dict[str, str]:
    """Make folders absolute, since a run's paths are; a URL stays as it is."""
    return {
        name: str(place) if "://" in str(place) else str(Path(place).expanduser().resolve())
        for name, place in sets.items()
    }


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "gzip -9": lambda text: gzip.compress(text, compresslevel=9, mtime=0),
    "xz -9": lambda text: lzma.compress(text, preset=9),
}


def compressors(corpus: Corpus, tokenizer: Tokenizer) -> dict[str, float]:
    """Return the bits per byte of each compressor, on each document by itself and on all of them joined.

    Python's zlib and lzma stand for the programs: lzma gives xz's bytes, zlib up to half a percent more than gzip.

    Raises MegatfmError if the tokens don't decode to the bytes that the corpus says it was made of.
    """
    texts = list(_texts(corpus, tokenizer))
    size = sum(map(len, texts))
    if size != corpus.n_text_bytes:
        raise MegatfmError(
            f"{corpus.folder}: its tokens decode to {size} bytes, but its manifest counts {corpus.n_text_bytes}: "
            "compare nothing with this corpus; prepare it again"
        )
    if not size:
        raise UsageError(f"{corpus.folder}: has no text that could be compressed: leave out --baselines")
    result = {}
    for name, compress in COMPRESSORS.items():
        result[f"{name}, per document"] = 8 * sum(len(compress(text)) for text in texts) / size
        result[f"{name}, joined"] = 8 * len(compress(b"".join(texts))) / size
    return result


def _texts(corpus: Corpus, tokenizer: Tokenizer) -> Iterator[bytes]:
    for block in range(corpus.n_blocks):
        for _, tokens in corpus.read_block(block):
            yield tokenizer.decode(tokens.tolist()).encode()
