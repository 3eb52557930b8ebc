"""Going on by itself after a process of the run has died."""

from collections.abc import Callable

from rlhf_cli.errors import ProcessDied
from rlhf_cli.trainers.loop import Finished


def with_restarts(
    attempt: Callable[[bool], Finished],
    *,
    max_restarts: int,
    should_stop: Callable[[], bool],
    say: Callable[[str], None],
) -> Finished:
    """How `attempt(continues)` ended, which is called again from the last checkpoint on after a process has died.

    An attempt leaves no process behind, also when it fails. Other errors would come again: they are raised.
    """
    restarts = 0
    while True:
        try:
            return attempt(restarts > 0)
        except ProcessDied as death:
            if restarts == max_restarts or should_stop():
                raise
            restarts += 1
            say(f"{death.said}; going on from the last checkpoint (restart {restarts} of {max_restarts})")
