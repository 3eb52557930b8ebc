"""Asynchronous sampling on real engines and tiny models: runs are reproducible, resume exactly, and learn.

Ray is left out, as in test_online_repeats.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from online_settings import resolve
from site_hooks import undocumented
from test_online_repeats import (
    PROMPTS,
    Parts,
    WorthOfEpisodes,
    episode_prompts,
    episodes_config,
    play_parity,
    train,
)

pytestmark = pytest.mark.usefixtures("group_of_one")

Found = tuple[list[Any], list[Any], dict[str, torch.Tensor]]
SMALL = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "train_batch_size": 2, "max_new_tokens": 4}


def without_times(logged: list[tuple[int, dict[str, float]]]) -> list[tuple[int, dict[str, float]]]:
    return [(step, {k: v for k, v in metrics.items() if not k.startswith("perf/")}) for step, metrics in logged]


def assert_same(first: Found, second: Found, *, after: int = 0) -> None:
    assert without_times(first[0])[after:] == without_times(second[0])
    assert first[1][after:] == second[1]
    assert all(weight.equal(second[2][name]) for name, weight in first[2].items())


@pytest.mark.parametrize(("command", "staleness"), [("ppo", 1), ("grpo", 2), ("remax", 1)])
def test_a_run_that_samples_ahead_repeats_and_goes_on_as_if_never_stopped(command, staleness, tiny_model_dir, tmp_path):
    ahead = {"async_train": "true", "max_staleness": str(staleness)}
    config = resolve(command, pretrain=tiny_model_dir, param_dtype="fp32", init_kl_coef=0.1, **SMALL, **ahead)

    def run(folder: Path | None) -> Found:
        return train(config, command, tmp_path, PROMPTS * 2, folder, iterations=4)

    whole, again, resumed = run(tmp_path / "saved"), run(None), run(tmp_path / "saved")
    assert_same(whole, again)
    assert_same(whole, resumed, after=1)
    oldest = [metrics["staleness/max"] for _, metrics in whole[0]]
    assert oldest == [float(min(staleness, number)) for number in range(4)]
    assert not undocumented(command, whole[0][0][1])
    # Samples of an older policy differ from the current policy once it has been trained in between.
    differences = [metrics["rollout_diff_max"] for _, metrics in whole[0]]
    assert differences[0] < 1e-5 < differences[-1]


def test_staleness_0_is_the_run_without_sampling_ahead(tiny_model_dir, tmp_path):
    common = {"pretrain": tiny_model_dir, "param_dtype": "fp32", "init_kl_coef": 0.1, **SMALL}
    plain = train(resolve("ppo", **common), "ppo", tmp_path)
    assert_same(plain, train(resolve("ppo", **common, async_train="true", max_staleness="0"), "ppo", tmp_path))


def test_groups_that_are_replaced_and_batches_that_wait_are_kept_together(tiny_model_dir, tmp_path):
    config = resolve(
        "grpo", pretrain=tiny_model_dir, param_dtype="fp32", async_train="true", dynamic_filtering="true", **SMALL
    )

    def run(folder: Path | None) -> Found:
        return train(config, "grpo", tmp_path, PROMPTS * 4, folder, iterations=4)

    whole, resumed = run(tmp_path / "saved"), run(tmp_path / "saved")
    assert_same(whole, resumed, after=1)
    assert sum(metrics["dynamic/carried_in"] for _, metrics in whole[0]) > 0


@pytest.mark.parametrize("command", ["grpo", "ppo"])
def test_episodes_that_are_sampled_ahead_go_on_as_if_never_stopped(command, tiny_model_dir, tmp_path):
    def run(folder: Path | None) -> Found:
        return train(
            episodes_config(command, tiny_model_dir, async_train="true"),
            command,
            tmp_path,
            episode_prompts(12),
            folder,
            parts=Parts(play_parity, WorthOfEpisodes([], fails=lambda index: False)),
            iterations=3,
        )

    whole, resumed = run(tmp_path / "saved"), run(tmp_path / "saved")
    assert_same(whole, resumed, after=1)
    assert [metrics["staleness/mean"] for _, metrics in whole[0]] == [0.0, 1.0, 1.0]
    assert whole[0][-1][1]["episode/turns"] == 2.0


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_the_answer_to_an_observation_is_learned_on_responses_of_older_policies(staleness, tiny_model_dir, tmp_path):
    logged, _, _ = train(
        episodes_config("grpo", tiny_model_dir, seed=1, async_train="true", max_staleness=str(staleness)),
        "grpo",
        tmp_path,
        episode_prompts(240),
        parts=Parts(play_parity, WorthOfEpisodes([], fails=lambda index: False)),
        iterations=60,
    )
    assert sum(metrics["reward"] for _, metrics in logged[-5:]) / 5 >= 0.95
