"""Reading and writing a folder in the Hugging Face format: config.json, and safetensors in one file or several."""

import json
import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatfm.checkpoint import file_io
from megatfm.checkpoint.file_format import DTYPE_NAMES
from megatfm.convert.architecture import (
    ARCHITECTURES,
    OLD_NAMES,
    Architecture,
    architectures_of,
    format_error,
)
from megatfm.convert.weight_mapping import WeightMapping, to_hf
from megatfm.errors import MegatfmError, UsageError

PREPROCESSOR = "preprocessor_config.json"
PIXELS = ("image_mean", "image_std")
"""Keys of preprocessor_config.json that a model of images embeds with."""
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


def is_hf_folder(path: str | Path) -> bool:
    """Whether a path is a folder with a config.json."""
    return (Path(path) / CONFIG).is_file()


class HfFolder:
    """A Hugging Face checkpoint folder. Tensors are read lazily, by the names in its architecture's table."""

    def __init__(self, path: str | Path) -> None:
        """Raises UsageError if megatfm has no such model, MegatfmError if the folder is damaged."""
        self.path = Path(path)
        self.json = read_json(self.path / CONFIG)
        self._open: dict[str, Any] = {}
        remarks = self._take_type_from_tensors()
        try:
            names = architectures_of(self.json)
        except UsageError as error:
            raise UsageError(f"{self.path}: {error}") from None
        stored: Mapping[str, str] | None = None
        missing_names: list[str] = []
        for name in names:
            self._read_config(name)
            stored = self.stored_names(name) if stored is None else stored
            if not (missing := self._match_tensors(stored)):
                break
            missing_names = missing_names or missing
        else:
            raise MegatfmError(f"{self.path}: {missing_names[0]} is not in its files, but {names[0]} has it")
        self.notes = [*remarks, *self._unused_tensors(), *self.architecture.remarks(self.config)]
        if missing_names and self.json.get("architectures"):
            self.notes.insert(
                0, f"opened without its head, for its files lack {_counted(missing_names)} of a {names[0]}"
            )

    def stored_names(self, name: str) -> Mapping[str, str]:
        """Name of a tensor → its file; name: the architecture's."""
        return _weight_map(self.path, name)

    def _take_type_from_tensors(self) -> list[str]:
        """Add the model_type to a config.json that tells nothing of its class; returns a note if it was added."""
        if self.json.get("architectures") or self.json.get("model_type"):
            return []
        stored = self.stored_names("AutoModel")
        for name, kind in OLD_NAMES.items():
            if name in stored:
                self.json = {**self.json, "model_type": kind}
                return [f"its config.json names no class: taken for a {kind}, for its files have {name}"]
        return []

    def _read_config(self, name: str) -> None:
        """Take it for a model of that class."""
        self.name, self.architecture = name, ARCHITECTURES.get(name)
        try:
            pixels = read_pixels(self.path) if PIXELS[0] in self.architecture.keys else {}
            self.config = self.architecture.parse_config(self.json | pixels, name)
        except (ArithmeticError, KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"{self.path / CONFIG}: not a config that megatfm can read: {format_error(error)}"
            ) from None
        except UsageError as error:
            raise UsageError(f"{self.path}: {error}") from None

    def _match_tensors(self, stored: Mapping[str, str]) -> list[str]:
        """Find its tensors in the files; returns those that are missing."""
        self.files = _canonical_names(stored, self.architecture)
        self.config = self.architecture.refine_config(self.config, self.files)
        self.rules = list(self.architecture.rules_for(self.config, self.files))
        return sorted({name for rule in self.rules for name in rule.hf} - self.files.keys())

    def _unused_tensors(self) -> list[str]:
        """Note tensors beside the model: heads of a bare one. Raises MegatfmError for all others."""
        allowed = {name for rule in self.rules for name in (*rule.hf, *rule.tied_names)}
        prefix, beyond = self.architecture.base_model_prefix, sorted(self.files.keys() - allowed)
        further = self.architecture.further(self.json, self.files)
        for name in (name for name in beyond if not any(re.search(pattern, name) for pattern in further)):
            is_head = not name.startswith(prefix) or name.startswith(f"{prefix}pooler.")
            if not (self.architecture.is_base_model and is_head):
                raise MegatfmError(
                    f"{self.path}: {name} is in its files, but no part of a {self.name} that megatfm knows"
                )
        return [f"left there, for it is no part of a {self.name}: {_counted(beyond)}"] * bool(beyond)

    def read_tensor(self, name: str) -> Tensor:
        """A tensor under its name in the table, in its own memory: in the file it may begin anywhere."""
        file, stored = self.files[name]
        try:
            if file not in self._open:
                _check_regular(self.path / file)
                self._open[file] = safe_open(self.path / file, framework="pt", device="cpu")
            return self._open[file].get_tensor(stored).clone()
        except (SafetensorError, OSError) as error:
            raise MegatfmError(f"{self.path / file}: can't read {stored}: {error}") from None

    def megatfm_tensors(self, mapping: WeightMapping) -> Mapping[str, Tensor]:
        """The tensors of a rule under our names. Raises MegatfmError where a copy differs from its original."""
        hf_tensors = [self.read_tensor(name) for name in mapping.hf]
        for copy in mapping.tied_names:
            if copy in self.files and not torch.equal(self.read_tensor(copy), hf_tensors[0]):
                raise MegatfmError(
                    f"{self.path}: {copy} differs from {mapping.hf[0]}, which config.json says it shares: the "
                    "config must say tie_word_embeddings = false, or the file was damaged"
                )
        try:
            return dict(zip(mapping.megatfm, mapping.from_hf(hf_tensors), strict=True))
        except (RuntimeError, ValueError, IndexError):
            shapes = (
                f"{name} {list(tensor.shape)}" for name, tensor in zip(mapping.hf, hf_tensors, strict=True)
            )
            raise MegatfmError(
                f"{self.path}: {', '.join(shapes)} can't be what its config.json describes: its widths or heads differ"
            ) from None


