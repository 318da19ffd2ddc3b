"""Convert a model to or from the Hugging Face format, or merge its adapters, a few tensors in memory at a time.

A converted folder holds a config to start from: its [model] is the converted model, the rest are usual values.
"""

import glob
import logging
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import JsonValue
from torch import Tensor, nn

from megatfm import checkpoint, tokenizers
from megatfm.checkpoint import file_io
from megatfm.checkpoint.locate import find_best_checkpoint, is_peft_folder
from megatfm.config import Config, ModelConfig, to_toml
from megatfm.config.load import parse_stored_config
from megatfm.convert import tokenizer_files
from megatfm.convert.architectures.task_heads import make_task_labels
from megatfm.convert.electra_pair import ElectraFolder, choose_exported_models, is_electra_folder, open_folder
from megatfm.convert.hf_checkpoint import CONFIG, HfFolder, is_hf_folder, stamp_weights, write_json, write_weights
from megatfm.convert.starting_config import adopt_image_options, make_starting_config, write_preprocessor
from megatfm.errors import MegatfmError, UsageError
from megatfm.layers.initialisation import list_checkpoint_tensors
from megatfm.layers.lora import is_factor, merge_lora, name_factors
from megatfm.models import build
from megatfm.models.dtypes import find_main_dtype
from megatfm.registry import import_foreign_plugins
from megatfm.terminal import ProgressLog, format_counted, join_first
from megatfm.version import __version__

log = logging.getLogger("megatfm")

UNTRAINABLE = {
    "discriminator": "no objective trains a discriminator without its generator: convert a folder with both, as "
    "FOLDER/generator and FOLDER/discriminator, or add a head (model.extra_heads) with an objective of its own"
}
"""Family that no objective trains → message with the way out."""


def format_config_comment(
    name: str, arguments: str = "--from THIS_FOLDER data.train=CORPUS/train", family: str = ""
) -> str:
    """Return the comment at the top of config.toml. arguments: of the `megatfm train` that continues from the
    weights."""
    if family in UNTRAINABLE:
        first_line = f"# Made by `megatfm convert` from a {name}. [model] is the converted model."
        return f"{first_line}\n# {UNTRAINABLE[family]}.\n\n"
    return (
        f"# Made by `megatfm convert` from a {name}. [model] is the converted model, the rest are starting values:\n"
        f"# continue from its weights with `megatfm train {arguments}`.\n\n"
    )


SHARD_BYTES = 5 * 10**9
"""Default size limit of a file, as in transformers."""
READ_BYTES = 2**29
"""Bytes of a checkpoint to read at once. Each read verifies the hashes of whole files, so few reads are faster."""


def convert(
    source: str | Path,
    target: str | Path,
    to: Literal["hf", "megatfm"],
    *,
    shard_bytes: int = SHARD_BYTES,
    dtype: torch.dtype | None = None,
    trust_plugins: bool = False,
) -> list[str]:
    """Convert the model at `source` into the new or empty folder `target`; returns notes for the user.

    dtype: of the weights with to="hf"; None: as stored. trust_plugins: import the packages that a checkpoint's config
    names. `target` appears only when it is complete on disk. Raises UsageError and MegatfmError, and then leaves no
    target.
    """
    source, target = Path(source), Path(target)
    check_is_new(target)
    if to == "megatfm":
        checkpoint.refuse_foreign_checkpoint(source)
    if (is_hf_folder(source) or is_electra_folder(source)) == (to == "hf"):
        source_format = "megatfm" if to == "hf" else "hf"
        if to == "megatfm":
            _check_is_megatfm_model(source)
        raise UsageError(f"{source}: is already in that format: use --to {source_format}, or copy it")
    with new_folder(target) as partial:
        if to == "hf":
            return _to_hf(source, partial, shard_bytes, dtype, trust_plugins)
        return _to_megatfm(source, partial, target)


def _check_is_megatfm_model(source: Path) -> None:
    """Raise UsageError if a path holds no megatfm model."""
    try:
        checkpoint.find_checkpoint(source)
    except UsageError as error:
        if not source.exists() or is_peft_folder(source):
            raise
        raise UsageError(
            f"{source}: holds no model: the Hugging Face format has a {CONFIG}; for megatfm's it is "
            f"{str(error).removeprefix(f'{source} is ')}; `megatfm prep` turns text into a corpus"
        ) from None


