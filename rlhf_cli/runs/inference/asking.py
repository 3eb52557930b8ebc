"""Runs the models of `rlhf eval` group by group. Each group starts and stops its engines."""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from rlhf_cli.backends.cluster.ray_cluster import Cluster
from rlhf_cli.backends.roles.start import Started
from rlhf_cli.backends.rollout.backend_choice import described
from rlhf_cli.runs.inference.model_groups import ModelGroup, manifest_of
from rlhf_cli.runs.inference.run import InferenceHooks, ModelUnderTest, answer_by, answer_prompts, started_scorer
from rlhf_cli.runs.inference.workers import OtherModels, started_models
from rlhf_cli.runs.run_directory import LOGS


@dataclass(frozen=True)
class Asking:
    """All models, the first unanswered chunk per model, and the indices of models with such chunks.

    `facts` are shown when the first model starts. `is_kept`: the output folder is kept.
    """

    models: list[ModelUnderTest]
    begins: list[int]
    left: list[int]
    root: Path
    cluster: Cluster
    facts: dict[str, str]
    is_kept: bool
    hooks: InferenceHooks

    def answer(self, group: ModelGroup) -> bool:
        """Answer the rest of the group. Returns whether to continue with the next group."""
        # A resumed evaluation skips completed models.
        numbers = [number for number in group.numbers if number in self.left]
        if group.base is not None and numbers:
            return self._answer_on_base(group, group.base, numbers)
        return all(self._answer_alone(number) for number in numbers)

    def _answer_alone(self, number: int) -> bool:
        def announce(placement: str) -> None:
            self._announce(number, placement)
            self._name(number)

        is_answered = answer_prompts(
            self.models[number],
            begin=self.begins[number],
            cluster=self.cluster,
            root=self.root,
            log_dir=self._logs(number),
            announce=announce,
            hooks=self.hooks,
        )
        return is_answered and self._goes_on(number)

    def _answer_on_base(self, group: ModelGroup, base: Path, numbers: list[int]) -> bool:
        first = self.models[numbers[0]]
        with started_models(
            first.config,
            first.backend,
            OtherModels(first.reward_model or first.process_model, first.judge),
            weights=nullcontext(str(base)),
            cluster=self.cluster,
            log_dir=self._logs(numbers[0]),
            announce=lambda placement: self._announce(numbers[0], placement),
            max_lora_rank=group.max_lora_rank,
        ) as models:
            # `all` stops at the first model that was interrupted.
            return all(self._answer_with_adapter(models, number) for number in numbers)

    def _answer_with_adapter(self, models: Started, number: int) -> bool:
        # Version 0 is the model that the engines load at startup.
        tested, version = self.models[number], number + 1
        self._name(number)
        with started_scorer(tested, models, self.hooks) as scorer:
            # They sleep after the model before, if a judge takes turns with them.
            models.engines.wake_cache()
            models.engines.take_adapter(manifest_of(tested, version=version), version)
            is_answered = answer_by(models, scorer, tested, begin=self.begins[number], hooks=self.hooks)
        return is_answered and self._goes_on(number)

    def _announce(self, number: int, placement: str) -> None:
        # The tracker prints its header once, for the first model that still has prompts.
        if number != self.left[0]:
            return
        tested = self.models[number]
        engine = described(tested.config.engine, tested.backend)
        judge = {"Judge": tested.judge.described} if tested.judge else {}
        facts = self.facts | judge | {"Engine": engine, "Placement": placement}
        self.hooks.tracker.start(facts, is_kept=self.is_kept)

    def _name(self, number: int) -> None:
        if len(self.models) > 1:
            self.hooks.tracker.message(f"Model {self.models[number].config.model.pretrain}")

    def _logs(self, number: int) -> Path:
        logs = self.root / LOGS
        return logs / f"model_{number + 1}" if len(self.models) > 1 else logs

    def _goes_on(self, number: int) -> bool:
        # After the last model a stop request no longer matters.
        return number == self.left[-1] or not self.hooks.should_stop()
