"""Convert a DeepSpeed universal checkpoint of a transformers model: weights and Adam's state.

`ds_to_universal` writes a folder `zero/NAME` for each parameter, with `fp32.pt`, `exp_avg.pt` and `exp_avg_sq.pt`: for
stages 1 and 2 a dict that holds the tensor, for stage 3 its flat elements. The step count is beside them in `step.pt`,
or for stage 3 in `zero/optimizer_state.pt`. Weight mappings only move elements, so they also convert Adam's state.
"""

import math
import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from pydantic import JsonValue
from torch import Tensor

from megatfm import tokenizers
from megatfm.convert import tokenizer_files
from megatfm.convert.convert import (
    check_is_new,
    format_config_comment,
    list_tensor_shapes,
    new_folder,
    note_non_finite,
    read_converted_tensors,
    write_model,
)
from megatfm.convert.hf_checkpoint import HfFolder
from megatfm.convert.restricted_pickle import Stored, read_torch_file
from megatfm.convert.starting_config import make_branching_config, make_starting_config
from megatfm.convert.weight_mapping import to_hf
from megatfm.errors import MegatfmError, UsageError

ZERO, WEIGHT = "zero", "fp32"
MOMENTS = ("exp_avg", "exp_avg_sq")
MAX_STEPS = 2**53
"""Larger step counts are not exact as floats."""


def is_universal(path: str | Path) -> bool:
    """Return whether a path is a folder that `ds_to_universal` wrote."""
    return (Path(path) / ZERO).is_dir()


def from_universal(source: str | Path, target: str | Path, like: str | Path) -> list[str]:
    """Write a run at `target` with one checkpoint, of the step at which DeepSpeed saved; returns notes for the user.

    like: a Hugging Face folder with the model's config.json and tokenizer. Raises UsageError, MegatfmError; then there
    is no target.
    """
    source, target = Path(source), Path(target)
    if not is_universal(source):
        raise UsageError(
            f"{source}: no universal checkpoint, for it has no folder {ZERO}: make one with `python -m "
            "deepspeed.checkpoint.ds_to_universal --input_folder …/global_stepN --output_folder NEW`"
        )
    check_is_new(target)
    folder = UniversalFolder(source, like)
    step = folder.step()
    with new_folder(target) as partial:
        tokenizer_file, notes = tokenizer_files.import_tokenizer(Path(like), partial)
        started = make_starting_config(target, folder.config, tokenizer_file, folder.max_length)
        config = make_branching_config(started, target, step)
        state: dict[str, JsonValue] = {
            "tokens": 0,
            "precision": "fp32",
            "data": {"position": 0},
            "converted_from": folder.name,
            "tokenizer": tokenizers.load(partial / tokenizer_file).hash if tokenizer_file else None,
        }
        arguments = "THIS_FILE data.train=CORPUS/train name=NEW"
        comment = format_config_comment(f"{folder.name} of DeepSpeed", arguments)
        write_model(partial, config, folder.read_state_tensors(step), state, comment, step=step)
    summary = f"{folder.name}, {len(list_tensor_shapes(folder.config))} tensors with Adam's state of step {step}"
    return [summary, *folder.notes, *notes]


class UniversalFolder(HfFolder):
    """A universal checkpoint with the interface of a Hugging Face folder."""

    def __init__(self, source: Path, like: str | Path) -> None:
        self.source = source
        super().__init__(like)

    def stored_names(self, name: str) -> Mapping[str, str]:
        """Return name of a tensor → its folder."""
        folder = self.source / ZERO
        return {path.parent.name: path.parent.name for path in folder.glob(f"*/{WEIGHT}.pt")}

    def read_tensor(self, name: str) -> Tensor:
        """Read a weight in float32."""
        return self.read_state(name, WEIGHT)

    def read_state(self, name: str, key: str) -> Tensor:
        """Read a weight (`fp32`), or one of Adam's moments of it. Raises MegatfmError if it is missing or doesn't
        fit."""
        file = self.source / ZERO / self.files[name][0] / f"{key}.pt"
        if not os.path.lexists(file):
            raise MegatfmError(
                f"{file.parent}: no {key}.pt: DeepSpeed trained that weight with another optimizer than Adam, or not "
                "at all: convert its Hugging Face folder, which has weights alone, with --to megatfm"
            )
        content = read_torch_file(file)
        stored = content.get("param") if isinstance(content, Mapping) else content
        if not isinstance(stored, Stored):
            raise MegatfmError(f"{file}: holds no tensor")
        tensor, shape = stored.tensor, self._shapes[name]
        if not tensor.is_floating_point():
            raise MegatfmError(f"{file}: holds {tensor.dtype}, not floating-point numbers")
        is_flat = tensor.dim() == 1 and tensor.numel() == math.prod(shape)
        if not is_flat and tuple(tensor.shape) != shape:
            raise MegatfmError(
                f"{file}: holds {list(tensor.shape)}, but the model of {self.path} has {list(shape)}: give the "
                "folder of that very model with --hf-config"
            )
        return tensor.reshape(shape)

    @cached_property
    def _shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name in transformers → shape, from the model's config."""
        tensors = {name: torch.empty(shape, device="meta") for name, shape in list_tensor_shapes(self.config).items()}
        shapes = {name: tuple(tensor.shape) for name, tensor in to_hf(self.mappings, tensors).items()}
        return shapes | {copy: shapes[mapping.hf[0]] for mapping in self.mappings for copy in mapping.tied_names}

    def step(self) -> int:
        """Return Adam's step count. Raises MegatfmError if parameters differ in it, or none has one."""
        counts = {_as_int(read_torch_file(path)) for path in (self.source / ZERO).glob("*/step.pt")}
        state_file = self.source / ZERO / "optimizer_state.pt"
        if not counts and state_file.is_file():
            state = read_torch_file(state_file)
            for key in ("optimizer_state_dict", "state"):
                state = state.get(key, {}) if isinstance(state, Mapping) else {}
            states = state.values() if isinstance(state, Mapping) else ()
            counts = {_as_int(s.get("step")) if isinstance(s, Mapping) else None for s in states}
        if len(counts) != 1 or None in counts:
            raise MegatfmError(
                f"{self.source}: its parameters have {len(counts - {None})} counts of steps, not one: give what "
                "ds_to_universal makes of a run with Adam"
            )
        (step,) = counts
        assert step is not None
        return step

    def read_state_tensors(self, step: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights and optimizer state of a megatfm checkpoint."""
        shapes, non_finite = list_tensor_shapes(self.config), list[str]()
        for name, tensor in read_converted_tensors(self, shapes):
            yield f"model.{name}", tensor
        for mapping in self.mappings:
            for key in MOMENTS:
                moments = mapping.from_hf([self.read_state(name, key) for name in mapping.hf])
                for name, tensor in zip(mapping.megatfm, moments, strict=True):
                    non_finite += [f"{name}'s {key}"] * (not tensor.isfinite().all())
                    yield f"optimizer.{name}.{key}", tensor.contiguous()
            for name in mapping.megatfm:
                yield f"optimizer.{name}.step", torch.tensor(float(step))
        self.notes += note_non_finite(non_finite)


def _as_int(value: Any) -> int | None:
    """Convert a count, perhaps in a tensor, to an integer; None if it is no count."""
    if isinstance(value, Stored):
        value = value.tensor.item() if value.tensor.numel() == 1 else None
    if type(value) not in (int, float) or not 0 <= value < MAX_STEPS or value != int(value):
        return None
    return int(value)
