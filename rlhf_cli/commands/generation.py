"""What `rlhf generate` does: engines answer chunks of prompts, rewards score them, rows are kept, some are selected.

Leaves out which rows are selected (data/selection.py) and whose the folder is (generation_folder.py).
"""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_cli.backends.engine_group import rollout_backend
from rlhf_cli.backends.signals import INTERRUPTED, StopSignal
from rlhf_cli.commands.generate import GenerateConfig
from rlhf_cli.commands.generation_folder import (
    SAMPLES,
    SELECTED,
    Chunks,
    check_folder,
    chunks_done,
    prepare_folder,
)
from rlhf_cli.commands.generation_models import started_models
from rlhf_cli.commands.run_directory import LOGS
from rlhf_cli.config.generate import OptionalRewardConfig, SamplingConfig
from rlhf_cli.config.model import ModelConfig
from rlhf_cli.config.train import TrackingConfig
from rlhf_cli.data.prompts import Prompt, PromptData, load_prompts
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams, scattered_seed
from rlhf_cli.data.selection import prompt_cells, select_samples, summary, write_rows
from rlhf_cli.errors import RunError
from rlhf_cli.models.loading import load_tokenizer, resolve_model_path
from rlhf_cli.models.reward_model import RewardModel, find_reward_model
from rlhf_cli.models.weight_files import fingerprint, folder_of
from rlhf_cli.options import to_yaml
from rlhf_cli.rewards.model_scores import with_model_scores
from rlhf_cli.rewards.records import Score, ScoreRequest
from rlhf_cli.rewards.scorer import Scorer
from rlhf_cli.tracking.phases import PhaseTimer
from rlhf_cli.tracking.sinks import read_lines
from rlhf_cli.tracking.terminal import quiet_process
from rlhf_cli.tracking.tracker import Tracker
from rlhf_cli.trainers import rl
from rlhf_cli.trainers.rl_batch import as_sequence, length_metrics, rollout_metrics, score_requests


@dataclass(frozen=True)
class Answers:
    """Responses to one chunk of prompts; lists are by response, the samples of a prompt next to each other."""

    prompts: list[Prompt]
    requests: list[ScoreRequest]
    generations: list[Generation]
    scores: list[Score] | None


@dataclass(frozen=True)
class Answering:
    """What turns prompts into answers: engines, the words of their tokens, and scores where there is a scorer."""

    engines: rl.Engines
    decode: Callable[[Sequence[int]], str]
    scorer: rl.Scoring | None
    reward_model: rl.RewardModel | None


@dataclass(frozen=True)
class _Run:
    """What is known before anything heavy starts; `done` is None where nothing is continued."""

    config: GenerateConfig
    backend: str
    tokenizer: Any
    data: PromptData
    reward_model: RewardModel | None
    chunks: Chunks
    identity: dict[str, Any]
    done: int | None

    @property
    def is_generated(self) -> bool:
        return self.done == len(self.chunks)


def run_generation(config: GenerateConfig) -> None:
    """Answer what is not answered yet, then write what is selected; exit with 130 where Ctrl-C came between."""
    check_folder(config.out)
    run = _check(config)
    stop = StopSignal()
    with ExitStack() as stack:
        root = prepare_folder(config.out, to_yaml(config), run.identity, keep=run.done is not None)
        terminal = stack.enter_context(quiet_process(root / LOGS / "driver.log"))
        tracker = Tracker(
            TrackingConfig(use_tensorboard=False),
            root,
            command="generate",
            total_steps=len(run.chunks),
            console=terminal.console,
            resume_step=run.done,
            unit="chunk",
        )
        stack.enter_context(tracker)
        is_generated = _generate(run, root, tracker, stop)
        if is_generated:
            tracker.close(facts={"Responses": str(root / SAMPLES)} | _select(config, root))
        else:
            tracker.close(outcome="interrupted", facts={"Continue": "the same command with --load_checkpoint"})
    if not is_generated:
        sys.exit(INTERRUPTED)


