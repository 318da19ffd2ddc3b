"""Cost of Muon's iteration in bfloat16 and in float32: interleaved, the median ratio.

python benchmarks/newton_schulz.py [cpu|cuda]
"""

import statistics
import sys
import time

import torch

from megatfm.train.optimizers.stacked_muon import newton_schulz

SHAPES = ((160, 160), (160, 640), (512, 512), (512, 2048), (1024, 1024))
ROUNDS = 12


def seconds(x: torch.Tensor, in_bf16: bool) -> float:
    """Time one orthogonalisation of a matrix."""
    start = time.perf_counter()
    newton_schulz(x[None], in_bf16=in_bf16)
    if x.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    generator = torch.Generator().manual_seed(0)
    for shape in SHAPES:
        x = torch.randn(shape, generator=generator).to(device)
        seconds(x, True), seconds(x, False)
        pairs = [(seconds(x, True), seconds(x, False)) for _ in range(ROUNDS)]
        bf16, full = (1e3 * statistics.median(times) for times in zip(*pairs, strict=True))
        ratio = statistics.median(full / bf16 for bf16, full in pairs)
        print(
            f"{shape[0]} × {shape[1]}: bf16 {bf16:.2f} ms, float32 {full:.2f} ms, {ratio:.2f} times as long"
        )


if __name__ == "__main__":
    main()
