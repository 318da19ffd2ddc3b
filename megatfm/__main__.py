"""`python -m megatfm`: the same as the `megatfm` command."""

import sys

from megatfm.cli import main

sys.exit(main())
