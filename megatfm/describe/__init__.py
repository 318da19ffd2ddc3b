"""Description of a config: parts, exact parameter counts, FLOPs and state, before anything is allocated."""

from megatfm.describe.description import Description, describe
from megatfm.describe.text import to_lines

__all__ = ["Description", "describe", "to_lines"]
