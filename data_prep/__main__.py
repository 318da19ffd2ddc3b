"""`python -m megatfm.data_prep CONFIG [key=value …]`."""

import sys

from megatfm.data_prep.cli import cli
from megatfm.terminal import spell_unencodable

if __name__ == "__main__":
    spell_unencodable()
    sys.exit(cli())
