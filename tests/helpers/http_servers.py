"""HTTP servers whose answers a test decides."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, bytes, dict[str, str]]
HANG_UP: Answer = (0, b"", {})


def rewards(values: list[Any], **others: Any) -> Answer:
    """Return the answer of a reward server."""
    return 200, json.dumps({"rewards": values} | others).encode(), {}


def lengths(body: dict) -> Answer:
    """Return the expected scores: the length of each query."""
    return rewards([len(query) for query in body["query"]])


@dataclass
class Server:
    """A server whose answers the test decides and whose requests it can inspect."""

    answer: Callable[[dict], Answer] = lengths
    health: Answer = (404, b"", {})
    asked: list[dict] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    url: str = ""
    """Address of a reward server."""

    @property
    def base(self) -> str:
        """Address of a judge."""
        return self.url.replace("/get_reward", "/v1")

    @property
    def num_queries(self) -> list[int]:
        return [len(body["query"]) for body in self.asked]


@contextmanager
def running(server: Server, *, port: int = 0) -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.asked.append(body)
            server.keys.add(self.headers["Authorization"])
            self._reply(server.answer(body))

        def do_GET(self) -> None:
            self._reply(server.health)

        def _reply(self, answer: Answer) -> None:
            status, said, headers = answer
            if not status:
                self.close_connection = True
                return
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(said))}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *_: Any) -> None:
            pass

    listener = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    listener.daemon_threads = True
    server.url = f"http://127.0.0.1:{listener.server_port}/get_reward"
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        listener.shutdown()
        thread.join()
        listener.server_close()


def dead_url() -> str:
    """Return an address without a server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/get_reward"
