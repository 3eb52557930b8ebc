"""A response in an iteration that was run again for `rlhf why`, and the shares of its tokens in the gradient."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from rlhf_cli.algorithms.estimators.estimator import Experience
from rlhf_cli.algorithms.formulas import number
from rlhf_cli.algorithms.token_trace import SAMPLE
from rlhf_cli.backends.roles.watch import Place
from rlhf_cli.commands.gkd import GKDConfig
from rlhf_cli.commands.online import OnlineConfig
from rlhf_cli.config.replay import WhyGroup
from rlhf_cli.data.tokenizing.decoding import text_of
from rlhf_cli.runs.online.replay import Replayed
from rlhf_cli.trainers.online.batch import experience_of
from rlhf_cli.trainers.online.loop import ScoredBatch
from rlhf_cli.trainers.online.samples import Rollout, Sample

MOST_SHARES = 64
"""Tokens of a response for whose shares of the gradient a JSON file has room: each costs a backward pass."""


def tokens_with_share(
    row: Mapping[str, object], settings: WhyGroup, config: OnlineConfig, batch: ScoredBatch
) -> list[Place]:
    """Return the tokens whose gradient shares are computed: the chosen one; for a file, all of a short response."""
    _, _, places = located(batch, row, config) or (None, None, [])
    if settings.json_file is not None and len(places) <= MOST_SHARES:
        return places
    return [] if settings.token is None else places[settings.token : settings.token + 1]


def located(
    batch: ScoredBatch, row: Mapping[str, object], config: OnlineConfig
) -> tuple[Rollout, int, list[Place]] | None:
    """Return a response in a batch; None if it was not trained on.

    Returns:
        The rollout with it, its number there, and its tokens in the update; these are [] if it is truncated and masked.
    """
    # A student learns from all responses, also from those without a score.
    is_student = isinstance(config, GKDConfig)
    rollout = batch.sampled if is_student else batch.trainable
    numbers = [number for number, sample in enumerate(rollout.samples) if sample.id == row["id"]]
    if not numbers:
        return None
    trained = [True] * len(rollout) if is_student else rollout.trained_B(config.policy).tolist()
    # The update contains only the sequences of trained responses.
    counts = [
        (len(sample.branches) + 1) * is_trained for sample, is_trained in zip(rollout.samples, trained, strict=True)
    ]
    first, own = sum(counts[: numbers[0]]), rollout.samples[numbers[0]].sequences[: counts[numbers[0]]]
    return rollout, numbers[0], [(first + n, token) for n, one in enumerate(own) for token in range(one.num_trained)]


@dataclass(frozen=True)
class Explained:
    """A response in an iteration that was run again.

    - `number`: its place in the trained responses of the iteration.
    - `places`: its tokens in the update; [] if it is truncated and masked.
    """

    again: Replayed
    rollout: Rollout
    number: int
    places: Sequence[Place]

    @property
    def sample(self) -> Sample:
        """The response."""
        return self.rollout.samples[self.number]

    @cached_property
    def experience(self) -> Experience:
        """Input for the estimator."""
        assert self.again.batch is not None
        assert self.again.state is not None
        batch, state = self.again.batch, self.again.state
        return experience_of(self.rollout, batch.greedy, self.again.run.settings, kl_coef=state.kl_coef)[0]

    @cached_property
    def steps(self) -> dict[int, list[dict[str, float]]]:
        """Columns of its tokens in order, by number of the optimizer step."""
        found: dict[int, list[dict[str, float]]] = {}
        sequences = sorted({sequence for sequence, _ in self.places})
        for step, columns in enumerate(self.again.trace, start=1):
            for place in np.flatnonzero(np.isin(columns[SAMPLE], sequences)).tolist():
                found.setdefault(step, []).append({name: float(values[place]) for name, values in columns.items()})
        return found

    def version(self, token: int) -> int:
        """Return the number of the weights that sampled a token."""
        end = 0
        for version, count in self.sample.response.runs:
            end += count
            if token < end:
                return int(version)
        return self.sample.response.weight_version

    @cached_property
    def texts(self) -> list[str]:
        """Text of each sampled token."""
        tokenizer = self.again.run.tokenizer
        ids = [
            int(token)
            for sequence in self.sample.sequences
            for token in sequence.token_ids[np.flatnonzero(sequence.loss_mask)]
        ]
        return [text_of(tokenizer, [token], skip_special_tokens=False) for token in ids]


def share_lines(explained: Explained, step: int, token: int) -> list[str]:
    """Return the share of a token in the gradient of an optimizer step, as a formula."""
    again, name = explained.again, "share of the gradient norm"
    if again.no_shares is not None:
        return [f"{name}: not computed: {again.no_shares}"]
    found = again.projections[step - 1].get(explained.places[token])
    if found is None:
        return [f"{name}: not computed for all of more than {MOST_SHARES} tokens: set --token {token}"]
    if not math.isfinite(found.step_norm) or not found.step_norm:
        return [f"{name}: not computed: the gradient of the step has norm {number(found.step_norm)}"]
    percent = number(100 * found.share)
    return [
        f"gradient g_t of the token: norm {number(found.norm)}; gradient g of the step, the sum over all tokens: norm "
        f"{number(found.step_norm)}; cosine {number(found.cosine)}",
        f"{name}: g_t . g / |g|^2 = {number(found.product)} / {number(found.step_norm**2)} = {percent}%",
    ]


def response_lines(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield prompt and response of a row of samples.jsonl; of an episode, all messages, with rewards of turns."""
    yield f"  prompt    {row['prompt']!r}"
    if "messages" not in row:
        yield f"  response  {row['response']!r}"
        return
    rewards = iter(row.get("turn_rewards") or ())
    for message in row["messages"]:
        reward = next(rewards, None) if message["role"] == "assistant" else None
        shown = "" if reward is None else f"  reward {number(reward)}"
        yield f"  {message['role']:9} {message.get('content')!r}{shown}"


def sampled_lines(explained: Explained, token: int) -> list[str]:
    """Return how the engine sampled a token."""
    sampling = explained.again.run.config.rollout
    limits = [f"temperature {number(sampling.temperature)}"]
    limits += [f"top_p {number(sampling.top_p)}"] if sampling.top_p < 1 else []
    limits += [f"top_k {sampling.top_k}"] if sampling.top_k and sampling.top_k > 0 else []
    limits += [f"min_p {number(sampling.min_p)}"] if sampling.min_p > 0 else []
    engine = float(explained.rollout.rollout_logprobs[explained.number][token])
    probability = number(float(np.exp(engine)))
    return [
        f"Token {token}, {explained.texts[token]!r}, sampled by the weights after iteration {explained.version(token)}",
        f"  log-prob of the engine {number(engine)} (probability {probability}, {', '.join(limits)})",
    ]
