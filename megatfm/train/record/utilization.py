"""How much of what the machine could do a run uses: model FLOPs utilization (MFU).

Chowdhery et al. 2022, appendix B: the FLOPs that the model needs for its tokens, over those that the devices could have
done in the time. Nothing that is recomputed counts.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatfm.config import Config

FlopsPerToken = Callable[[Config], tuple[float, float]]
"""What a token costs in training: with all of the attention matrix, and without the half that a causal model masks."""

PEAK_FLOPS = {
    "H200": 989e12,
    "GH200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "MI300X": 1307e12,
    "MI250X": 383e12,
    "V100": 125e12,
}
"""Dense FLOP/s in 16 bits of GPUs by what their names hold, from their makers' data sheets; of V100, float16 alone."""
MATMUL_SIZE, MATMUL_SECONDS = 1024, 0.1
"""Of the matrices whose product is timed where no data sheet is known, and how long at least."""


@dataclass(frozen=True)
class Peak:
    """FLOP/s that a device could do, and where the figure is from."""

    flops: float
    source: str

    def __str__(self) -> str:
        return f"{self.flops / 1e12:,.3g} TFLOP/s a device ({self.source})"


@dataclass(frozen=True)
class Utilization:
    """full, causal_flops_per_token: FLOPs per token. peak: of one device."""

    flops_per_token: float
    causal_flops_per_token: float
    peak: Peak
    devices: int

    def mfu(self, tokens_per_second: float) -> dict[str, float]:
        """`mfu` and, without the masked half of attention, `mfu_causal`, each at a speed."""
        reached = tokens_per_second / (self.peak.flops * self.devices)
        return {"mfu": reached * self.flops_per_token, "mfu_causal": reached * self.causal_flops_per_token}


def get_peak_flops(device: torch.device, dtype: torch.dtype) -> Peak:
    """Of this process's device in a precision: the data sheet's figure where one is known, else measured."""
    bits = str(dtype).removeprefix("torch.")
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        known = from_data_sheet(name, dtype)
        return (
            Peak(known, f"{name}, {bits}: data sheet")
            if known
            else measure_peak_flops(device, dtype, f"{name}, {bits}")
        )
    return measure_peak_flops(device, dtype, f"CPU, {bits}, {torch.get_num_threads()} threads")


def from_data_sheet(name: str, dtype: torch.dtype) -> float | None:
    """A GPU's dense FLOP/s in 16 bits; None for other precisions, and GPUs that are not in the table."""
    if dtype not in (torch.bfloat16, torch.float16) or ("V100" in name and dtype == torch.bfloat16):
        return None
    words = name.replace("-", " ").split()
    for known, flops in PEAK_FLOPS.items():
        if all(word in words for word in known.split()):
            return flops
    return None


def measure_peak_flops(device: torch.device, dtype: torch.dtype, where: str) -> Peak:
    """The rate of the fastest of several products of square matrices, on a CPU while its threads are running: what else
    runs on the machine then is no reason for a lower peak."""
    a, b = (torch.ones(MATMUL_SIZE, MATMUL_SIZE, dtype=dtype, device=device) for _ in range(2))

    def clock() -> float:
        return time.perf_counter() if device.type == "cuda" else time.process_time() / torch.get_num_threads()

    best, began = float("inf"), time.perf_counter()
    while time.perf_counter() - began < MATMUL_SECONDS:
        start = clock()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, clock() - start)
    return Peak(2 * MATMUL_SIZE**3 / best, f"{where}: measured, products of {MATMUL_SIZE} × {MATMUL_SIZE}")
