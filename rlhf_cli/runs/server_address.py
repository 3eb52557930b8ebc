"""Address and API key of a server. This module imports nothing heavy."""

import ipaddress
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rlhf_cli.config.serve import AddressConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.rewards.remote.api_key import api_key


def server_key(config: AddressConfig, *, prefix: str = "") -> tuple[str, bool]:
    """Return the API key, and whether it was generated. Keys start with `prefix`, because clients refuse others.

    Raises:
        UsageError: the server is reachable from other machines and no key is set, or the key lacks the prefix.
    """
    given = api_key(config.api_key_env)
    if given is not None:
        if not given.startswith(prefix):
            raise UsageError(f"the key in {config.api_key_env} must start with {prefix}: clients refuse other keys")
        return given, False
    if not is_loopback(config.host):
        raise UsageError(
            f"--host {config.host} is reachable from other machines: set a key in the environment variable "
            f"{config.api_key_env} (or choose another variable with --api_key_env)"
        )
    # 24 bytes are beyond guessing, and fit in a header.
    return prefix + secrets.token_urlsafe(24), True


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """Bind the address and yield the socket. Raises UsageError if the address is in use."""
    # create_server defaults to IPv4.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"cannot listen on {host}, --port {port}: {reason}") from None
    with listener:
        yield listener


def address_of(listener: socket.socket) -> str:
    """Return the URL at which clients reach a listening socket."""
    host, port = listener.getsockname()[:2]
    # Clients cannot connect to a wildcard address.
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether an address is reachable only from this machine."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
