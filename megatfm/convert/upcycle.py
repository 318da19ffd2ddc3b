"""A dense model as a mixture of experts that computes the same (Komatsuzaki et al. 2023; finer: He et al. 2024)."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import JsonValue, ValidationError
from torch import Tensor

from megatfm import checkpoint
from megatfm.checkpoint import file_io
from megatfm.config import Config, ModelConfig, invalid, to_toml
from megatfm.config.ffn import DenseFFNConfig, FFNConfig, MoEConfig
from megatfm.config.key_migrations import migrate
from megatfm.convert.convert import check_is_new, meta_shapes, new_folder
from megatfm.errors import MegatfmError, UsageError
from megatfm.layers.initialisation import Normal, draw
from megatfm.registry import import_foreign_plugins
from megatfm.version import __version__

EXPERT_TENSOR = re.compile(r"(.*\.ffn)\.experts\.([wb])_(gate|up|down)")
ROUTER_STD = 0.02
"""Standard deviation of the routers' initial weights."""


@dataclass(frozen=True)
class Upcycling:
    """The mixture that a dense model becomes.

    experts: copies of its feed-forward network; top_k: how many of them a token goes through; granularity: number G of
    fine-grained experts that each copy is cut into: the model has experts × G, of which a token takes top_k × G; every:
    the last of so many blocks has experts; noise: standard deviation of what is added to weights of experts, a multiple
    of that of the weights; seed: of noise and routers.
    """

    experts: int
    top_k: int = 2
    granularity: int = 1
    every: int = 1
    noise: float = 0.0
    seed: int = 0

    def model(self, dense: ModelConfig) -> ModelConfig:
        """The config of the mixture. Raises UsageError for a model that none can be made of."""
        kinds = dense.layer_kinds
        if any(isinstance(kind.ffn, MoEConfig) for kind in kinds):
            raise UsageError(
                "it has experts already: upcycle a dense model, or go on with its own experts (train --from)"
            )
        if other_names := [kind.ffn.name for kind in kinds if kind.ffn.name != "dense"]:
            raise UsageError(f"model.ffn.name = {other_names[0]!r}: only dense networks can become experts")
        if min(self.experts, self.top_k, self.granularity, self.every) < 1 or self.noise < 0:
            raise UsageError(
                "--experts, --top-k, --granularity and --every are 1 or more, and --noise 0 or more"
            )
        for key, d_ff in _widths(dense).items():
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
                block = {kind: self._block(dense, kind) for kind in dense.layer_type}
                return dense.with_changes({"ffn": self._section(dense.ffn), "layer_type": block})
            blocks = ["dense"] * (self.every - 1) + ["sparse"]
            sparse = {"ffn": self._section(dense.ffn)}
            return dense.with_changes({"layer_types": blocks, "layer_type": {"dense": {}, "sparse": sparse}})
        except ValidationError as error:
            raise invalid("no mixture can be made of it", error) from None

    def _section(self, ffn: FFNConfig) -> dict[str, Any]:
        """The section of the experts that a dense network becomes."""
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

    def _block(self, dense: ModelConfig, kind: str) -> dict[str, Any]:
        """The keys of a kind of blocks, with experts of its own where its network is another than the model's."""
        keys = {key: value for key, value in dense.layer_type[kind].items() if key.partition(".")[0] != "ffn"}
        has_ffn = len(keys) < len(dense.layer_type[kind])
        return keys | ({"ffn": self._section(dense.type_config(kind).ffn)} if has_ffn else {})

    def tensors(
        self, dense: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]
    ) -> Iterator[tuple[str, Tensor]]:
        """The mixture's tensors, one after the other, from the dense model's."""
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
                yield name, self._experts(name, dense[_dense_name(match)], match)
            elif name.endswith(".ffn.router.weight"):
                # The parts of a network are chosen together at first, as they have a router's row in common.
                rows = (self.experts, shape[1])
                router_weight = draw(Normal(ROUTER_STD), self.seed, name, rows, (0, 0), rows)
                yield name, router_weight.repeat_interleave(self.granularity, 0)
            elif name.endswith(".ffn.shares"):
                yield name, torch.full(shape, 1 / shape[0])
            else:
                yield name, dense[name]

    def _experts(self, name: str, tensor: Tensor, match: re.Match[str]) -> Tensor:
        kind, part = match[2], match[3]
        if part == "down" and kind == "b":
            parts = tensor.expand(self.granularity, -1)
        elif (
            part == "down"
        ):  # a token's weights add up to 1 over the parts, and their outputs are to be added
            parts = torch.stack(tensor.chunk(self.granularity, dim=1)) * self.granularity
        else:
            parts = torch.stack(tensor.chunk(self.granularity))
        all_experts = parts.repeat(self.experts, *[1] * (parts.dim() - 1))
        if not self.noise or kind == "b":
            return all_experts
        rows = (len(all_experts), all_experts[0].numel())
        noise = draw(
            Normal(self.noise * float(all_experts.double().std())), self.seed, name, rows, (0, 0), rows
        )
        return (all_experts.double() + noise.view_as(all_experts).double()).to(tensor.dtype)


