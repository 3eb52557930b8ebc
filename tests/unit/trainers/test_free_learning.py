"""An actor learns from episodes whose turns start as soon as their environments have answered."""

from typing import Any

import pytest
from episode_fakes import episode_engines
from test_online_repeats import (
    OneEngine,
    Parts,
    StoppedTurns,
    WorthOfEpisodes,
    episode_prompts,
    episodes_config,
    parity_game,
    train,
)

from rlhf_cli.data.rollouts import GenerationRequest, SamplingParams

pytestmark = [pytest.mark.usefixtures("group_of_one"), pytest.mark.slow]


class JoinedTurns(StoppedTurns):
    """An engine whose running batch accepts requests and generates them immediately."""

    def begin(self, requests: list[GenerationRequest], sampling: SamplingParams) -> None:
        self._sampling, self._count = sampling, len(requests)
        self._engine.begin(requests, sampling)

    def add(self, requests: list[GenerationRequest]) -> None:
        added = enumerate(self._engine.generate(requests, self._sampling), start=self._count)
        self._engine._left += added
        self._count += len(requests)


def play_freely(engine: OneEngine) -> Any:
    return episode_engines(JoinedTurns(engine), parity_game(), max_turns=4, max_len=32, in_step=False)


def test_the_answer_to_an_observation_is_learned_with_free_turns(tiny_model_dir, tmp_path):
    logged, _, _ = train(
        episodes_config("grpo", tiny_model_dir, seed=1),
        "grpo",
        tmp_path,
        episode_prompts(240),
        iterations=60,
        parts=Parts(play=play_freely, scorer=WorthOfEpisodes([], fails=lambda index: False)),
    )
    assert sum(metrics["reward"] for _, metrics in logged[-5:]) / 5 >= 0.95
    assert max(metrics["rollout_diff_max"] for _, metrics in logged) < 1e-5
