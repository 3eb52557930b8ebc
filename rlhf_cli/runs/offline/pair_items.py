"""Preference pairs as items for the offline loop, for `rm` and `dpo`."""

from functools import partial
from typing import Protocol

from rlhf_cli.config.data import PreferenceDataConfig, TemplateConfig
from rlhf_cli.config.train import BatchConfig, DeepSpeedConfig
from rlhf_cli.data.pictures.reading import PictureReader
from rlhf_cli.data.preference_data import PAIRS
from rlhf_cli.models.sequence_parallel.checks import can_share_prompts
from rlhf_cli.runs.offline.task import Items, load_items
from rlhf_cli.runs.trained_model import ModelPlan
from rlhf_cli.trainers.offline.pairs import PairItems, margins
from rlhf_cli.trainers.offline.rm import MARGIN


class _PairConfig(Protocol):
    """Settings used to load pairs."""

    @property
    def data(self) -> PreferenceDataConfig: ...
    @property
    def template(self) -> TemplateConfig: ...
    @property
    def batch(self) -> BatchConfig: ...
    @property
    def deepspeed(self) -> DeepSpeedConfig: ...


def load_pair_items(
    config: _PairConfig,
    model: ModelPlan,
    *,
    read_ends: bool,
    with_margin: bool = False,
    reader: PictureReader | None = None,
) -> tuple[Items, str]:
    """Load training and evaluation pairs, with a summary line.

    Prompts are shared if enabled and supported by the model's layers. `reader` loads images.

    Raises:
        UsageError: a required margin is missing.
    """
    # Not all kernels and layers support two branches after one prompt.
    share = config.batch.share_prompts and can_share_prompts(model.attention, config.deepspeed, model.layers)
    data, seed = config.data, config.batch.seed

    load = partial(PAIRS.load, data, model.tokenizer, template=config.template, seed=seed, reader=reader)
    items = load_items(
        data,
        model,
        load,
        lambda pairs: PairItems(pairs, share, read_ends, {MARGIN: margins(pairs)} if with_margin else {}),
    )
    prompts = "shared prompts" if share else "prompts repeated for each response"
    return items, f"{items.data.data.report.summary}; {prompts}"
