"""Connection limits for `rlhf serve-rm`, so that clients without the key cannot exhaust all connections."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class BoundedConnection(H11Protocol):
    """An HTTP connection with a header timeout and a limit per client address.

    If the server is full, a new connection replaces the oldest one that has not sent complete headers. Otherwise a few
    addresses together could block all other clients.
    """

    head_seconds = 10.0
    """Time limit in seconds for the request line and headers. uvicorn has no such limit."""
    max_per_address = 256
    """Maximum connections per address. `rlhf` clients open at most a few dozen."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection, or close it if the address exceeds `max_per_address`."""
        # First: uvicorn registers the connection in `self.connections`, which the checks below count.
        super().connection_made(transport)
        if self._num_of_this_address() > self.max_per_address:
            transport.abort()
        else:
            self._make_room()
            self._start_timer()

    def data_received(self, data: bytes) -> None:
        """Receive data and update the header timeout, which runs from the first byte to the complete headers."""
        super().data_received(data)
        # IDLE until h11 has parsed complete headers.
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        elif self._head_timer is None:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timeout and unregister."""
        self._stop_timer()
        super().connection_lost(exc)

    def _num_of_this_address(self) -> int:
        addresses = [other.client[0] for other in self.connections if isinstance(other, H11Protocol) and other.client]
        return 0 if self.client is None else addresses.count(self.client[0])

    def _make_room(self) -> None:
        """If the server is full, close the oldest connection without complete headers."""
        # At this count, uvicorn answers every new request with status 503.
        if self.limit_concurrency is None or len(self.connections) < self.limit_concurrency:
            return
        waiting = {
            other: other._head_timer.when()
            for other in self.connections
            if isinstance(other, BoundedConnection) and other._head_timer is not None
        }
        if waiting:
            oldest = min(waiting, key=waiting.__getitem__)
            # Without a timer it is not chosen again: `abort` closes the connection later, in the event loop.
            oldest._stop_timer()
            oldest.transport.abort()

    def _start_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.head_seconds, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
