"""Cost of Muon's iteration in bfloat16 and in float32: interleaved, the median ratio.

python benchmarks/newton_schulz.py [cpu|cuda]
"""

import statistics

import common
import torch

from megatfm.optim.matrix_optimizers import newton_schulz

SHAPES = ((160, 160), (160, 640), (512, 512), (512, 2048), (1024, 1024))


def time_iteration(x: torch.Tensor, in_bf16: bool) -> float:
    """Time one orthogonalisation of a matrix."""

    def run() -> None:
        newton_schulz(x[None], in_bf16=in_bf16)
        if x.device.type == "cuda":
            torch.cuda.synchronize()

    return common.time_call(run)


def main() -> None:
    parser = common.make_parser(__doc__)
    parser.add_argument("device", nargs="?", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    for shape in SHAPES:
        x = torch.randn(shape, generator=generator).to(args.device)
        time_iteration(x, True), time_iteration(x, False)
        pairs = [(time_iteration(x, True), time_iteration(x, False)) for _ in range(args.rounds)]
        bf16, full = zip(*pairs, strict=True)
        bf16_ms, full_ms = (1e3 * statistics.median(times) for times in (bf16, full))
        print(
            f"{shape[0]} × {shape[1]}: bf16 {bf16_ms:.2f} ms, float32 {full_ms:.2f} ms, "
            f"{common.compute_median_ratio(full, bf16):.2f} times as long"
        )


if __name__ == "__main__":
    main()
