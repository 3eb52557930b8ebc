"""The key that a server of environments asks for: read from the environment, so that no file, log or process list has
it.
"""

from urllib.parse import urlsplit

from rlhf_cli.rewards.remote.api_key import api_key

SERVER_KEY = "RLHF_ENVIRONMENT_API_KEY"
HUB_KEY = "HF_TOKEN"
"""The key of Hugging Face, for Spaces alone: another server must not learn it."""
KEY_ADVICE = f"the server asks for a key: put it into the environment variable {SERVER_KEY}"
NEEDS_KEY = frozenset({401, 403})

_SPACES = ".hf.space"


def server_headers(url: str) -> dict[str, str]:
    """Return the headers that show the key of the server at a URL, {} without a key.

    Raises:
        UsageError: no header can carry the key.
    """
    parts = urlsplit(url)
    is_space = parts.scheme in ("https", "wss") and (parts.hostname or "").endswith(_SPACES)
    key = api_key(SERVER_KEY) or (api_key(HUB_KEY) if is_space else None)
    return {} if key is None else {"Authorization": f"Bearer {key}"}
