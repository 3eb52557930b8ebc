"""One TRL training run, in a process that vs_trl.py starts with TRL on its path.

    python trl_run.py SPEC.json

Rows arrive tokenised, or as text with images, and keep their order. The result file has seconds, trained units, and
loss or reward for each step.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, Image, List
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoProcessor,
    AutoTokenizer,
    Trainer,
    TrainerCallback,
)
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl_task import Trail, trl_reward


class EarlierRates(Trainer):
    """Shifts the warm-up by one step, so that the first step has a learning rate above 0, as in `rlhf`."""

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LambdaLR:
        """Shift the parent's schedule."""
        warm_up = self.args.get_warmup_steps(num_training_steps)
        factor_at = super().create_scheduler(num_training_steps, optimizer).lr_lambdas[0]
        self.lr_scheduler = LambdaLR(optimizer or self.optimizer, lambda step: factor_at(step + (step < warm_up)))
        return self.lr_scheduler


class TokenisedSFT(EarlierRates, SFTTrainer):
    """Trains tokenised rows unchanged."""


class TokenisedReward(EarlierRates, RewardTrainer):
    """Trains tokenised rows unchanged."""


class SampledGRPO(EarlierRates, GRPOTrainer):
    """Uses prompts unchanged."""


class TokenisedDPO(EarlierRates, DPOTrainer):
    """Skips the parent's tokenisation."""

    def _prepare_dataset(self, dataset: Dataset, *args: Any) -> Dataset:
        return dataset


class TokenisedKTO(EarlierRates, KTOTrainer):
    """Skips the parent's tokenisation; adds mismatched responses from the previous row, like the parent."""

    def _prepare_dataset(self, dataset: Dataset, processing_class: Any, args: KTOConfig, *names: Any) -> Dataset:
        def shifted(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
            responses = rows["completion_ids"]
            return {"KL_completion_ids": [responses[-1], *responses[:-1]]}

        if not self.calculate_KL:
            return dataset
        return dataset.map(shifted, batched=True, batch_size=args.per_device_train_batch_size)


@dataclass(frozen=True)
class Kind:
    """A trainer and its model; `curve` is the plotted metric."""

    trainer: Callable[..., Any]
    config: Callable[..., Any]
    model: Callable[..., Any]
    curve: str = "loss"
    arguments: dict[str, Any] = field(default_factory=dict)
    processor: Callable[..., Any] = AutoTokenizer.from_pretrained


LM = AutoModelForCausalLM.from_pretrained
SCORED = AutoModelForSequenceClassification.from_pretrained
VISION, PROCESSOR = AutoModelForImageTextToText.from_pretrained, AutoProcessor.from_pretrained


def vision_that_counts(path: str, **options: Any) -> Any:
    """Load a vision-language model for which SFTTrainer divides by the total tokens in a step.

    The Qwen2.5-VL class in transformers accepts no such count, so TRL would average micro-batch means.
    """
    model = VISION(path, **options)
    model.accepts_loss_kwargs = True
    return model


KINDS = {
    "sft": Kind(TokenisedSFT, SFTConfig, LM),
    "dpo": Kind(TokenisedDPO, DPOConfig, LM),
    "kto": Kind(TokenisedKTO, KTOConfig, LM),
    "rm": Kind(TokenisedReward, RewardConfig, SCORED),
    "vision_sft": Kind(TokenisedSFT, SFTConfig, vision_that_counts, processor=PROCESSOR),
    "vision_dpo": Kind(TokenisedDPO, DPOConfig, VISION, processor=PROCESSOR),
    "grpo": Kind(SampledGRPO, GRPOConfig, LM, "reward", {"reward_funcs": trl_reward}),
    "episodes": Kind(SampledGRPO, GRPOConfig, LM, "reward", {"environment_factory": Trail}),
}


class StepClock(TrainerCallback):
    """Records the seconds for each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._since = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self._since = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Record a step."""
        now = time.perf_counter()
        self.seconds.append(now - self._since)
        self._since = now


def read_rows(path: str) -> Dataset:
    """Read the rows, with image files if present."""
    rows = Dataset.from_json(path)
    return rows.cast_column("images", List(Image())) if "images" in rows.column_names else rows


def trained_units(rows: Dataset) -> list[int]:
    """Return trained tokens or responses by row; packed rows in SFTTrainer have lost the count."""
    if "trained" in rows.column_names:
        return list(rows["trained"])
    return [sum(label != -100 for label in labels) for labels in rows["labels"]]


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    kind = KINDS[spec["trainer"]]
    settings = kind.config(
        output_dir=spec["output"],
        report_to="none",
        use_cpu=True,
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        gradient_checkpointing=False,
        train_sampling_strategy="sequential",
        **spec["settings"],
    )
    clock = StepClock()
    trainer = kind.trainer(
        kind.model(spec["model"], dtype=getattr(torch, spec["dtype"])),
        args=settings,
        train_dataset=read_rows(spec["rows"]),
        processing_class=kind.processor(spec["model"]),
        callbacks=[clock],
        **kind.arguments,
    )
    trained = trained_units(trainer.train_dataset)
    trainer.train()
    size = settings.per_device_train_batch_size * settings.gradient_accumulation_steps
    size //= getattr(settings, "num_generations", 1)  # GRPO's batch counts responses
    result = {
        "seconds": clock.seconds,
        "trained": [sum(trained[step * size : (step + 1) * size]) for step in range(len(clock.seconds))],
        "curve": [line[kind.curve] for line in trainer.state.log_history if kind.curve in line],
    }
    Path(spec["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
