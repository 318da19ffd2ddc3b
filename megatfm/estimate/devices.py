"""Devices, links and nodes: small tables with sources (`devices.toml`); a user's file may add to them."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt, TypeAdapter, ValidationError

from megatfm.config.section import MAX_WIDTH
from megatfm.errors import UsageError
from megatfm.registry import did_you_mean

GIB = 2**30
NODE = "here"
"""Name of the calibrated machine, as device and as node."""
CALIBRATED_PRECISIONS = ("bf16", "fp32")
"""Precisions in which `calibrate.py` measures a machine."""
DeviceKind = Literal["cuda", "cpu"]
Share = Annotated[float, Field(gt=0, le=1)]
Flops = Mapping[Annotated[str, Field(pattern="^(bf16|fp16|fp8|fp32|fp64)$")], PositiveFloat]
CHECKED = ConfigDict(extra="forbid", allow_inf_nan=False)
MeasuredMatmuls = Annotated[
    Sequence[tuple[PositiveFloat, PositiveFloat, PositiveFloat, PositiveFloat]], Field(min_length=1)
]
MeasuredBySize = Sequence[tuple[PositiveFloat, PositiveFloat]]


@dataclass(frozen=True)
class Device:
    """One GPU, or a process on a CPU. flops: peak by precision, dense. Efficiencies are shares of a peak that large
    operations reach.

    kind: whose kernels a model runs, as torch names it. tile: rows and columns of a matmul that one multiprocessor
    computes at a time. launch_seconds: shortest kernel. host_seconds: time of the host to launch a kernel.
    reserved_gib: memory of CUDA, its libraries, NCCL and fragments. attention_backward: rate of attention's backward
    pass over its forward pass (FlashAttention 2; Dao 2023, figures 5 and 6). compiles: whether
    `train.compile = "auto"` compiles there.

    Measured (`calibrate.py`), by size: products: (m, n, k, seconds) of matmuls by precision and layout
    (`name_matmuls`); moves: (bytes, seconds) of in-place additions, and operators: of other memory-bound operators by
    variant (`describe_variant`); attention: (FLOPs, seconds) of a fused kernel's passes; update_seconds: of the
    optimizer's update, a tensor and a byte that it moves; gradient_seconds: a byte of gradients that a pass adds up.
    """

    __pydantic_config__ = CHECKED

    key: str
    name: str
    memory_gib: PositiveFloat
    flops: Annotated[Flops, Field(min_length=1)]
    memory_bandwidth: PositiveFloat
    multiprocessors: PositiveInt
    tile: tuple[PositiveInt, PositiveInt]
    matmul_efficiency: Share
    attention_efficiency: Share
    memory_efficiency: Share
    launch_seconds: PositiveFloat
    host_seconds: NonNegativeFloat
    reserved_gib: NonNegativeFloat
    source: str
    kind: DeviceKind = "cuda"
    attention_backward: PositiveFloat = 0.85
    compiles: bool = True
    products: Mapping[str, MeasuredMatmuls] = field(default_factory=dict)
    moves: MeasuredBySize = ()
    operators: Mapping[str, MeasuredBySize] = field(default_factory=dict)
    attention: Mapping[Literal["forward", "backward"], MeasuredBySize] = field(default_factory=dict)
    update_seconds: tuple[NonNegativeFloat, NonNegativeFloat] | None = None
    gradient_seconds: NonNegativeFloat = 0.0

    @property
    def memory_bytes(self) -> float:
        """Bytes of memory that the driver offers."""
        return self.memory_gib * GIB

    def peak(self, precision: str) -> float:
        """Return the dense FLOP/s in a `train.precision`. Raises UsageError for one that the device lacks."""
        key = "fp8" if precision.startswith("fp8") else precision
        if key not in self.flops:
            is_measurable = self.key == NODE and key in CALIBRATED_PRECISIONS
            measure = f", or measure it so: --calibrate FILE train.precision={key}" * is_measurable
            raise UsageError(
                f"train.precision = {precision!r}: the table of {self.name} has no {key}: set "
                f"train.precision = {'bf16' if 'bf16' in self.flops else next(iter(self.flops))!r}{measure}"
            )
        return self.flops[key]


@dataclass(frozen=True)
class Link:
    """Connection of a GPU to others, in one direction. bandwidth: bytes a second; efficiency: share of it that
    collectives reach; latency: seconds of one step of a ring."""

    __pydantic_config__ = CHECKED

    name: str
    bandwidth: PositiveFloat
    efficiency: Share
    latency: NonNegativeFloat

    @property
    def rate(self) -> float:
        """Bytes a second that collectives reach."""
        return self.bandwidth * self.efficiency


@dataclass(frozen=True)
class Node:
    """A machine: its GPUs, the link among them, each GPU's network to other machines, and its share of the disk."""

    __pydantic_config__ = CHECKED

    key: str
    gpus: PositiveInt
    within: Link
    between: Link
    disk_bandwidth: PositiveFloat
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


