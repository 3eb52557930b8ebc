"""The program's entry, for `rlhf` and for `python -m rlhf_cli` as launchers call it.

Imports nothing heavy at module level: a Ctrl-C while the program is imported ends it with one line too.
"""

import atexit
import os
import sys
from contextlib import suppress

from rlhf_cli.errors import missing_package


def main() -> int:
    """Run the program. Return its exit status."""
    status: list[int] = []
    atexit.register(_end_process, status)  # before all others, so that it is called after them
    status.append(_run())
    return status[0]


def _run() -> int:
    try:
        from rlhf_cli import cli

        return cli.main()
    except ModuleNotFoundError as error:
        sys.stderr.write(f"rlhf: {missing_package(error)}\n")
        return 1
    except SystemExit as end:  # how a command ends that was interrupted
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        sys.stderr.write("rlhf: interrupted\n")
        return 130


def _end_process(status: list[int]) -> None:
    """End the process with its status, when everything else is closed.

    Python would take ten thousand modules apart first, which takes a second and more.
    """
    if status:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # nobody reads it any more
                stream.flush()
        os._exit(status[0])


if __name__ == "__main__":
    sys.exit(main())
