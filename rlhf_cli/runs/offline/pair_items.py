"""Preference pairs as items for the offline loop, for `rm` and `dpo`."""

from rlhf_cli.commands.dpo import DPOConfig
from rlhf_cli.commands.rm import RMConfig
from rlhf_cli.data.loading import LoadedData
from rlhf_cli.data.preference_data import PAIRS, Pair
from rlhf_cli.models.sequence_parallel.checks import can_share_prompts
from rlhf_cli.runs.offline.task import Items, load_items
from rlhf_cli.runs.trained_model import ModelPlan
from rlhf_cli.trainers.offline.pairs import PairItems, margins
from rlhf_cli.trainers.offline.rm import MARGIN


def load_pair_items(
    config: RMConfig | DPOConfig, model: ModelPlan, *, read_ends: bool, with_margin: bool = False
) -> tuple[Items, str]:
    """Load training and evaluation pairs, with a summary line.

    Prompts are shared if enabled and supported by the model's layers.

    Raises:
        UsageError: a required margin is missing.
    """
    # Not all kernels and layers support two branches after one prompt.
    share = config.batch.share_prompts and can_share_prompts(model.attention, config.deepspeed, model.layers)

    def made(pairs: LoadedData[Pair]) -> PairItems:
        return PairItems(pairs, share, read_ends, {MARGIN: margins(pairs)} if with_margin else {})

    items = load_items(config, PAIRS, config.data, model, made)
    prompts = "shared prompts" if share else "prompts repeated for each response"
    return items, f"{items.data.data.report.summary}; {prompts}"
