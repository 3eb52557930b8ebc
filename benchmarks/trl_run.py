"""One run of a trainer of TRL for the comparisons, which start it with TRL on its path.

    python trl_run.py SPEC.json

The rows arrive tokenised, so that both programs train the same tokens, or with pictures as the text of these tokens;
they are taken in their order. Prints nothing:
the result (seconds, trained units, and loss or reward of every step) is written to the file that the specification
names.
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
from grpo_reward import trl_reward
from torch.optim.lr_scheduler import LambdaLR
from trail import Trail
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


class EarlierRates(Trainer):
    """Takes each step of the warm-up at the rate of the next one, without a first step of rate 0, as `rlhf` does."""

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LambdaLR:
        """As in the parent class, in the warm-up one step ahead."""
        warm_up = self.args.get_warmup_steps(num_training_steps)
        factor_at = super().create_scheduler(num_training_steps, optimizer).lr_lambdas[0]
        self.lr_scheduler = LambdaLR(optimizer or self.optimizer, lambda step: factor_at(step + (step < warm_up)))
        return self.lr_scheduler


class TokenisedSFT(EarlierRates, SFTTrainer):
    """Takes tokenised rows by itself."""


class TokenisedReward(EarlierRates, RewardTrainer):
    """Takes tokenised rows by itself."""


class TokenisedDPO(EarlierRates, DPOTrainer):
    """Leaves the rows as they come."""

    def _prepare_dataset(self, dataset: Dataset, *args: Any) -> Dataset:
        return dataset


class TokenisedKTO(EarlierRates, KTOTrainer):
    """Only adds the mismatched responses, as the parent class does: each row has the response of the row before it."""

    def _prepare_dataset(self, dataset: Dataset, processing_class: Any, args: KTOConfig, *names: Any) -> Dataset:
        def shifted(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
            responses = rows["completion_ids"]
            return {"KL_completion_ids": [responses[-1], *responses[:-1]]}

        if not self.calculate_KL:
            return dataset
        return dataset.map(shifted, batched=True, batch_size=args.per_device_train_batch_size)


class SampledGRPO(EarlierRates, GRPOTrainer):
    """Takes prompts by itself."""


@dataclass(frozen=True)
class Kind:
    """A trainer, its model, and how much of a row of its data set counts as trained: tokens, or responses to it.

    `course` is the metric that it logs for every step and that judges it; `arguments` are for the trainer alone;
    `reader` makes tokens, and the tower's inputs of pictures.
    """

    trainer: Callable[..., Any]
    config: Callable[..., Any]
    model: Callable[..., Any]
    trained: Callable[[dict[str, Any]], int]
    course: str = "loss"
    arguments: dict[str, Any] = field(default_factory=dict)
    reader: Callable[..., Any] = AutoTokenizer.from_pretrained


LM = AutoModelForCausalLM.from_pretrained
SCORED = AutoModelForSequenceClassification.from_pretrained
PICTURED, PROCESSOR = AutoModelForImageTextToText.from_pretrained, AutoProcessor.from_pretrained


def pictured_and_counting(path: str, **options: Any) -> Any:
    """Load a vision-language model of which SFTTrainer divides by the tokens of the step.

    transformers' class of Qwen2.5-VL takes no such count, so TRL would train the mean of the micro-batches' means.
    """
    model = PICTURED(path, **options)
    model.accepts_loss_kwargs = True
    return model


KINDS = {
    "sft": Kind(TokenisedSFT, SFTConfig, LM, lambda row: sum(label != -100 for label in row["labels"])),
    "dpo": Kind(TokenisedDPO, DPOConfig, LM, lambda row: len(row["chosen_ids"]) + len(row["rejected_ids"])),
    "kto": Kind(TokenisedKTO, KTOConfig, LM, lambda row: len(row["completion_ids"])),
    "rm": Kind(TokenisedReward, RewardConfig, SCORED, lambda row: row["trained"]),
    "vision_sft": Kind(TokenisedSFT, SFTConfig, pictured_and_counting, lambda row: row["trained"], reader=PROCESSOR),
    "vision_dpo": Kind(TokenisedDPO, DPOConfig, PICTURED, lambda row: row["trained"], reader=PROCESSOR),
    "grpo": Kind(SampledGRPO, GRPOConfig, LM, lambda row: row["responses"], "reward", {"reward_funcs": trl_reward}),
    "episodes": Kind(
        SampledGRPO, GRPOConfig, LM, lambda row: row["responses"], "reward", {"environment_factory": Trail}
    ),
}


class StepClock(TrainerCallback):
    """Seconds of every step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._since = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """The clock starts."""
        self._since = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """A step is done."""
        now = time.perf_counter()
        self.seconds.append(now - self._since)
        self._since = now


def read_rows(path: str) -> Dataset:
    """The rows, which name the files of their pictures if they have any."""
    rows = Dataset.from_json(path)
    return rows.cast_column("images", List(Image())) if "images" in rows.column_names else rows


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
        processing_class=kind.reader(spec["model"]),
        callbacks=[clock],
        **kind.arguments,
    )
    counted = [name for name in trainer.train_dataset.column_names if name != "images"]  # else all are decoded
    trained = [kind.trained(row) for row in trainer.train_dataset.select_columns(counted)]
    trainer.train()
    size = settings.per_device_train_batch_size * settings.gradient_accumulation_steps
    size //= getattr(settings, "num_generations", 1)  # of GRPO's batch, which counts responses and not rows
    result = {
        "seconds": clock.seconds,
        "trained": [sum(trained[step * size : (step + 1) * size]) for step in range(len(clock.seconds))],
        "course": [line[kind.course] for line in trainer.state.log_history if kind.course in line],
    }
    Path(spec["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
