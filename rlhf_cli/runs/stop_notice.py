"""Terminal notice after Ctrl-C, while the run finishes the current step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rlhf_cli.backends.process.signals import StopSignal


@contextmanager
def stop_announced(stop: StopSignal, say: Callable[[str], None], what: str) -> Iterator[None]:
    """Call `say` on the first stop signal inside the block. `what` completes "The run ends as soon as ..."."""
    before = stop.on_request
    stop.on_request = lambda: say(f"The run ends as soon as {what}; a second Ctrl-C ends it at once")
    try:
        yield
    finally:
        # Restore the outer notice, such as that of the start of a run.
        stop.on_request = before
