"""Speed of drawing initial weights by several threads against one: interleaved, the median ratio.

python benchmarks/initial.py [--threads 2] [--rounds 10]
"""

import statistics

import common

from megatfm.layers.initialisation import Normal, TruncatedNormal, draw

SHAPE = (16384, 4096)
"""One matrix of a 6.7B feed-forward network."""


def time_drawing(kind: Normal | TruncatedNormal, threads: int) -> float:
    return common.time_call(lambda: draw(kind, 0, "weight", SHAPE, (0, 0), SHAPE, threads))


def main() -> None:
    parser = common.make_parser(__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    for kind in (Normal(0.02), TruncatedNormal(0.02)):
        rounds = [(time_drawing(kind, 1), time_drawing(kind, args.threads)) for _ in range(args.rounds)]
        single, several = zip(*rounds, strict=True)
        ratio, rate = (
            common.compute_median_ratio(single, several),
            SHAPE[0] * SHAPE[1] / statistics.median(single),
        )
        print(f"{type(kind).__name__}: {args.threads} threads / 1: {ratio:.2f} (1: {rate / 1e6:.0f} M/s)")


if __name__ == "__main__":
    main()
