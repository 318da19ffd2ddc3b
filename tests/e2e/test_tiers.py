"""Checkpoints on the shared disk and on the nodes' own: a resume takes the newest that is whole, wherever it is."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from megatfm import checkpoint
from megatfm.config import Config
from megatfm.errors import EXIT_OK
from tests.support.training_runs import run_training, training_curve
from tests.support.workers import Workers

LAST = "step-00000012"


def damage(path: Path) -> None:
    """One bit of one file of tensors."""
    file = path / "rank-00001-000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def on_nodes(nodes: Path, step: int) -> list[Path]:
    return sorted(nodes.glob(f"node-*/*/step-{step:08d}"))


def lose_a_node(shared: Path, nodes: Path) -> None:
    shutil.rmtree(shared / LAST)
    shutil.rmtree(nodes / "node-1")


def damage_the_shared(shared: Path, nodes: Path) -> None:
    damage(shared / LAST)


def damage_both_copies(shared: Path, nodes: Path) -> None:
    shutil.rmtree(shared / LAST)
    for path in on_nodes(nodes, 9):
        damage(path)


def lose_all_nodes(shared: Path, nodes: Path) -> None:
    shutil.rmtree(shared / LAST)
    shutil.rmtree(nodes)


# What goes wrong after the last step → the step that the run then goes on from.
ACCIDENTS = [(lose_a_node, 9), (damage_the_shared, 9), (damage_both_copies, 8), (lose_all_nodes, 8)]


def test_the_newest_whole_one_of_either_tier_is_taken(
    workers: Workers, make_config: Callable[..., Config], tmp_path: Path
) -> None:
    """Shared at 4, 8 and 12; each rank stands for a node, with a disk of its own, and saves at 3, 6 and 9."""

    def config(name: str) -> Config:
        local = [f"checkpoint.local_dir={tmp_path / name}-nodes/node-$RANK", "checkpoint.local_every=3"]
        return make_config("parallel.dp_shard=2", "evaluate.every=0", *local, run=name)

    assert workers.run(run_training, 2, config("whole")) == [EXIT_OK, EXIT_OK]
    full = tmp_path / "whole"
    assert len(on_nodes(tmp_path / "whole-nodes", 9)) == 2
    assert not on_nodes(tmp_path / "whole-nodes", 12), "both rules name it: it goes to the shared disk"
    expected = checkpoint.read_tensors(full / "checkpoints" / LAST)
    for number, (happens, step) in enumerate(ACCIDENTS):
        run, nodes = tmp_path / f"run-{number}", tmp_path / f"run-{number}-nodes"
        shutil.copytree(full, run)
        shutil.copytree(tmp_path / "whole-nodes", nodes)
        happens(run / "checkpoints", nodes)
        assert workers.run(run_training, 2, config(run.name)) == [EXIT_OK, EXIT_OK], happens
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        (resumed,) = [event["detail"] for event in events if event["event"] == "resumed"]
        assert resumed == f"from step-{step:08d}", happens
        assert training_curve(run) == training_curve(full), happens
        tensors = checkpoint.read_tensors(run / "checkpoints" / LAST)
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in expected.items()), happens
