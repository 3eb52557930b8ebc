"""Sampling, selection and output of batch generation and evaluation."""

from typing import Annotated, Literal, Protocol

from pydantic import Field

from rlhf_cli.config.base import Excludes, Needs, SettingsGroup
from rlhf_cli.config.data import PromptConfig, TemplateConfig
from rlhf_cli.config.episodes import EpisodeConfig
from rlhf_cli.config.model import ModelSource
from rlhf_cli.config.pictures import PicturesConfig
from rlhf_cli.config.rollout import EngineConfig, SamplingConfig
from rlhf_cli.config.scoring import RewardConfig


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
    def template(self) -> TemplateConfig: ...
    @property
    def pictures(self) -> PicturesConfig: ...
    @property
    def sampling(self) -> SamplingConfig: ...
    @property
    def engine(self) -> EngineConfig: ...
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
