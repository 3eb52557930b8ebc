"""Time limit for agent programs, excluding time spent in the model."""


class TimeLimit:
    """A limit of `timeout` seconds that restarts after each model response.

    The clock stops while any request is pending. A rejected request neither uses nor restores time. All times are in
    seconds on one clock.
    """

    def __init__(self, timeout: float, *, now: float) -> None:
        self._timeout = self._left = timeout
        # Meaningless while the clock is stopped.
        self._deadline = now + timeout
        self._num_open = 0

    def ask(self, now: float) -> None:
        """Record a new request and stop the clock."""
        # Concurrent requests: only the first one stops the clock.
        if not self._num_open:
            self._left = self._deadline - now
        self._num_open += 1

    def answer(self, now: float, *, is_refused: bool) -> None:
        """Record a response, and restart the clock if no other request is pending."""
        self._num_open -= 1
        # Otherwise an agent could run forever by sending invalid requests.
        if not is_refused:
            self._left = self._timeout
        if not self._num_open:
            self._deadline = now + self._left

    def remaining(self, now: float) -> float:
        """Return the remaining seconds, at most 0 if the limit is exceeded. While a request is pending: `timeout`."""
        return self._timeout if self._num_open else self._deadline - now
