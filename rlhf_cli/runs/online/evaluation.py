"""Evaluation in online commands: prompts, best model, and checkpointed state."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from rlhf_cli.backends.training.checkpoint import Checkpoint
from rlhf_cli.commands.online import OnlineConfig
from rlhf_cli.data.pictures.reading import PictureReader
from rlhf_cli.data.prompts import PromptData, load_prompts
from rlhf_cli.data.rollouts import SamplingParams
from rlhf_cli.models.folders import whole_folder
from rlhf_cli.rewards.scorer import Scorer
from rlhf_cli.runs.episodes import EpisodePlan
from rlhf_cli.runs.online.start_roles import OnlineRoles
from rlhf_cli.runs.run_directory import BEST_FILE, RunDirectory, set_later_best_aside
from rlhf_cli.tracking.figures import number
from rlhf_cli.tracking.tracker import SilentTracker, Tracker
from rlhf_cli.trainers.online.evaluation import Best, EvaluationState, EvaluationTask, Evaluator


def load_evaluation_prompts(
    config: OnlineConfig, tokenizer: object, reader: PictureReader | None, episodes: EpisodePlan | None
) -> PromptData | None:
    """Load the evaluation prompts, rendered like training prompts; None without an evaluation dataset."""
    evaluation = config.evaluation
    if evaluation.eval_dataset is None:
        return None
    source = {
        "prompt_data": evaluation.eval_dataset,
        "prompt_data_probs": None,
        "prompt_split": evaluation.eval_split,
        "pass_rate_range": None,
        "teacher_context_key": None,
        "max_samples": evaluation.eval_max_samples,
    }
    return load_prompts(
        config.prompts.model_copy(update=source),
        tokenizer,
        max_new_tokens=config.rollout.max_new_tokens,
        seed=config.batch.seed,
        template=config.template,
        reward=config.reward,
        reader=reader,
        environment=episodes.description if episodes else None,
    )


def evaluation_task(
    config: OnlineConfig,
    data: PromptData | None,
    decode: Callable[[Sequence[int]], str],
    *,
    total_iterations: int,
) -> EvaluationTask:
    """Return the evaluation for these settings.

    With images or episodes, engines receive at most one rollout batch of prompts at a time, which bounds memory.
    """
    temperature, rollout = config.evaluation.eval_temperature, config.rollout
    # Each episode holds an environment process, and images stay in engine memory.
    is_large = bool(data and data.has_pictures) or config.episodes.plays_episodes
    end_ids = data.end_ids if data else ()
    greedy = SamplingParams(rollout.max_new_tokens, greedy=True, stop=tuple(rollout.stop), end_ids=end_ids)
    return EvaluationTask(
        config=config.evaluation,
        reward=config.reward,
        prompts=data.prompts if data else (),
        decode=decode,
        sampling=replace(greedy, greedy=False, temperature=temperature) if temperature else greedy,
        seed=config.batch.seed,
        total_iterations=total_iterations,
        # Engines without sleep keep the weights until the next push.
        engines_lose_weights=bool(config.engine.vllm_enable_sleep),
        prompts_at_once=rollout.rollout_batch_size if is_large else None,
    )


def make_evaluator(
    task: EvaluationTask,
    started: OnlineRoles,
    scorer: Scorer,
    tracker: Tracker | SilentTracker,
    *,
    paths: RunDirectory,
    resume: Checkpoint | None,
) -> Evaluator:
    """Return the run's evaluator, resumed from the checkpoint `resume` if given."""

    def save_best(best: Best) -> None:
        # Replace the folder as a whole, so that a kill leaves the old or the new best model.
        with whole_folder(paths.best) as folder:
            started.actor.save_model(folder)
            record = {"metric": task.config.best_metric_key, **asdict(best)}
            (folder / BEST_FILE).write_text(json.dumps(record) + "\n", encoding="utf-8")

    # Without the state, a resumed run could replace a better model.
    state = EvaluationState() if resume is None else EvaluationState.of(resume.state["evaluation"])
    return Evaluator(task, started.with_scorer(started.actor, scorer), tracker, save_best=save_best, state=state)


def forget_later_best(paths: RunDirectory, resume: Checkpoint, say: Callable[[str], None]) -> None:
    """Rename and report a best model newer than the checkpoint."""
    known = EvaluationState.of(resume.state["evaluation"]).best
    if aside := set_later_best_aside(paths, known=known.iteration if known else None):
        say(f"{paths.best} was saved after the checkpoint of iteration {resume.step}: renamed to {aside.name}")


def best_facts(evaluator: Evaluator, paths: RunDirectory) -> dict[str, str]:
    """Return the facts about the best model for the run summary."""
    best = evaluator.state.best
    if best is None:
        return {}
    metric = evaluator.task.config.best_metric_key
    # A killed run may have replaced the best model after its last checkpoint.
    where = paths.best if paths.best.exists() else "not kept"
    return {"Best model": f"{where}: {metric} {number(best.value)} after iteration {best.iteration}"}
