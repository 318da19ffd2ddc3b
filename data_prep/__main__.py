"""`python -m megatfm.data_prep CONFIG [key=value …]`."""

import sys

from megatfm.data_prep.command import cli

if __name__ == "__main__":
    sys.exit(cli())
