"""Rollouts, placement and optimizers of online training; rewards are in scoring.py, its objective in policy.py."""

import json
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from rlhf_cli.config.base import JsonObject, SettingsGroup
from rlhf_cli.config.plugins import Plugin
from rlhf_cli.config.train import BatchConfig, DeepSpeedConfig, OptimConfig
from rlhf_cli.config.vllm_args import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE, fault_of_vllm_args


class EngineConfig(SettingsGroup):
    """Engine"""

    rollout_backend: Annotated[
        str,
        Plugin(
            ("auto", "vllm", "transformers"),
            ("model_path", "settings"),
            methods=("begin", "collect", "cut", "sleep", "wake", "update_weights", "shutdown"),
        ),
    ] = "auto"
    """Engine that generates; auto takes vLLM if it is installed."""
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
    vllm_tensor_parallel_size: int = Field(1, gt=0)
    """GPUs that share one engine."""
    vllm_gpu_memory_utilization: float = Field(0.6, gt=0, le=1)
    """Share of a GPU's memory an engine may take (weights and KV cache)."""
    enable_prefix_caching: bool = True
    """vLLM computes a prompt once for its samples, in whole blocks of the KV cache (128 tokens on a CPU)."""
    enforce_eager: bool | None = None
    """No CUDA graphs and no compilation in vLLM: starts faster, generates slower. By default on a CPU alone, where
    --no_enforce_eager starts up to a minute later and generates in 0.7 of the time."""
    vllm_args: JsonObject = "{}"
    """Further engine arguments of vLLM, as a JSON object or a YAML mapping: {"max_num_seqs": 1024}."""

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


class RolloutConfig(EngineConfig):
    """Rollout"""

    rollout_batch_size: int = Field(1024, gt=0)
    """Prompts per iteration."""
    n_samples_per_prompt: int = Field(1, gt=0)
    """Responses sampled for each prompt."""
    num_episodes: int = Field(1, gt=0)
    """Passes over the prompts."""
    max_iterations: int | None = Field(None, gt=0)
    """Stop after this many iterations."""
    temperature: float = Field(1.0, ge=LOWEST_TEMPERATURE, le=HIGHEST_TEMPERATURE)
    """Sampling temperature; all log-probs are of logits divided by it."""
    vllm_num_engines: int = Field(1, gt=0)
    """Rollout engines."""
    vllm_enable_sleep: bool = False
    """Engines free their GPU memory while models train."""
    vllm_sync_backend: Literal["auto", "nccl", "ipc", "shm"] = "auto"
    """How weights reach the engines: nccl between GPUs, ipc on shared GPUs, shm through files on one machine."""


class DynamicSamplingConfig(SettingsGroup):
    """Dynamic sampling"""

    dynamic_filtering: bool = False
    """Replace prompts whose responses teach nothing (all right, all wrong, all alike) by further ones (DAPO)."""
    dynamic_filtering_reward_range: tuple[float, float] | None = None
    """Replace prompts whose mean score is not between these two instead."""
    dynamic_oversample: float = Field(0.5, ge=0)
    """Extra prompts to sample, as a share of the missing prompts; surplus is dropped or kept."""
    dynamic_max_rounds: int = Field(8, gt=0)
    """Rounds of prompts per iteration; after them it trains on the groups there are."""

    @model_validator(mode="after")
    def _settings_belong_to_filtering(self) -> "DynamicSamplingConfig":
        if not self.dynamic_filtering:
            for name, field in type(self).model_fields.items():
                if getattr(self, name) != field.default:
                    raise ValueError(f"{name} says how prompts are replaced: add --dynamic_filtering")
        if self.dynamic_filtering_reward_range is not None:
            low, high = self.dynamic_filtering_reward_range
            if not low < high:
                raise ValueError(f"dynamic_filtering_reward_range {low:g} {high:g} is empty: nothing lies between")
        return self


