"""Rollout engines, sampling, and the choice of prompts while sampling."""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from rlhf_cli.config.base import JsonObject, Needs, Range, SettingsGroup
from rlhf_cli.config.plugins import Plugin
from rlhf_cli.config.vllm_args import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE, Temperature, fault_of_vllm_args

SyncBackend = Literal["nccl", "ipc", "shm"]

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
    "abort_weight_update",
    "weight_checksum",
    "shutdown",
)
"""The methods of `RolloutEngine` (backends/rollout/engine.py)."""


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
    """Engine that generates; auto takes vLLM if it is installed."""
    vllm_tensor_parallel_size: int = Field(1, gt=0)
    """GPUs that share one engine."""
    vllm_gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    """Share of a GPU's memory an engine may take (weights and KV cache). By default 0.9 on GPUs of its own, 0.6 on GPUs
    that it shares with models."""
    enable_prefix_caching: bool = True
    """vLLM computes a prompt once for its samples, in whole blocks of the KV cache (128 tokens on a CPU)."""
    enforce_eager: bool | None = None
    """No CUDA graphs and no compilation in vLLM: starts faster, generates slower. By default on a CPU alone, where
    --no_enforce_eager starts up to a minute later and generates in 0.7 of the time."""
    vllm_args: JsonObject = "{}"
    """Further engine arguments of vLLM, as a JSON object or a YAML mapping: {"max_num_seqs": 1024}."""
    vllm_num_engines: int | None = Field(None, gt=0)
    """Rollout engines. By default as many as fit on the GPUs that models leave, or share with them; without GPUs 1."""
    vllm_enable_sleep: bool | None = None
    """Engines free their GPU memory while models train. By default where all models share GPUs."""
    vllm_sync_backend: Literal["auto", SyncBackend] = "auto"
    """How weights reach the engines: nccl between GPUs, ipc on shared GPUs, shm through files on one machine."""

    @property
    def engine_arguments(self) -> dict[str, Any]:
        """The further engine arguments of vLLM."""
        return dict(json.loads(self.vllm_args))

    @field_validator("vllm_args")
    @classmethod
    def _engine_arguments_are_not_settings(cls, text: str) -> str:
        if fault := fault_of_vllm_args(json.loads(text)):
            raise ValueError(fault)
        return text


SYNC = frozenset({"engine.vllm_enable_sleep", "engine.vllm_sync_backend"})
"""Settings of engines whose weights change, which commands without training do not support."""


class SamplingConfig(SettingsGroup):
    """Sampling"""

    max_new_tokens: int = Field(1024, gt=0)
    """Tokens generated per response at most."""
    stop: list[str] = []
    """Texts that end a response, of which they stay a part: </answer>,User: for example. Blanks around them are cut off
    here, and commas separate them; a list in YAML takes any text."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the smallest set of tokens with this probability."""
    top_k: int = Field(0, ge=-1)
    """Sample from this many of the likeliest tokens, and others as likely as the last of them; 0 or -1 from all."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Sample from tokens with at least this share of the probability of the likeliest one; 0 from all."""
    temperature: Temperature = Field(1.0, ge=0, le=HIGHEST_TEMPERATURE)
    """Sampling temperature; 0 takes the likeliest token."""
    repetition_penalty: float = Field(1.0, gt=0)
    """Above 1, tokens of prompt and response get less likely: logits above 0 are divided by it, others multiplied."""
    rollout_batch_size: int = Field(1024, gt=0)
    """Prompts per iteration; in generate and eval the prompts answered, scored and written together, which bound the
    memory and the work lost by a kill."""
    n_samples_per_prompt: int = Field(1, gt=0)
    """Responses sampled for each prompt."""
    seed: int = Field(42, ge=0, lt=2**32)
    """Seed of the sampled responses, and of the order in which mixed prompt sets are read."""

    @field_validator("top_k")
    @classmethod
    def _no_bound_has_one_spelling(cls, top_k: int) -> int:
        return max(top_k, 0)

    @field_validator("stop")
    @classmethod
    def _stop_strings_are_no_ends_by_themselves(cls, stop: list[str]) -> list[str]:
        if "" in stop:
            raise ValueError("an empty text is in every response; blanks alone can be given as a list in YAML")
        return stop

    @model_validator(mode="after")
    def _the_likeliest_token_has_no_rivals(self) -> Self:
        given = self.changed("top_p", "top_k", "min_p")
        if self.temperature == 0 and given:
            raise ValueError(f"{given} chooses among tokens, and temperature 0 takes the likeliest: raise temperature")
        if self.temperature == 0 and self.n_samples_per_prompt > 1:
            raise ValueError(
                f"temperature 0 gives the same response each time: n_samples_per_prompt {self.n_samples_per_prompt} "
                "needs a temperature above 0"
            )
        return self


class RolloutConfig(SamplingConfig):
    """Rollout"""

    temperature: float = Field(1.0, ge=LOWEST_TEMPERATURE, le=HIGHEST_TEMPERATURE)
    """Sampling temperature; all log-probs are of logits divided by it."""
    num_episodes: int = Field(1, gt=0)
    """Passes over the prompts."""
    max_iterations: int | None = Field(None, gt=0)
    """Stop after this many iterations."""


class AsyncConfig(SettingsGroup):
    """Asynchronous training"""

    async_train: bool = False
    """Sample the responses of later iterations while the models train; engines need GPUs of their own."""
    max_staleness: Annotated[int, Needs("async_train")] = Field(1, ge=0)
    """Iterations that sampling is ahead of training: iteration k learns on responses of the policy after iteration
    k - 1 - max_staleness. 0 samples before each iteration, as without --async_train."""
    partial_rollout: Annotated[bool, Needs("async_train")] = False
    """Push weights in the middle of responses, which go on with the new weights, instead of waiting for their end. Such
    a run cannot be repeated bit for bit."""

    @property
    def lag(self) -> int:
        """Iterations that sampling is ahead of training."""
        return self.max_staleness if self.async_train else 0

    @model_validator(mode="after")
    def _staleness_comes_of_sampling_ahead(self) -> "AsyncConfig":
        if self.partial_rollout and not self.lag:
            raise ValueError("partial_rollout needs --max_staleness of 1 or more")
        return self


class DynamicSamplingConfig(SettingsGroup):
    """Dynamic sampling"""

    needs = Needs("dynamic_filtering")

    dynamic_filtering: bool = False
    """Replace prompts whose responses teach nothing (all right, all wrong, all alike) by further ones (DAPO)."""
    dynamic_filtering_reward_range: Range = None
    """Replace prompts whose mean score is not between these two instead."""
    dynamic_oversample: float = Field(0.5, ge=0)
    """Extra prompts to sample, as a share of the missing prompts; surplus is dropped or kept."""
    dynamic_max_rounds: int = Field(8, gt=0)
    """Rounds of prompts per iteration; after them it trains on the groups there are."""
