"""The data of one online iteration: from generations to the samples of policy and critic.

Pure functions over flat arrays: the loop asks the models for log-probs and values.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rlhf_cli.algorithms.kl import kl_estimate
from rlhf_cli.algorithms.ragged import segment_ids, segment_lengths, segment_sum
from rlhf_cli.algorithms.shaping import clip_scores, shaped_scores, token_rewards
from rlhf_cli.algorithms.table import Algorithm, Experience, compute_advantages
from rlhf_cli.config.policy import PolicyConfig
from rlhf_cli.config.scoring import OnlineRewardConfig
from rlhf_cli.data.packing.packs import TokenSequence
from rlhf_cli.data.packing.samples import Sample
from rlhf_cli.data.prompts import Prompt
from rlhf_cli.data.rollouts import Generation
from rlhf_cli.rewards.model_scores import weights_of_all_parts
from rlhf_cli.rewards.records import Score, ScoreRequest


@dataclass(frozen=True)
class Rollouts:
    """Scored responses of one iteration; lists are by response.

    `groups_B` is the number of each one's group, the responses to one prompt; `truncated_B` which were cut.
    """

    sequences: list[TokenSequence]
    rollout_logprobs: list[np.ndarray]
    scores_B: torch.Tensor
    groups_B: torch.Tensor
    truncated_B: torch.Tensor
    parts: dict[str, torch.Tensor]  # the rewards [B] that scores were added up from, not weighted

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def cu(self) -> torch.Tensor:
        """Bounds of the responses in arrays over all response tokens, int64 [B + 1]."""
        return torch.tensor(np.cumsum([0] + [len(logprobs) for logprobs in self.rollout_logprobs]))

    def only(self, keep_B: torch.Tensor) -> "Rollouts":
        """Return the responses that a boolean selects."""
        kept = torch.nonzero(keep_B).squeeze(1).tolist()
        return Rollouts(
            sequences=[self.sequences[i] for i in kept],
            rollout_logprobs=[self.rollout_logprobs[i] for i in kept],
            scores_B=self.scores_B[keep_B],
            groups_B=self.groups_B[keep_B],
            truncated_B=self.truncated_B[keep_B],
            parts={name: part_B[keep_B] for name, part_B in self.parts.items()},
        )

    def trained_B(self, policy: PolicyConfig) -> torch.Tensor:
        """Which responses are trained on, bool [B]."""
        return ~self.truncated_B if policy.mask_truncated else torch.ones_like(self.truncated_B)


def as_sequence(prompt_ids: list[int], response_ids: list[int]) -> TokenSequence:
    """Prompt and response end to end; exactly the sampled tokens are trained on."""
    token_ids = np.array(prompt_ids + response_ids, dtype=np.int32)
    return TokenSequence(token_ids, np.arange(len(token_ids)) >= len(prompt_ids))


def scored_rollouts(
    prompts: Sequence[Prompt], generations: Sequence[Generation], scores: Sequence[Score], groups: Sequence[int]
) -> Rollouts:
    """Return the responses that can be trained on, in order: all whose score did not fail.

    Args:
        prompts: the prompt of each response.
        groups: the number of each response's group: a prompt may be asked twice in an iteration.
    """
    rows = [row for row in zip(prompts, generations, scores, groups, strict=True) if row[2].value is not None]
    return Rollouts(
        sequences=[as_sequence(prompt.prompt_ids, generation.token_ids) for prompt, generation, *_ in rows],
        rollout_logprobs=[np.array(generation.logprobs, dtype=np.float32) for _, generation, *_ in rows],
        scores_B=torch.tensor([row[2].value for row in rows], dtype=torch.float32),
        groups_B=torch.tensor([row[3] for row in rows], dtype=torch.int64),
        truncated_B=torch.tensor([row[1].finish_reason == "length" for row in rows], dtype=torch.bool),
        parts={
            name: torch.tensor([row[2].parts[name] for row in rows], dtype=torch.float32)
            for name in (rows[0][2].parts if rows else ())
        },
    )


def with_greedy(rollouts: Rollouts, greedy: Rollouts) -> Rollouts:
    """Return the responses to prompts whose greedy response has a score too."""
    return rollouts.only(torch.isin(rollouts.groups_B, greedy.groups_B))


@dataclass(frozen=True)
class Evaluated:
    """The models' values for each response token, as lists by response; None for a model that takes no part.

    `bootstrap_B` are the values of the states that responses ended in: 0 for finished ones, None if not asked for.
    """

    old_logprobs: list[np.ndarray] | None
    ref_logprobs: list[np.ndarray] | None
    values: list[np.ndarray] | None
    bootstrap_B: torch.Tensor | None


def with_last_states(rollouts: Rollouts) -> list[TokenSequence]:
    """Return the sequences with one more target behind the cut ones, so that a critic also values the state they ended
    in.

    No state before a token sees it, so that the target may be any token.
    """
    return [
        TokenSequence(np.append(s.token_ids, s.token_ids[-1]), np.append(s.loss_mask, True)) if cut else s
        for s, cut in zip(rollouts.sequences, rollouts.truncated_B.tolist(), strict=True)
    ]


def split_last_values(values: list[np.ndarray], truncated_B: torch.Tensor) -> tuple[list[np.ndarray], torch.Tensor]:
    """Return (values of the states before each response token, `bootstrap_B`) from values under `with_last_states`."""
    cuts = truncated_B.tolist()
    own = [values[:-1] if cut else values for values, cut in zip(values, cuts, strict=True)]
    last = [float(values[-1]) if cut else 0.0 for values, cut in zip(values, cuts, strict=True)]
    return own, torch.tensor(last)


def learning_samples(
    rollouts: Rollouts,
    evaluated: Evaluated,
    *,
    greedy: Rollouts | None,
    algorithm: Algorithm,
    policy: PolicyConfig,
    reward: OnlineRewardConfig,
    kl_coef: float,
    max_new_tokens: int,
) -> tuple[list[Sample], dict[str, float]]:
    """Return a sample for each response that is trained on, and the metrics of KL divergence and advantages.

    `greedy` are responses to the same prompts to compare with. `kl` is the mean over responses of the divergence summed
    over their tokens, which the adaptive controller steers. It is a metric here if it is subtracted from the reward.
    """

    def rewards(of: Rollouts) -> torch.Tensor:
        lengths_B = segment_lengths(of.cu)
        return shaped_scores(of.scores_B, lengths_B, of.truncated_B, reward=reward, max_new_tokens=max_new_tokens)

    cu = rollouts.cu
    kl_N = None if policy.has_kl_loss else _kl(evaluated, policy)
    trained_B = rollouts.trained_B(policy)
    experience = Experience(
        rewards_N=token_rewards(rewards(rollouts), kl_N, cu, kl_coef=kl_coef),
        parts=weighted_parts(rollouts, reward) if algorithm.rewards_apart else (),
        values_N=None if evaluated.values is None else _flat(evaluated.values),
        bootstrap_B=evaluated.bootstrap_B,
        cu=cu,
        groups_B=rollouts.groups_B,
        trained_B=trained_B,
        greedy_B=None if greedy is None else _of_groups(rewards(greedy), greedy.groups_B, rollouts.groups_B),
    )
    advantages_N, returns_N = compute_advantages(algorithm, experience, settings=policy)
    columns = _columns(rollouts, evaluated, advantages_N=advantages_N, returns_N=returns_N)
    if policy.has_kl_loss and evaluated.ref_logprobs is not None:
        columns["ref_logprobs"] = evaluated.ref_logprobs
    samples = [
        Sample(rollouts.sequences[i], {name: values[i] for name, values in columns.items()})
        for i in torch.nonzero(trained_B).squeeze(1).tolist()
    ]
    metrics = {"advantage_abs": float(advantages_N[trained_B[segment_ids(cu)]].abs().mean())}
    if kl_N is not None:
        metrics["kl"] = float(segment_sum(kl_N, cu).mean())
    return samples, metrics


def weighted_parts(rollouts: Rollouts, reward: OnlineRewardConfig) -> tuple[tuple[float, torch.Tensor], ...]:
    """(weight, clipped values [B]) of each reward."""
    weights = weights_of_all_parts(reward)
    return tuple(
        (weights[name], clip_scores(part_B, reward.reward_clip_range)) for name, part_B in rollouts.parts.items()
    )


def _of_groups(values_G: torch.Tensor, numbers_G: torch.Tensor, groups_B: torch.Tensor) -> torch.Tensor:
    """Return the value of each response's group; `numbers_G` holds the group of each value."""
    by_number = values_G.new_zeros(int(numbers_G.max()) + 1).index_put((numbers_G,), values_G)
    return by_number[groups_B]


