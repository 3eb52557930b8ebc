"""Score requests for reward tests, and waiting for results."""

import asyncio
import itertools
import time
from collections.abc import Callable

import psutil

from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.rewards.records import Score, ScoreRequest
from rlhf_cli.rewards.scorer import Scorer
from rlhf_cli.rewards.session import ScoringSession

WriteFile = Callable[[str], str]


def config(**settings) -> RewardConfig:
    return RewardConfig.model_validate({"reward_timeout": 20.0, "reward_retries": 0} | settings)


NUMBERS = itertools.count()


def group(*responses: str, label: str | None = "18") -> list[ScoreRequest]:
    """Return samples of one prompt."""
    name = str(next(NUMBERS))
    return [
        ScoreRequest(
            query="Q: " + response,
            prompt="Q: ",
            response=response,
            label=label,
            num_tokens=len(response),
            truncated=False,
            group=name,
            sample=sample,
            group_size=len(responses),
        )
        for sample, response in enumerate(responses)
    ]


def request(response: str, label: str | None = "18") -> ScoreRequest:
    """Return the only sample of a prompt."""
    return group(response, label=label)[0]


def finished(session: ScoringSession) -> list[Score]:
    """Return the available scores by response number."""
    found = asyncio.run(session.finish())
    return [found[number] for number in sorted(found)]


def score(settings: RewardConfig, *responses: str) -> list[Score]:
    with Scorer(settings) as scorer:
        return scorer.score(group(*responses))


def values(settings: RewardConfig, *responses: str) -> list[float | None]:
    return [result.value for result in score(settings, *responses)]


def asked(
    response: str, label: str, *, tokens: int = 1, of: int = 1, sample: int = 0, prompt: str = "Q: "
) -> ScoreRequest:
    """Return a sample of a prompt with `of` samples; a single one forms its own group."""
    group = "g" if of > 1 else str(next(NUMBERS))
    return ScoreRequest(prompt + response, prompt, response, label, tokens, False, group, sample, of)


def ready_scores(session: ScoringSession, count: int) -> dict[int, Score]:
    """Return a session's next scores before its end."""
    found: dict[int, Score] = {}
    wait_until(lambda: bool(found.update(session.ready())) or len(found) >= count)
    return found


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool], limit: float = 20.0) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
