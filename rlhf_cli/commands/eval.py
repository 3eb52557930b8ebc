"""`rlhf eval`: greedy answers of a model to prompts with ground truth, and the share that is right."""

from pydantic import BaseModel, ConfigDict

from rlhf_cli.config.base import Group
from rlhf_cli.config.data import PromptConfig
from rlhf_cli.config.model import ModelSource
from rlhf_cli.config.online import EngineConfig, RewardConfig


class EvalOutputConfig(Group):
    """Output"""

    output: str | None = None
    """Folder for eval.json (the figures) and samples.jsonl (prompts, answers and verdicts)."""
    seed: int = 42
    """Seed of the order in which mixed prompt sets are read."""


class EvalConfig(BaseModel):
    """Settings of `rlhf eval`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: ModelSource
    prompts: PromptConfig
    engine: EngineConfig = EngineConfig()
    reward: RewardConfig
    out: EvalOutputConfig = EvalOutputConfig()


def eval(config: EvalConfig) -> None:
    """Answer prompts with a model, greedily, and count what a verifier or your own reward finds right."""
    from rlhf_cli.commands.evaluation import run_evaluation

    run_evaluation(config)
