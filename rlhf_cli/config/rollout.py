"""Rollout engines, sampling, and dynamic prompt selection."""

import json
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from rlhf_cli.config.base import JsonObject, Needs, Range, SettingsGroup
from rlhf_cli.config.plugins import Plugin
from rlhf_cli.config.vllm_args import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE, Temperature, fault_of_vllm_args

SyncBackend = Literal["nccl", "ipc", "shm"]
PromptSampling = Literal["shuffle", "variance", "source_variance"]

CPU_CACHE_GIB = 1
"""Limit of an engine's KV cache without a GPU."""
ENGINE_METHODS = (
    "generate",
    "begin",
    "add",
    "collect",
    "cut",
    "check_alive",
    "sleep",
    "wake",
    "init_weight_transfer",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
    "weight_checksum",
    "shutdown",
)
"""Methods of `RolloutEngine` (backends/rollout/engine.py)."""


class EngineConfig(SettingsGroup):
    """Engine"""

    rollout_backend: Annotated[
        str,
        Plugin(
            ("auto", "vllm", "transformers"),
            ("model_path", "settings"),
            methods=ENGINE_METHODS,
        ),
    ] = "auto"
    """Rollout engine. auto uses vLLM if installed; on a CPU, transformers for models with convolutions or recurrent
    layers that vLLM does not run there, and with --rollout_routing_replay.
    """
    vllm_tensor_parallel_size: int | None = Field(None, gt=0)
    """Tensor parallel size of each engine. Default: 1, or more in online training where no placement setting is given
    and the model does not fit on one GPU."""
    vllm_gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    """Fraction of GPU memory for an engine (weights and KV cache). Default: 0.9 on dedicated GPUs, 0.6 on shared
    GPUs.
    """
    enable_prefix_caching: bool = True
    """Compute a shared prompt once for all its samples, in full KV cache blocks (128 tokens on a CPU). vLLM only."""
    enforce_eager: bool | None = None
    """Disable CUDA graphs and compilation in vLLM: faster startup, slower generation. Default: only on a CPU, where
    --no_enforce_eager adds up to a minute to startup and reduces generation time to 0.7.
    """
    vllm_args: JsonObject = "{}"
    """Additional vLLM engine arguments as a JSON object or YAML mapping, such as {"max_num_seqs": 1024}."""
    vllm_num_engines: int | None = Field(None, gt=0)
    """Number of rollout engines. Default: as many as fit on free or shared GPUs; 1 without GPUs."""
    vllm_enable_sleep: bool | None = None
    """Free engine GPU memory during training. Default: if all models share GPUs and do not fit on them at once."""
    vllm_sync_backend: Literal["auto", SyncBackend] = "auto"
    """Weight transfer to engines: nccl between GPUs, ipc on shared GPUs, shm through files on one machine."""

    @property
    def engine_arguments(self) -> dict[str, object]:
        """Additional vLLM engine arguments."""
        return dict(json.loads(self.vllm_args))

    @field_validator("vllm_args")
    @classmethod
    def _check_engine_arguments(cls, text: str) -> str:
        if fault := fault_of_vllm_args(json.loads(text)):
            raise ValueError(fault)
        return text


SYNC = frozenset({"engine.vllm_enable_sleep", "engine.vllm_sync_backend"})
"""Settings of engines whose weights change, which commands without training do not support."""