def _to_hf(source: Path, folder: Path, shard_bytes: int, dtype: torch.dtype | None, trust_plugins: bool) -> list[str]:
    path, state, config = open_best_checkpoint(source, trust_plugins=trust_plugins)
    stored_origin = state.get("origin")
    origin: dict[str, Any] = stored_origin if isinstance(stored_origin, dict) else {}
    lora, model = config.model.lora, config.model.model_copy(update={"lora": None})
    exported_models = choose_exported_models(model, origin.get("name"))
    tensors = _plan_tensors(path, config.model, dtype)
    main_dtype = find_main_dtype(tensors.values())
    written_names, summary, notes, non_finite = set[str](), list[str](), list[str](), list[str]()
    for exported in exported_models:
        model_folder = folder / exported.folder
        file_io.make_durable_dirs(model_folder)
        order = [key for mapping in exported.mappings for key in mapping.megatfm]
        tokenizer_notes, ids = tokenizer_files.export_tokenizer(path, config, model_folder, state)
        _check_padding(exported.hf_config, ids)
        log.info("%s: %s of %s", path, format_counted(len(order), "tensor"), exported.name)
        reader = _CheckpointReader(path, order, tensors, lora.alpha / lora.rank if lora else 0.0)
        size = write_weights(model_folder, exported.mappings, tensors, reader.read, shard_bytes)
        non_finite += reader.non_finite
        notes += [*tokenizer_notes, *exported.architecture.notes(model)]
        exported_origin = origin if exported.name == origin.get("name") else {}
        labels = make_task_labels(config) if "problem_type" in exported.hf_config else {}
        restored = tokenizer_files.restore_origin(exported_origin, exported.hf_config | labels)
        hf_config = exported.hf_config | labels | {"dtype": str(main_dtype).removeprefix("torch."), **ids, **restored}
        generation = tokenizer_files.make_generation_config(exported_origin, config, model_folder, hf_config)
        if generation:
            write_json(model_folder / tokenizer_files.GENERATION, generation)
        if (key := exported.architecture.max_length_key) and key not in hf_config:
            hf_config[key] = config.data.sequence_length
        hf_config = tokenizer_files.move_text_ids(hf_config)
        notes += write_preprocessor(model_folder, hf_config, config.data.images, origin.get("preprocessor"))
        write_json(model_folder / CONFIG, hf_config)
        file_io.sync_folder(model_folder)
        written_names |= set(order)
        summary.append(f"{exported.name}, {len(order)} tensors, {size / 1e6:,.1f} MB")
    if unwritten := sorted(tensors.keys() - written_names):
        notes.append(f"not converted, since transformers has no such weights: {', '.join(unwritten)}")
    if config.task is not None and path != source:
        notes.insert(0, f"{path}: the best checkpoint of the run")
    return ["; ".join(summary), *dict.fromkeys(notes), *note_non_finite(list(dict.fromkeys(non_finite)))]


