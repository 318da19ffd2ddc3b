"""A run's record beside its estimate, as text."""

from typing import TYPE_CHECKING

from megatfm.estimate.devices import GIB
from megatfm.estimate.estimator import Estimate
from megatfm.estimate.recorded import Recorded

if TYPE_CHECKING:
    from rich.table import Table

OWNERS_SHOWN = 8
"""Lines of code that are listed with the memory that they asked for."""


def recorded_lines(estimate: Estimate, recorded: Recorded) -> list[str]:
    """Lines of what the run recorded of its memory."""
    lines = []
    if recorded.peak:
        modelled = estimate.memory[0].total - (estimate.memory[0].reserved if recorded.is_gpu else 0)
        counted = (
            "" if recorded.is_gpu else "; of a CPU with Python and its libraries, held at the end of a step"
        )
        lines.append(
            f"recorded: {recorded.peak / GIB:.2f} GiB on rank 0 in step {recorded.peak_step}; predicted for its "
            f"tensors: {modelled / GIB:.2f}{counted}"
        )
    else:
        lines.append("recorded: no step, so no memory: the first one did not end")
    for rank, held, asked in recorded.failures:
        pipeline_rank = rank * estimate.config.parallel.pp // recorded.processes
        predicted = estimate.memory[pipeline_rank].total / GIB
        request = f" and asked for {asked} more" if asked else ""
        lines.append(f"rank {rank} held {held:.2f} GiB{request}; predicted for it: {predicted:.2f}")
    if not recorded.failures:
        lines.append("no rank of it ran out of memory, as far as its logs tell")
    if recorded.snapshot is not None:
        lines.append(f"in {recorded.snapshot.name}, by the line that asked for it:")
        for owner, n_bytes in recorded.owners.most_common(OWNERS_SHOWN):
            lines.append(f"  {n_bytes / GIB:8.3f} GiB  {owner}")
    return lines


def phases_table(estimate: Estimate) -> "Table":
    """The fullest moment of each phase, on the fullest rank."""
    from rich.table import Table

    worst = estimate.worst
    title = f"Fullest moment by phase, pipeline rank {worst.pipeline_rank}"
    table = Table(title=title, title_justify="left")
    table.add_column("phase")
    table.add_column("GiB", justify="right")
    table.add_column("of the device", justify="right")
    for phase, n_bytes in worst.by_phase.items():
        share = 100 * n_bytes / estimate.cluster.device.memory_bytes
        table.add_row(phase, f"{n_bytes / GIB:,.2f}", f"{share:.0f} %")
    return table
