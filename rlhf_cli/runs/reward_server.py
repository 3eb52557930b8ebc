"""Implementation of `rlhf serve-rm`: binds the address, loads the rewards, and serves requests until a signal."""

import asyncio
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise

from rlhf_cli.backends.process.signals import INTERRUPTED, StopSignal
from rlhf_cli.commands.serve_rm import ServeRMConfig
from rlhf_cli.config.model import ModelConfig
from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.config.serve import ServeConfig, ServedModelConfig
from rlhf_cli.errors import RunError
from rlhf_cli.models.reward_model import read_reward_model
from rlhf_cli.rewards.model_scores import with_model_scores
from rlhf_cli.rewards.parts import stop_if_too_many_failed
from rlhf_cli.rewards.records import Score, ScoreRequest
from rlhf_cli.rewards.scorer import Scorer
from rlhf_cli.rewards.server.app import REWARD_PATH, StoppableServer, reward_app
from rlhf_cli.rewards.server.text_model import TextRewardModel
from rlhf_cli.runs.server_address import address_of, listening, server_key


def run_server(config: ServeRMConfig) -> None:
    """Serve until Ctrl-C or SIGTERM, then finish the requests in progress and exit with status 130."""
    stop = StopSignal()
    key, is_made = server_key(config.server)
    with ExitStack() as stack:
        # Bind before loading the model, so that a port in use is reported at once.
        listener = stack.enter_context(listening(config.server.host, config.server.port))
        score = stack.enter_context(scoring(config.reward, config.model))
        app = reward_app(score, config.server, key=key, takes_images=score.takes_images)
        server = StoppableServer(app, stop)
        _announce(listener, config.server, key if is_made else None)
        # Pass the bound socket, so that no other process can take the port meanwhile.
        asyncio.run(server.serve(sockets=[listener]))
    sys.exit(INTERRUPTED)


@dataclass(frozen=True)
class _RewardScoring:
    """Scores the responses in several requests together."""

    reward: RewardConfig
    scorer: Scorer
    text_model: TextRewardModel | None

    def __call__(self, jobs: Sequence[Sequence[ScoreRequest]]) -> Sequence[list[Score] | RunError]:
        """Return the scores for each request, or the error."""
        scores = _score([request for job in jobs for request in job], self.scorer, self.text_model, self.reward)
        bounds = [0, *accumulate(map(len, jobs))]
        return [_within_limit(scores[low:high], self.reward) for low, high in pairwise(bounds)]

    @property
    def takes_images(self) -> bool:
        """Whether a reward uses images: a vision-language model, or a reward file with the parameter `images`."""
        return self.scorer.reads_images if self.text_model is None else self.text_model.takes_images


@contextmanager
def scoring(reward: RewardConfig, model: ServedModelConfig) -> Iterator[_RewardScoring]:
    """Start the rewards, and stop their processes at the end of the block."""
    text_model = _text_model(reward, model)
    with Scorer(reward) as scorer:
        yield _RewardScoring(reward, scorer, text_model)


def _source(pretrain: str, model: ServedModelConfig) -> ModelConfig:
    return ModelConfig(pretrain=pretrain, param_dtype=model.param_dtype, trust_remote_code=model.trust_remote_code)


def _text_model(reward: RewardConfig, model: ServedModelConfig) -> TextRewardModel | None:
    if reward.reward_pretrain is None:
        return None
    source = _source(reward.reward_pretrain, model)
    found, tokenizer = read_reward_model(source, normalize=reward.normalize_reward)
    return TextRewardModel(found, tokenizer, max_len=model.max_len, max_tokens=model.max_tokens_per_gpu)


def _score(
    requests: Sequence[ScoreRequest], scorer: Scorer, model: TextRewardModel | None, reward: RewardConfig
) -> list[Score]:
    with scorer.session() as session:
        session.add(requests)
        found = asyncio.run(session.finish())
    scores = [found[number] for number in range(len(requests))]
    if model is None:
        return scores
    results = model.scores([request.query for request in requests], [request.pictures for request in requests])
    # NaN marks a failed text, and its reason replaces the score below.
    values = [float("nan") if isinstance(value, str) else value for value in results]
    joined = with_model_scores(scores, values, weight=reward.reward_model_weight)
    return [
        Score(None, "failed", why, score.parts, failure="bad_result") if isinstance(why, str) else score
        for score, why in zip(joined, results, strict=True)
    ]


def _within_limit(scores: list[Score], reward: RewardConfig) -> list[Score] | RunError:
    """Return a request's scores, or the error if too many responses failed."""
    try:
        stop_if_too_many_failed(scores, reward.reward_max_failures)
    except RunError as error:
        return error
    return scores


def _announce(listener: socket.socket, config: ServeConfig, made_key: str | None) -> None:
    print(f"Serving rewards: --remote_rm_url {address_of(listener)}{REWARD_PATH} (Ctrl-C ends it)")
    if made_key is not None:
        print(f"Clients require the server's key: export {config.api_key_env}={made_key}")
    # Clients may wait for this line in a pipe.
    sys.stdout.flush()