def _check(config: GenerateConfig) -> _Run:
    """Everything that can be found wrong before the first process starts."""
    backend = rollout_backend(config.sampling.rollout_backend)
    tokenizer = load_tokenizer(config.model)
    data = load_prompts(config.prompts, tokenizer, max_new_tokens=config.sampling.max_new_tokens, seed=config.out.seed)
    reward_model = _reward_model(config, tokenizer)
    chunks = Chunks(len(data.prompts), config.sampling.rollout_batch_size, config.sampling.n_samples_per_prompt)
    identity = run_identity(config, backend, data)
    done = chunks_done(config.out, chunks, identity)
    run = _Run(config, backend, tokenizer, data, reward_model, chunks, identity, done)
    if config.reward.is_given and not run.is_generated:
        with Scorer(config.reward) as scorer:  # the one that is used starts later, when its output goes to a log
            scorer.check_labels([prompt.label for prompt in data.prompts])
    return run


def _reward_model(config: GenerateConfig, tokenizer: Any) -> RewardModel | None:
    if config.reward.reward_pretrain is None:
        return None
    policy = ModelConfig(**config.model.model_dump())
    return find_reward_model(config.reward.reward_pretrain, policy, tokenizer, normalize=config.reward.normalize_reward)


def run_identity(config: GenerateConfig, backend: str, data: PromptData) -> dict[str, Any]:
    """What has to be equal for the rows of two runs to be of one; the number of engines is not part of it."""
    sampling, reward = config.sampling, config.reward
    return {
        "pretrain": config.model.pretrain,
        "fingerprint of the weights": weights_of(config.model.pretrain),
        "param_dtype": config.model.param_dtype,
        "number of prompts": len(data.prompts),
        "fingerprint of the prompts": data.fingerprint,
        "rollout_backend": backend,
        "rollout_batch_size": sampling.rollout_batch_size,
        "n_samples_per_prompt": sampling.n_samples_per_prompt,
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": config.out.seed,
        "reward_funcs": reward.reward_funcs,
        "reward_weights": reward.reward_weights,
        "reward_func": reward.reward_func,
        "reward_pretrain": reward.reward_pretrain,
        "fingerprint of the reward model": None
        if reward.reward_pretrain is None
        else weights_of(reward.reward_pretrain),
        "reward_model_weight": reward.reward_model_weight,
        "normalize_reward": reward.normalize_reward,
    }


def weights_of(pretrain: str) -> str:
    """A fingerprint of the model's weights: a folder may hold those of a later run."""
    return fingerprint(folder_of(resolve_model_path(pretrain)))


def _generate(run: _Run, root: Path, tracker: Tracker, stop: StopSignal) -> bool:
    """Answer the chunks that are left; whether all are answered now."""
    facts = {"Model": run.config.model.pretrain, "Prompts": run.data.report.summary}
    if run.is_generated:
        tracker.start(facts)
        return True
    log_dir = root / LOGS

    def announce(placement: str) -> None:
        engine = f"{run.config.sampling.vllm_num_engines} x {run.backend}"
        model = {"Reward model": run.reward_model.source.pretrain} if run.reward_model else {}
        tracker.start(facts | model | {"Engine": engine, "Placement": placement, "Logs": str(log_dir)})

    with ExitStack() as stack:
        scorer = stack.enter_context(Scorer(run.config.reward)) if run.config.reward.is_given else None
        models = stack.enter_context(
            started_models(run.config, run.backend, run.reward_model, log_dir=log_dir, announce=announce)
        )

        def decode(token_ids: Sequence[int]) -> str:
            return str(run.tokenizer.decode(token_ids, skip_special_tokens=True))

        answering = Answering(models.engines, decode, scorer, models.reward_model)
        return answer_chunks(
            answering, run.data, run.chunks, begin=run.done or 0, config=run.config, tracker=tracker, stop=stop
        )


def answer_chunks(
    answering: Answering,
    data: PromptData,
    chunks: Chunks,
    *,
    begin: int,
    config: GenerateConfig,
    tracker: Any,
    stop: Callable[[], bool],
) -> bool:
    """Answer chunks from `begin` on and report their rows, each chunk before the next; whether the last was reached.

    A chunk's metrics are kept before its rows: a folder that has all rows of a chunk lacks nothing of it.
    """
    for number in range(begin, len(chunks)):
        timer = PhaseTimer(on_change=tracker.phase)
        first, end = chunks.bounds(number)
        answers = _answer(answering, data.prompts[first:end], config, first=first, timer=timer)
        tracker.log(number + 1, _metrics(answers), timer.take())
        tracker.samples(number + 1, sample_cells(answers, data, first=first, num_samples=chunks.num_samples))
        if stop() and number + 1 < len(chunks):
            return False
    return True


