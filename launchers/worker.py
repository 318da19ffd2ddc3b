"""One rank under torchrun: megatfm's command line, with its exit code left where `megatfm.launchers.agent` finds it."""

import os
import runpy
from pathlib import Path

EXIT_CODE_DIR = "MEGATFM_EXIT_CODES"
"""Variable that names the folder."""


def main() -> None:
    """Run the command of `sys.argv` and exit with its code."""
    try:
        runpy.run_module("megatfm", run_name="__main__", alter_sys=True)
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
        (Path(os.environ[EXIT_CODE_DIR]) / os.environ["RANK"]).write_text(str(code))
        raise


if __name__ == "__main__":
    main()
