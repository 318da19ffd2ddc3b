"""What ranks tell one another: rank 0's result or error, everyone's items, and who has problems."""

import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from megatfm.checkpoint.nodes import Nodes
from megatfm.errors import UsageError
from megatfm.ranks import gather, gather_problems, own_on_host, run_on_rank_0, tell
from tests.workers import Workers


def agreed() -> tuple[int, str, list[int], dict[str, list[str]]]:
    rank, calls = dist.get_rank(), list[int]()

    def work() -> int:
        calls.append(rank)
        return 7

    def fails() -> None:
        raise UsageError(f"rank {rank} says no")

    result = run_on_rank_0(work)
    assert calls == ([0] if rank == 0 else [])
    try:
        run_on_rank_0(fails)
        said = "nothing"
    except UsageError as error:
        said = str(error)
    return result, said, gather(rank), gather_problems(["bad"] if rank == 2 else [])


def test_all_ranks_know_the_same(workers: Workers) -> None:
    problems = {f"rank 2 on {socket.gethostname()}": ["bad"]}
    assert workers.run(agreed, 3) == [(7, "rank 0 says no", [0, 1, 2], problems)] * 3


def on_machines_of_one_name(folder: Path) -> tuple[set[str], tuple[int, ...]]:
    """Ranks 0 and 1 share a machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: "localhost")
        real, boot = Path.read_text, f"boot of {dist.get_rank() // 2}\n"
        patch.setattr(
            Path, "read_text", lambda path, *rest: boot if path.name == "boot_id" else real(path, *rest)
        )
        return own_on_host(["a", f"of {dist.get_rank()}"]), Nodes.meet(folder, dist.group.WORLD).node


def test_machines_of_one_name_are_told_apart(workers: Workers, tmp_path: Path) -> None:
    (first, nodes), (second, _), (third, _) = workers.run(on_machines_of_one_name, 3, tmp_path)
    assert (first, second, third) == ({"of 0"}, {"of 1"}, {"a", "of 2"})
    assert nodes == (0, 0, 1)


def told() -> list[list[str]]:
    mine = f"of {dist.get_rank()}"
    return [tell(mine, holders) for holders in (1, 2, 3)]


def test_what_the_first_ranks_have_is_told_to_all(workers: Workers) -> None:
    held = ["of 0", "of 1", "of 2"]
    assert workers.run(told, 3) == [[held[:1], held[:2], held]] * 3


def test_without_a_group_there_is_one_rank() -> None:
    assert run_on_rank_0(lambda: 3) == 3
    assert gather("x") == ["x"]
    assert gather_problems([]) == {}
