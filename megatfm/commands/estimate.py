"""`megatfm estimate`: whether a run fits, how fast it will be, and which layout is best, before it is queued."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from megatfm.commands.arguments import add_config_and_overrides, add_trust_argument, check_trust
from megatfm.config import load_config
from megatfm.terminal import print_table

if TYPE_CHECKING:
    from megatfm.estimate.estimator import Estimate, Estimator

SHOWN = 3
"""Changes that are listed where nothing fits."""


def add_estimate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the config, the cluster and what is asked of it."""
    add_config_and_overrides(parser, "parallel.tp=8")
    parser.add_argument("--gpus", type=int, default=8, metavar="N", help="GPUs of the run (8)")
    parser.add_argument("--device", default="h100", metavar="NAME", help="h100, a100, … or your own (h100)")
    parser.add_argument("--node", metavar="NAME", help="a kind of node, such as dgx-h100 (by the device)")
    parser.add_argument(
        "--gpus-per-node", type=int, metavar="N", help="GPUs of a node (as the kind of node has)"
    )
    parser.add_argument(
        "--hardware", type=Path, metavar="FILE", help="devices and nodes of your own, in TOML"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    add_trust_argument(parser)


def estimate_command(args: argparse.Namespace) -> int:
    """Print the estimate; the exit code is 0 if it fits and 1 if not."""
    from megatfm.estimate.devices import load_cluster

    config = load_config(args.config, args.overrides)
    check_trust(config, args)
    cluster = load_cluster(args.device, args.gpus, args.node, args.gpus_per_node, args.hardware)

    from megatfm.estimate.estimator import estimator
    from megatfm.estimate.text import as_dict

    with estimator(config, cluster, (1, 2, 4, 8)) as opened:
        estimate = opened.estimate(opened.base)
        if args.json:
            print(json.dumps(as_dict(estimate), indent=2))
        else:
            _print(opened, estimate)
    return 0 if estimate.fits else 1


def _print(opened: "Estimator", estimate: "Estimate") -> None:
    from megatfm.estimate.text import heading, memory_table, speed, time_table, traffic_table, verdict

    for line in (*heading(estimate), verdict(estimate), *speed(estimate)):
        print(line)
    print()
    for table in (memory_table(estimate), time_table(estimate), traffic_table(estimate)):
        if table.rows:
            print_table(table)
    _advise(opened, estimate)


def _advise(opened: "Estimator", estimate: "Estimate") -> None:
    from megatfm.estimate.advice import changes_that_fit, largest_micro_batch

    if estimate.fits:
        largest = largest_micro_batch(opened, estimate)
        if largest and largest > estimate.config.train.micro_batch:
            print(f"train.micro_batch={largest} fits as well")
        return
    changes = changes_that_fit(opened, estimate)
    if not changes:
        print("none of the usual changes makes it fit: take more GPUs, or shorter rows")
    for change in changes[:SHOWN]:
        worst = change.estimate.worst.total / 2**30
        print(f"fits with {change}: {worst:.1f} GiB, {change.estimate.time.step:.3g} s a step")
