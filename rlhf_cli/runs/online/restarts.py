"""Automatic restarts after a process has died."""

from collections.abc import Callable

from rlhf_cli.errors import ProcessDied
from rlhf_cli.trainers.offline.loop import Finished


def with_restarts(
    attempt: Callable[[bool], Finished],
    *,
    max_restarts: int,
    should_stop: Callable[[], bool],
    has_checkpoint: Callable[[], bool],
    say: Callable[[str], None],
) -> Finished:
    """Run `attempt(continues)` and repeat it after a process died, from the last checkpoint or from the start."""
    restarts = 0
    while True:
        try:
            return attempt(restarts > 0)
        except ProcessDied as death:
            if restarts == max_restarts or should_stop():
                raise
            restarts += 1
            way = "going on from the last checkpoint" if has_checkpoint() else "no checkpoint yet, beginning anew"
            say(f"{death.message}; {way} (restart {restarts} of {max_restarts})")
