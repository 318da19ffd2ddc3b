"""How fast initial weights are drawn, by several threads against one: interleaved, the median ratio.

python benchmarks/initial.py [--threads 2] [--rounds 10]
"""

import argparse
import statistics
import time

from megatfm.ops.initial import Normal, TruncatedNormal, draw

SHAPE = (16384, 4096)
"""One matrix of a 6.7B feed-forward network."""


def seconds(kind: Normal | TruncatedNormal, threads: int) -> float:
    start = time.perf_counter()
    draw(kind, 0, "weight", SHAPE, (0, 0), SHAPE, threads)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    for kind in (Normal(0.02), TruncatedNormal(0.02)):
        rounds = [(seconds(kind, 1), seconds(kind, options.threads)) for _ in range(options.rounds)]
        ratio = statistics.median(one / several for one, several in rounds)
        rate = SHAPE[0] * SHAPE[1] / statistics.median(one for one, _ in rounds)
        print(f"{type(kind).__name__}: {options.threads} threads / 1: {ratio:.2f} (1: {rate / 1e6:.0f} M/s)")


if __name__ == "__main__":
    main()
