"""What `rlhf eval` does: an engine in this process answers all prompts, rewards judge, figures are shown and kept."""

import asyncio
import json
import math
import tempfile
from pathlib import Path

from rlhf_cli.backends.engine_group import make_engine, rollout_backend
from rlhf_cli.backends.rollout_engine import EngineSettings
from rlhf_cli.commands.eval import EvalConfig
from rlhf_cli.commands.run_directory import CONFIG
from rlhf_cli.data.prompts import Prompt, load_prompts
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams
from rlhf_cli.errors import UsageError
from rlhf_cli.models.loading import load_tokenizer, resolve_model_path
from rlhf_cli.rewards.scorer import Scorer
from rlhf_cli.tracking.sinks import SamplesFile
from rlhf_cli.tracking.terminal import quiet_process
from rlhf_cli.trainers.rl_batch import rollout_metrics, sample_rows, score_requests


def run_evaluation(config: EvalConfig) -> None:
    """Print accuracy with its 95 % interval, mean reward, lengths and truncation; keep them where asked."""
    if config.out.output is not None and (Path(config.out.output) / CONFIG).exists():
        raise UsageError(f"--output {config.out.output} is the directory of a run; choose a folder of its own")
    tokenizer = load_tokenizer(config.model)
    data = load_prompts(config.prompts, tokenizer, max_new_tokens=config.engine.max_new_tokens, seed=config.out.seed)
    prompts = list(data.prompts)
    with tempfile.TemporaryDirectory() as scratch, Scorer(config.reward) as scorer:
        scorer.check_labels([prompt.label for prompt in prompts])
        folder = Path(config.out.output) if config.out.output else Path(scratch)
        with quiet_process(folder / "logs" / "eval.log") as terminal:
            generations = asyncio.run(_answers(config, prompts))
            requests = score_requests(
                prompts, generations, lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=True)
            )
            scores = scorer.score(requests)
            figures = rollout_metrics(generations, scores) | {"num_prompts": float(len(prompts))}
            if "accuracy" in figures:
                judged = sum(score.status in ("correct", "wrong", "invalid") for score in scores)
                low, high = wilson_interval(figures["accuracy"], judged)
                figures |= {"accuracy_low": low, "accuracy_high": high}
            for line in report_lines(config.model.pretrain, figures):
                terminal.console.print(line, markup=False)
            (folder / "eval.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
            samples = SamplesFile(folder, resume_step=None)
            samples.log(0, sample_rows(requests, generations, scores))
            samples.close()


async def _answers(config: EvalConfig, prompts: list[Prompt]) -> list[Generation]:
    settings = EngineSettings(
        max_model_len=config.prompts.max_len,
        dtype=config.model.param_dtype,
        tensor_parallel_size=config.engine.vllm_tensor_parallel_size,
        gpu_memory_utilization=config.engine.vllm_gpu_memory_utilization,
        enforce_eager=config.engine.enforce_eager,
        enable_prefix_caching=config.engine.enable_prefix_caching,
        trust_remote_code=config.model.trust_remote_code,
    )
    backend = rollout_backend(config.engine.rollout_backend)
    engine = await asyncio.to_thread(make_engine, backend, resolve_model_path(config.model.pretrain), settings)
    try:
        requests = [GenerationRequest(prompt.prompt_ids, seed=0) for prompt in prompts]
        return list(await engine.generate(requests, SamplingParams(config.engine.max_new_tokens, greedy=True)))
    finally:
        await engine.shutdown()


def wilson_interval(share: float, num_trials: int, *, z: float = 1.96) -> tuple[float, float]:
    """The 95 % score interval of a share (Wilson 1927), which stays sensible near 0 and 1 and for few trials."""
    centre = (share + z * z / (2 * num_trials)) / (1 + z * z / num_trials)
    spread = math.sqrt(share * (1 - share) / num_trials + z * z / (4 * num_trials**2))
    half = z * spread / (1 + z * z / num_trials)
    return max(0.0, centre - half), min(1.0, centre + half)


def report_lines(name: str, figures: dict[str, float]) -> list[str]:
    """The figures as lines for a person."""
    lines = [f"{name}: {figures['num_prompts']:.0f} prompts, greedy"]
    if "accuracy" in figures:
        interval = f"(95 % between {figures['accuracy_low']:.3f} and {figures['accuracy_high']:.3f})"
        lines.append(f"  accuracy   {figures['accuracy']:.3f} {interval}")
    lines.append(f"  reward     {figures['reward']:.3f}")
    lines.append(f"  length     {figures['response_length']:.1f} tokens, {figures['truncated']:.1%} cut at the limit")
    if figures["reward_failed"]:
        lines.append(f"  failed     {figures['reward_failed']:.1%} of the rewards, left out of all means")
    return lines
