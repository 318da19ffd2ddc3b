"""Read and write folders in the Hugging Face format: config.json, and safetensors in one or several files."""

import json
import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import JsonValue
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatfm.checkpoint import file_io
from megatfm.checkpoint.file_format import DTYPE_NAMES
from megatfm.convert.architecture import (
    ARCHITECTURES,
    MODEL_TYPE_BY_TENSOR,
    Architecture,
    format_error,
    list_candidates,
)
from megatfm.convert.hf_values import PIXEL_KEYS
from megatfm.convert.weight_mapping import WeightMapping, to_hf
from megatfm.errors import MegatfmError, UsageError
from megatfm.models.dtypes import DTYPES
from megatfm.terminal import join_first

PREPROCESSOR = "preprocessor_config.json"
READ_DTYPES = [DTYPE_NAMES[dtype] for dtype in DTYPES.values()]
"""Names in safetensors files of the dtypes that weights are read in."""
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


def is_hf_folder(path: str | Path) -> bool:
    """Return whether a path is a folder with a config.json."""
    return (Path(path) / CONFIG).is_file()


def stamp_weights(folder: Path) -> dict[str, JsonValue]:
    """Return file name → [bytes, time of the last change in ns] of a folder's weights, which other content changes."""
    stats = {path.name: path.stat() for path in sorted(folder.glob("*.safetensors"))}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}


