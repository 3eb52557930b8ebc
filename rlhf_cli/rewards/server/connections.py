"""Connections of `rlhf serve-rm`: bounded in time and number, so that nobody without the key can hold all of them."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class BoundedConnection(H11Protocol):
    """An HTTP connection that is closed if the head of a request takes too long, or if its address has too many.

    If the server is full, a new connection takes the place of the oldest that has sent no complete head: a few
    addresses together could otherwise keep everybody else out.
    """

    head_seconds = 10.0
    """Seconds a client may take to send a request line and its headers; uvicorn itself waits for good."""
    max_per_address = 256
    """Connections of one address. A client of this program opens at most a few dozen."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection, or close it if its address has `max_per_address` others."""
        super().connection_made(transport)
        if self._num_of_this_address() > self.max_per_address:
            transport.abort()
        else:
            self._make_room()
            self._start_timer()

    def data_received(self, data: bytes) -> None:
        """Read what arrived. The time for a head runs from its first byte until it is complete."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        elif self._head_timer is None:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_timer()
        super().connection_lost(exc)

    def _num_of_this_address(self) -> int:
        addresses = [other.client[0] for other in self.connections if isinstance(other, H11Protocol) and other.client]
        return 0 if self.client is None else addresses.count(self.client[0])

    def _make_room(self) -> None:
        """Close the connection that has waited longest for a complete head, if uvicorn would refuse this one."""
        if self.limit_concurrency is None or len(self.connections) < self.limit_concurrency:
            return
        waiting = {
            other: other._head_timer.when()
            for other in self.connections
            if isinstance(other, BoundedConnection) and other._head_timer is not None
        }
        if waiting:
            oldest = min(waiting, key=waiting.__getitem__)
            oldest._stop_timer()  # a connection that is closed already is not chosen again
            oldest.transport.abort()

    def _start_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.head_seconds, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
