"""Ledger of live device memory: bytes by owner now, and at the fullest moment of a phase of a step."""

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

HIDDEN_FILES = ("/verify/traffic", "/imaginary/", "/ops/transfer")
"""Files that allocate on behalf of their callers, which are named instead."""

GATHERING = "torch/distributed/fsdp"
"""Owner of what FSDP gathers for a compiled block: no line of megatfm's calls it there."""


class Ledger:
    """Bytes that are live on the device, by owner: who allocated them, and where.

    An owner is "PHASE LAYER LINE": the phase of the step, the block ("-" outside of blocks), and the line of code, or
    in a backward pass autograd's node. Start a phase by `begin`; set `line` where a compiled graph runs.
    """

    def __init__(self) -> None:
        self.phase, self.layer, self.line = "build", "-", ""
        self.live_bytes = self.peak = 0
        self._live: dict[int, tuple[int, str, Any]] = {}
        self._at_start: Counter[str] = Counter()
        self._changes: list[tuple[str, int]] = []

    def begin(self, phase: str) -> None:
        """Start a phase, whose peak is counted from what is live now."""
        self.phase, self.peak, self._changes = phase, self.live_bytes, []
        self._at_start = Counter()
        for n_bytes, owner, _ in self._live.values():
            self._at_start[owner] += n_bytes

    def __contains__(self, key: int) -> bool:
        return key in self._live

    def add(self, key: int, n_bytes: int, reference: Any) -> None:
        """Add a storage. reference: weak, kept as long as the storage is live."""
        owner = f"{self.phase} {self.layer} {self.line or find_allocating_line()}"
        self._live[key] = n_bytes, owner, reference
        self._change(owner, n_bytes)

    def resize(self, key: int, n_bytes: int) -> None:
        """Set the size of a live storage."""
        previous, owner, reference = self._live[key]
        self._live[key] = n_bytes, owner, reference
        self._change(owner, n_bytes - previous)

    def remove(self, key: int) -> None:
        """Remove a storage that is freed."""
        n_bytes, owner, _ = self._live.pop(key, (0, "", None))
        if n_bytes:
            self._change(owner, -n_bytes)

    def _change(self, owner: str, n_bytes: int) -> None:
        self.live_bytes += n_bytes
        self.peak = max(self.peak, self.live_bytes)
        self._changes.append((owner, n_bytes))

    def list_activations(self, layer: str) -> dict[int, Any]:
        """Return the live storages that a layer owns, without gathered weights, by key."""
        owners = ((key, self._live[key][1].split(" ", 2)) for key in self._live)
        return {
            key: self._live[key][2]
            for key, (_, owning_layer, line) in owners
            if owning_layer == layer and not line.startswith(("engines/", GATHERING))
        }

    def list_storages(self, tensors: Iterable[Tensor]) -> dict[int, Any]:
        """Return the live storages of tensors, by key."""
        keys = (tensor.untyped_storage()._cdata for tensor in tensors)
        return {key: self._live[key][2] for key in keys if key in self._live}

    def count_live(self, storages: Mapping[int, Any]) -> int:
        """Return the bytes of those storages that are still live."""
        entries = ((self._live[key], reference) for key, reference in storages.items() if key in self._live)
        return sum(n_bytes for (n_bytes, _, live_reference), reference in entries if live_reference is reference)

    def at_peak(self) -> dict[str, int]:
        """Return owner → bytes at the fullest moment since the phase began, the largest first."""
        live = peak = sum(self._at_start.values())
        index_of_peak = -1
        for index, (_, n_bytes) in enumerate(self._changes):
            live += n_bytes
            if live > peak:
                peak, index_of_peak = live, index
        owners = self._at_start.copy()
        for owner, n_bytes in self._changes[: index_of_peak + 1]:
            owners[owner] += n_bytes
        return {owner: n_bytes for owner, n_bytes in owners.most_common() if n_bytes > 0}


def find_allocating_line() -> str:
    """Return the line of code that allocates, or in a backward pass the operator whose gradient is computed."""
    node = torch._C._current_autograd_node()
    if node is not None and is_called_by_autograd():
        return str(node.name()).removeprefix("torch::autograd::")
    line = find_calling_line()
    return GATHERING if line.startswith("models/") and _is_called_by_fsdp() else line


def _is_called_by_fsdp() -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if GATHERING in frame.f_code.co_filename:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def is_called_by_autograd() -> bool:
    """Return whether autograd itself calls an operator in a backward pass, rather than a function written in Python."""
    line = find_calling_line()
    return line == "torch" or line.startswith("engines/")


def find_calling_line() -> str:
    """Return file and line of the megatfm code that calls an operator; "torch" if there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        if path := get_path_in_package(frame.f_code.co_filename):
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "torch"


@cache
def get_path_in_package(filename: str) -> str:
    """Return a file's path in the package; "" for files outside of it and for HIDDEN_FILES."""
    if "site-packages" in filename or any(path in filename for path in HIDDEN_FILES):
        return ""
    return filename.rpartition("/megatfm/")[2] if "/megatfm/" in filename else ""