def _check_regular(path: Path) -> None:
    """Raise MegatfmError for a path that is no regular file: opening a FIFO waits for a writer."""
    if path.exists() and not path.is_file():
        raise MegatfmError(f"{path}: no regular file")


def _counted(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises MegatfmError."""
    _check_regular(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MegatfmError(f"{path}: can't read it: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise MegatfmError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise MegatfmError(f"{path}: not a JSON object")
    return content


def read_pixels(folder: Path) -> dict[str, Any]:
    """Mean and deviation of pixels from 0 to 1, as preprocessor_config.json says, if there is one.

    Raises UsageError where pixels are scaled otherwise.
    """
    if not (folder / PREPROCESSOR).is_file():
        return {}
    values = read_json(folder / PREPROCESSOR)
    factor = values.get("rescale_factor") or 1 / 255
    if values.get("do_rescale") is False or not math.isclose(float(factor), 1 / 255, rel_tol=1e-6):
        raise UsageError(
            f"{PREPROCESSOR}: do_rescale = {values.get('do_rescale')}, rescale_factor = {factor}: megatfm divides "
            "pixels by 255: scale image_mean and image_std, and leave both keys out"
        )
    if values.get("do_normalize") is False:
        return {"image_mean": [0.0] * 3, "image_std": [1.0] * 3}
    return {key: values[key] for key in PIXELS if key in values}


def write_preprocessor(folder: Path, hf_config: dict[str, Any]) -> None:
    """Move mean and deviation of pixels out of a config.json-to-be, where it has them, into a file of their own."""
    pixels = {key: hf_config.pop(key) for key in PIXELS if key in hf_config}
    if not pixels:
        return
    side = dict.fromkeys(("height", "width"), hf_config.get("vision_config", hf_config)["image_size"])
    steps = {
        "do_resize": True,
        "size": side,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
    }
    write_json(folder / PREPROCESSOR, {"image_processor_type": "ViTImageProcessor", **steps, **pixels})


def _weight_map(path: Path, name: str) -> Mapping[str, str]:
    """Name of a tensor → its file."""
    if (path / INDEX).is_file():
        weight_map = read_json(path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or any(
            Path(str(file)).name != file for file in weight_map.values()
        ):
            raise MegatfmError(f"{path / INDEX}: no weight_map from names to files beside it")
        return dict(weight_map)
    if (path / WEIGHTS).is_file():
        try:
            with safe_open(path / WEIGHTS, framework="pt", device="cpu") as weights_file:
                return dict.fromkeys(weights_file.keys(), WEIGHTS)
        except (SafetensorError, OSError) as error:
            raise MegatfmError(f"{path / WEIGHTS}: can't read it: {error}") from None
    pickled = (
        f" (pickled weights are never opened; transformers' {name}.from_pretrained({str(path)!r}).save_pretrained(NEW) "
        "writes safetensors)"
    ) * any(path.glob("*.bin"))
    raise UsageError(f"{path}: a config.json, but neither {WEIGHTS} nor {INDEX}{pickled}")


def _canonical_names(files: Mapping[str, str], architecture: Architecture) -> dict[str, tuple[str, str]]:
    """Name in the table → file and name in that file."""
    bare = architecture.base_model_prefix and not any(
        name.startswith(architecture.base_model_prefix) for name in files
    )
    names: dict[str, tuple[str, str]] = {}
    for stored, file in files.items():
        name = f"{architecture.base_model_prefix}{stored}" if bare else stored
        for old, new in architecture.legacy_names:
            name = re.sub(old, new, name)
        if not any(re.search(pattern, name) for pattern in architecture.ignored_tensors):
            names[name] = (file, stored)
    return names


Read = Callable[[Sequence[str]], Mapping[str, Tensor]]
"""Our tensors of some names."""


def write_weights(
    folder: Path, rules: Sequence[WeightMapping], tensors: Mapping[str, Tensor], read: Read, shard_bytes: int
) -> int:
    """Write the tensors that `rules` make, into files of at most `shard_bytes` (or one larger tensor); returns bytes.

    tensors: every tensor on the meta device, from which the layout of the files follows before anything is read.
    """
    hf_tensors = to_hf(rules, tensors)
    shards = split(hf_tensors, shard_bytes)
    total = len(shards)
    names = [WEIGHTS] if total == 1 else [_file(number, total) for number in range(1, total + 1)]
    hf_parts = _converted(rules, read)
    for name, shard in zip(names, shards, strict=True):
        file_io.write_file(folder / name, _parts({key: hf_tensors[key] for key in shard}, hf_parts))
    size = sum(tensor.nbytes for tensor in hf_tensors.values())
    if total > 1:
        weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(folder / INDEX, index)
    return size


def split(hf_tensors: Mapping[str, Tensor], shard_bytes: int) -> list[list[str]]:
    """Names in order, as many a file as fit."""
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


def _converted(rules: Sequence[WeightMapping], read: Read) -> Iterator[Tensor]:
    for rule in rules:
        yield from to_hf([rule], read(rule.megatfm)).values()


def _parts(layout: Mapping[str, Tensor], tensors: Iterator[Tensor]) -> Iterator[memoryview]:
    """Header and data of a safetensors file (the format is in `checkpoint.shard`), tensors read on the way."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in layout.items():
        start, end = end, end + tensor.nbytes
        entries[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    yield memoryview(struct.pack("<Q", len(header)) + header)
    for planned in layout.values():
        tensor = next(tensors)
        assert (tensor.shape, tensor.dtype) == (planned.shape, planned.dtype)
        yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _file(number: int, total: int) -> str:
    return f"model-{number:05d}-of-{total:05d}.safetensors"
