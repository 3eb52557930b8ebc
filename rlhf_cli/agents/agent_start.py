"""Entry point for an agent process: ties the process to the driver, then executes the agent program."""

import os
import signal

from rlhf_cli.rewards.workers.worker import die_with_lifeline, own_file


def main(lifeline: int, words: list[str]) -> None:
    """Execute the agent program. If the driver dies, the kernel kills the whole process group."""
    # A separate open file: the signal goes to one process group per open file, and all agents inherit the same pipe.
    descriptor = own_file(lifeline)
    os.close(lifeline)
    die_with_lifeline(descriptor)
    # The signal is sent only while the file is open, so it must stay open across exec.
    os.set_inheritable(descriptor, True)
    # Python ignores SIGPIPE, and exec keeps ignored signals: restore the default that other programs expect.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execvp(words[0], words)
