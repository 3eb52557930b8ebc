"""Sampling, selection and output of batch generation and evaluation."""

from typing import Annotated, Literal, Protocol

from pydantic import Field, model_validator

from rlhf_cli.config.base import Excludes, Needs, SettingsGroup
from rlhf_cli.config.data import PromptConfig
from rlhf_cli.config.episodes import EpisodeConfig
from rlhf_cli.config.model import ModelSource
from rlhf_cli.config.pictures import PicturesConfig
from rlhf_cli.config.rollout import DecodingConfig, EngineConfig
from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.config.vllm_args import HIGHEST_TEMPERATURE, Temperature


class InferenceModelConfig(ModelSource):
    """Model"""

    pretrain: str
    """Model that answers: a folder, an adapter, a run directory or checkpoint of this program, a Hugging Face name."""


class ResponseSamplingConfig(DecodingConfig):
    """Sampling"""

    temperature: Temperature = Field(1.0, ge=0, le=HIGHEST_TEMPERATURE)
    """Sampling temperature; 0 takes the likeliest token."""
    repetition_penalty: float = Field(1.0, gt=0)
    """Above 1, tokens of prompt and response get less likely: logits above 0 are divided by it, others multiplied."""

    @model_validator(mode="after")
    def _the_likeliest_token_has_no_rivals(self) -> "ResponseSamplingConfig":
        given = self.changed("top_p", "top_k", "min_p")
        if self.temperature == 0 and given:
            raise ValueError(f"{given} chooses among tokens, and temperature 0 takes the likeliest: raise temperature")
        return self


class SamplingConfig(EngineConfig, ResponseSamplingConfig):
    """Sampling"""

    rollout_batch_size: int = Field(1024, gt=0)
    """Prompts answered, scored and written together: the bound on memory, and on the work lost by a kill."""
    n_samples_per_prompt: int = Field(1, gt=0)
    """Responses sampled for each prompt."""
    vllm_num_engines: int | None = Field(None, gt=0)
    """Rollout engines. By default as many as there are GPUs for, without GPUs 1."""

    @model_validator(mode="after")
    def _samples_differ(self) -> "SamplingConfig":
        if self.temperature == 0 and self.n_samples_per_prompt > 1:
            raise ValueError(
                f"temperature 0 gives the same response each time: n_samples_per_prompt {self.n_samples_per_prompt} "
                "needs a temperature above 0"
            )
        return self


class RewardPlacementConfig(SettingsGroup):
    """Placement"""

    reward_num_gpus_per_node: int = Field(1, gt=0)
    """Ranks of the model that scores responses or steps: GPUs, or processes without a GPU."""
    colocate_all_models: bool | None = None
    """Reward model and engines share the same GPUs; what vllm_gpu_memory_utilization leaves is the reward model's. By
    default where there are too few GPUs for both."""


class SelectConfig(SettingsGroup):
    """Selection"""

    select: Literal["none", "best", "best_worst", "all"] = "none"
    """Rows of selected.jsonl: the best response to a prompt or all of them (sft), or the best with the worst (dpo)."""
    min_score: Annotated[float | None, Needs("select")] = None
    """Responses below this score are not selected; in a pair it is the chosen one that has to reach it."""


class AnswersOutputConfig(SettingsGroup):
    """Output"""

    seed: int = Field(42, ge=0, lt=2**32)
    """Seed of the sampled responses, and of the order in which mixed prompt sets are read."""
    load_checkpoint: Annotated[bool, Needs("output")] = False
    """Continue behind the responses that are there; starts fresh if there is nothing to continue."""
    overwrite: Annotated[bool, Needs("output"), Excludes("load_checkpoint")] = False
    """Replace the folder's contents from an earlier time."""


class GenerateOutputConfig(AnswersOutputConfig):
    """Output"""

    output: str
    """Folder for samples.jsonl (every response), selected.jsonl, settings, metrics and logs."""


class InferenceConfig(Protocol):
    """The settings that every command that answers prompts has."""

    @property
    def model(self) -> ModelSource: ...
    @property
    def prompts(self) -> PromptConfig: ...
    @property
    def pictures(self) -> PicturesConfig: ...
    @property
    def sampling(self) -> SamplingConfig: ...
    @property
    def episodes(self) -> EpisodeConfig: ...
    @property
    def reward(self) -> RewardConfig: ...
    @property
    def placement(self) -> RewardPlacementConfig: ...
    @property
    def out(self) -> AnswersOutputConfig: ...
    @property
    def needs_scores(self) -> bool:
        """Whether answers without scores are of no use."""
        ...
