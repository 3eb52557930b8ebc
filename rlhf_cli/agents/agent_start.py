"""The first moment of an agent program's process: it ties the process to the driver, then becomes the program."""

import os
import signal

from rlhf_cli.rewards.workers.worker import die_with_lifeline, own_file


def main(lifeline: int, words: list[str]) -> None:
    """Become the program of these words, which the kernel kills with its children when the driver is gone."""
    descriptor = own_file(lifeline)
    os.close(lifeline)
    die_with_lifeline(descriptor)
    os.set_inheritable(descriptor, True)  # the signal lasts as long as the file is open
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # which Python ignores, and a program inherits
    os.execvp(words[0], words)
