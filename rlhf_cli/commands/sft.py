"""`rlhf sft`: supervised fine-tuning.

Leaves out the loop itself (trainers/) and everything heavy: importing this module costs settings only.
"""

import sys

from pydantic import BaseModel, ConfigDict

from rlhf_cli.config.data import DataConfig
from rlhf_cli.config.model import ModelConfig
from rlhf_cli.config.train import (
    CheckpointConfig,
    DeepSpeedConfig,
    LaunchConfig,
    OfflineBatchConfig,
    SingleOptimConfig,
    TrackingConfig,
)


class SFTConfig(BaseModel):
    """Settings of `rlhf sft`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: ModelConfig
    data: DataConfig
    batch: OfflineBatchConfig = OfflineBatchConfig(max_epochs=2)
    optim: SingleOptimConfig = SingleOptimConfig()
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    launch: LaunchConfig = LaunchConfig()
    checkpoint: CheckpointConfig
    tracking: TrackingConfig = TrackingConfig()


def sft(config: SFTConfig) -> None:
    """Fine-tune a language model on examples: prompts with responses, conversations, or plain text."""
    from rlhf_cli.backends.distributed_env import is_under_launcher, rank_and_world_size
    from rlhf_cli.commands.run_directory import check_run_directory

    if rank_and_world_size()[0] == 0:
        check_run_directory(config.checkpoint)
    if config.launch.num_processes > 1 and not is_under_launcher():
        from rlhf_cli.backends.launch import run_ranks

        sys.exit(run_ranks(config.launch.num_processes, sys.argv[1:]))

    from rlhf_cli.commands.offline import Items, OfflineTask, run_offline
    from rlhf_cli.data.sft_data import load_sft_sequences
    from rlhf_cli.models.loading import load_causal_lm, load_tokenizer
    from rlhf_cli.models.policy import PolicyModel
    from rlhf_cli.tracking.tracker import check_tracking
    from rlhf_cli.trainers.sft import SequenceItems, sft_objective

    check_tracking(config.tracking)
    tokenizer = load_tokenizer(config.model)
    data, seed = config.data, config.batch.seed
    train_data = load_sft_sequences(data, tokenizer, dataset=data.dataset, split=data.dataset_split, seed=seed)
    eval_data = None
    if data.eval_dataset is not None:
        eval_data = load_sft_sequences(data, tokenizer, dataset=data.eval_dataset, split=data.eval_split, seed=seed)
    task = OfflineTask(
        command="sft",
        objective=sft_objective,
        items=Items(SequenceItems(train_data), SequenceItems(eval_data) if eval_data is not None else None),
        summary=train_data.report.summary,
        load=lambda zero3: load_causal_lm(config.model, zero3_config=zero3),
        wrap=PolicyModel,
        tokenizer=tokenizer,
    )
    run_offline(config, task)
