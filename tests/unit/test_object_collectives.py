"""Objects that ranks exchange: rank 0's result or error, everyone's items, and who has problems."""

import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from megatfm.checkpoint.local import NodeTopology
from megatfm.errors import MegatfmError, UsageError
from megatfm.object_collectives import (
    all_gather_object,
    broadcast_each,
    gather_errors,
    run_and_gather,
    run_on_rank_0,
    run_on_rank_0_raising,
    unique_on_host,
)
from tests.support.workers import Workers


def agreed() -> tuple[int, str, list[int], dict[str, list[str]]]:
    rank, calls = dist.get_rank(), list[int]()

    def work() -> int:
        calls.append(rank)
        return 7

    def fails() -> None:
        raise UsageError(f"rank {rank} says no")

    result = run_on_rank_0_raising(work)
    assert calls == ([0] if rank == 0 else [])
    try:
        run_on_rank_0_raising(fails)
        output = "nothing"
    except UsageError as error:
        output = str(error)
    return result, output, all_gather_object(rank), gather_errors(["bad"] if rank == 2 else [])


def test_all_ranks_know_the_same(workers: Workers) -> None:
    problems = {f"rank 2 on {socket.gethostname()}": ["bad"]}
    assert workers.run(agreed, 3) == [(7, "rank 0 says no", [0, 1, 2], problems)] * 3


def check_equal_host_names(folder: Path) -> tuple[set[str], tuple[int, ...]]:
    """Ranks 0 and 1 share a machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: "localhost")
        real, boot = Path.read_text, f"boot of {dist.get_rank() // 2}\n"
        patch.setattr(
            Path, "read_text", lambda path, *remaining: boot if path.name == "boot_id" else real(path, *remaining)
        )
        hosts = unique_on_host(["a", f"of {dist.get_rank()}"])
        return hosts, NodeTopology.discover(folder, dist.group.WORLD).node_of_rank


def test_machines_of_the_same_name_are_distinguished(workers: Workers, tmp_path: Path) -> None:
    (first, nodes), (second, _), (third, _) = workers.run(check_equal_host_names, 3, tmp_path)
    assert (first, second, third) == ({"of 0"}, {"of 1"}, {"a", "of 2"})
    assert nodes == (0, 0, 1)


def collect_from_holders() -> list[list[str]]:
    message = f"of {dist.get_rank()}"
    return [broadcast_each(message, holders) for holders in (1, 2, 3)]


def test_objects_of_the_first_ranks_reach_all(workers: Workers) -> None:
    messages = ["of 0", "of 1", "of 2"]
    assert workers.run(collect_from_holders, 3) == [[messages[:1], messages[:2], messages]] * 3


def test_without_a_group_there_is_one_rank() -> None:
    assert run_on_rank_0_raising(lambda: 3) == 3
    assert all_gather_object("x") == ["x"]
    assert gather_errors([]) == {}


class TwoArguments(Exception):
    """Pickle makes it again of one argument, and fails."""

    def __init__(self, key: str, value: int) -> None:
        super().__init__(f"{key} = {value}")


def unsendable() -> list[str]:
    """Errors on all ranks when rank 0 can't send its result, or its error."""

    def raises() -> None:
        raise TwoArguments("a", 3)

    output = []
    for function, work in (
        (run_on_rank_0_raising, lambda: lambda: 1),
        (lambda work: run_on_rank_0("not done", work), lambda: lambda: 1),
        (run_on_rank_0_raising, raises),
        (lambda work: run_and_gather("not done", work), lambda: lambda: 1),
    ):
        try:
            function(work)
            output.append("nothing")
        except Exception as error:
            output.append(f"{type(error).__name__}: {error}")
    assert run_on_rank_0_raising(lambda: 5) == 5
    return output


def test_an_object_that_can_not_be_sent_is_an_error_of_all_ranks(workers: Workers) -> None:
    for result in workers.run(unsendable, 3):
        assert "nothing" not in result
        assert all("lost each other" not in words for words in result)
        assert all("pickle" in words for words in (result[0], result[1], result[3])), result
        assert result[2] == "MegatfmError: TwoArguments: a = 3"


def in_a_group_without_rank_0() -> tuple[int, list[int]] | None:
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    me = dist.get_rank()
    return run_on_rank_0("a", lambda: me, group), run_and_gather("b", lambda: me, group)


def test_rank_0_is_the_group_s(workers: Workers) -> None:
    assert workers.run(in_a_group_without_rank_0, 3) == [None, (1, [1, 2]), (1, [])]


def run_with_failing_rank() -> str:
    def work() -> int:
        if dist.get_rank() == 1:
            raise UsageError("no")
        return 3

    try:
        run_and_gather("not done", work)
    except MegatfmError as error:
        return str(error)
    return "nothing"


def test_a_failure_of_one_is_that_of_all(workers: Workers) -> None:
    (result,) = set(workers.run(run_with_failing_rank, 2))
    assert result.startswith("not done: rank 1 on ")
