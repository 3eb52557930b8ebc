"""Source of an iteration's responses: selects prompts in order until none remain."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from rlhf_cli.data.prompts import Prompt
from rlhf_cli.data.rollouts import GenerationRequest
from rlhf_cli.data.sampling import StepBatches
from rlhf_cli.errors import RunError
from rlhf_cli.rewards.parts import stop_if_all_failed, stop_if_too_many_failed
from rlhf_cli.tracking.phases import PhaseTimer
from rlhf_cli.trainers.online.curriculum import (
    curriculum_keys,
    curriculum_metrics,
    draw_prompts,
    reward_variance,
    source_shares,
    variances_after,
)
from rlhf_cli.trainers.online.dynamic_sampling import DynamicBatch, sample_until_full
from rlhf_cli.trainers.online.interfaces import SamplingEngines, Scoring
from rlhf_cli.trainers.online.rollout import (
    Round,
    SampledGroups,
    Sampler,
    mean_lengths,
    prompt_lengths,
    sample_once,
)
from rlhf_cli.trainers.online.samples import samples_of, scores_of
from rlhf_cli.trainers.online.state import OnlineSettings, SourceState


def planned_iterations(num_prompts: int, settings: OnlineSettings) -> int:
    """Return the number of iterations in a run; an upper bound with dynamic sampling, which ends when prompts run
    out.
    """
    rollout = settings.rollout
    if settings.dynamic is not None:
        # Rounded up: the last batch may be incomplete.
        iterations = -(-num_prompts * rollout.num_episodes // rollout.rollout_batch_size)
    else:
        iterations = len(_batches(num_prompts, settings, batch_size=rollout.rollout_batch_size))
    return min(iterations, rollout.max_iterations or iterations)


def _batches(num_prompts: int, settings: OnlineSettings, *, batch_size: int) -> StepBatches:
    """Return batches of prompt indices, shuffled per episode."""
    return StepBatches(
        num_prompts, batch_size=batch_size, epochs=settings.rollout.num_episodes, seed=settings.batch.seed
    )


def prompt_at(place: int, prompts: Sequence[Prompt], settings: OnlineSettings) -> Prompt:
    """Return the prompt at a position in the run's order.

    With dynamic sampling, positions count all prompts from 0. Otherwise batch k uses positions from k *
    `rollout_batch_size`, with k counted from 1.
    """
    if settings.dynamic is not None:
        return prompts[int(_batches(len(prompts), settings, batch_size=1)[place][0])]
    size = settings.rollout.rollout_batch_size
    return prompts[int(_batches(len(prompts), settings, batch_size=size)[place // size - 1][place % size])]


@dataclass(frozen=True)
class RolloutSource:
    """Source of an iteration's responses."""

    engines: SamplingEngines
    scorer: Scoring
    settings: OnlineSettings
    prompts: Sequence[Prompt]
    decode: Callable[[Sequence[int]], str]
    tell: Callable[[str], None]

    def is_used_up(self, state: SourceState) -> bool:
        """Return whether no data remains. Known in advance only with dynamic sampling."""
        is_taken = state.num_taken == self._num_places and not (state.postponed or state.surplus)
        return self.settings.dynamic is not None and is_taken

    def requests(self, state: SourceState) -> list[GenerationRequest]:
        """Return the requests of the batch after a state, without dynamic sampling."""
        return Round(self._prompts_at(self._chosen(state), state), self._sampler(state), session=None).requests()

    async def sample(self, state: SourceState, timer: PhaseTimer) -> tuple[SampledGroups | None, SourceState]:
        """Return (groups to train on, state after them); None for the groups if the last prompts gave none. A batch
        without groups skips the iteration.

        Raises:
            RunError: no prompt in the run gave a group, or too many rewards failed.
        """
        if self.settings.dynamic is None:
            chosen = self._chosen(state)
            sampled = await sample_once(self._sampler(state), self._prompts_at(chosen, state), timer)
            self._check_scores(sampled, state)
            if self.settings.rollout.prompt_sampling != "shuffle":
                return self._learned(state, chosen, sampled)
            return sampled, self._after(state, sampled)
        batch = DynamicBatch(
            self.settings.dynamic,
            state,
            batch_size=self.settings.rollout.rollout_batch_size,
            num_places=self._num_places,
        )
        sampled = await sample_until_full(
            self._sampler(state),
            batch,
            partial(prompt_at, prompts=self.prompts, settings=self.settings),
            max_failures=self.settings.reward.reward_max_failures,
            timer=timer,
        )
        left = batch.left(state)
        self._report_shortage(sampled, left)
        # A skipped iteration is reported, but without remaining prompts the run simply ends.
        if not sampled.groups and self.is_used_up(left):
            return None, replace(left, iteration=state.iteration + 1, postponed=(), surplus=())
        return sampled, self._after(left, sampled)

    def _check_scores(self, sampled: SampledGroups, state: SourceState) -> None:
        """Raise RunError for a batch with too few scores before it is checkpointed, if it is sampled ahead."""
        scores = scores_of(samples_of([*sampled.groups, *sampled.greedy]))
        stop_if_too_many_failed(scores, self.settings.reward.reward_max_failures)
        stop_if_all_failed(scores, iteration=state.iteration + 1)

    def _after(self, state: SourceState, sampled: SampledGroups) -> SourceState:
        """Return the state after a batch, with response lengths for scheduling later prompts."""
        # Lengths per prompt only help if prompts are sampled again; they would grow the checkpoint otherwise.
        is_asked_again = self.settings.rollout.num_episodes > 1
        return replace(
            state,
            iteration=state.iteration + 1,
            lengths={**state.lengths, **mean_lengths(sampled.groups)},
            prompt_lengths=prompt_lengths(state.prompt_lengths, sampled.groups) if is_asked_again else {},
        )

    @property
    def _num_places(self) -> int:
        return len(self.prompts) * self.settings.rollout.num_episodes

    def _sampler(self, state: SourceState) -> Sampler:
        return Sampler(
            self.engines,
            self.scorer,
            self.decode,
            self.settings.sampling,
            num_samples=self.settings.rollout.n_samples_per_prompt,
            seed=self.settings.rollout.sampling_seed(self.settings.batch.seed),
            greedy=self.settings.estimator.greedy,
            expected_tokens=partial(_expected_tokens, state),
        )

    def _prompts_at(self, chosen: Sequence[int], state: SourceState) -> dict[int, Prompt]:
        """Return the prompts of the batch after a state, by group number."""
        first = (state.iteration + 1) * self.settings.rollout.rollout_batch_size
        return {first + number: self.prompts[index] for number, index in enumerate(chosen)}

    def _chosen(self, state: SourceState) -> list[int]:
        """Return the indices of the prompts of the batch after a state, without dynamic sampling."""
        rollout, num_prompts = self.settings.rollout, len(self.prompts)
        batches = _batches(num_prompts, self.settings, batch_size=rollout.rollout_batch_size)
        chosen = batches[state.iteration]
        if rollout.prompt_sampling != "shuffle":
            chosen = draw_prompts(
                state.reward_variances,
                self._keys,
                size=len(chosen),
                seed=self.settings.batch.seed,
                iteration=state.iteration,
            )
        return chosen.tolist()

    @cached_property
    def _keys(self) -> list[str]:
        return curriculum_keys(self.prompts, self.settings.rollout.prompt_sampling)

    def _learned(
        self, state: SourceState, chosen: Sequence[int], sampled: SampledGroups
    ) -> tuple[SampledGroups, SourceState]:
        """Return the batch with metrics of the curriculum, and the state with the variances of its rewards."""
        sampling = self.settings.rollout.prompt_sampling
        drawn, found = [self._keys[index] for index in chosen], dict[str, list[float]]()
        for key, group in zip(drawn, sampled.groups, strict=True):
            variance = reward_variance(scores_of(group))
            # Failed rewards say nothing about the prompt.
            if variance is not None:
                found.setdefault(key, []).append(variance)
        metrics = curriculum_metrics(state.reward_variances, drawn, num_keys=len(set(self._keys)))
        if sampling == "source_variance":
            metrics |= source_shares(drawn, self._keys)
        variances = variances_after(state.reward_variances, found, sampling)
        after = replace(self._after(state, sampled), reward_variances=variances)
        return replace(sampled, metrics=sampled.metrics | metrics), after

    def _report_shortage(self, sampled: SampledGroups, left: SourceState) -> None:
        """Report an incomplete batch; `left` is the state after its rounds."""
        size, iteration = self.settings.rollout.rollout_batch_size, left.iteration + 1
        if len(sampled.groups) == size:
            return
        shares = ", ".join(
            f"{sampled.metrics.get(f'dynamic/{name}', 0.0):.0%} {words}"
            for name, words in (("too_easy", "all right"), ("too_hard", "all wrong"), ("alike", "all alike"))
        )
        asked = f"{sampled.metrics['dynamic/prompts']:.0f} prompts in {sampled.metrics['dynamic/rounds']:.0f} rounds"
        used_up = left.num_taken == self._num_places and not left.postponed
        if not sampled.groups and used_up and not left.iteration:
            raise RunError(
                f"iteration {iteration}: {asked} gave no group with a learning signal ({shares}); choose prompts that "
                "the model solves sometimes, raise n_samples_per_prompt, or train without --dynamic_filtering"
            )
        reason = "no prompts remain" if used_up else "dynamic_max_rounds is reached"
        if not sampled.groups and not used_up:
            reason += (
                ", so it is skipped: choose prompts that the model solves sometimes, or raise n_samples_per_prompt"
            )
        self.tell(f"Iteration {iteration}: {asked} gave {len(sampled.groups)} of {size} groups ({shares}); {reason}")


def _expected_tokens(state: SourceState, prompt: Prompt) -> int:
    """Estimate a response length: the prompt's mean so far, else that of its source."""
    known = state.lengths.get(prompt.source, max(state.lengths.values(), default=0))
    return state.prompt_lengths.get(prompt.source, {}).get(str(prompt.index), round(known))