def _widths(dense: ModelConfig) -> dict[str, int]:
    """d_ff of every kind of blocks, by its key."""
    kinds = {"model.ffn.d_ff": dense} | {
        f"model.layer_type.{k}.ffn.d_ff": dense.type_config(k) for k in dense.layer_type
    }
    return {key: kind.ffn.d_ff for key, kind in kinds.items() if isinstance(kind.ffn, DenseFFNConfig)}


def _dense_name(match: re.Match[str]) -> str:
    return f"{match[1]}.w_{match[3]}.{'weight' if match[2] == 'w' else 'bias'}"


def upcycle(
    source: str | Path, target: str | Path, mixture: Upcycling, *, trust_plugins: bool = False
) -> list[str]:
    """Write a mixture of the dense model at `source`, a run or checkpoint, to the new folder `target`.

    trust_plugins: import the packages that its config names.
    Returns notes for the user. Raises UsageError, MegatfmError; then there is no target.
    """
    source, target = Path(source), Path(target)
    check_is_new(target)
    path = checkpoint.find_checkpoint(source)
    state = checkpoint.read_state(path)
    config = Config.model_validate(migrate(state.get("config")))
    import_foreign_plugins(config.plugins, path, trusted=trust_plugins)
    try:
        model = mixture.model(config.model)
        upcycled = config.with_changes(
            {"model": model, "train.init_from": str(target.absolute()), "train.branch_from": None}
        )
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None
    except ValidationError as error:
        raise invalid(f"{source}: its config doesn't go with a mixture of experts", error) from None
    shapes = meta_shapes(upcycled.model)
    kept_state: dict[str, JsonValue] = {
        key: state[key] for key in ("tokenizer", "begins", "stop") if key in state
    }
    metadata = {**kept_state, "step": 0, "megatfm": __version__, "config": upcycled.model_dump(mode="json")}
    with new_folder(target) as folder:
        tensors = mixture.tensors(_LazyCheckpoint(path), shapes)
        checkpoint.write_checkpoint_from_iterator(
            folder / "checkpoints", 0, ((f"model.{name}", t) for name, t in tensors), metadata
        )
        header = f"# Made by `megatfm convert --to moe` from {source}: go on with `megatfm train --from {target}`.\n\n"
        file_io.write_file(folder / "config.toml", [memoryview((header + to_toml(upcycled)).encode())])
    dropped = max(kind.ffn.dropout for kind in config.model.layer_kinds)
    notes = [f"ffn.dropout = {dropped} is left out: experts have none"] if dropped else []
    return [f"{mixture.experts * mixture.granularity} experts a block, {len(shapes)} tensors", *notes]


class _LazyCheckpoint(Mapping[str, Tensor]):
    """A checkpoint's tensors, each read on use."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __getitem__(self, name: str) -> Tensor:
        return checkpoint.read_tensors(self.path, only={f"model.{name}"})[f"model.{name}"]

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix("model.") for name in checkpoint.names(self.path))

    def __len__(self) -> int:
        return len(checkpoint.names(self.path))
