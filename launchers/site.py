"""A cluster, described once in `slurm/site.toml`."""

import json
import os
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from megatfm.config import load
from megatfm.config.base import Section
from megatfm.errors import UsageError

# Wide enough for every site's names, too narrow for a quote, a space, a newline or a `$`.
SlurmToken = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.,:/+@-]*\z", max_length=200)]
Constraint = Annotated[str, Field(pattern=r"^[A-Za-z0-9_\[(][A-Za-z0-9_.,:&|*()\[\]-]*\z", max_length=200)]
NodeList = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.,\[\]-]*\z", max_length=1000)]
Memory = Annotated[str, Field(pattern=r"^\d+[KMGT]?\z", max_length=20)]
SBATCH_OPTION_PATTERN = r"^--[a-z][a-z-]*(=[A-Za-z0-9_.,:/+@?*%\[\]-]+)?\Z"
SbatchOption = Annotated[str, Field(pattern=SBATCH_OPTION_PATTERN.replace(r"\Z", r"\z"), max_length=200)]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*\z", max_length=200)]
SingleLine = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]*\z")]


class Site(Section):
    """What jobs need to know of a site; see the comments in `slurm/site.toml`."""

    partition: SlurmToken | None = None
    """Partition (queue) of jobs."""
    account: SlurmToken | None = None
    """Account that jobs are charged to."""
    qos: SlurmToken | None = None
    """Quality of service."""
    constraint: Constraint | None = None
    """Features that nodes must have."""
    exclude: NodeList | None = None
    """Nodes never to use."""
    cpus_per_task: PositiveInt | None = None
    """Cores for each process."""
    memory: Memory | None = None
    """Memory of each node; left out, what the partition gives."""
    exclusive: bool = False
    """Whole nodes, with no other jobs on them."""
    gpus: Literal["gpus-per-node", "gres"] = "gpus-per-node"
    """How GPUs are asked for; sites with old settings know only gres."""
    sbatch: list[SbatchOption] = Field(default_factory=list)
    """More options of sbatch."""
    srun: list[SbatchOption] = Field(default_factory=list)
    """More options of srun."""
    modules: list[SlurmToken] = Field(default_factory=list)
    """Environment modules to load."""
    setup: list[list[SingleLine]] = Field(default_factory=list)
    """Commands before anything else, as lists of words."""
    container: list[SingleLine] = Field(default_factory=list)
    """Command put before every process, one word an item."""
    python: SingleLine | None = None
    """Python inside the container; left out, the one that submits."""
    start: Literal["srun", "torchrun"] = "srun"
    """Who starts the processes: srun, one task a process, or torchrun, one task a node."""
    interface: SlurmToken | None = None
    """Network interface over which processes meet."""
    stop_seconds: PositiveInt = 300
    """Seconds before the time limit at which a run is told to save and requeue."""
    requeue: bool = True
    """Whether jobs may be requeued here; where not, use `--chain`."""
    max_restarts: NonNegativeInt = 3
    """Failures in a row without a new checkpoint after which a run is still started again."""
    environment: dict[VariableName, SingleLine] = Field(default_factory=dict)
    """Variables for every process."""


RESERVED_SBATCH_OPTIONS = (
    *("array", "chdir", "error", "job-name", "no-requeue", "nodes", "ntasks", "ntasks-per-node", "open-mode"),
    *("output", "parsable", "requeue", "signal", "test-only", "wait", "wrap"),
    *(
        "account",
        "constraint",
        "cpus-per-task",
        "exclude",
        "gpus-per-node",
        "mem",
        "partition",
        "qos",
        "time",
    ),
)
"""Options of sbatch on which the scripts rely as they are, and those for which there are flags and fields."""
WRITTEN_OUT = (*RESERVED_SBATCH_OPTIONS, "begin", "dependency", "nodelist", "reservation")
"""Options that are read here, for which sbatch would take a beginning of the name, too."""
FROM_SHELL = {"account": "SBATCH_ACCOUNT", "partition": "SBATCH_PARTITION", "qos": "SBATCH_QOS"}
"""Field → the variable of sbatch whose value it has where neither the site nor a flag says another."""


def load_site(path: Path | None, overrides: dict[str, str | int | None], options: Sequence[str] = ()) -> Site:
    """Read a site: `path`, else `slurm/site.toml` here, else the one that ships with megatfm.

    `overrides` replace fields where they are not None; `options` of sbatch are added to the site's. Raises UsageError.
    """
    here, shipped = Path("slurm/site.toml"), Path(str(resources.files("megatfm.slurm") / "site.toml"))
    chosen = path or (here if here.is_file() else shipped)
    for option in options:
        if re.fullmatch(SBATCH_OPTION_PATTERN, option) is None:
            raise UsageError(
                f"{option!r}: no option of sbatch: give one as --name=value, without blanks or quotes"
            )
    given = {key: value for key, value in overrides.items() if value is not None}
    site = _load(chosen, given)
    shell = {key: os.environ.get(name) for key, name in FROM_SHELL.items() if getattr(site, key) is None}
    if any(shell.values()):
        site = _load(chosen, given | {key: value for key, value in shell.items() if value})
    for option in (*site.sbatch, *options):
        _check_option(option)
    return site.model_copy(update={"sbatch": [*site.sbatch, *options]})


def _load(path: Path, fields: dict[str, str | int]) -> Site:
    return load(Site, path, [f"{key}={json.dumps(value)}" for key, value in fields.items()])


def _check_option(option: str) -> None:
    """Raise UsageError for one that `megatfm launch` sets itself, also where the name is cut short."""
    name = option.removeprefix("--").partition("=")[0]
    if name in RESERVED_SBATCH_OPTIONS:
        raise UsageError(
            f"{option}: `megatfm launch` sets this itself: see its own flags, and the site file's fields"
        )
    whole = [known for known in WRITTEN_OUT if known.startswith(name)]
    if whole and name not in WRITTEN_OUT:
        raise UsageError(
            f"{option}: sbatch would take this for --{' or --'.join(whole)}: write the name out, or leave it to "
            "`megatfm launch`, which has flags for what it sets itself"
        )
