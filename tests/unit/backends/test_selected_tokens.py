"""Token selections and the mean over prompts in actor updates: no micro-batch changes them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from shared_roles import WEIGHTS, role_settings, samples

from rlhf_cli.algorithms.aggregation import PROMPT_TOKENS
from rlhf_cli.algorithms.estimators.gae import ActorCriticPolicyConfig
from rlhf_cli.backends.roles.planner import MicroBatchPlanner
from rlhf_cli.backends.roles.ranks import ActorRank
from rlhf_cli.config.train import BatchConfig

pytestmark = pytest.mark.usefixtures("group_of_one")

STEPS = [np.arange(0, 8), np.arange(0, 8)]


def updated(pretrain: str, max_tokens: int, **policy: Any) -> list[dict[str, float]]:
    """Return metrics for two steps over the same samples, from three prompts."""
    settings = role_settings(pretrain, 1, policy=ActorCriticPolicyConfig(**policy))
    given = samples()
    if policy.get("loss_agg") == "prompt_mean":
        groups = [given[0:3], given[3:5], given[5:8]]
        totals = [sum(one.num_trained for one in group) for group in groups for _ in group]
        given = [
            replace(one, columns=one.columns | {PROMPT_TOKENS: np.full(one.num_trained, total, np.float32)})
            for one, total in zip(given, totals, strict=True)
        ]
    (work,) = MicroBatchPlanner(1, BatchConfig(train_max_tokens_per_gpu=max_tokens), 0.0).steps(given, STEPS)
    return ActorRank(settings).update(work, on_policy=False, weights=WEIGHTS)


@pytest.mark.parametrize(
    ("policy", "metric", "expected"),
    [
        ({"top_entropy_quantile": 0.2}, "entropy_kept", 9 / 41),  # 8.2 of 41 tokens, with the next one
        ({"policy_loss": "clip_cov", "clip_cov_ratio": 0.1, "clip_cov_range": (0.0, 5.0)}, "covariant", 4 / 41),
        ({"policy_loss": "kl_cov", "kl_cov_ratio": 0.1}, "covariant", 4 / 41),
        ({"loss_agg": "prompt_mean"}, "policy_loss", None),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_micro_batches_do_not_change_what_is_selected(tiny_model_dir, policy, metric, expected):
    whole, parts = updated(tiny_model_dir, 500, **policy), updated(tiny_model_dir, 28, **policy)
    plain = updated(tiny_model_dir, 500, policy_loss="clip")
    for one, other in zip(whole, parts, strict=True):
        assert one[metric] == pytest.approx(other[metric], rel=1e-4)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
        assert one[metric] == pytest.approx(expected if expected is not None else one[metric], rel=1e-6)
    assert abs(whole[0]["grad_norm"] - plain[0]["grad_norm"]) > 1e-4
