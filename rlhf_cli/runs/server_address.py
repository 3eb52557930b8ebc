"""The address and the key of a reward server; imports nothing heavy."""

import ipaddress
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rlhf_cli.config.serve import ServeConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.rewards.remote.api_key import api_key


def server_key(config: ServeConfig) -> tuple[str, bool]:
    """Return the key that clients must show, and whether it was made up here.

    Raises:
        UsageError: other machines could reach the server and no key is given.
    """
    given = api_key(config.api_key_env)
    if given is not None:
        return given, False
    if not is_loopback(config.host):
        raise UsageError(
            f"--host {config.host} lets other machines in: give a key in the environment variable {config.api_key_env} "
            "(--api_key_env names another)"
        )
    return secrets.token_urlsafe(24), True


@contextmanager
def listening(config: ServeConfig) -> Iterator[socket.socket]:
    """Yield the socket of the settings. Raise UsageError if the address is not free."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        listener = socket.create_server((config.host, config.port), family=family)
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"--host {config.host} --port {config.port} cannot be listened on: {reason}") from None
    with listener:
        yield listener


def is_loopback(host: str) -> bool:
    """Return whether an address is reached from this machine alone."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