class HfFolder:
    """Checkpoint folder in the Hugging Face format, whose tensors are read on use."""

    def __init__(self, path: str | Path) -> None:
        """Open a folder. Raises UsageError if megatfm has no such model, MegatfmError if the folder is damaged."""
        self.path = Path(path)
        self.json = read_json_object(self.path / CONFIG)
        self._open: dict[str, Any] = {}
        model_type_note = self._infer_model_type()
        try:
            names = list_candidates(self.json)
        except UsageError as error:
            raise UsageError(f"{self.path}: {error}") from None
        file_by_tensor: Mapping[str, str] | None = None
        missing_names: list[str] = []
        for name in names:
            self._read_config(name)
            file_by_tensor = self.stored_names(name) if file_by_tensor is None else file_by_tensor
            if not (missing := self._match_tensors(file_by_tensor)):
                break
            missing_names = missing_names or missing
        else:
            raise MegatfmError(f"{self.path}: {missing_names[0]} is not in its files, but {names[0]} has it")
        self.notes = [*model_type_note, *self._note_unused_tensors(), *self.architecture.notes(self.config)]
        if missing_names and self.json.get("architectures"):
            self.notes.insert(
                0, f"opened without its head: its files lack {join_first(missing_names, 3)} of a {names[0]}"
            )

    @property
    def max_length(self) -> int | None:
        """Tokens of the longest text for which the model was made; None: unknown."""
        length: int | None = self.json.get(self.architecture.max_length_key) or self.config.position.limit
        return length

    def stored_names(self, name: str) -> Mapping[str, str]:
        """Return tensor name → file; name: of the architecture."""
        return _read_weight_map(self.path, name)

    def _infer_model_type(self) -> list[str]:
        """Infer model_type from tensor names if config.json names neither it nor a class; returns a note if so."""
        if self.json.get("architectures") or self.json.get("model_type"):
            return []
        file_by_tensor = self.stored_names("AutoModel")
        for name, model_type in MODEL_TYPE_BY_TENSOR.items():
            if name in file_by_tensor:
                self.json = {**self.json, "model_type": model_type}
                return [f"its config.json names no class: taken for a {model_type}, since its files have {name}"]
        return []

    def _read_config(self, name: str) -> None:
        """Read config.json as that of an architecture."""
        self.name, self.architecture = name, ARCHITECTURES.get(name)
        try:
            pixels = read_pixel_normalization(self.path) if PIXEL_KEYS[0] in self.architecture.keys else {}
            self.config = self.architecture.parse_config(self.json | pixels, name)
        except (ArithmeticError, KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"{self.path / CONFIG}: not a config that megatfm can read: {format_error(error)}"
            ) from None
        except UsageError as error:
            raise UsageError(f"{self.path}: {error}") from None

    def _match_tensors(self, file_by_tensor: Mapping[str, str]) -> list[str]:
        """Match the architecture's tensors with the files'; returns the names of missing ones."""
        self.files = _map_canonical_names(file_by_tensor, self.architecture)
        self.config = self.architecture.refine_config(self.config, self.files)
        self.mappings = list(self.architecture.choose_mappings(self.config, self.files))
        return sorted({name for mapping in self.mappings for name in mapping.hf} - self.files.keys())

    def _note_unused_tensors(self) -> list[str]:
        """Return a note about stored heads of a bare model. Raises MegatfmError for other unknown tensors."""
        allowed = {name for mapping in self.mappings for name in (*mapping.hf, *mapping.tied_names)}
        prefix, unexpected = self.architecture.base_model_prefix, sorted(self.files.keys() - allowed)
        unused_patterns = self.architecture.unused_tensors(self.json, self.files)
        for name in unexpected:
            if any(re.search(pattern, name) for pattern in unused_patterns):
                continue
            is_head = not name.startswith(prefix) or name.startswith(f"{prefix}pooler.")
            if not (self.architecture.is_base_model and is_head):
                raise MegatfmError(
                    f"{self.path}: {name} is in its files, but is no weight of a {self.name} that megatfm knows"
                )
        return [f"not read, as it belongs to no {self.name}: {join_first(unexpected, 3)}"] * bool(unexpected)

    def read_tensor(self, name: str) -> Tensor:
        """Read a tensor by its name in the mappings, into aligned memory. Raises MegatfmError."""
        file, stored_name = self.files[name]
        try:
            if file not in self._open:
                _check_regular(self.path / file)
                self._open[file] = safe_open(self.path / file, framework="pt", device="cpu")
            dtype = self._open[file].get_slice(stored_name).get_dtype()
            if dtype not in READ_DTYPES:
                raise UsageError(
                    f"{self.path / file}: {stored_name} is stored as {dtype}, and megatfm reads "
                    f"{', '.join(READ_DTYPES)}: dequantise the model first"
                )
            return self._open[file].get_tensor(stored_name).clone()
        except (SafetensorError, OSError) as error:
            raise MegatfmError(f"{self.path / file}: can't read {stored_name}: {error}") from None

    def megatfm_tensors(self, mapping: WeightMapping) -> Mapping[str, Tensor]:
        """Read the tensors of a mapping under megatfm's names. Raises MegatfmError if tied tensors differ."""
        hf_tensors = [self.read_tensor(name) for name in mapping.hf]
        for copy in mapping.tied_names:
            if copy in self.files and not torch.equal(self.read_tensor(copy), hf_tensors[0]):
                raise MegatfmError(
                    f"{self.path}: {copy} differs from {mapping.hf[0]}, though config.json ties them: set "
                    "tie_word_embeddings = false, or replace the damaged file"
                )
        try:
            return dict(zip(mapping.megatfm, mapping.from_hf(hf_tensors), strict=True))
        except (RuntimeError, ValueError, IndexError):
            shapes = (f"{name} {list(tensor.shape)}" for name, tensor in zip(mapping.hf, hf_tensors, strict=True))
            raise MegatfmError(
                f"{self.path}: {', '.join(shapes)} do not fit its config.json: its widths or heads differ"
            ) from None