Section = TypeVar("Section", Device, Node)


def load_cluster(
    device: str, gpus: int, node: str | None = None, gpus_per_node: int | None = None, hardware: Path | None = None
) -> Cluster:
    """Look up a cluster. hardware: a user's file, whose tables take precedence. Raises UsageError for unknown names."""
    tables = _load_tables(hardware)
    for flag, number in (("--gpus", gpus), ("--gpus-per-node", gpus_per_node)):
        if number is not None and number < 1:
            raise UsageError(f"{flag} {number}: choose 1 or more")
        if number is not None and number > MAX_WIDTH:  # as many processes as [parallel] allows
            raise UsageError(f"{flag} {number}: no cluster has more than {MAX_WIDTH:,}")
    devices = tables["device"]
    section = _get_section(devices, device, "device", "--device")
    names = _list_ancestors(devices, device)
    default_nodes = (tables["default_node"][name] for name in names if name in tables["default_node"])
    node = node or next(default_nodes, next(iter(tables["node"])))
    machine = _read(Node, "node", node, _get_section(tables["node"], node, "node", "--node"))
    if gpus_per_node:
        machine = replace(machine, gpus=gpus_per_node)
    return Cluster(_read(Device, "device", device, section), machine, gpus)


def list_device_names(hardware: Path | None = None) -> list[str]:
    """Return the names of all devices."""
    return sorted(_load_tables(hardware)["device"])


def _get_section(table: Mapping[str, Any], key: str, kind: str, flag: str) -> dict[str, Any]:
    """Return a table's section, with the keys of those that it extends. Raises UsageError for an unknown name."""
    section: dict[str, Any] = {}
    for name in _list_ancestors(table, key):
        if name not in table:
            where = flag if name == key else f"[{kind}.{key}] extends ="
            raise UsageError(
                f"{where} {name!r}: unknown{did_you_mean(name, table)}; known: {', '.join(sorted(table))}; "
                "add others by a file of your own (--hardware)"
            )
        section = {**table[name], **section}
    section.pop("extends", None)
    return section


def _list_ancestors(table: Mapping[str, Any], key: str) -> list[str]:
    """Return a section's name, then those of the sections that it extends. Raises UsageError for a circle."""
    names = [key]
    while base := table.get(names[-1], {}).get("extends"):
        if base in names:
            raise UsageError(f"{key!r} extends itself ({' → '.join([*names, base])}): name another section")
        names.append(str(base))
    return names


def _read(cls: type[Section], kind: str, key: str, section: Mapping[str, Any]) -> Section:
    """Make a device or node of a section. Raises UsageError for an unknown or missing key, and for a wrong value."""
    try:
        return TypeAdapter(cls).validate_python({**section, "key": key})
    except ValidationError as error:
        first, header = error.errors()[0], f"[{kind}.{key}]"
        path = ".".join(map(str, first["loc"]))
        if first["type"] == "unexpected_keyword_argument":
            keys = [field.name for field in fields(cls)]
            raise UsageError(f"{header} {path}: unknown key{did_you_mean(path, keys)}") from None
        if first["type"] == "missing":
            missing_keys = ", ".join(".".join(map(str, e["loc"])) for e in error.errors() if e["type"] == "missing")
            example = "h100" if cls is Device else "dgx-h100"
            raise UsageError(f'{header} lacks {missing_keys}: give them, or extends = "{example}"') from None
        advice = "; measure the machine anew: --calibrate FILE" * (key == NODE)
        raise UsageError(f"{header} {path} = {first['input']!r}: {first['msg']}{advice}") from None


def _load_tables(hardware: Path | None) -> dict[str, dict[str, Any]]:
    text = files("megatfm.estimate").joinpath("devices.toml").read_text(encoding="utf-8")
    tables: dict[str, dict[str, Any]] = tomllib.loads(text)
    if hardware is None:
        return tables
    try:
        added = tomllib.loads(hardware.read_text(encoding="utf-8-sig"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--hardware {hardware}: can't be read: {error}") from None
    if unknown := sorted(set(added) - set(tables)):
        raise UsageError(f"--hardware {hardware}: no table {unknown[0]!r}: there are {', '.join(sorted(tables))}")
    for kind, table in added.items():
        entry = str if kind == "default_node" else dict
        if not isinstance(table, dict) or not all(isinstance(value, entry) for value in table.values()):
            form = '[default_node] with lines DEVICE = "NODE"' if entry is str else f"a table [{kind}.NAME]"
            raise UsageError(f"--hardware {hardware}: {kind!r} is not {form}: see megatfm/estimate/devices.toml")
    return {name: {**table, **added.get(name, {})} for name, table in tables.items()}
