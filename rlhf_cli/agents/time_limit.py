"""The time that an agent program may take for itself."""


class TimeLimit:
    """`timeout` seconds from the start of a program, and again from each answer of the model.

    The clock stands still while any request of the program waits: the time of the model does not count. A request that
    is refused gains the program no time and costs it none. All times are seconds of one clock.
    """

    def __init__(self, timeout: float, *, now: float) -> None:
        self._timeout = self._left = timeout
        self._deadline = now + timeout  # means nothing while the clock stands still
        self._num_open = 0

    def ask(self, now: float) -> None:
        """A request waits from now on."""
        if not self._num_open:
            self._left = self._deadline - now
        self._num_open += 1

    def answer(self, now: float, *, is_refused: bool) -> None:
        """A request waits no longer."""
        self._num_open -= 1
        if not is_refused:
            self._left = self._timeout
        if not self._num_open:
            self._deadline = now + self._left

    def remaining(self, now: float) -> float:
        """Return the seconds to the end of the program's time, 0 or less if it is over; the whole `timeout` while a
        request waits.
        """
        return self._timeout if self._num_open else self._deadline - now
