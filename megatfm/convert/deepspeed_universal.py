"""DeepSpeed's universal checkpoints, of a model of transformers: weights and Adam's state become a megatfm checkpoint.

`ds_to_universal` writes a folder `zero/NAME` for each parameter, with `fp32.pt`, `exp_avg.pt` and `exp_avg_sq.pt`: of
stages 1 and 2 a table that holds the tensor, of stage 3 its elements alone. The count of steps is beside them in
`step.pt`, or for stage 3 in `zero/optimizer_state.pt`. Rules between both sides' tensors are linear, and move elements,
so they hold for Adam's state as for weights.
"""

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import JsonValue
from torch import Tensor

from megatfm import checkpoint, tokenizers
from megatfm.checkpoint import file_io
from megatfm.config import to_toml
from megatfm.convert import convert, tokenizer_files
from megatfm.convert.convert import check_is_new, converted_tensors, meta_shapes, new_folder, note_non_finite
from megatfm.convert.hf_checkpoint import HfFolder
from megatfm.convert.restricted_pickle import Stored, read
from megatfm.convert.starting_config import branching_config, starting_config
from megatfm.convert.weight_mapping import WeightMapping
from megatfm.errors import MegatfmError, UsageError
from megatfm.version import __version__

ZERO, WEIGHT = "zero", "fp32"
MOMENTS = ("exp_avg", "exp_avg_sq")
MOST_STEPS = 2**53
"""Counts from here on are no whole numbers as floats."""


def is_universal(path: str | Path) -> bool:
    """Whether a path is a folder that `ds_to_universal` has made."""
    return (Path(path) / ZERO).is_dir()


def from_universal(source: str | Path, target: str | Path, like: str | Path) -> list[str]:
    """Write a run at `target` with one checkpoint, that of the step at which DeepSpeed saved.

    like: a Hugging Face folder with the config.json, and the tokenizer, of the model. Returns notes for the user.
    Raises UsageError, MegatfmError; then there is no target.
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
        tokenizer_file, notes = tokenizer_files.to_megatfm(Path(like), partial)
        length = folder.json.get(folder.architecture.max_length_key) or folder.config.position.limit
        config = branching_config(
            starting_config(target, folder.config, tokenizer_file, length), target, step
        )
        state: dict[str, JsonValue] = {
            "step": step,
            "tokens": 0,
            "precision": "fp32",
            "data": {"position": 0},
            "megatfm": __version__,
            "converted_from": folder.name,
            "config": config.model_dump(mode="json"),
            "tokenizer": tokenizers.load(partial / tokenizer_file).hash if tokenizer_file else None,
        }
        checkpoint.write_checkpoint_from_iterator(
            partial / "checkpoints", step, folder.state_tensors(step), state
        )
        arguments = "THIS_FILE data.train=CORPUS/train name=NEW"
        header = convert.config_comment(f"{folder.name} of DeepSpeed", arguments).encode()
        file_io.write_file(partial / "config.toml", [memoryview(header + to_toml(config).encode())])
    summary = f"{folder.name}, {len(meta_shapes(folder.config))} tensors with Adam's state of step {step}"
    return [summary, *folder.notes, *notes]


class UniversalFolder(HfFolder):
    """The tensors of a universal checkpoint, under the names that the table of its architecture uses."""

    def __init__(self, source: Path, like: str | Path) -> None:
        self.source = source
        super().__init__(like)

    def stored_names(self, name: str) -> Mapping[str, str]:
        """Name of a tensor → its folder."""
        folder = self.source / ZERO
        return {path.parent.name: path.parent.name for path in folder.glob(f"*/{WEIGHT}.pt")}

    def read_tensor(self, name: str) -> Tensor:
        """A weight, as DeepSpeed's optimizer moves it."""
        return self.tensor(name, WEIGHT)

    def tensor(self, name: str, key: str) -> Tensor:
        """A weight, or one of Adam's moments of it. Raises MegatfmError."""
        file = self.source / ZERO / self.files[name][0] / f"{key}.pt"
        if not os.path.lexists(file):
            raise MegatfmError(
                f"{file.parent}: no {key}.pt: DeepSpeed trained that weight with another optimizer than Adam, or not "
                "at all: convert its Hugging Face folder, which has weights alone, with --to megatfm"
            )
        content = read(file)
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

    @property
    def _shapes(self) -> Mapping[str, tuple[int, ...]]:
        if not hasattr(self, "_known"):
            meta_tensors = {
                name: torch.empty(shape, device="meta") for name, shape in meta_shapes(self.config).items()
            }
            self._known = {
                hf_name: tuple(tensor.shape)
                for rule in self.rules
                for hf_name, tensor in zip(
                    rule.hf, rule.to_hf([meta_tensors[o] for o in rule.megatfm]), strict=True
                )
            }
            self._known |= {copy: self._known[rule.hf[0]] for rule in self.rules for copy in rule.tied_names}
        return self._known

    def step(self) -> int:
        """Steps of Adam. Raises MegatfmError where parameters differ in it, or none has one."""
        counts = {_as_int(read(path)) for path in (self.source / ZERO).glob("*/step.pt")}
        together = self.source / ZERO / "optimizer_state.pt"
        if not counts and together.is_file():
            table = read(together)
            for key in ("optimizer_state_dict", "state"):
                table = table.get(key, {}) if isinstance(table, Mapping) else {}
            states = table.values() if isinstance(table, Mapping) else ()
            counts = {_as_int(s.get("step")) if isinstance(s, Mapping) else None for s in states}
        if len(counts) != 1 or None in counts:
            raise MegatfmError(
                f"{self.source}: its parameters have {len(counts - {None})} counts of steps, not one: give what "
                "ds_to_universal makes of a run with Adam"
            )
        (step,) = counts
        assert step is not None
        return step

    def state_tensors(self, step: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a megatfm checkpoint, one after the other."""
        shapes, non_finite = meta_shapes(self.config), list[str]()
        for name, tensor in converted_tensors(self, shapes):
            yield f"model.{name}", tensor
        for rule in self.rules:
            for key in MOMENTS:
                for name, tensor in self._moments(rule, key):
                    non_finite += [f"{name}'s {key}"] * (not tensor.isfinite().all())
                    yield f"optimizer.{name}.{key}", tensor
            for name in rule.megatfm:
                yield f"optimizer.{name}.step", torch.tensor(float(step))
        self.notes += note_non_finite(non_finite)

    def _moments(self, rule: WeightMapping, key: str) -> Iterator[tuple[str, Tensor]]:
        tensors = rule.from_hf([self.tensor(name, key) for name in rule.hf])
        yield from zip(rule.megatfm, (tensor.contiguous() for tensor in tensors), strict=True)


def _as_int(value: Any) -> int | None:
    """A count that may be in a tensor; None for what counts nothing."""
    if isinstance(value, Stored):
        value = value.tensor.item() if value.tensor.numel() == 1 else None
    if type(value) not in (int, float) or not 0 <= value < MOST_STEPS or value != int(value):
        return None
    return int(value)
