"""The line on the terminal that answers Ctrl-C while a run finishes its step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rlhf_cli.backends.process.signals import StopSignal


@contextmanager
def stop_announced(stop: StopSignal, say: Callable[[str], None], what: str) -> Iterator[None]:
    """Have the first signal of the block answered by `say`; behind the block it is answered as before.

    `what` completes "The run ends as soon as ...".
    """
    before = stop.on_request
    stop.on_request = lambda: say(f"The run ends as soon as {what}; a second Ctrl-C ends it at once")
    try:
        yield
    finally:
        stop.on_request = before