def _check_regular(path: Path) -> None:
    """Raise MegatfmError for a path that is not a regular file: opening a FIFO would wait for a writer."""
    if path.exists() and not path.is_file():
        raise MegatfmError(f"{path}: not a regular file")


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises MegatfmError if there is none."""
    _check_regular(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise MegatfmError(f"{path}: can't read it: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise MegatfmError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise MegatfmError(f"{path}: not a JSON object")
    return content


def read_pixel_normalization(folder: Path) -> dict[str, Any]:
    """Read mean and standard deviation of pixels in [0, 1] from preprocessor_config.json, if there is one.

    Raises UsageError if it scales pixels in another way.
    """
    if not (folder / PREPROCESSOR).is_file():
        return {}
    values = read_json_object(folder / PREPROCESSOR)
    factor = values.get("rescale_factor") or 1 / 255
    is_usual = isinstance(factor, int | float) and math.isclose(factor, 1 / 255, rel_tol=1e-6)
    if values.get("do_rescale") is False or not is_usual:
        raise UsageError(
            f"{PREPROCESSOR}: do_rescale = {values.get('do_rescale')}, rescale_factor = {factor}: megatfm divides "
            "pixels by 255: rescale image_mean and image_std, and remove both keys"
        )
    if values.get("do_normalize") is False:
        return {"image_mean": [0.0] * 3, "image_std": [1.0] * 3}
    return {key: values[key] for key in PIXEL_KEYS if key in values}


def _read_weight_map(path: Path, name: str) -> Mapping[str, str]:
    """Return tensor name → file, of the one file if there is an index, too, as transformers does.

    name: of the architecture, for errors.
    """
    if (path / WEIGHTS).is_file():
        try:
            with safe_open(path / WEIGHTS, framework="pt", device="cpu") as weights_file:
                return dict.fromkeys(weights_file.keys(), WEIGHTS)
        except (SafetensorError, OSError) as error:
            raise MegatfmError(f"{path / WEIGHTS}: can't read it: {error}") from None
    if (path / INDEX).is_file():
        weight_map = read_json_object(path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or any(Path(str(file)).name != file for file in weight_map.values()):
            raise MegatfmError(f"{path / INDEX}: has no weight_map from tensor names to files in its folder")
        return dict(weight_map)
    pickled = (
        f" (pickled weights are never opened; transformers' {name}.from_pretrained({str(path)!r}).save_pretrained(NEW) "
        "writes safetensors)"
    ) * any(path.glob("*.bin"))
    raise UsageError(f"{path}: has a config.json, but neither {WEIGHTS} nor {INDEX}{pickled}")


def _map_canonical_names(files: Mapping[str, str], architecture: Architecture) -> dict[str, tuple[str, str]]:
    """Return name in the mappings → file and name in that file."""
    is_bare = architecture.base_model_prefix and not any(
        name.startswith(architecture.base_model_prefix) for name in files
    )
    names: dict[str, tuple[str, str]] = {}
    for stored_name, file in files.items():
        name = f"{architecture.base_model_prefix}{stored_name}" if is_bare else stored_name
        for old, new in architecture.legacy_names:
            name = re.sub(old, new, name)
        if not any(re.search(pattern, name) for pattern in architecture.ignored_tensors):
            names[name] = (file, stored_name)
    return names


ReadTensors = Callable[[Sequence[str]], Mapping[str, Tensor]]
"""Reads megatfm's tensors by name."""


def write_weights(
    folder: Path, mappings: Sequence[WeightMapping], tensors: Mapping[str, Tensor], read: ReadTensors, shard_bytes: int
) -> int:
    """Write converted tensors into files of at most `shard_bytes` (or one larger tensor); returns their bytes.

    tensors: all tensors on the meta device, from which the layout of the files is planned before anything is read.
    """
    hf_tensors = to_hf(mappings, tensors)
    shards = split_by_size(hf_tensors, shard_bytes)
    total = len(shards)
    names = [f"model-{index:05d}-of-{total:05d}.safetensors" for index in range(1, total + 1)]
    names = [WEIGHTS] if total == 1 else names
    converted = (tensor for mapping in mappings for tensor in to_hf([mapping], read(mapping.megatfm)).values())
    for name, shard in zip(names, shards, strict=True):
        file_io.write_file(folder / name, _iter_safetensors_chunks({key: hf_tensors[key] for key in shard}, converted))
    size = sum(tensor.nbytes for tensor in hf_tensors.values())
    if total > 1:
        weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(folder / INDEX, index)
    return size


def split_by_size(hf_tensors: Mapping[str, Tensor], shard_bytes: int) -> list[list[str]]:
    """Split names in order into files, each with as many tensors as fit."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in hf_tensors.items():
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.nbytes
    return shards


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write a new JSON file and sync it."""
    file_io.write_file(path, [memoryview((json.dumps(content, indent=2) + "\n").encode())])


def _iter_safetensors_chunks(layout: Mapping[str, Tensor], tensors: Iterator[Tensor]) -> Iterator[memoryview]:
    """Yield header and data of a safetensors file (see `checkpoint.file_format`), reading tensors on the way."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in layout.items():
        start, end = end, end + tensor.nbytes
        entries[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    yield memoryview(struct.pack("<Q", len(header)) + header)
    for planned in layout.values():
        tensor = next(tensors)
        assert (tensor.shape, tensor.dtype) == (planned.shape, planned.dtype)
        yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
