"""The command line: commands, nothing else."""

import sys


def main() -> None:
    from megatfm.config import load_config
    from megatfm.train.loop import train

    sys.exit(train(load_config(sys.argv[2], sys.argv[3:])))


if __name__ == "__main__":
    main()
