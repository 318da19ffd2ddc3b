"""Presets × layouts, one after the other in one program: the rank processes stay from case to case."""

import gc
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from megatfm.config import load_config
from megatfm.errors import MegatfmError, UsageError
from megatfm.verify.batch import Documents
from megatfm.verify.layouts import LAYOUTS, ONE
from megatfm.verify.ranks import RankTeam
from megatfm.verify.verify import Comparison, verify

Outcome = Literal["agrees", "refused", "DIFFERENT", "FAILED"]


@dataclass(frozen=True)
class Case:
    """A preset under a layout, and what came of it. text: why it was refused, or what differs."""

    preset: str
    layout: str
    outcome: Outcome
    text: str
    seconds: float

    @property
    def is_wrong(self) -> bool:
        """Whether the layout is another computation than one process, or failed."""
        return self.outcome in ("DIFFERENT", "FAILED")


def walk(
    cases: Iterable[tuple[str, str]], overrides: Sequence[str] = (), documents: Documents = "mixed"
) -> Iterator[Case]:
    """Verify presets under layouts, by their names; a layout that can't be is refused, as a config's would be."""
    with RankTeam() as team:
        for preset, layout in cases:
            start = time.monotonic()
            outcome, text = _case(preset, layout, overrides, documents, team)
            yield Case(preset, layout, outcome, text, time.monotonic() - start)
            gc.collect()  # models are in cycles with their hooks


def _case(
    preset: str, layout: str, overrides: Sequence[str], documents: Documents, team: RankTeam
) -> tuple[Outcome, str]:
    axes = [f"parallel.{key}={value}" for key, value in {**ONE, **LAYOUTS[layout]}.items()]
    try:
        config = load_config(preset, [*axes, *overrides])
        if config.parallel.engine == "native":
            return _outcome(verify(config, documents, team))
        return _outcome(verify(config, documents))  # other engines keep global state: processes of their own
    except UsageError as error:
        return "refused", str(error)
    except MegatfmError as error:
        return "FAILED", str(error)


def _outcome(comparison: Comparison) -> tuple[Outcome, str]:
    if wrong := comparison.wrong:
        worst = wrong[0]
        return "DIFFERENT", f"{worst.name} by {worst.error:.1e} (and {len(wrong) - 1} more)"
    if misses := comparison.traffic_mismatches:
        return "DIFFERENT", f"{misses[0]} (and {len(misses) - 1} more)"
    return "agrees", f"{max(one.error for one in comparison.gradients):.1e}"