def _columns(
    rollouts: Rollouts, evaluated: Evaluated, *, advantages_N: torch.Tensor, returns_N: torch.Tensor | None
) -> dict[str, list[np.ndarray]]:
    """Return the columns of each response's tokens, by name."""
    columns = {"rollout_logprobs": rollouts.rollout_logprobs, "advantages": _split(advantages_N, rollouts.cu)}
    if evaluated.old_logprobs is not None:
        columns["old_logprobs"] = evaluated.old_logprobs
    if returns_N is not None and evaluated.values is not None:
        columns |= {"old_values": evaluated.values, "returns": _split(returns_N, rollouts.cu)}
    return columns


def _kl(evaluated: Evaluated, policy: PolicyConfig) -> torch.Tensor | None:
    if evaluated.ref_logprobs is None:
        return None
    assert evaluated.old_logprobs is not None, "the KL divergence needs the policy's own log-probs"
    return kl_estimate(_flat(evaluated.old_logprobs), _flat(evaluated.ref_logprobs), policy.kl_estimator)


def _flat(by_response: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(by_response))


def _split(values_N: torch.Tensor, cu: torch.Tensor) -> list[np.ndarray]:
    return np.split(values_N.numpy(), cu[1:-1].numpy())


MAX_SOURCES = 32
"""Sources whose metrics are told apart at most: a column of names that all differ is no source."""


