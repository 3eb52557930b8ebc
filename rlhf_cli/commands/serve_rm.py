"""`rlhf serve-rm`: rewards over HTTP for runs on other machines."""

from importlib.util import find_spec

from rlhf_cli.config.commands.serve_rm import ServeRMConfig
from rlhf_cli.errors import UsageError


def serve_rm(config: ServeRMConfig) -> None:
    """Serve a reward model, verifiers or your own reward over HTTP, for runs with --remote_rm_url.

    Texts are read with the reward model's own tokenizer, so it may have another vocabulary than the policy. Requests
    are POST /get_reward {"query": [...], "prompts": [...], "labels": [...]}, answered by {"rewards": [...]}: they carry
    neither numbers of tokens nor whether a response was cut. So rewards by length are refused, and a reward model reads
    a response that was cut with an end of sequence, as if it were whole; within a run (--reward_pretrain) it does not.
    """
    missing = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
    if missing:
        raise UsageError(f"{' and '.join(missing)} is not installed: pip install 'rlhf-cli[serve]'")
    from rlhf_cli.runs.reward_server import run_server

    run_server(config)
