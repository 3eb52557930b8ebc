"""Dynamic sampling (DAPO, arXiv 2503.14476): sample prompts in rounds until the batch has enough useful groups."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from rlhf_cli.config.rollout import DynamicSamplingConfig
from rlhf_cli.data.prompts import Prompt
from rlhf_cli.rewards.parts import stop_if_too_many_failed
from rlhf_cli.tracking.phases import PhaseTimer
from rlhf_cli.trainers.online.groups import longest_needed, sort_round, usefulness
from rlhf_cli.trainers.online.metrics import rollout_metrics
from rlhf_cli.trainers.online.rollout import Round, SampledGroups, Sampler, sample_and_score
from rlhf_cli.trainers.online.samples import Group, samples_of, scores_of
from rlhf_cli.trainers.online.state import SourceState


class DynamicBatch:
    """Groups of one iteration, filled round by round.

    Starts with the previous batch's surplus, which counts in the iteration that trains on it. `num_places` is the
    number of prompts in the run's order.
    """

    def __init__(self, config: DynamicSamplingConfig, state: SourceState, *, batch_size: int, num_places: int) -> None:
        self.config = config
        self._batch_size = batch_size
        self._num_places = num_places
        # With a large dynamic_oversample the surplus may exceed a batch.
        self._groups = list(state.surplus[:batch_size])
        self._num_carried = len(self._groups)
        self._surplus = list(state.surplus[batch_size:])
        self._postponed = list(state.postponed)
        self._num_taken = state.num_taken
        self._judged: list[Group] = []
        self._num_rounds = self._num_asked = 0

    @property
    def missing(self) -> int:
        """Number of useful groups still missing."""
        return self._batch_size - len(self._groups)

    @property
    def _filtered(self) -> list[Group]:
        """Groups without a learning signal."""
        # Carried groups were judged in an earlier iteration and do not count here.
        return [group for group in self._judged if usefulness(scores_of(group), self.config) != "useful"]

    @property
    def _most_to_come(self) -> int:
        """Maximum number of prompts in later rounds."""
        return (self.config.dynamic_max_rounds - self._num_rounds) * self._round_size

    @property
    def _round_size(self) -> int:
        """Number of prompts in the next round: one per missing group plus oversampling, limited by the remaining
        prompts.
        """
        # Oversample, because some groups will be filtered; a full extra round costs more than unused responses.
        wanted = math.ceil(self.missing * (1 + self.config.dynamic_oversample))
        return min(wanted, len(self._postponed) + self._num_places - self._num_taken)

    def next_round(self) -> list[int]:
        """Return the prompt positions for the next round, postponed prompts first; [] if no round follows."""
        if not self.missing or self._num_rounds == self.config.dynamic_max_rounds:
            return []
        num_places = self._round_size
        # Postponed prompts come first, so that the order of the run is kept and none is lost.
        places, self._postponed = self._postponed[:num_places], self._postponed[num_places:]
        first, self._num_taken = self._num_taken, self._num_taken + num_places - len(places)
        return [*places, *range(first, self._num_taken)]

    def add(self, places: Sequence[int], groups: Sequence[Group | None]) -> None:
        """Distribute a round's groups: this batch, surplus for the next iteration, or postponed."""
        split = sort_round(places, groups, missing=self.missing, config=self.config)
        self._groups += split.accepted
        self._surplus += split.surplus
        self._judged += split.judged
        # Prepend: these prompts precede later ones in the run's order.
        self._postponed = [*split.postponed, *self._postponed]
        self._num_rounds += 1
        self._num_asked += len(places)

    def stop_if_too_many_failed(self, max_failures: float, *, num_samples: int) -> None:
        """Raise RunError if too many rewards have failed, regardless of later rounds."""
        scores = scores_of(samples_of([*self._groups, *self._filtered]))
        stop_if_too_many_failed(scores, max_failures, num_to_come=self._most_to_come * num_samples)

    def sampled(self) -> SampledGroups:
        """Return the batch in its current state."""
        metrics = _filter_metrics(self._judged, self.config) | {
            "dynamic/rounds": float(self._num_rounds),
            "dynamic/prompts": float(self._num_asked),
            "dynamic/carried_in": float(self._num_carried),
            "dynamic/carried_over": float(len(self._surplus)),
            "dynamic/postponed": float(len(self._postponed)),
        }
        return SampledGroups(
            self._groups,
            greedy=[],
            filtered=self._filtered,
            num_carried=self._num_carried,
            metrics=metrics,
        )

    def left(self, state: SourceState) -> SourceState:
        """Return the source state with the data left for the next batch."""
        return replace(state, surplus=self._surplus, postponed=self._postponed, num_taken=self._num_taken)


async def sample_until_full(
    sampler: Sampler,
    batch: DynamicBatch,
    prompt_at: Callable[[int], Prompt],
    *,
    max_failures: float,
    timer: PhaseTimer,
) -> SampledGroups:
    """Sample useful groups until the batch is full, the round limit is reached, or no prompts remain.

    Args:
        prompt_at: returns the prompt at a position in the run's order.

    Raises:
        RunError: more than `max_failures` of the rewards have failed, regardless of later rounds.
    """

    def enough(work: Round) -> int | None:
        groups = (work.group(slot) for slot in range(len(places)))
        return longest_needed(groups, batch.missing, batch.config)

    # Wake once for all rounds; between rounds engines keep their cache.
    with timer("generate"):
        sampler.engines.wake_cache()
    while places := batch.next_round():
        work = await sample_and_score({place: prompt_at(place) for place in places}, sampler, timer, enough=enough)
        batch.add(places, work.groups())
        # Check after each round, so that a broken reward does not consume all rounds.
        batch.stop_if_too_many_failed(max_failures, num_samples=sampler.num_samples)
    with timer("generate"):
        sampler.engines.sleep()
    return batch.sampled()


def _filter_metrics(judged: Sequence[Group], config: DynamicSamplingConfig) -> dict[str, float]:
    """Return the share of groups by usefulness, and metrics over their responses."""
    if not judged:
        return {}
    found = [usefulness(scores_of(group), config) for group in judged]
    shares = {f"dynamic/{name}": found.count(name) / len(found) for name in ("too_easy", "too_hard", "alike", "failed")}
    samples = samples_of(judged)
    sampled = rollout_metrics([sample.response for sample in samples], scores_of(samples))
    named = ("reward", "accuracy", "response_length")
    return shares | {f"dynamic/{name}": sampled[name] for name in named if name in sampled}
