"""CPU time of `rlhf --help` and the help of each command: the median of several fresh processes.

    python benchmarks/help_time.py [RUNS]

Exits with 1 if one takes longer than the limit. Counts user and system time of the process, so that a busy machine
changes little.
"""

import os
import statistics
import subprocess
import sys
import time

from rlhf_cli.cli import COMMANDS

LIMIT = 0.4  # seconds of CPU time: what feels instant, with room for a slow machine
RUNS = 7


def seconds_of(args: list[str]) -> tuple[float, float]:
    """CPU and wall seconds of one process of the program."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "rlhf_cli", *args], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"rlhf {' '.join(args)} ended with status {process.returncode}")
    return usage.ru_utime + usage.ru_stime, time.perf_counter() - start


def main() -> int:
    """Print the table; 0 if every line is within the limit."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else RUNS
    slow = 0
    print(f"{'command':<28} {'CPU s':>7} {'wall s':>7}   median of {runs}, limit {LIMIT} s of CPU time")
    for args in [["--help"], *([name, "--help"] for name in COMMANDS)]:
        seconds_of(args)  # compiles to .pyc, fills the page cache
        cpu, wall = zip(*(seconds_of(args) for _ in range(runs)), strict=True)
        median = statistics.median(cpu)
        slow += median > LIMIT
        mark = "  too slow" if median > LIMIT else ""
        print(f"rlhf {' '.join(args):<23} {median:>7.3f} {statistics.median(wall):>7.3f}{mark}")
    return int(slow > 0)


if __name__ == "__main__":
    sys.exit(main())
