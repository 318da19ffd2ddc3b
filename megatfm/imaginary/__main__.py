"""`python -m megatfm.imaginary`: see `trace.py`."""

import sys

from megatfm.imaginary.trace import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
