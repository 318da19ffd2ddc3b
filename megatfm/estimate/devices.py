"""Devices, links and nodes: small tables with sources (`devices.toml`); a user's file may add to them."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from megatfm.errors import UsageError
from megatfm.registry import did_you_mean

GIB = 2**30
NODE = "here"
"""Name of the calibrated machine, as device and as node."""
EXAMPLE = 'a table [device.NAME] with the keys of those in megatfm/estimate/devices.toml, or extends = "h100"'


@dataclass(frozen=True)
class Device:
    """One GPU. flops: peak by precision, dense. Efficiencies are shares of a peak that large operations reach.

    tile: rows and columns of a matmul that one multiprocessor computes at a time. launch_seconds: shortest kernel.
    host_seconds: time of the host to launch a kernel. reserved_gib: memory of CUDA, its libraries, NCCL and fragments.
    attention_backward: rate of attention's backward pass over its forward pass (FlashAttention 2; Dao 2023, figures 5
    and 6). compiles: whether `train.compile = "auto"` compiles there.

    Measured (`calibrate.py`): products: precision → (m, n, k, seconds) of matmuls; moves: (bytes, seconds) of in-place
    additions; operators: time as a multiple of an addition that moves as many bytes.
    """

    key: str
    name: str
    memory_gib: float
    flops: Mapping[str, float]
    memory_bandwidth: float
    multiprocessors: int
    tile: tuple[int, int]
    matmul_efficiency: float
    attention_efficiency: float
    memory_efficiency: float
    launch_seconds: float
    host_seconds: float
    reserved_gib: float
    source: str
    attention_backward: float = 0.85
    compiles: bool = True
    products: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)
    moves: Sequence[Sequence[float]] = ()
    operators: Mapping[str, float] = field(default_factory=dict)

    @property
    def memory_bytes(self) -> float:
        """Bytes of memory that the driver offers."""
        return self.memory_gib * GIB

    def peak(self, precision: str) -> float:
        """Return the dense FLOP/s in a `train.precision`. Raises UsageError for one that the device lacks."""
        key = "fp8" if precision.startswith("fp8") else precision
        if key not in self.flops:
            raise UsageError(
                f"train.precision = {precision!r}: {self.name} has no {key} (devices.toml): set "
                f"train.precision = {'bf16' if 'bf16' in self.flops else next(iter(self.flops))!r}"
            )
        return self.flops[key]


@dataclass(frozen=True)
class Link:
    """Connection of a GPU to others, in one direction. bandwidth: bytes a second; efficiency: share of it that
    collectives reach; latency: seconds of one step of a ring."""

    name: str
    bandwidth: float
    efficiency: float
    latency: float

    @property
    def rate(self) -> float:
        """Bytes a second that collectives reach."""
        return self.bandwidth * self.efficiency


@dataclass(frozen=True)
class Node:
    """A machine: its GPUs, the link among them, each GPU's network to other machines, and its share of the disk."""

    key: str
    gpus: int
    within: Link
    between: Link
    disk_bandwidth: float
    source: str


@dataclass(frozen=True)
class Cluster:
    """GPUs of one kind in nodes of one kind."""

    device: Device
    node: Node
    gpus: int

    @property
    def nodes(self) -> int:
        """Number of nodes; the last may not be full."""
        return -(-self.gpus // self.node.gpus)

    def __str__(self) -> str:
        return f"{self.gpus:,} × {self.device.name} on {self.nodes:,} node{'s' * (self.nodes > 1)} of {self.node.gpus}"


def load_cluster(
    device: str,
    gpus: int,
    node: str | None = None,
    gpus_per_node: int | None = None,
    hardware: Path | None = None,
) -> Cluster:
    """Look up a cluster. hardware: a user's file, whose tables take precedence. Raises UsageError for unknown names."""
    tables = _tables(hardware)
    if gpus < 1:
        raise UsageError(f"--gpus {gpus}: choose 1 or more")
    gpu = _device(tables["device"], device)
    node = node or tables["default_node"].get(device) or next(iter(tables["node"]))
    section = _get(tables["node"], node, "--node")
    try:
        within, between = Link(**section.pop("within")), Link(**section.pop("between"))
        machine = Node(key=node, within=within, between=between, **section)
    except TypeError as error:
        raise UsageError(f"[node.{node}]: {error}: see megatfm/estimate/devices.toml") from None
    if gpus_per_node:
        machine = replace(machine, gpus=gpus_per_node)
    return Cluster(gpu, machine, gpus)


def device_names(hardware: Path | None = None) -> list[str]:
    """Return the names of all devices."""
    return sorted(_tables(hardware)["device"])


def _device(table: Mapping[str, Any], key: str) -> Device:
    section = _get(table, key, "--device")
    if base := section.pop("extends", None):
        section = {**_get(table, base, f"[device.{key}] extends"), **section}
    try:
        return Device(key=key, **{**section, "tile": tuple(section.get("tile", ()))})
    except TypeError as error:
        raise UsageError(f"[device.{key}]: {error}: give {EXAMPLE}") from None


def _get(table: Mapping[str, Any], key: str, flag: str) -> dict[str, Any]:
    if key not in table:
        raise UsageError(
            f"{flag} {key!r}: unknown{did_you_mean(key, table)}; known: {', '.join(sorted(table))}; "
            "add others by a file of your own (--hardware)"
        )
    return dict(table[key])


def _tables(hardware: Path | None) -> dict[str, dict[str, Any]]:
    text = files("megatfm.estimate").joinpath("devices.toml").read_text(encoding="utf-8")
    tables: dict[str, dict[str, Any]] = tomllib.loads(text)
    if hardware is None:
        return tables
    try:
        added = tomllib.loads(hardware.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--hardware {hardware}: can't be read: {error}") from None
    if unknown := sorted(set(added) - set(tables)):
        raise UsageError(f"--hardware {hardware}: no table {unknown[0]!r}: there are {', '.join(sorted(tables))}")
    return {name: {**table, **added.get(name, {})} for name, table in tables.items()}
