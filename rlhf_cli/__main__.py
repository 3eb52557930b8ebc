"""Entry point for `rlhf`, and for `python -m rlhf_cli` as used by launchers.

Keep module-level imports light, so that Ctrl-C during the import of `cli` also prints a single line.
"""

import atexit
import os
import sys
from contextlib import suppress

from rlhf_cli.errors import missing_package


def main() -> int:
    """Run the command line and return the exit status."""
    status: list[int] = []
    # Registered first, because exit handlers run in reverse order and this one skips the rest.
    atexit.register(_end_process, status)
    status.append(_run())
    return status[0]


def _run() -> int:
    try:
        from rlhf_cli import cli

        return cli.main()
    except ModuleNotFoundError as error:
        sys.stderr.write(f"rlhf: {missing_package(error)}\n")
        return 1
    # Raised by interrupted commands.
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        sys.stderr.write("rlhf: interrupted\n")
        return 130


def _end_process(status: list[int]) -> None:
    """Exit immediately after all other exit handlers."""
    # Python's own shutdown tears down thousands of modules, which takes more than a second.
    if status:
        for stream in (sys.stdout, sys.stderr):
            # The reader may have closed the pipe.
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(status[0])


if __name__ == "__main__":
    sys.exit(main())
