"""`python -m rlhf_cli`, as launchers call the program."""

import sys

from rlhf_cli.cli import main

if __name__ == "__main__":
    sys.exit(main())
