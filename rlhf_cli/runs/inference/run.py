"""Common parts of `rlhf generate` and `rlhf eval`: a model answers prompts chunk by chunk."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from transformers import PretrainedConfig

from rlhf_cli.backends.cluster.ray_cluster import Cluster
from rlhf_cli.backends.roles.start import Started
from rlhf_cli.backends.rollout.backend_choice import rollout_backend
from rlhf_cli.commands.inference import InferenceConfig
from rlhf_cli.config.model import ModelConfig
from rlhf_cli.data.prompts import Prompt, PromptData, load_prompts
from rlhf_cli.data.rollouts import sampling_params
from rlhf_cli.data.selection import prompt_cells
from rlhf_cli.data.tokenizing.decoding import text_of
from rlhf_cli.data.tokenizing.tokenizer import check_token_ids
from rlhf_cli.errors import UsageError
from rlhf_cli.models.requirements import check_packed_length, check_positions
from rlhf_cli.models.reward_model import RewardModelPlan, find_process_reward_model, find_reward_model
from rlhf_cli.rewards.scorer import Scorer
from rlhf_cli.runs.episodes import EpisodePlan, find_episodes
from rlhf_cli.runs.inference.model import InferenceModel, find_inference_model
from rlhf_cli.runs.inference.output_folder import WHOLE_MODEL, Chunks
from rlhf_cli.runs.inference.workers import REWARD, OtherModels, started_models
from rlhf_cli.runs.judge_model import JudgeModel, asked_judge, find_judge
from rlhf_cli.runs.online.checks import refuse_length_rewards
from rlhf_cli.runs.pictured_roles import check_engine_pictures, check_role_pictures
from rlhf_cli.runs.pictures import picture_reader
from rlhf_cli.runs.plugin_files import ENVIRONMENT_FILE, environment_file_hash
from rlhf_cli.runs.reward_file import JUDGE_TEMPLATE, REWARD_FILE, judge_template_hash, reward_file_hash
from rlhf_cli.tracking.phases import PhaseTimer
from rlhf_cli.tracking.tracker import Tracker
from rlhf_cli.trainers.online.interfaces import Engines, RewardModel
from rlhf_cli.trainers.online.metrics import failure_metrics, length_metrics, rollout_metrics
from rlhf_cli.trainers.online.rollout import Sampler, sample_and_score, scored_by_all
from rlhf_cli.trainers.online.sample_rows import sample_row
from rlhf_cli.trainers.online.samples import Sample, samples_of, scores_of
from rlhf_cli.trainers.online.step_scoring import StepScorer, step_finder

STEP_SCORES = "step_scores"
"""samples.jsonl column with the probability of each step in the response."""


@dataclass(frozen=True)
class ModelUnderTest:
    """A checked model with its prompts.

    Chunks are numbered from `first_step`. `cells` are constant columns added to all rows. At most one of `reward_model`
    and `process_model` is set.
    """

    config: InferenceConfig
    backend: str
    model: InferenceModel
    data: PromptData
    reward_model: RewardModelPlan | None
    chunks: Chunks
    first_step: int = 1
    cells: Mapping[str, object] = field(default_factory=dict)
    process_model: RewardModelPlan | None = None
    episodes: EpisodePlan | None = None
    judge: JudgeModel | None = None

    @property
    def facts_of_models(self) -> dict[str, object]:
        """Facts about other models than the one under test that must match to resume."""
        found = {} if self.judge is None else {"fingerprint of the judge": self.judge.found.fingerprint()}
        if self.process_model is not None:
            found["fingerprint of the process reward model"] = self.process_model.found.fingerprint()
        return dict(found)


@dataclass(frozen=True)
class InferenceRun:
    """Engines and scoring used to answer prompts."""

    sampler: Sampler
    reward_model: RewardModel | None = None
    steps: StepScorer | None = None

    @property
    def is_scored(self) -> bool:
        """Whether there are rewards."""
        return self.sampler.scorer is not None


@dataclass(frozen=True)
class InferenceHooks:
    """Callbacks between chunks: tracking and stop requests."""

    tracker: Tracker
    should_stop: Callable[[], bool]


def model_under_test(
    config: InferenceConfig,
    *,
    first_step: int = 1,
    cells: Mapping[str, object] | None = None,
    prm_pretrain: str | None = None,
) -> ModelUnderTest:
    """Find the model, its prompts and its judges. Raises UsageError if they conflict."""
    sampling, model = config.sampling, find_inference_model(config.model)
    backend = rollout_backend(config.engine, model.architecture)
    check_engine_pictures(model.architecture, backend=backend)
    # transformers has no maximum length, unlike vLLM, which refuses a longer one at startup.
    if backend == "vllm":
        check_positions(model.architecture, config.prompts.max_len)
    if backend == "transformers":
        check_packed_length(model.architecture, config.prompts.max_len)
    if config.episodes.plays_episodes:
        refuse_length_rewards(config.reward)
    episodes = find_episodes(config.episodes, config.prompts, config.template, model.found, model.tokenizer)
    data = load_prompts(
        config.prompts,
        model.tokenizer,
        max_new_tokens=sampling.max_new_tokens,
        seed=sampling.seed,
        template=config.template,
        reward=config.reward,
        reader=picture_reader(config.pictures, config.model, model.found, model.tokenizer),
        environment=episodes.description if episodes else None,
    )
    if episodes is not None:
        episodes.check_rows(data)
        num_prompts = min(sampling.rollout_batch_size, len(data.prompts))
        episodes.check_sessions(num_prompts * sampling.n_samples_per_prompt)
    largest, where = data.report.largest_token, data.report.largest_token_at
    check_token_ids(largest, where, model.tokenizer, model.architecture, pretrain=config.model.pretrain)
    process_model = None
    if prm_pretrain is not None and episodes is not None:
        raise UsageError("--prm_pretrain does not support multi-turn episodes")
    if prm_pretrain is not None:
        process_model = find_process_reward_model(prm_pretrain, _as_policy(config), model.tokenizer)
        _check_pictures(config, model, process_model, f"--prm_pretrain {prm_pretrain!r}")
    return ModelUnderTest(
        config,
        backend,
        model,
        data,
        _reward_model(config, model),
        Chunks(len(data.prompts), sampling.rollout_batch_size, sampling.n_samples_per_prompt),
        first_step,
        cells or {},
        process_model,
        episodes,
        find_judge(config.reward, config.model),
    )


def _reward_model(config: InferenceConfig, model: InferenceModel) -> RewardModelPlan | None:
    name, normalize = config.reward.reward_pretrain, config.reward.normalize_reward
    if name is None:
        return None
    found = find_reward_model(name, _as_policy(config), model.tokenizer, normalize=normalize)
    _check_pictures(config, model, found, f"--reward_pretrain {name!r}")
    return found


def _check_pictures(config: InferenceConfig, model: InferenceModel, judge: RewardModelPlan, what: str) -> None:
    # The judge reads the same image tokens, so it must split images like the model.
    trusted = config.model.trust_remote_code
    check_role_pictures(model.found, judge.found, what, pictures=config.pictures, trust_remote_code=trusted)


def _as_policy(config: InferenceConfig) -> ModelConfig:
    return ModelConfig(**config.model.model_dump())


def model_identity(tested: ModelUnderTest) -> dict[str, object]:
    """Return facts that must match for runs with the same model and prompts."""
    return {
        "fingerprint of the weights": tested.model.fingerprint(),
        "number of prompts": len(tested.data.prompts),
        "fingerprint of the prompts": tested.data.fingerprint,
    }


def settings_identity(
    config: InferenceConfig, reward_model: RewardModelPlan | None, architecture: PretrainedConfig | None = None
) -> dict[str, object]:
    """Return the settings that must match to resume. The number of engines may differ."""
    sampling, engine, reward = config.sampling, config.engine, config.reward
    return {
        "pretrain": config.model.pretrain,
        "param_dtype": config.model.param_dtype,
        "rollout_backend": rollout_backend(engine, architecture),
        "rollout_batch_size": sampling.rollout_batch_size,
        "n_samples_per_prompt": sampling.n_samples_per_prompt,
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "enforce_eager": engine.enforce_eager,
        "vllm_args": engine.vllm_args,
        "stop": sampling.stop,
        "seed": sampling.seed,
        "reward_funcs": reward.reward_funcs,
        "reward_weights": reward.reward_weights,
        "reward_func": reward.reward_func,
        REWARD_FILE: reward_file_hash(reward),
        "reward_func_weight": reward.reward_func_weight,
        "reward_func_args": reward.reward_func_args,
        "reward_key": reward.reward_key,
        "reward_by_source": reward.reward_by_source,
        "reward_pretrain": reward.reward_pretrain,
        "fingerprint of the reward model": None if reward_model is None else reward_model.found.fingerprint(),
        "reward_model_weight": reward.reward_model_weight,
        **config.episodes.identity(max_len=config.prompts.max_len),
        ENVIRONMENT_FILE: environment_file_hash(config.episodes),
        "rewards of servers": bool(reward.remote_rm_url),
        "remote_rm_weight": reward.remote_rm_weight,
        "judges": bool(reward.judge),
        "judge_model": reward.judge_model,
        "judge_weight": reward.judge_weight,
        "judge_method": reward.judge_method,
        "judge_rubric_key": reward.judge_rubric_key,
        "judge_score_range": list(reward.judge_score_range),  # as JSON returns it
        "judge_args": reward.judge_args,
        JUDGE_TEMPLATE: judge_template_hash(reward),
        "normalize_reward": reward.normalize_reward,
    }


def answer_prompts(
    tested: ModelUnderTest,
    *,
    begin: int,
    cluster: Cluster,
    root: Path,
    log_dir: Path,
    announce: Callable[[str], None],
    hooks: InferenceHooks,
) -> bool:
    """Start the model and answer its chunks from `begin`. Returns whether the last chunk was completed.

    `root` is the run's folder, which temporarily holds a merged model.
    """
    # An absolute path is valid in the working directory of any engine.
    weights = tested.model.whole(root.resolve() / WHOLE_MODEL, tell=hooks.tracker.message)
    with (
        started_models(
            tested.config,
            tested.backend,
            OtherModels(tested.reward_model or tested.process_model, tested.judge),
            weights=weights,
            cluster=cluster,
            log_dir=log_dir,
            announce=announce,
        ) as models,
        started_scorer(tested, models, hooks) as scorer,
    ):
        return answer_by(models, scorer, tested, begin=begin, hooks=hooks)


def started_scorer(
    tested: ModelUnderTest, models: Started, hooks: InferenceHooks
) -> AbstractContextManager[Scorer | None]:
    """Return a context manager with the scorer; None without rewards."""
    config = tested.config
    if not config.reward.is_given:
        return nullcontext()
    decode = partial(text_of, tested.model.tokenizer, skip_special_tokens=False)
    needs_environment = config.needs_scores and config.reward.asks_environment
    return Scorer(
        config.reward,
        judges=asked_judge(tested.judge, models),
        tell=hooks.tracker.message,
        decode=decode,
        needs_environment=needs_environment,
    )


def answer_by(
    models: Started, scorer: Scorer | None, tested: ModelUnderTest, *, begin: int, hooks: InferenceHooks
) -> bool:
    """Answer chunks from `begin` on engines with the model. Returns whether the last chunk was completed."""

    def decode(token_ids: Sequence[int]) -> str:
        return text_of(tested.model.tokenizer, token_ids, skip_special_tokens=True)

    with _engines(models, tested) as engines:
        sampling, reward_model = tested.config.sampling, models.roles.get(REWARD)
        sampler = Sampler(
            engines,
            scorer,
            decode,
            sampling_params(sampling, end_ids=tested.data.end_ids),
            sampling.n_samples_per_prompt,
            sampling.seed,
        )
        answering = InferenceRun(sampler, reward_model)
        if tested.process_model is not None and reward_model is not None:
            finder = step_finder(tested.process_model, tested.model.tokenizer)
            answering = InferenceRun(sampler, steps=StepScorer(reward_model, finder))
        return answer_chunks(answering, tested, begin=begin, hooks=hooks)


def _engines(models: Started, tested: ModelUnderTest) -> AbstractContextManager[Engines]:
    """Return the model's engines, wrapped for episodes with an environment."""
    return tested.episodes.played_by(models.engines) if tested.episodes else nullcontext(models.engines)


