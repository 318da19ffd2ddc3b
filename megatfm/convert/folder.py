"""A folder in the Hugging Face format: config.json, and safetensors in one file or several with an index."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatfm.convert.registry import Architecture, architecture_of, reason
from megatfm.convert.table import Rule
from megatfm.errors import MegatfmError, UsageError

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


def is_hf_folder(path: str | Path) -> bool:
    """Whether a path is a folder with a config.json."""
    return (Path(path) / CONFIG).is_file()


class HfFolder:
    """What is in it, under the names that its architecture's table uses; tensors are read when asked for."""

    def __init__(self, path: str | Path) -> None:
        """Raises UsageError where it can't be a model of ours, MegatfmError where it is damaged."""
        self.path = Path(path)
        self.json = read_json(self.path / CONFIG)
        self.name, self.architecture = architecture_of(self.json)
        try:
            self.config = self.architecture.config(self.json, self.name)
        except (ArithmeticError, KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"{self.path / CONFIG}: not a config that megatfm can read: {reason(error)}"
            ) from None
        except UsageError as error:
            raise UsageError(f"{self.path}: {error}") from None
        self.rules = list(self.architecture.rules(self.config))
        self.files = _place(self.path, self.architecture)
        self._open: dict[str, Any] = {}
        self._check_names()

    def get(self, name: str) -> Tensor:
        """A tensor under the name that the table has, in memory of its own: in the file it may begin anywhere."""
        file, stored = self.files[name]
        try:
            if file not in self._open:
                self._open[file] = safe_open(self.path / file, framework="pt", device="cpu")
            return self._open[file].get_tensor(stored).clone()
        except (SafetensorError, OSError) as error:
            raise MegatfmError(f"{self.path / file}: can't read {stored}: {error}") from None

    def ours(self, rule: Rule) -> Mapping[str, Tensor]:
        """The tensors of a rule under our names. Raises MegatfmError where a copy differs from its original."""
        theirs = [self.get(name) for name in rule.theirs]
        for copy in rule.copies:
            if copy in self.files and not torch.equal(self.get(copy), theirs[0]):
                raise MegatfmError(
                    f"{self.path}: {copy} differs from {rule.theirs[0]}, which config.json says it shares: the "
                    "config must say tie_word_embeddings = false, or the file was damaged"
                )
        try:
            return dict(zip(rule.ours, rule.back(theirs), strict=True))
        except (RuntimeError, ValueError, IndexError):
            shapes = (
                f"{name} {list(tensor.shape)}" for name, tensor in zip(rule.theirs, theirs, strict=True)
            )
            raise MegatfmError(
                f"{self.path}: {', '.join(shapes)} can't be what its config.json describes: its widths or heads differ"
            ) from None

    def _check_names(self) -> None:
        wanted = {name for rule in self.rules for name in rule.theirs}
        allowed = wanted.union(*(rule.copies for rule in self.rules))
        for missing in sorted(wanted - self.files.keys()):
            raise MegatfmError(f"{self.path}: {missing} is not in its files, but {self.name} has it")
        for beyond in sorted(self.files.keys() - allowed):
            raise MegatfmError(
                f"{self.path}: {beyond} is in its files, but no part of a {self.name} that megatfm knows"
            )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises MegatfmError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MegatfmError(f"{path}: can't read it: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise MegatfmError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise MegatfmError(f"{path}: not a JSON object")
    return content


def _place(path: Path, architecture: Architecture) -> dict[str, tuple[str, str]]:
    """Name in the table → file and name in that file."""
    if (path / INDEX).is_file():
        listed = read_json(path / INDEX).get("weight_map")
        if not isinstance(listed, dict) or any(Path(str(file)).name != file for file in listed.values()):
            raise MegatfmError(f"{path / INDEX}: no weight_map from names to files beside it")
        files: Mapping[str, str] = listed
    elif (path / WEIGHTS).is_file():
        try:
            with safe_open(path / WEIGHTS, framework="pt", device="cpu") as opened:
                files = dict.fromkeys(opened.keys(), WEIGHTS)
        except (SafetensorError, OSError) as error:
            raise MegatfmError(f"{path / WEIGHTS}: can't read it: {error}") from None
    else:
        pickled = " (pickled weights are never opened: save it anew with transformers)" * any(
            path.glob("*.bin")
        )
        raise UsageError(f"{path}: a config.json, but neither {WEIGHTS} nor {INDEX}{pickled}")
    return _named(files, architecture)


def _named(files: Mapping[str, str], architecture: Architecture) -> dict[str, tuple[str, str]]:
    bare = architecture.prefix and not any(name.startswith(architecture.prefix) for name in files)
    found: dict[str, tuple[str, str]] = {}
    for stored, file in files.items():
        name = f"{architecture.prefix}{stored}" if bare else stored
        for old, new in architecture.spellings:
            name = re.sub(old, new, name)
        if not any(re.search(pattern, name) for pattern in architecture.ignored):
            found[name] = (file, stored)
    return found
