"""The description of a SLURM cluster: `Site`, read from a site file (slurm/site.toml) and flags."""

import json
import os
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from megatfm.config import load_section
from megatfm.config.section import Section
from megatfm.errors import UsageError

# Allow the names that sites use, but no quote, blank, newline or `$`.
SlurmToken = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.,:/+@-]*\z", max_length=200)]
Constraint = Annotated[str, Field(pattern=r"^[A-Za-z0-9_\[(][A-Za-z0-9_.,:&|*()\[\]-]*\z", max_length=200)]
NodeList = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.,\[\]-]*\z", max_length=1000)]
Memory = Annotated[str, Field(pattern=r"^\d+[KMGT]?\z", max_length=20)]
SBATCH_OPTION_PATTERN = r"^--[a-z][a-z-]*(=[A-Za-z0-9_.,:/+@?*%\[\]-]+)?\Z"
SbatchOption = Annotated[str, Field(pattern=SBATCH_OPTION_PATTERN.replace(r"\Z", r"\z"), max_length=200)]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*\z", max_length=200)]
SingleLine = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]*\z")]


class Site(Section):
    """Description of a cluster; see the comments in `slurm/site.toml`."""

    partition: SlurmToken | None = None
    """Partition (queue) of jobs."""
    account: SlurmToken | None = None
    """Account to charge."""
    qos: SlurmToken | None = None
    """Quality of service."""
    constraint: Constraint | None = None
    """Features that nodes must have."""
    exclude: NodeList | None = None
    """Nodes that jobs never use."""
    cpus_per_task: PositiveInt | None = None
    """Cores of each process."""
    memory: Memory | None = None
    """Memory of each node; by default the partition's default."""
    exclusive: bool = False
    """Whether jobs use whole nodes, shared with no other job."""
    gpus: Literal["gpus-per-node", "gres"] = "gpus-per-node"
    """Option that requests GPUs; some sites support only gres."""
    sbatch: list[SbatchOption] = Field(default_factory=list)
    """More options of sbatch."""
    srun: list[SbatchOption] = Field(default_factory=list)
    """More options of srun."""
    modules: list[SlurmToken] = Field(default_factory=list)
    """Environment modules to load."""
    setup: list[list[SingleLine]] = Field(default_factory=list)
    """Commands that run first in a job, each a list of arguments."""
    container: list[SingleLine] = Field(default_factory=list)
    """Command prefix that runs a process in a container, as a list of arguments."""
    python: SingleLine | None = None
    """Python inside the container; by default the Python that submits."""
    start: Literal["srun", "torchrun"] = "srun"
    """Program that starts the processes: srun, one task per process, or torchrun, one task per node."""
    interface: SlurmToken | None = None
    """Network interface for communication between processes."""
    stop_seconds: PositiveInt = 300
    """Seconds before the time limit at which a run is signalled to save and requeue."""
    requeue: bool = True
    """Whether the site allows jobs to be requeued; if not, use `--chain`."""
    max_restarts: NonNegativeInt = 3
    """Largest number of failures in a row, without a new checkpoint, after which a run is restarted."""
    environment: dict[VariableName, SingleLine] = Field(default_factory=dict)
    """Environment variables of every process."""


RESERVED_SBATCH_OPTIONS = (
    *("array", "chdir", "error", "job-name", "no-requeue", "nodes", "ntasks", "ntasks-per-node", "open-mode"),
    *("output", "parsable", "requeue", "signal", "test-only", "wait", "wrap"),
    *("account", "constraint", "cpus-per-task", "exclude", "gpus-per-node", "mem", "partition", "qos", "time"),
)
"""Options of sbatch that users can't set: the templates set them, or there are flags and site fields for them."""
UNABBREVIATED_OPTIONS = (*RESERVED_SBATCH_OPTIONS, "begin", "dependency", "nodelist", "reservation")
"""Options that must not be abbreviated, as sbatch would allow, because this module looks for their full names."""
FROM_SHELL = {"account": "SBATCH_ACCOUNT", "partition": "SBATCH_PARTITION", "qos": "SBATCH_QOS"}
"""Site field → sbatch's environment variable that is its default."""


def load_site(path: Path | None, overrides: dict[str, str | int | None], options: Sequence[str] = ()) -> Site:
    """Load a site file: `path`, else `slurm/site.toml` in the working directory, else megatfm's default.

    overrides: values that replace fields, unless None. options: options of sbatch to add to the site's. Raises
    UsageError.
    """
    local_file = Path("slurm/site.toml")
    default_file = Path(str(resources.files("megatfm.slurm") / "site.toml"))
    site_file = path or (local_file if local_file.is_file() else default_file)
    for option in options:
        if re.fullmatch(SBATCH_OPTION_PATTERN, option) is None:
            raise UsageError(
                f"{option!r}: not an option of sbatch: write one as --name=value, without blanks or quotes"
            )
    fields = {key: value for key, value in overrides.items() if value is not None}
    site = _load(site_file, fields)
    shell_values: dict[str, str | int] = {
        key: value for key, name in FROM_SHELL.items() if getattr(site, key) is None and (value := os.environ.get(name))
    }
    if shell_values:
        site = _load(site_file, fields | shell_values)
    for option in (*site.sbatch, *options):
        _check_option(option)
    return site.model_copy(update={"sbatch": [*site.sbatch, *options]})


def _load(path: Path, fields: dict[str, str | int]) -> Site:
    return load_section(Site, path, [f"{key}={json.dumps(value)}" for key, value in fields.items()])


def _check_option(option: str) -> None:
    """Raise UsageError for an option, or an abbreviation of one, that `megatfm launch` sets itself."""
    name = option.removeprefix("--").partition("=")[0]
    if name in RESERVED_SBATCH_OPTIONS:
        raise UsageError(f"{option}: `megatfm launch` sets this itself: see its own flags, and the site file's fields")
    full_names = [full_name for full_name in UNABBREVIATED_OPTIONS if full_name.startswith(name)]
    if full_names and name not in UNABBREVIATED_OPTIONS:
        raise UsageError(
            f"{option}: sbatch would take this for --{' or --'.join(full_names)}: write the full name, or use the "
            "flag of `megatfm launch`"
        )
