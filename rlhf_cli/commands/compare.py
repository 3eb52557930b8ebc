"""`rlhf compare`: differences of two models, and the checkpoint at which a run broke."""

from pydantic import model_validator

from rlhf_cli.commands.eval import EvalConfig
from rlhf_cli.config.base import CommandConfig
from rlhf_cli.config.comparison import CompareGroup
from rlhf_cli.config.data import PromptConfig, TemplateConfig
from rlhf_cli.config.episodes import EpisodeConfig
from rlhf_cli.config.evaluation import EvaluatedModelConfig, StatisticsConfig
from rlhf_cli.config.pictures import PicturesConfig
from rlhf_cli.config.placement import PlacementConfig
from rlhf_cli.config.roles import RewardRanksConfig
from rlhf_cli.config.rollout import EngineConfig, SamplingConfig
from rlhf_cli.config.scoring import RewardConfig


class CompareConfig(CommandConfig):
    """Compare two models on the same prompts and seeds: paired differences with 95% intervals.

    MODELS are two models, checkpoints, or outputs of `rlhf eval`. Models without an evaluation are evaluated first,
    with the settings of the other one, and with flags as for `rlhf eval`.
    """

    positional = "models"
    example = (
        "runs/sft runs/grpo --prompt_data openai/gsm8k:main --reward_funcs gsm8k --max_new_tokens 512 --max_len 1024"
    )
    unsupported = frozenset({"model.pretrain", *filter(lambda name: "out." not in name, EvalConfig.unsupported)})

    compare: CompareGroup
    model: EvaluatedModelConfig = EvaluatedModelConfig(pretrain="each")
    prompts: PromptConfig = PromptConfig(prompt_data="")
    template: TemplateConfig = TemplateConfig()
    pictures: PicturesConfig = PicturesConfig()
    episodes: EpisodeConfig = EpisodeConfig()
    sampling: SamplingConfig = SamplingConfig(temperature=0.0)
    engine: EngineConfig = EngineConfig()
    reward: RewardConfig = RewardConfig()
    placement: PlacementConfig = PlacementConfig()
    reward_ranks: RewardRanksConfig = RewardRanksConfig(reward_num_gpus_per_node=1)
    statistics: StatisticsConfig = StatisticsConfig()

    @model_validator(mode="after")
    def _check_number(self) -> "CompareConfig":
        number, is_bisect = len(self.compare.models), self.compare.bisect
        if is_bisect and number != 1:
            raise ValueError(f"bisect requires one run directory, not {number}: rlhf compare RUN --bisect")
        if not is_bisect and number not in (1, 2):
            raise ValueError(f"{number} models are given: compare two, as in rlhf compare A B")
        return self
