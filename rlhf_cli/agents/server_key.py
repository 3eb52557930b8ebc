"""API key for environment servers.

It is read from an environment variable, so that it appears in no file, log or process list.
"""

from urllib.parse import urlsplit

from rlhf_cli.rewards.remote.api_key import api_key

_SERVER_KEY = "RLHF_ENVIRONMENT_API_KEY"
_HUB_KEY = "HF_TOKEN"
"""Hugging Face token, sent only to Spaces: other servers must not see it."""
KEY_ADVICE = f"the server requires an API key: set the environment variable {_SERVER_KEY}"
NEEDS_KEY = frozenset({401, 403})

_SPACES = ".hf.space"


def server_headers(url: str) -> dict[str, str]:
    """Return the authentication headers for a server, {} without a key.

    Raises:
        UsageError: the key is not valid in a header.
    """
    parts = urlsplit(url)
    # TLS only: over plain HTTP, anyone on the network could read the token.
    is_space = parts.scheme in ("https", "wss") and (parts.hostname or "").endswith(_SPACES)
    key = api_key(_SERVER_KEY) or (api_key(_HUB_KEY) if is_space else None)
    return {} if key is None else {"Authorization": f"Bearer {key}"}
