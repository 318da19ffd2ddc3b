"""Upcycle a dense model to a mixture of experts with the same outputs (Komatsuzaki et al. 2023; He et al. 2024)."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import JsonValue, ValidationError
from torch import Tensor

from megatfm import checkpoint
from megatfm.config import ModelConfig, make_usage_error
from megatfm.config.ffn import DenseFFNConfig, FFNConfig, MoEConfig
from megatfm.config.load import parse_stored_config
from megatfm.convert.convert import check_is_new, list_tensor_shapes, new_folder, write_model
from megatfm.errors import MegatfmError, UsageError
from megatfm.layers.initialisation import Normal, draw
from megatfm.registry import import_foreign_plugins

EXPERT_TENSOR = re.compile(r"(.*\.ffn)\.experts\.([wb])_(gate|up|down)")
ROUTER_STD = 0.02
"""Standard deviation of the routers' initial weights."""


@dataclass(frozen=True)
class Upcycling:
    """Options of upcycling.

    experts: number of copies of the feed-forward network. top_k: copies that a token is routed to. granularity: number
    G of fine-grained experts that each copy is split into; the model has experts × G, and a token uses top_k × G.
    every: one in so many blocks, the last, has experts. noise: standard deviation of noise added to the experts'
    weights, as a multiple of the weights' own. seed: of noise and routers.
    """

    experts: int
    top_k: int = 2
    granularity: int = 1
    every: int = 1
    noise: float = 0.0
    seed: int = 0

    def model(self, dense: ModelConfig) -> ModelConfig:
        """Return the config of the mixture. Raises UsageError for a model that can't be upcycled."""
        kinds = dense.layer_kinds
        if any(isinstance(kind.ffn, MoEConfig) for kind in kinds):
            raise UsageError(
                "it has experts already: upcycle a dense model, or go on with its own experts (train --from)"
            )
        if unsupported := [kind.ffn.name for kind in kinds if kind.ffn.name != "dense"]:
            raise UsageError(f"model.ffn.name = {unsupported[0]!r}: only dense networks can become experts")
        if min(self.experts, self.top_k, self.granularity, self.every) < 1 or not 0 <= self.noise < math.inf:
            raise UsageError("--experts, --top-k, --granularity and --every are 1 or more, --noise is a number from 0")
        for key, d_ff in _list_widths(dense).items():
            if d_ff % self.granularity:
                raise UsageError(
                    f"--granularity {self.granularity} does not divide {key} = {d_ff}: choose "
                    f"{max(g for g in range(1, self.granularity) if d_ff % g == 0)}"
                )
        if self.every > 1 and (dense.layer_types or dense.distinct_layers):
            raise UsageError(
                f"--every {self.every}: the model's blocks differ already, so all get experts: leave it out"
            )
        try:
            if self.every == 1:
                block = {kind: self._make_block_kind(dense, kind) for kind in dense.layer_type}
                return dense.with_changes({"ffn": self._make_section(dense.ffn), "layer_type": block})
            blocks = ["dense"] * (self.every - 1) + ["sparse"]
            sparse = {"ffn": self._make_section(dense.ffn)}
            return dense.with_changes({"layer_types": blocks, "layer_type": {"dense": {}, "sparse": sparse}})
        except ValidationError as error:
            raise make_usage_error("no mixture can be made of it", error) from None

    def _make_section(self, ffn: FFNConfig) -> dict[str, Any]:
        """Return the section of the experts that replace a dense network."""
        assert isinstance(ffn, DenseFFNConfig)
        return {
            "name": "moe",
            "d_ff": ffn.d_ff // self.granularity,
            "activation": ffn.activation,
            "bias": ffn.bias,
            "dropout": 0.0,
            "n_experts": self.experts * self.granularity,
            "top_k": self.top_k * self.granularity,
            "router": {"name": "top_k", "aux_loss_coef": 0.01},
        }

    def _make_block_kind(self, dense: ModelConfig, kind: str) -> dict[str, Any]:
        """Return the keys of a layer type, with its own section of experts if its network differs from the model's."""
        keys = {key: value for key, value in dense.layer_type[kind].items() if key.partition(".")[0] != "ffn"}
        has_ffn = len(keys) < len(dense.layer_type[kind])
        return keys | ({"ffn": self._make_section(dense.type_config(kind).ffn)} if has_ffn else {})

    def tensors(
        self, dense: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the mixture's tensors from the dense model's. shapes: name → shape. Raises MegatfmError if one
        differs."""
        for name, tensor in self._build_tensors(dense, shapes):
            if tuple(tensor.shape) != shapes[name]:
                raise MegatfmError(
                    f"{name} would be {list(tensor.shape)}, but {list(shapes[name])} in the mixture's model: report it"
                )
            yield name, tensor

    def _build_tensors(
        self, dense: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]
    ) -> Iterator[tuple[str, Tensor]]:
        for name, shape in shapes.items():
            if match := EXPERT_TENSOR.fullmatch(name):
                dense_name = f"{match[1]}.w_{match[3]}.{'weight' if match[2] == 'w' else 'bias'}"
                yield name, self._stack_experts(name, dense[dense_name], match)
            elif name.endswith(".ffn.router.weight"):
                # The parts of a copy share a row of the router, so they are chosen together at first.
                rows = (self.experts, shape[1])
                router_weight = draw(Normal(ROUTER_STD), self.seed, name, rows, (0, 0), rows)
                yield name, router_weight.repeat_interleave(self.granularity, 0)
            elif name.endswith(".ffn.shares"):
                yield name, torch.full(shape, 1 / shape[0])
            else:
                yield name, dense[name]

    def _stack_experts(self, name: str, tensor: Tensor, match: re.Match[str]) -> Tensor:
        """Return a stacked tensor of experts [E, …] from the dense tensor."""
        is_bias, projection = match[2] == "b", match[3]
        if projection == "down" and is_bias:
            expert_slices = tensor.expand(self.granularity, -1)
        elif projection == "down":  # routing weights average the parts' outputs, which should be summed
            expert_slices = torch.stack(tensor.chunk(self.granularity, dim=1)) * self.granularity
        else:
            expert_slices = torch.stack(tensor.chunk(self.granularity))
        stacked = expert_slices.repeat(self.experts, *[1] * (expert_slices.dim() - 1))
        if not self.noise or is_bias:
            return stacked
        shape = (len(stacked), stacked[0].numel())
        std = self.noise * float(stacked.double().std())
        noise = draw(Normal(std), self.seed, name, shape, (0, 0), shape)
        return (stacked.double() + noise.view_as(stacked).double()).to(tensor.dtype)


def _list_widths(dense: ModelConfig) -> dict[str, int]:
    """Return config key → d_ff of each layer type."""
    kinds = {"model.ffn.d_ff": dense} | {
        f"model.layer_type.{k}.ffn.d_ff": dense.type_config(k) for k in dense.layer_type
    }
    return {key: kind.ffn.d_ff for key, kind in kinds.items() if isinstance(kind.ffn, DenseFFNConfig)}


def upcycle(source: str | Path, target: str | Path, mixture: Upcycling, *, trust_plugins: bool = False) -> list[str]:
    """Upcycle the dense model at `source`, a run or checkpoint, to the new folder `target`; returns notes for the user.

    trust_plugins: import the packages that its config names. Raises UsageError, MegatfmError; then there is no target.
    """
    source, target = Path(source), Path(target)
    check_is_new(target)
    path = checkpoint.find_checkpoint(source)
    state = checkpoint.read_state(path)
    config = parse_stored_config(path, state)
    import_foreign_plugins(config.plugins, path, trusted=trust_plugins)
    if config.model.lora is not None:
        raise UsageError(
            f"{source}: its model has adapters (model.lora), and those of its feed-forward networks would be lost: "
            f"merge them first, megatfm convert {source} MERGED --to megatfm"
        )
    dense = _LazyCheckpoint(path)
    checkpoint.check_tensor_names(path, dense, list_tensor_shapes(config.model))
    try:
        model = mixture.model(config.model)
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None
    changes = {"model": model, "train.init_from": str(target.absolute()), "train.branch_from": None}
    try:
        upcycled = config.with_changes(changes)
    except UsageError as error:
        raise UsageError(f"{source}: its config doesn't go with a mixture of experts: {error}") from None
    shapes = list_tensor_shapes(upcycled.model)
    kept_state: dict[str, JsonValue] = {key: state[key] for key in ("tokenizer", "begins", "stop") if key in state}
    comment = f"# Made by `megatfm convert --to moe` from {source}: go on with `megatfm train --from {target}`.\n\n"
    with new_folder(target) as folder:
        tensors = mixture.tensors(dense, shapes)
        write_model(folder, upcycled, ((f"model.{name}", t) for name, t in tensors), kept_state, comment)
    dropped = max(kind.ffn.dropout for kind in config.model.layer_kinds)
    notes = [f"ffn.dropout = {dropped} is left out: experts have none"] if dropped else []
    return [f"{mixture.experts * mixture.granularity} experts a block, {len(shapes)} tensors", *notes]


class _LazyCheckpoint(Mapping[str, Tensor]):
    """Name → tensor of a checkpoint, read on use."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __getitem__(self, name: str) -> Tensor:
        return checkpoint.read_tensors(self.path, only={f"model.{name}"})[f"model.{name}"]

    def __iter__(self) -> Iterator[str]:
        names = checkpoint.read_tensor_specs(self.path)
        return (name.removeprefix("model.") for name in names if name.startswith("model."))

    def __len__(self) -> int:
        return len(list(iter(self)))
