"""`python -m megatfm`: runs the `megatfm` command."""

import sys

from megatfm.cli import main

sys.exit(main())