def rollout_metrics(generations: Sequence[Generation], scores: Sequence[Score]) -> dict[str, float]:
    """Return the rewards, verdicts and lengths of an iteration's responses; failed rewards are not averaged in."""
    return rollout_rewards(scores) | length_metrics(generations)


def rollout_rewards(scores: Sequence[Score]) -> dict[str, float]:
    """Return the rewards, verdicts and the metrics that rewards report besides; failed rewards are not averaged in."""
    values = [score.value for score in scores if score.value is not None]
    judged = [score.status for score in scores if score.status in ("correct", "wrong", "invalid")]
    metrics = {
        "reward": float(np.mean(values)) if values else 0.0,
        "reward_std": float(np.std(values)) if values else 0.0,
    }
    if judged:
        metrics["accuracy"] = judged.count("correct") / len(judged)
    parts: dict[str, list[float]] = {}
    for score in scores:
        for name, value in score.parts.items():
            parts.setdefault(f"reward/{name}", []).append(value)
        for name, value in score.metrics.items():
            parts.setdefault(name, []).append(value)
    return metrics | {name: float(np.mean(part)) for name, part in parts.items()}


def source_metrics(questions: Sequence[ScoreRequest], scores: Sequence[Score]) -> dict[str, float]:
    """Return the rewards and verdicts by the source that rows name, if they name several, but not too many to look
    at.
    """
    found: dict[str, list[Score]] = {}
    for question, score in zip(questions, scores, strict=True):
        if question.source is not None:
            found.setdefault(question.source, []).append(score)
    if not 1 < len(found) <= MAX_SOURCES:
        return {}
    return {
        f"source/{source}/{name}": value
        for source, of_source in found.items()
        for name, value in rollout_rewards(of_source).items()
        if name in ("reward", "accuracy")
    }


