"""Evaluation in the online loop with fakes: schedule, results, and that training does not change."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
from online_fakes import FakeTracker, Run

from rlhf_cli.backends.training.checkpoint import Checkpoint
from rlhf_cli.config.evaluation import EvaluationConfig
from rlhf_cli.config.train import CheckpointConfig
from rlhf_cli.data.prompts import Prompt
from rlhf_cli.data.rollouts import SamplingParams, scattered_seed
from rlhf_cli.errors import RunError, UsageError
from rlhf_cli.options import build_config
from rlhf_cli.rewards.records import Score
from rlhf_cli.runs.online.evaluation import forget_later_best
from rlhf_cli.runs.run_directory import run_directory
from rlhf_cli.trainers.online.evaluation import (
    EVALUATION,
    MAX_KEPT_CHARACTERS,
    MAX_KEPT_ROWS,
    Best,
    EvaluationState,
    EvaluationTask,
    Evaluator,
    kept_rows,
    short_names,
    source_names,
)
from rlhf_cli.trainers.online.loop import LoopState

HELD_OUT = [Prompt([70 + i], f"held out {i}: ", str(i), "sets/held_out.jsonl", i) for i in range(3)]
OTHER = [Prompt([80 + i], f"other {i}: ", str(i), "sets/other.jsonl", i) for i in range(2)]


class Tracker(FakeTracker):
    """Also records evaluations."""

    def __init__(self) -> None:
        super().__init__()
        self.evaluations: dict[int, dict[str, float]] = {}
        self.timed: list[list[str]] = []
        self.kept: dict[int, list[Mapping[str, Any]]] = {}

    def evaluation_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self.kept[step] = list(rows)

    def evaluation(self, step: int, metrics: Mapping[str, float], phases: Mapping[str, float]) -> None:
        assert step not in self.evaluations
        self.evaluations[step] = dict(metrics)
        self.timed.append(list(phases))


class Evaluated(Run):
    """A run with evaluations; with `lose`, sleeping engines lose their weights. `run` has settings of the run."""

    def __init__(
        self,
        *,
        prompts: list[Prompt] = HELD_OUT,
        state: EvaluationState | None = None,
        lose: bool = False,
        at_once: int | None = None,
        total_iterations: int = 4,
        run: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**(run or {}))
        self.tracker: Tracker = Tracker()
        self.best: list[Best] = []
        config = EvaluationConfig(eval_dataset="sets", **settings)
        sampling = SamplingParams(4, temperature=config.eval_temperature, greedy=config.eval_temperature == 0)
        task = EvaluationTask(
            config, self.settings.reward, prompts, str, sampling, 42, total_iterations, lose, prompts_at_once=at_once
        )
        self.total_iterations = total_iterations
        self.evaluate = self.evaluator = Evaluator(
            task, self.roles(), self.tracker, save_best=self.best.append, state=state or EvaluationState()
        )

    def training_requests(self) -> list[Any]:
        return [asked for asked in self.engines.requests if asked[0].prompt_ids[0] < 70]


def trained_on(run: Run) -> list[Any]:
    """Return everything that affects the weights: samples with all columns, and the order of steps."""
    return [
        (
            [(s.token_ids.tolist(), {n: v.tolist() for n, v in s.columns.items()}) for s in samples],
            steps,
        )
        for model in (run.actor, run.critic)
        for samples, steps in model.updates
    ]


def test_training_is_the_same_with_and_without_evaluations():
    plain, greedy = Run(), Evaluated(eval_steps=1)
    sampled = Evaluated(eval_steps=1, eval_n_samples_per_prompt=3, eval_temperature=0.8, best_metric_key="eval/reward")
    for run in (plain, greedy, sampled):
        run(save_steps=2)
    for run in (greedy, sampled):
        assert len(run.tracker.evaluations) == 5
        assert run.training_requests() == plain.engines.requests
        assert trained_on(run) == trained_on(plain)
        assert run.saved == plain.saved
        assert run.tracker.rows == plain.tracker.rows
        assert run.tracker.logged == plain.tracker.logged


@pytest.mark.parametrize(
    ("eval_steps", "evaluated"), [(-1, [0, 4]), (1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (3, [0, 3, 4]), (9, [0, 4])]
)
def test_evaluations_come_before_the_first_update_when_due_and_at_the_end(eval_steps, evaluated):
    run = Evaluated(eval_steps=eval_steps)
    run()
    assert list(run.tracker.evaluations) == evaluated
    assert run.journal[:4] == ["engines.wake_cache", "engines.generate", "engines.sleep", "scorer.score"]
    assert run.tracker.phases[:2] == ["eval", None]
    assert run.tracker.timed == [["eval"]] * len(evaluated)


def test_what_was_trained_before_an_evaluation_that_fails_is_saved():
    run, whole = Evaluated(eval_steps=2), Evaluated(eval_steps=2)
    whole()
    evaluate = run.evaluate

    def broken(iteration: int, is_last: bool) -> None:
        if iteration == 2:
            raise RunError("2 of 3 rewards failed")
        evaluate(iteration, is_last)

    run.evaluate = broken
    with pytest.raises(RunError, match="2 of 3 rewards failed"):
        run()
    assert [state.iteration for state in run.saved] == [2]
    assert run.tracker.messages == ["Saved iteration 2; resume with --load_checkpoint"]
    run.evaluate = evaluate
    run(state=run.saved[0])
    assert trained_on(run) == trained_on(whole)
    assert run.tracker.evaluations == whole.tracker.evaluations


def test_without_prompts_nothing_is_evaluated():
    run = Evaluated(prompts=[])
    run()
    assert run.tracker.evaluations == {}


def test_every_evaluation_asks_the_same_greedily_and_reports_lengths_and_rewards():
    run = Evaluated(eval_steps=2)
    run()
    asked = [requests for requests in run.engines.requests if requests[0].prompt_ids[0] >= 70]
    assert asked == [asked[0]] * 3
    assert [request.prompt_ids for request in asked[0]] == [[70], [71], [72]]
    assert run.engines.sampling[0].greedy
    answers = [run.engines._answer(request) for request in asked[0]]
    metrics = run.tracker.evaluations[0]
    lengths = [len(answer.token_ids) for answer in answers]
    assert metrics["response_length"] == pytest.approx(np.mean(lengths))
    assert metrics["response_length_max"] == max(lengths)
    assert metrics["truncated"] == pytest.approx(np.mean([length == 4 for length in lengths]))
    assert metrics["reward"] == pytest.approx(np.mean([len(str(answer.token_ids)) for answer in answers]))
    assert "accuracy" not in metrics  # the fake scorer gives no verdicts


def test_prompts_that_engines_get_in_parts_give_the_same_evaluation():
    sampled: dict[str, Any] = {"eval_n_samples_per_prompt": 2, "eval_temperature": 0.8}
    whole, parts = (Evaluated(at_once=at_once, **sampled) for at_once in (None, 2))
    for run in (whole, parts):
        run.evaluate(0, False)
    assert parts.tracker.evaluations == whole.tracker.evaluations
    assert [len(asked) for asked in whole.engines.requests] == [2 * len(HELD_OUT)]
    assert [len(asked) for asked in parts.engines.requests] == [4, 2 * len(HELD_OUT) - 4]
    assert [*parts.engines.requests[0], *parts.engines.requests[1]] == whole.engines.requests[0]


def test_no_request_of_an_evaluation_has_the_seed_of_one_of_training():
    run = Evaluated(eval_n_samples_per_prompt=4, eval_temperature=1.0)
    run()
    seeds = [[request.seed for request in requests] for requests in run.engines.requests]
    held_out, training = {*seeds[0]}, {seed for requests in seeds[1:-1] for seed in requests}
    assert len(held_out) == 12
    assert not held_out & training


def test_seeds_are_those_of_group_and_sample_in_training_as_in_evaluation():
    run = Evaluated(eval_n_samples_per_prompt=4, eval_temperature=1.0)
    run()
    evaluated, trained = run.engines.requests[:2]
    first, num_samples = run.settings.rollout.rollout_batch_size, run.settings.rollout.n_samples_per_prompt
    for requests, seed, begin, size in ((evaluated, 42 ^ EVALUATION, 0, 4), (trained, 42, first, num_samples)):
        for place, request in enumerate(requests):
            assert request.seed == scattered_seed(seed, begin * size + place)
            assert request.environment_seed == scattered_seed(seed, begin + place // size)


def verdicts(run: Evaluated, shares: list[list[bool]]) -> None:
    """Make the scorer judge responses of the n-th evaluation by the n-th list."""
    left = chain.from_iterable(shares)
    plain = run.scorer.judge

    def judge(request):
        if not request.prompt.startswith(("held out", "other")):
            return plain(request)
        right = next(left)
        return Score(float(right), "correct" if right else "wrong", answer=str(right))

    run.scorer.judge = judge  # type: ignore[method-assign]


def test_data_sets_count_together_and_apart():
    run = Evaluated(prompts=[*HELD_OUT, *OTHER], eval_n_samples_per_prompt=2, eval_temperature=1.0)
    verdicts(run, [[True, False] * 3 + [False] * 4] * 2)
    run()
    metrics = run.tracker.evaluations[4]
    assert [metrics[name] for name in ("accuracy", "held_out/accuracy", "other/accuracy")] == pytest.approx(
        [0.3, 0.5, 0]
    )
    assert [metrics[name] for name in ("pass@2", "held_out/pass@2", "other/maj@2")] == pytest.approx([0.6, 1.0, 0])
    assert metrics["num_prompts"] == 5


def test_names_of_data_sets_are_short_where_that_tells_them_apart():
    assert short_names(["a/x.jsonl", "a/y.json"]) == ["x", "y"]
    assert short_names(["a/x.jsonl", "b/x.jsonl"]) == ["a/x.jsonl", "b/x.jsonl"]


RISING_AND_FALLING = [[False] * 3, [True, True, False], [True, False, False], [True, True, False], [True] * 3]


def test_a_model_that_is_better_than_the_checkpoint_knows_is_renamed_with_a_line(tmp_path):
    paths = run_directory(CheckpointConfig(output=str(tmp_path)))
    paths.best.mkdir()
    (paths.best / "best.json").write_text(json.dumps({"metric": "eval/reward", "iteration": 3, "value": 0.75}))
    said: list[str] = []
    for best in (Best(3, 0.75), Best(1, 0.5)):
        state = {"evaluation": EvaluationState(3, best).plain()}
        forget_later_best(paths, Checkpoint(tmp_path, 2, state), said.append)
    assert said == [f"{tmp_path}/best was saved after the checkpoint of iteration 2: renamed to best.after_3"]
    assert (tmp_path / "best.after_3" / "best.json").is_file()


def test_the_model_of_each_new_best_value_is_kept_and_equal_ones_are_not():
    run = Evaluated(eval_steps=1, best_metric_key="eval/accuracy")
    verdicts(run, RISING_AND_FALLING)
    run(save_steps=1)
    assert [(best.iteration, best.value) for best in run.best] == [
        (0, 0.0),
        (1, pytest.approx(2 / 3)),
        (4, 1.0),
    ]


def test_the_best_so_far_belongs_to_the_checkpoint():
    first = Evaluated(eval_steps=1, best_metric_key="eval/accuracy", run={"stop_after": 2})
    verdicts(first, RISING_AND_FALLING)
    first()
    state = EvaluationState.of(json.loads(json.dumps(first.evaluator.state.plain())))
    assert state == first.evaluator.state
    assert state.best == Best(1, 2 / 3)
    second = Evaluated(eval_steps=1, best_metric_key="eval/accuracy", state=state)
    verdicts(second, RISING_AND_FALLING[3:])
    second(state=LoopState(**vars(first.saved[-1])))
    assert list(second.tracker.evaluations) == [3, 4]  # the evaluation of iteration 2 is in the checkpoint
    assert second.best == [Best(4, 1.0)]
    assert EvaluationState.of(json.loads(json.dumps(EvaluationState().plain()))) == EvaluationState()


def test_a_metric_that_is_not_there_ends_the_run_before_any_training():
    run = Evaluated(best_metric_key="eval/accuracy")
    with pytest.raises(RunError, match="iteration 0: evaluation metric eval/accuracy not found; available: reward"):
        run()
    assert run.actor.updates == []


def test_engines_that_lose_their_weights_asleep_get_them_back_except_at_the_end():
    run = Evaluated(lose=True)
    run(total_iterations=4)
    back = ["actor.wake_weights", "engines.receive_weights 0", "actor.sleep", "engines.wake_cache"]
    assert run.journal[4:8] == back
    assert run.journal[-4:] == ["engines.wake_cache", "engines.generate", "engines.sleep", "scorer.score"]
    assert "engines.receive_weights 0" not in journal_of(Evaluated())


def journal_of(run: Evaluated) -> list[str]:
    run()
    return run.journal


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"eval_dataset": "e", "eval_n_samples_per_prompt": 4}, "requires an eval_temperature above 0"),
        (
            {"eval_dataset": "e", "best_metric_key": "eval/pass@8"},
            "best_metric_key eval/pass@8: must be one of eval/accuracy",
        ),
        (
            {"eval_dataset": "e", "best_metric_key": "eval/accuracy", "reward_funcs": "", "reward_func": "r.py"},
            "requires a verifier",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, complaint):
    from rlhf_cli.commands.grpo import GRPOConfig

    needed = {"pretrain": "m", "prompt_data": "p", "output": "o", "reward_funcs": "exact"}
    with pytest.raises(UsageError, match=complaint):
        build_config(GRPOConfig, needed | settings)


def test_the_responses_of_every_evaluation_are_kept_as_rows():
    run = Evaluated(eval_steps=2, eval_n_samples_per_prompt=2, eval_temperature=1.0)
    run()
    assert list(run.tracker.kept) == [0, 2, 4]
    for step, rows in run.tracker.kept.items():
        assert [row["prompt"] for row in rows] == [prompt.text for prompt in HELD_OUT for _ in range(2)]
        rewards = [row["reward"] for row in rows]
        assert run.tracker.evaluations[step]["reward"] == pytest.approx(np.mean(rewards))


def test_the_rows_of_an_evaluation_are_bounded_in_number_and_text():
    assert len(kept_rows([{"prompt": "p", "response": "r"}] * 1000)) == MAX_KEPT_ROWS
    half = {"prompt": "", "response": "r" * (MAX_KEPT_CHARACTERS // 2)}
    assert [len(kept_rows(rows)) for rows in ([half] * 3, [{"prompt": "", "response": "r" * 10**7}])] == [2, 1]


def test_evaluations_count_sources_apart_that_rows_name():
    named = [replace(prompt, data_source=source) for prompt, source in zip(HELD_OUT, ("a", "b", None), strict=True)]
    assert source_names(named) == ["a", "b", "sets/held_out.jsonl"]
    many = [replace(HELD_OUT[0], data_source=str(number)) for number in range(40)]
    assert set(source_names(many)) == {"sets/held_out.jsonl"}
