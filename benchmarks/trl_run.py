"""One run of TRL's SFTTrainer for sft_vs_trl.py, which starts it with TRL on its path.

    python trl_sft.py SPEC.json

The rows arrive tokenised, so that both programs train the same tokens; they are taken in their order. Prints nothing:
the result (seconds, trained tokens and loss of every step) is written to the file that the specification names.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer


class CountingTrainer(SFTTrainer):
    """Counts the trained tokens of every step, and begins the learning rate's course one step later, as `rlhf` does."""

    num_trained = 0

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LambdaLR:
        """As in the parent class, without its first step of rate 0."""
        factor_at = super().create_scheduler(num_training_steps, optimizer).lr_lambdas[0]
        self.lr_scheduler = LambdaLR(optimizer or self.optimizer, lambda step: factor_at(step + 1))
        return self.lr_scheduler

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """As in the parent class."""
        self.num_trained += int((inputs["labels"] != -100).sum())
        return super().training_step(model, inputs, *args, **kwargs)


class StepClock(TrainerCallback):
    """Seconds and trained tokens of every step."""

    def __init__(self) -> None:
        self.trainer: CountingTrainer | None = None
        self.seconds: list[float] = []
        self.tokens: list[int] = []
        self._since = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """The clock starts."""
        self._since = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """A step is done."""
        assert self.trainer is not None
        now = time.perf_counter()
        self.seconds.append(now - self._since)
        self.tokens.append(self.trainer.num_trained)
        self.trainer.num_trained, self._since = 0, now


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=getattr(torch, spec["dtype"]))
    clock = StepClock()
    trainer = CountingTrainer(
        model,
        args=SFTConfig(
            output_dir=spec["output"],
            report_to="none",
            use_cpu=True,
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            gradient_checkpointing=False,
            completion_only_loss=True,
            train_sampling_strategy="sequential",
            **spec["settings"],
        ),
        train_dataset=Dataset.from_json(spec["rows"]),
        processing_class=AutoTokenizer.from_pretrained(spec["model"]),
        callbacks=[clock],
    )
    clock.trainer = trainer
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    result = {"seconds": clock.seconds, "tokens": clock.tokens, "loss": losses}
    Path(spec["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