class PlacementConfig(SettingsGroup):
    """Placement"""

    actor_num_nodes: int = Field(1, gt=0)
    """Nodes of the actor."""
    actor_num_gpus_per_node: int = Field(1, gt=0)
    """Actor ranks per node: GPUs, or processes without a GPU."""
    ref_num_nodes: int = Field(1, gt=0)
    """Nodes of the reference model."""
    ref_num_gpus_per_node: int = Field(1, gt=0)
    """Reference ranks per node."""
    reward_num_nodes: int = Field(1, gt=0)
    """Nodes of the reward model."""
    reward_num_gpus_per_node: int = Field(1, gt=0)
    """Reward model ranks per node."""
    colocate_all_models: bool = False
    """All models share GPUs (the engines share the actor's) and take turns; each has the first ones it needs."""
    colocate_actor_ref: bool = False
    """Actor and reference share GPUs, the smaller one the first of the other's."""
    deepspeed_enable_sleep: bool = False
    """Move weights, gradients and optimizer states of idle trainers to host memory."""


class CriticPlacementConfig(PlacementConfig):
    """Placement"""

    critic_num_nodes: int = Field(1, gt=0)
    """Nodes of the critic."""
    critic_num_gpus_per_node: int = Field(1, gt=0)
    """Critic ranks per node."""
    colocate_critic_reward: bool = False
    """Critic and reward model share GPUs, the smaller one the first of the other's."""


class CriticModelConfig(SettingsGroup):
    """Critic"""

    critic_pretrain: str | None = None
    """Model that the critic starts from, by default the actor's: a language model, or a reward model, whose head it
    keeps; same token ids."""


ZeroStage = Literal[0, 1, 2, 3]


class OnlineDeepSpeedConfig(DeepSpeedConfig):
    """DeepSpeed"""

    ref_zero_stage: ZeroStage | None = None
    """Stage of the reference, by default zero_stage; frozen weights are partitioned at 3 and whole at the others."""
    reward_zero_stage: ZeroStage | None = None
    """Stage of the reward model, by default zero_stage."""

    def of(self, role: str) -> "OnlineDeepSpeedConfig":
        """Return the settings of a role: "actor", "critic", "ref" or "reward"."""
        stage = getattr(self, f"{role}_zero_stage", None)
        return self if stage is None else self.model_copy(update={"zero_stage": stage})

    @property
    def stages(self) -> set[int]:
        """The stages of all roles there can be."""
        return {self.of(role).zero_stage for role in ("actor", "critic", "ref", "reward")}


class ActorCriticDeepSpeedConfig(OnlineDeepSpeedConfig):
    """DeepSpeed"""

    critic_zero_stage: ZeroStage | None = None
    """Stage of the critic, by default zero_stage."""


class OnlineBatchConfig(BatchConfig):
    """Batches"""

    share_prompts: bool = True
    """Compute a prompt once for its responses in a micro-batch; with attention varlen."""


class ActorCriticBatchConfig(OnlineBatchConfig):
    """Batches"""

    critic_update_steps: int | None = Field(None, gt=0)
    """Optimizer steps of even size into which the critic cuts each pass over the responses; by default the actor's."""
    freezing_actor_steps: int = Field(0, ge=-1)
    """Iterations at the start in which the critic is trained alone and the engines keep their weights; -1 is 0."""


class ActorOptimConfig(OptimConfig):
    """Optimizer"""

    actor_learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate of the actor."""
    enable_ema: bool = False
    """Keep a moving average of the actor's weights in host memory, and save it as a model of its own, `ema`."""
    ema_beta: float = Field(0.992, ge=0, lt=1)
    """Share of the average that is kept in each optimizer step."""

    @model_validator(mode="after")
    def _a_share_is_of_an_average(self) -> "ActorOptimConfig":
        if not self.enable_ema and self.changed("ema_beta"):
            raise ValueError("ema_beta is about the average of the weights: give --enable_ema")
        return self


class ActorCriticOptimConfig(ActorOptimConfig):
    """Optimizer"""

    critic_learning_rate: float = Field(9e-6, gt=0)
    """Peak learning rate of the critic."""