def answer_chunks(answering: InferenceRun, tested: ModelUnderTest, *, begin: int, hooks: InferenceHooks) -> bool:
    """Answer chunks from `begin` and log each chunk's rows. Returns whether the last chunk was completed.

    Metrics are written before rows, so that a chunk with all rows is complete.
    """
    chunks = tested.chunks
    # Chunks are answered in order, so that complete chunks form a prefix of the file.
    for number in range(begin, len(chunks)):
        timer = PhaseTimer(on_change=hooks.tracker.phase)
        first, end = chunks.bounds(number)
        samples, steps = _answer(answering, tested.data.prompts[first:end], tested, first=first, timer=timer)
        # Steps start at the model's first one, so that metrics of several models do not overlap.
        step = tested.first_step + number
        hooks.tracker.log(step, _metrics(samples, is_scored=answering.is_scored), timer.take())
        hooks.tracker.samples(step, _rows(samples, steps, tested, is_scored=answering.is_scored))
        # After the last chunk the run is complete, even if a stop was requested.
        if hooks.should_stop() and number + 1 < len(chunks):
            return False
    return True


def _answer(
    answering: InferenceRun, prompts: Sequence[Prompt], tested: ModelUnderTest, *, first: int, timer: PhaseTimer
) -> tuple[list[Sample], list[list[float]] | None]:
    """Return samples, and step probabilities per sample with a process reward model.

    `first` is the index of the first prompt, which determines the seeds.
    """
    numbered = dict(enumerate(prompts, start=first))
    # Engines sleep only for a judge that takes turns with them.
    work = asyncio.run(sample_and_score(numbered, answering.sampler, timer, wakes_engines=True))
    samples = samples_of(work.whole_groups())
    with timer("reward"):
        if answering.is_scored:
            samples = scored_by_all(samples, answering.reward_model, tested.config.reward)
        steps = None if answering.steps is None else answering.steps.probabilities(samples)
    return samples, steps


def _metrics(samples: Sequence[Sample], *, is_scored: bool) -> dict[str, float]:
    responses, scores = [sample.response for sample in samples], scores_of(samples)
    metrics = rollout_metrics(responses, scores) | failure_metrics(scores) if is_scored else length_metrics(responses)
    return metrics | {"num_tokens": float(sum(response.num_sampled for response in responses))}


def _rows(
    samples: Sequence[Sample], steps: Sequence[list[float]] | None, tested: ModelUnderTest, *, is_scored: bool
) -> list[dict[str, object]]:
    """Return rows for samples.jsonl. Prompts are those of the dataset, so that the file is a dataset itself."""
    rows = []
    for number, sample in enumerate(samples):
        # All samples of a prompt share its cells, and they are adjacent.
        if sample.index == 0:
            prompt = prompt_cells(tested.data.conversation_of(sample.prompt))
        row = {**tested.cells, **sample_row(sample, has_reward=is_scored), **prompt}
        row.pop("images", None)  # no thumbnails are written here
        rows.append(row | ({STEP_SCORES: steps[number]} if steps is not None else {}))
    return rows
