"""Usual layouts, under which presets are verified, and kinds of documents in their rows.

Imports nothing heavy, so that the command line is quick.
"""

from collections.abc import Mapping
from typing import Literal

Documents = Literal["mixed", "short", "long", "one", "sparse"]
"""Documents in a row. "short": many; "long": two, the second cut off; "one": one as long as the row; "sparse": a short
one, then padding; "mixed": rows of these kinds in turn."""

SINGLE_RANK = {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "tp": 1, "cp": 1, "ep": 1}

LAYOUTS: Mapping[str, Mapping[str, object]] = {
    "dp2": {"dp_shard": 2},
    "dp2-zero0": {"dp_shard": 2, "zero": 0},
    "dp2-zero1": {"dp_shard": 2, "zero": 1},
    "tp2": {"tp": 2},
    "cp2": {"cp": 2},
    "cp3-ring": {"cp": 3, "cp_method": "ring"},
    "cp2-heads": {"cp": 2, "cp_method": "ulysses"},
    "pp2": {"pp": 2},
    "ep2": {"dp_shard": 2, "ep": 2},
    "tp2-cp2": {"tp": 2, "cp": 2},
    "pp2-dp2": {"pp": 2, "dp_shard": 2, "pp_schedule": "interleaved"},
}
"""Name → keys of [parallel]; omitted axes have one rank."""
