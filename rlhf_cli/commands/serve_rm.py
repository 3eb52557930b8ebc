"""`rlhf serve-rm`: serve rewards over HTTP."""

from importlib.util import find_spec

from rlhf_cli.config.commands.serve_rm import ServeRMConfig
from rlhf_cli.errors import UsageError


def serve_rm(config: ServeRMConfig) -> None:
    """Serve a reward model, verifiers or your reward function over HTTP, for runs with --remote_rm_url.

    The reward model may use a different tokenizer than the policy. Requests are POST /get_reward {"query": [...],
    "prompts": [...], "labels": [...]}, and the response is {"rewards": [...]}. Requests do not contain token counts or
    truncation: length rewards are rejected, and a reward model adds an EOS token to truncated responses too, unlike
    with --reward_pretrain.
    """
    missing = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
    if missing:
        raise UsageError(f"{' and '.join(missing)} is not installed: pip install 'rlhf-cli[serve]'")
    from rlhf_cli.runs.reward_server import run_server

    run_server(config)
