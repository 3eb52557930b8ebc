"""Requests to reward servers, and their outcomes."""

import itertools

from rlhf_cli.rewards.records import ScoreRequest
from rlhf_cli.rewards.remote.client import RemoteRewards
from rlhf_cli.rewards.workers.pool import ItemOutcome

NUMBERS = itertools.count()


def request(query: str, *, prompt: str = "", label: str | None = None) -> ScoreRequest:
    """Return a response in a separate group."""
    response = query.removeprefix(prompt)
    group = str(next(NUMBERS))
    return ScoreRequest(query, prompt, response, label, len(response), False, group, sample=0, group_size=1)


def ask(client: RemoteRewards, asked: list[ScoreRequest]) -> list[ItemOutcome]:
    """Return each request's outcome."""
    return [future.result(timeout=60) for future in client.submit(asked)]