def zero_std_metrics(scores: Sequence[Score], groups: Sequence[int]) -> dict[str, float]:
    """Return the share of groups whose scores are all equal, as TRL calls it; {} if there is no group of two scores.

    Args:
        groups: the number of each response's group.
    """
    values: dict[int, list[float]] = {}
    for score, group in zip(scores, groups, strict=True):
        if score.value is not None:
            values.setdefault(group, []).append(score.value)
    compared = [min(of_group) == max(of_group) for of_group in values.values() if len(of_group) > 1]
    return {"frac_reward_zero_std": float(np.mean(compared))} if compared else {}


def failure_metrics(scores: Sequence[Score]) -> dict[str, float]:
    """Return the share of rewards that failed, and how many did in each way, of the ways in which some did."""
    counts = Counter(score.failure for score in scores if score.failure is not None)
    share = {"reward_failed": float(np.mean([score.status == "failed" for score in scores]))}
    return share | {f"reward/failed_{kind}": float(count) for kind, count in sorted(counts.items())}


def greedy_metrics(greedy: Rollouts | None) -> dict[str, float]:
    """Return the mean score of the greedy responses, if there are any."""
    return {} if greedy is None else {"greedy_reward": float(greedy.scores_B.mean())}


def length_metrics(generations: Sequence[Generation]) -> dict[str, float]:
    """Return the lengths of responses in tokens, and the share that was cut at the limit."""
    lengths = np.array([len(generation.token_ids) for generation in generations])
    return {
        "response_length": float(lengths.mean()),
        "response_length_max": float(lengths.max()),
        "truncated": float(np.mean([generation.finish_reason == "length" for generation in generations])),
    }


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """Which response something is, counted from 0, of the `size` in a group."""

    group: str
    sample: int
    size: int


def whole_groups(num_prompts: int, num_samples: int) -> list[GroupPlace]:
    """Return the places of all samples of prompts; the samples of a prompt are neighbours."""
    return [
        GroupPlace(str(group), sample, num_samples) for group in range(num_prompts) for sample in range(num_samples)
    ]


def score_requests(
    prompts: Sequence[Prompt],
    generations: Sequence[Generation],
    decode: Callable[[Sequence[int]], str],
    *,
    places: Sequence[GroupPlace],
) -> list[ScoreRequest]:
    """Return the requests to the rewards: texts of prompts and responses, without special tokens in the response.

    Args:
        prompts: the prompt of each response.
        places: the place of each response in its group: a prompt may be asked twice in an iteration.
    """
    requests = []
    for prompt, generation, place in zip(prompts, generations, places, strict=True):
        response = decode(generation.token_ids)
        requests.append(
            ScoreRequest(
                query=prompt.text + response,
                prompt=prompt.text,
                response=response,
                label=prompt.label,
                num_tokens=len(generation.token_ids),
                truncated=generation.finish_reason == "length",
                group=place.group,
                sample=place.sample,
                group_size=place.size,
                source=prompt.data_source,
                row=prompt.row,
                token_ids=generation.token_ids,
            )
        )
    return requests


def sample_rows(
    requests: Sequence[ScoreRequest], generations: Sequence[Generation], scores: Sequence[Score]
) -> list[dict[str, object]]:
    """Return the rows for samples.jsonl."""
    return [
        {
            "prompt": request.prompt,
            "response": request.response,
            "label": request.label,
            "reward": score.value,
            "verdict": score.status,
            "detail": score.detail,
            "length": len(generation.token_ids),
            "finish_reason": generation.finish_reason,
            **({"data_source": request.source} if request.source is not None else {}),
            **{f"reward/{name}": value for name, value in score.parts.items()},
            **score.metrics,
        }
        for request, generation, score in zip(requests, generations, scores, strict=True)
    ]
