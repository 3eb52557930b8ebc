"""The program's entry, for `rlhf` and for `python -m rlhf_cli` as launchers call it.

Imports nothing at module level: a Ctrl-C while the program is imported ends it with one line too.
"""

import sys


def main() -> int:
    """Run the program. Return its exit status."""
    try:
        from rlhf_cli import cli

        return cli.main()
    except KeyboardInterrupt:
        sys.stderr.write("rlhf: interrupted\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