def _answer(
    answering: Answering, prompts: Sequence[Prompt], config: GenerateConfig, *, first: int, timer: PhaseTimer
) -> Answers:
    """Responses to prompts, the first of which is number `first`, from which the seeds of its requests are counted."""
    sampling = config.sampling
    asked = [prompt for prompt in prompts for _ in range(sampling.n_samples_per_prompt)]
    count = first * sampling.n_samples_per_prompt
    requests = [
        GenerationRequest(prompt.prompt_ids, scattered_seed(config.out.seed, count + place))
        for place, prompt in enumerate(asked)
    ]
    with timer("generate"):
        generations = answering.engines.generate(requests, sampling_params(sampling))
    with timer("reward"):
        questions = score_requests(asked, generations, answering.decode)
        scores = _scores(answering, asked, questions, generations, reward=config.reward)
    return Answers(asked, questions, generations, scores)


def _scores(
    answering: Answering,
    asked: Sequence[Prompt],
    questions: list[ScoreRequest],
    generations: Sequence[Generation],
    *,
    reward: OptionalRewardConfig,
) -> list[Score] | None:
    if answering.scorer is None:
        return None
    scores = answering.scorer.score(questions)
    if answering.reward_model is None:
        return scores
    pairs = zip(asked, generations, strict=True)
    values = answering.reward_model.scores([as_sequence(p.prompt_ids, g.token_ids) for p, g in pairs])
    return with_model_scores(scores, values, weight=reward.reward_model_weight, max_failures=reward.reward_max_failures)


def sampling_params(sampling: SamplingConfig) -> SamplingParams:
    """The settings as engines take them."""
    if sampling.temperature == 0:
        return SamplingParams(sampling.max_new_tokens, greedy=True)
    return SamplingParams(sampling.max_new_tokens, temperature=sampling.temperature, top_p=sampling.top_p)


def _metrics(answers: Answers) -> dict[str, float]:
    if answers.scores is None:
        metrics = length_metrics(answers.generations)
    else:
        metrics = rollout_metrics(answers.generations, answers.scores)
    return metrics | {"num_tokens": float(sum(len(generation.token_ids) for generation in answers.generations))}


def sample_cells(answers: Answers, data: PromptData, *, first: int, num_samples: int) -> list[dict[str, Any]]:
    """Rows of samples.jsonl: prompt_index counts the prompts, row the rows of the data set they come from."""
    rows = []
    for place, prompt in enumerate(answers.prompts):
        number, sample = divmod(place, num_samples)
        if sample == 0:
            cells = {"source": prompt.source, "row": prompt.index, **prompt_cells(data.conversation_of(prompt))}
        generation = answers.generations[place]
        row = {
            "prompt_index": first + number,
            "sample_index": sample,
            **cells,
            "response": answers.requests[place].response,
            "label": prompt.label,
            "num_tokens": len(generation.token_ids),
            "finish_reason": generation.finish_reason,
        }
        rows.append(row | (_score_cells(answers.scores[place]) if answers.scores is not None else {}))
    return rows


def _score_cells(score: Score) -> dict[str, Any]:
    return {"score": score.value, "scores": score.parts, "verdict": score.status, "detail": score.detail}


def _select(config: GenerateConfig, root: Path) -> dict[str, str]:
    """Write selected.jsonl if it is wanted; what to say about it."""
    if config.selection.select == "none":
        return {}
    counts: Counter[str] = Counter()
    write_rows(root / SELECTED, select_samples(read_lines(root / SAMPLES), config.selection, counts))
    if not counts["rows"]:
        raise RunError(f"nothing could be selected ({summary(counts)}); all responses are in {root / SAMPLES}")
    return {"Selected": f"{root / SELECTED}: {summary(counts)}"}