class SamplingConfig(SettingsGroup):
    """Sampling"""

    max_new_tokens: int = Field(1024, gt=0)
    """Maximum number of generated tokens per response."""
    stop: list[str] = []
    """Strings that end a response and are kept in it, such as </answer>,User:. Comma-separated values are stripped; use
    a YAML list for arbitrary strings.
    """
    top_p: float = Field(1.0, gt=0, le=1)
    """Top-p sampling: sample from the smallest set of tokens with this total probability."""
    top_k: int = Field(0, ge=-1)
    """Top-k sampling (ties included); 0 or -1 disables it."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Min-p sampling: keep tokens with at least this fraction of the highest probability; 0 disables it."""
    temperature: Temperature = Field(1.0, ge=0, le=HIGHEST_TEMPERATURE)
    """Sampling temperature; 0 is greedy."""
    repetition_penalty: float = Field(1.0, gt=0)
    """Repetition penalty for prompt and response tokens. Above 1, positive logits are divided and negative logits
    multiplied by it.
    """
    rollout_batch_size: int = Field(1024, gt=0)
    """Prompts per iteration. In generate and eval, prompts that are answered, scored and written together: fewer need
    less memory, and lose less work if the command is killed."""
    n_samples_per_prompt: int = Field(1, gt=0)
    """Responses sampled per prompt."""
    seed: int = Field(42, ge=0, lt=2**32)
    """Random seed for sampling, and for the order of mixed prompt datasets."""

    @field_validator("top_k")
    @classmethod
    def _normalize_unbounded(cls, top_k: int) -> int:
        # vLLM disables top-k with -1 or 0; one value keeps run identities equal.
        return max(top_k, 0)

    @field_validator("stop")
    @classmethod
    def _check_stop_strings(cls, stop: list[str]) -> list[str]:
        if "" in stop:
            raise ValueError("an empty string is in every response; to stop at spaces, use a list in YAML")
        return stop

    @model_validator(mode="after")
    def _check_greedy(self) -> Self:
        # With temperature 0 these settings would be ignored silently.
        given = self.changed("top_p", "top_k", "min_p")
        if self.temperature == 0 and given:
            raise ValueError(f"{given} has no effect with temperature 0: raise temperature")
        if self.temperature == 0 and self.n_samples_per_prompt > 1:
            raise ValueError(
                "temperature 0 generates the same response each time: n_samples_per_prompt "
                f"{self.n_samples_per_prompt} requires a temperature above 0"
            )
        return self


class RolloutConfig(SamplingConfig):
    """Rollout"""

    temperature: float = Field(1.0, ge=LOWEST_TEMPERATURE, le=HIGHEST_TEMPERATURE)
    """Sampling temperature. All log-probs are computed from logits divided by it."""
    num_episodes: int = Field(1, gt=0)
    """Epochs over the prompts."""
    max_iterations: int | None = Field(None, gt=0)
    """Stop after this number of iterations."""
    prompt_sampling: PromptSampling = "shuffle"
    """How to choose prompts. shuffle: each one once per episode. variance: prompts whose rewards varied when they were
    last sampled are drawn more often; new ones count as most varied. source_variance: the same for sources of prompts
    (`data_source` or data set), so that their mixture follows the run. An episode is still as many iterations."""
    rollout_seed: int | None = Field(None, ge=0, lt=2**32)
    """Random seed for sampling and environments. Default: seed."""

    def sampling_seed(self, seed: int) -> int:
        """Return the seed for sampling in a run with this `seed`."""
        return seed if self.rollout_seed is None else self.rollout_seed


class AsyncConfig(SettingsGroup):
    """Asynchronous training"""

    async_train: bool = False
    """Sample responses for later iterations during training. Requires dedicated GPUs for engines."""
    max_staleness: Annotated[int, Needs("async_train")] = Field(1, ge=0)
    """Number of iterations that sampling is ahead of training: iteration k trains on responses from the policy after
    iteration k - 1 - max_staleness. 0 samples before each iteration, as without --async_train.
    """
    partial_rollout: Annotated[bool, Needs("async_train")] = False
    """Push weights during responses, which continue with the new weights, instead of waiting for them to finish. Such
    runs are not bit-reproducible.
    """

    @property
    def staleness(self) -> int:
        """Number of iterations that sampling is ahead of training."""
        return self.max_staleness if self.async_train else 0

    @model_validator(mode="after")
    def _check_partial_rollout(self) -> "AsyncConfig":
        if self.partial_rollout and not self.staleness:
            raise ValueError("partial_rollout requires --max_staleness of at least 1")
        return self


class DynamicSamplingConfig(SettingsGroup):
    """Dynamic sampling"""

    needs = Needs("dynamic_filtering")

    dynamic_filtering: bool = False
    """Replace prompts without a learning signal (all responses correct, all wrong, or all scored equally), as in
    DAPO.
    """
    dynamic_filtering_reward_range: Range = None
    """Instead, replace prompts with a mean score outside this range."""
    dynamic_oversample: float = Field(0.5, ge=0)
    """Oversampling: extra prompts as a fraction of the missing prompts. Surplus is kept or dropped."""
    dynamic_max_rounds: int = Field(8, gt=0)
    """Maximum rounds of prompts per iteration; then it trains on the groups found so far."""