def _plan_tensors(path: Path, model: ModelConfig, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return the tensors of an exported checkpoint by name, on the meta device, without adapters.

    dtype: of the parameters; None: as stored. Buffers, such as the biases that balance experts, keep theirs.
    """
    stored = {
        key.removeprefix("model."): (stored_dtype, shape)
        for key, (stored_dtype, shape) in checkpoint.read_tensor_specs(path).items()
        if key.startswith("model.")
    }
    with torch.device("meta"):
        built = list_checkpoint_tensors(build(model))
    checkpoint.check_tensor_names(path, stored, built)
    return {
        name: torch.empty(
            shape, dtype=dtype if dtype and isinstance(built[name], nn.Parameter) else stored_dtype, device="meta"
        )
        for name, (stored_dtype, shape) in stored.items()
        if not is_factor(name)
    }


def open_best_checkpoint(source: str | Path, *, trust_plugins: bool) -> tuple[Path, Mapping[str, JsonValue], Config]:
    """Return the best checkpoint of a run or folder, its state and its config, and import the config's plugins."""
    path = find_best_checkpoint(source)
    state = checkpoint.read_state(path)
    config = parse_stored_config(path, state)
    import_foreign_plugins(config.plugins, path, trusted=trust_plugins)
    return path, state, config


def _to_megatfm(source: Path, folder: Path, target: Path) -> list[str]:
    hf_model = open_folder(source)
    family, shapes = hf_model.config.family, list_tensor_shapes(hf_model.config)
    tokenizer_file, notes = tokenizer_files.import_tokenizer(
        source / "discriminator" if is_electra_folder(source) else source, folder
    )
    log.info("%s: %s of %s", source, format_counted(len(shapes), "tensor"), hf_model.name)
    starting_config = make_starting_config(target, hf_model.config, tokenizer_file, hf_model.max_length)
    config, image_notes = adopt_image_options(starting_config, source)
    tokenizer = tokenizers.load(folder / tokenizer_file) if tokenizer_file else None
    state: dict[str, JsonValue] = {"origin": {"name": hf_model.name}}
    if isinstance(hf_model, HfFolder):
        state["hf_folder"] = {"path": str(source.absolute()), "weights": stamp_weights(source)}
        hf_config = hf_model.architecture.config_to_hf(hf_model.config)
        state["origin"] = tokenizer_files.record_origin(source, hf_model.name, hf_model.json, hf_config)
        if tokenizer and tokenizer_file:
            files = tokenizers.read_tokenizer_files(folder / tokenizer_file)
            state["begins"] = [*tokenizer_files.find_bos_prefix_ids(source, files, tokenizer)]
            state["stop"] = [*tokenizer_files.find_eos_token_ids(source, hf_model.json, tokenizer)]
    state["tokenizer"] = tokenizer.hash if tokenizer else None
    tensors = ((f"model.{name}", tensor) for name, tensor in read_converted_tensors(hf_model, shapes))
    write_model(folder, config, tensors, state, format_config_comment(hf_model.name, family=family))
    untrainable = [UNTRAINABLE[family]] if family in UNTRAINABLE else []
    notes = notes if config.reads_text else []
    return [f"{hf_model.name}, {len(shapes)} tensors", *hf_model.notes, *notes, *image_notes, *untrainable]


def merge_adapters(source: str | Path, target: str | Path, *, trust_plugins: bool = False) -> list[str]:
    """Write a megatfm model with its adapters merged to a new folder; returns notes for the user.

    trust_plugins: import the packages that its config names. Raises UsageError, MegatfmError; then there is no target.
    """
    source, target = Path(source), Path(target)
    check_is_new(target)
    path, state, config = open_best_checkpoint(source, trust_plugins=trust_plugins)
    options = config.model.lora
    assert options is not None
    plain: Config = config.with_changes(
        {"model.lora": None, "train.init_from": str(target.absolute()), "train.branch_from": None}
    )
    scale, shapes = options.alpha / options.rank, list_tensor_shapes(plain.model)

    def merge_tensors() -> Iterator[tuple[str, Tensor]]:
        stored, progress = checkpoint.read_tensor_specs(path), ProgressLog("merged", len(shapes), "tensor")
        for name in shapes:
            progress.advance()
            factors = {f"model.{factor}" for factor in name_factors(name)} & stored.keys()
            tensors = checkpoint.read_tensors(path, only={f"model.{name}", *factors})
            for key, merged in merge_lora(tensors, scale):
                yield key, merged.to(tensors[key].dtype)

    kept_state: dict[str, JsonValue] = {
        key: state[key] for key in ("tokenizer", "begins", "stop", "origin") if key in state
    }
    tokenizer_file = tokenizers.find_tokenizer_file(path.absolute().parent.parent) or config.data.tokenizer
    comment = f"# Made by `megatfm convert --to megatfm` from {source}, whose adapters are merged.\n\n"
    with new_folder(target) as folder:
        if tokenizer_file and Path(tokenizer_file).exists():
            tokenizer_files.copy_tokenizer(Path(tokenizer_file), folder)
        write_model(folder, plain, merge_tensors(), kept_state, comment)
    return [f"adapters of {path} merged, {len(shapes)} tensors"]


def write_model(
    folder: Path,
    config: Config,
    tensors: Iterable[tuple[str, Tensor]],
    state: Mapping[str, JsonValue],
    comment: str,
    *,
    step: int = 0,
) -> None:
    """Write a run directory with one checkpoint and config.toml.

    tensors: (name in the checkpoint, tensor), read one after the other. state: of the checkpoint, besides step, version
    and config. comment: at the top of config.toml.
    """
    contents = {**state, "step": step, "megatfm": __version__, "config": config.model_dump(mode="json")}
    checkpoint.write_checkpoint_from_iterator(folder / "checkpoints", step, tensors, contents)
    file_io.write_file(folder / "config.toml", [memoryview((comment + to_toml(config)).encode())])


def list_tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name → shape of a model's stored tensors: parameters and persistent buffers."""
    with torch.device("meta"):
        model = build(config)
    return {name: tuple(tensor.shape) for name, tensor in list_checkpoint_tensors(model).items()}


def read_converted_tensors(
    folder: HfFolder | ElectraFolder, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield a folder's tensors under megatfm's names; adds a note to the folder about NaN and infinity.

    shapes: name → expected shape. Raises MegatfmError for a tensor of another shape.
    """
    missing, progress = set(shapes), ProgressLog("converted", len(shapes), "tensor")
    non_finite: list[str] = []
    for mapping in folder.mappings:
        for name, tensor in folder.megatfm_tensors(mapping).items():
            if shapes.get(name) != tuple(tensor.shape):
                raise MegatfmError(
                    f"{folder.path}: {', '.join(mapping.hf)} would give {name} {list(tensor.shape)}, but the model of "
                    f"its config.json has {list(shapes[name]) if name in shapes else 'no such tensor'}"
                )
            missing.discard(name)
            progress.advance()
            non_finite += [name] * (not tensor.isfinite().all())
            yield name, tensor
    if missing:
        raise MegatfmError(f"{folder.name}: no weight mapping gives {min(missing)}: its mappings are incomplete")
    folder.notes += note_non_finite(non_finite)


def note_non_finite(names: Sequence[str]) -> list[str]:
    """Return a note about tensors with NaN or infinity, or none."""
    if not names:
        return []
    return [f"NaN or infinity in {join_first(names, 1)}: the model's outputs may be NaN, too"]


def _check_padding(hf_config: Mapping[str, object], ids: Mapping[str, object]) -> None:
    """Raise UsageError if a RoBERTa, which counts positions from its padding id, has another than its tokenizer."""
    config_pad, tokenizer_pad = hf_config.get("pad_token_id"), ids.get("pad_token_id")
    if config_pad is not None and tokenizer_pad is not None and config_pad != tokenizer_pad:
        raise UsageError(
            f"transformers would count positions from {tokenizer_pad}, the tokenizer's padding id, but this model has "
            f"model.position.offset = {int(str(config_pad)) + 1}: train with model.position.offset = "
            f"{int(str(tokenizer_pad)) + 1}, or 0 for a BERT"
        )


class _CheckpointReader:
    """Reads tensors of a checkpoint in a given order, about `READ_BYTES` at a time, merges adapters and casts."""

    def __init__(self, path: Path, order: Sequence[str], tensors: Mapping[str, Tensor], scale: float) -> None:
        """tensors: on the meta device, in the dtypes to read. scale: of the adapters; 0 without adapters."""
        self.path, self.order, self.tensors, self.scale = path, list(order), tensors, scale
        self._pending: dict[str, Tensor] = {}
        self._progress = ProgressLog("converted", len(order), "tensor")
        self.non_finite: list[str] = []

    def read(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        """Return tensors by name. Each name can be read once."""
        while any(name not in self._pending for name in names):
            self._read_more()
        return {name: self._pending.pop(name) for name in names}

    def _read_more(self) -> None:
        batch = [self.order.pop(0)]
        size = self.tensors[batch[0]].nbytes
        while self.order and (size := size + self.tensors[self.order[0]].nbytes) <= READ_BYTES:
            batch.append(self.order.pop(0))
        self._progress.advance(len(batch))
        adapters = [factor for name in batch for factor in name_factors(name) if self.scale]
        stored = checkpoint.read_tensors(self.path, only={f"model.{name}" for name in (*batch, *adapters)})
        for key, tensor in merge_lora(stored, self.scale):
            name = key.removeprefix("model.")
            self._pending[name] = cast_weights(name, tensor, self.tensors[name].dtype)
            self.non_finite += [name] * (not tensor.isfinite().all())


def cast_weights(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in a dtype. Raises UsageError for a finite value that is infinite there."""
    cast = tensor.to(dtype)
    overflows = cast.isinf() & tensor.isfinite()
    if overflows.any():
        largest, dtype_name = float(tensor[overflows].abs().max()), str(dtype).removeprefix("torch.")
        raise UsageError(
            f"--dtype {dtype_name}: {name} holds {largest:.4g}, beyond the largest {dtype_name}, "
            f"{torch.finfo(dtype).max:.4g}: give --dtype {'bfloat16' if dtype == torch.float16 else 'float32'}"
        )
    return cast


def check_is_new(target: Path) -> None:
    """Raise UsageError unless a target is new or an empty folder, and no link, which a folder can't replace."""
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise UsageError(f"{target}: exists already: give a new folder")


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `target` on success and removed on an error.

    Warns of those that killed conversions left.
    """
    target = target.absolute()
    file_io.make_durable_dirs(target.parent)
    prefix = f".{target.name}.partial-"
    for path in sorted(target.parent.glob(f"{glob.escape(prefix)}*")):
        log.warning("%s: left by a conversion that was killed, or still runs: remove it if none does", path)
    partial = target.with_name(f"{prefix}{secrets.token_hex(4)}")
    file_io.make_dir(partial)
    try:
        yield partial
        file_io.sync_folder(partial)
        file_io.rename(partial, target)
    except BaseException as error:
        file_io.remove_unfinished(partial, error)
        raise
