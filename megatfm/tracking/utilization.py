"""Model FLOPs utilization (MFU; Chowdhery et al. 2022, appendix B), and the peak FLOP/s of devices.

MFU is the ratio of the FLOPs that the model needs for its tokens to the FLOPs that the devices could have done in the
same time. Recomputation doesn't count.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatfm.config import Config

FlopsPerToken = Callable[[Config], tuple[float, float]]
"""Function that returns a token's FLOPs in training: with full attention, and without the half that is masked."""

PEAK_FLOPS = {
    "H200 NVL": 835e12,
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
    "MI250X": 383e12 / 2,
    "MI250": 362e12 / 2,
    "V100 PCIE": 112e12,
    "V100": 125e12,
}
"""Words in a GPU's name → dense 16-bit FLOP/s from the vendor's data sheet; for V100, in float16 only.
torch sees the two dies of an MI250 or MI250X as two devices."""
OTHER_CHIPS = {"MIG", "GRID", "Laptop", "D", "Ti"}
"""Words in the names of GPU slices, and of chips with other core counts than their namesakes: these are measured."""
MATMUL_SIZE, MATMUL_SECONDS = 1024, 0.1
"""Size of the matrices, and least duration, of the measurement for GPUs that are not in the table."""
SLOW_RATIO = 3.0
"""Time of a matmul in 16 bits, in multiples of that in float32, from which on we warn."""


@dataclass(frozen=True)
class Peak:
    """Peak FLOP/s of a device, and the source of the value."""

    flops: float
    source: str

    def __str__(self) -> str:
        return f"{self.flops / 1e12:,.3g} TFLOP/s per device ({self.source})"


@dataclass(frozen=True)
class Utilization:
    """Computes MFU from a speed.

    flops_per_token, causal_flops_per_token: FLOPs of a token with full and with causal attention. peak: of one device.
    """

    flops_per_token: float
    causal_flops_per_token: float
    peak: Peak
    devices: int

    def compute_mfu(self, tokens_per_second: float) -> dict[str, float]:
        """Return `mfu` and `mfu_causal`, which leaves out the masked half of attention, at a speed."""
        tokens_per_flop = tokens_per_second / (self.peak.flops * self.devices)
        return {
            "mfu": tokens_per_flop * self.flops_per_token,
            "mfu_causal": tokens_per_flop * self.causal_flops_per_token,
        }


def get_peak_flops(device: torch.device, dtype: torch.dtype) -> Peak:
    """Return the peak FLOP/s of this process's device in a dtype: from the data sheet if known, else measured."""
    dtype_name = str(dtype).removeprefix("torch.")
    if device.type != "cuda":
        threads = torch.get_num_threads()
        return measure_peak_flops(device, dtype, f"CPU, {dtype_name}, {threads} thread{'s' * (threads > 1)}")
    name = torch.cuda.get_device_name(device)
    if flops := look_up_peak_flops(name, dtype):
        return Peak(flops, f"{name}, {dtype_name}: data sheet")
    return measure_peak_flops(device, dtype, f"{name}, {dtype_name}")


def find_slow_dtype(peak: Peak, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return a warning if a CPU lacks instructions for a dtype of 16 bits, in which it is far slower than in float32.

    peak: of the device in that dtype.
    """
    if device.type == "cuda" or dtype.itemsize != 2:
        return None
    ratio = measure_peak_flops(device, torch.float32, "").flops / peak.flops
    if ratio < SLOW_RATIO:
        return None
    name = str(dtype).removeprefix("torch.")
    return f"matmuls take {ratio:,.0f} times as long in {name} as in float32 on this CPU: set train.precision=fp32 here"


def look_up_peak_flops(name: str, dtype: torch.dtype) -> float | None:
    """Return a GPU's dense 16-bit FLOP/s; None for other dtypes, and for GPUs that are not in the table."""
    if dtype not in (torch.bfloat16, torch.float16) or ("V100" in name and dtype == torch.bfloat16):
        return None
    words = name.replace("-", " ").split()
    if OTHER_CHIPS.intersection(words):
        return None
    for device_name, flops in PEAK_FLOPS.items():
        if all(word in words for word in device_name.split()):
            return flops
    return None


def measure_peak_flops(device: torch.device, dtype: torch.dtype, device_name: str) -> Peak:
    """Measure the peak FLOP/s as the fastest of several matmuls of square matrices.

    On a CPU, counts the threads' CPU time, so that other processes don't lower the peak.
    """
    a, b = (torch.ones(MATMUL_SIZE, MATMUL_SIZE, dtype=dtype, device=device) for _ in range(2))

    def clock() -> float:
        return time.perf_counter() if device.type == "cuda" else time.process_time() / torch.get_num_threads()

    best, start_time = float("inf"), time.perf_counter()
    while best == float("inf") or time.perf_counter() - start_time < MATMUL_SECONDS:
        start = clock()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, clock() - start)
    return Peak(2 * MATMUL_SIZE**3 / best, f"{device_name}: measured, matmuls of {MATMUL_SIZE} × {MATMUL_SIZE}")


def time_matmul(dtype: torch.dtype, device: torch.device, clock: Callable[[], float] | None = None) -> float:
    """Return the seconds of a matmul of a small model's size: the best of several. clock: None is that of the wall."""
    clock = clock or time.perf_counter
    left, right = (torch.ones(512, 512, dtype=dtype, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(8):
        start = clock()
        (left @ right.T).sum().item()
        best = min(best, clock() - start)
    return best


def measure_bf16_speedup(device: torch.device) -> float:
    """Measure how many times as fast matmuls are in bfloat16 as in float32.

    On a CPU, counts the thread's CPU time, so that other processes don't change the ratio.
    """
    clock = None if device.type == "cuda" else time.thread_time
    return time_matmul(torch.float32, device, clock) / time_matmul(torch.bfloat16, device, clock)
