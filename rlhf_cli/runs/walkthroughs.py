"""Quickstart walkthroughs: data, and commands as the user would type them."""

import shlex
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rlhf_cli.algorithms.estimators.table import ESTIMATORS
from rlhf_cli.command_table import COMMANDS
from rlhf_cli.data.arithmetic import write_problems
from rlhf_cli.data.squares import write_questions

_CRITIC = "--critic_learning_rate 5e-4"


@dataclass(frozen=True, slots=True)
class Step:
    """A command in a walkthrough. `stage` is the row in the results table; None for commands that do not train."""

    title: str
    words: list[str]
    stage: str | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """A column in the results table: accuracies from an evaluation folder for a dataset."""

    evaluation: str
    data: str


@dataclass(frozen=True)
class Walkthrough(ABC):
    """Paths and commands of a quickstart.

    - `measured`: columns of the results table by name.
    - `max_new_tokens`: response length limit.
    """

    root: Path
    seed: int
    algorithm: str
    measured: ClassVar[dict[str, Measured]]
    max_new_tokens: ClassVar[int]

    @property
    def folders(self) -> dict[str, Path]:
        """Run directories by stage."""
        return {"sft": self.root / "sft", self.algorithm: self.root / "practice"}

    @property
    @abstractmethod
    def introduction(self) -> str:
        """Text about the data, printed first."""

    @abstractmethod
    def write_data(self) -> None:
        """Write the datasets."""

    @abstractmethod
    def scratch(self) -> list[str]:
        """Return the command that creates the untrained model."""

    @abstractmethod
    def sft(self) -> list[str]:
        """Return the SFT command, which also imitates the demonstrations' errors."""

    @abstractmethod
    def practice(self) -> list[str]:
        """Return the RL command, with a verifier as the reward."""

    def steps(self) -> list[Step]:
        """Return all commands in order."""
        return [
            *self._first_steps(),
            Step(f"Practise with a verifier ({self._parts})", self.practice(), self.algorithm),
            Step("How often is it right on data it has never seen, before and after?", self.evaluation()),
        ]

    def _first_steps(self) -> list[Step]:
        return [
            Step("Make an untrained model and its tokenizer", self.scratch()),
            Step("Imitate demonstrations, their flaws included (supervised fine-tuning)", self.sft(), "sft"),
        ]

    @property
    def _parts(self) -> str:
        return f"{self.algorithm}: Ray, DeepSpeed, rollout engine"

    def evaluation(self) -> list[str]:
        """Return the command that evaluates both models on held-out data."""
        data = [measured.data for measured in self.measured.values()]
        words = (
            f"eval --pretrain {self._at('sft', 'practice')} --prompt_data {self._at(*data)} "
            f"--label_key answer --reward_funcs exact --max_len 64 --max_new_tokens {self.max_new_tokens} "
            f"--rollout_backend transformers --output {self._at('eval')}"
        )
        return shlex.split(words)

    def _at(self, *parts: str) -> str:
        """Format paths for a shell, separated by commas."""
        return shlex.quote(",".join(str(self.root / part) for part in parts))


@dataclass(frozen=True)
class SumsWalkthrough(Walkthrough):
    """Addition: SFT imitates demonstrations with rounded sums, and RL corrects them."""

    algorithm: str = "ppo"
    max_new_tokens: ClassVar[int] = 8
    measured: ClassVar[dict[str, Measured]] = {"accuracy": Measured("eval", "data/held_out.jsonl")}

    @property
    def introduction(self) -> str:
        return (
            f"[bold]Problems[/] such as 27+58= in {self.root / 'data'}; held-out ones are never seen.\n"
            "The demonstrations in it round most of the larger sums: imitation copies that, practice unlearns it."
        )

    def write_data(self) -> None:
        write_problems(self.root / "data", seed=self.seed)

    def scratch(self) -> list[str]:
        shape = "--hidden_size 128 --intermediate_size 384 --num_hidden_layers 2 --num_attention_heads 4"
        size = "--num_key_value_heads 2 --max_position_embeddings 64 --initializer_range 0.08 --vocab_size 300"
        data = self._at("data/train.jsonl")
        words = f"scratch --dataset {data} {shape} {size} --seed {self.seed} --output {self._at('untrained')}"
        return shlex.split(words)

    def sft(self) -> list[str]:
        words = (
            f"sft --pretrain {self._at('untrained')} --dataset {self._at('data/train.jsonl')} "
            f"--output_key demonstration --max_len 64 "
            f"--param_dtype fp32 --train_batch_size 64 --max_epochs 16 --learning_rate 3e-3 --l2 0.1 "
            f"--eval_dataset {self._at('data/validation.jsonl')} --eval_steps 50 --stop_eval_loss 0.15 "
            f"--seed {self.seed} --output {self._at('sft')} --logging_steps 50"
        )
        return shlex.split(words)

    @property
    def _has_critic(self) -> bool:
        return ESTIMATORS[COMMANDS[self.algorithm].estimator].critic

    def practice(self) -> list[str]:
        words = (
            f"{self.algorithm} --pretrain {self._at('sft')} --prompt_data {self._at('data/train.jsonl')} "
            f"--label_key answer --reward_funcs exact --param_dtype fp32 --max_len 64 "
            f"--max_new_tokens {self.max_new_tokens} --rollout_batch_size 256 "
            f"--n_samples_per_prompt 4 --train_batch_size 256 --max_iterations 12 --actor_learning_rate 3e-4 "
            f"{_CRITIC if self._has_critic else ''} --lr_warmup_ratio 0.05 --enforce_eager "
            f"--seed {self.seed} --output {self._at('practice')} --logging_steps 2"
        )
        return shlex.split(words)


@dataclass(frozen=True)
class PicturesWalkthrough(Walkthrough):
    """Questions about images: SFT learns the answer format from random guesses, and RL learns to use the image."""

    algorithm: str = "grpo"
    max_new_tokens: ClassVar[int] = 4
    measured: ClassVar[dict[str, Measured]] = {
        "colours": Measured("eval", "data/held_out_colour.jsonl"),
        "counts": Measured("eval", "data/held_out_count.jsonl"),
    }

    @property
    def introduction(self) -> str:
        return (
            f"[bold]Questions about pictures[/] of squares in {self.root / 'data'}; held-out ones are never seen.\n"
            "The demonstrations in it are guesses, right one time in four: imitation learns how answers are written, "
            "practice learns to look."
        )

    def write_data(self) -> None:
        write_questions(self.root / "data", seed=self.seed)

    def scratch(self) -> list[str]:
        shape = "--hidden_size 64 --intermediate_size 128 --num_hidden_layers 2 --num_attention_heads 2"
        size = "--num_key_value_heads 2 --max_position_embeddings 128 --initializer_range 0.08 --vocab_size 320"
        tower = "--image_size 56 --patch_size 14 --vision_hidden_size 96 --vision_num_attention_heads 3"
        data = self._at("data/train.jsonl")
        words = f"scratch --dataset {data} {shape} {size} {tower} --seed {self.seed} --output {self._at('untrained')}"
        return shlex.split(words)

    def sft(self) -> list[str]:
        words = (
            f"sft --pretrain {self._at('untrained')} --dataset {self._at('data/train.jsonl')} "
            f"--output_key demonstration --max_len 64 --param_dtype fp32 --train_batch_size 64 --max_epochs 2 "
            f"--learning_rate 2e-3 --seed {self.seed} --output {self._at('sft')} --logging_steps 10"
        )
        return shlex.split(words)

    def practice(self) -> list[str]:
        words = (
            f"{self.algorithm} --pretrain {self._at('sft')} --prompt_data {self._at('data/train.jsonl')} "
            f"--label_key answer --reward_funcs exact --param_dtype fp32 --max_len 64 "
            f"--max_new_tokens {self.max_new_tokens} --rollout_batch_size 256 --n_samples_per_prompt 8 "
            f"--train_batch_size 128 --max_iterations 60 "
            f"--num_episodes 8 --actor_learning_rate 3e-4 --entropy_loss_coef 0.02 --enforce_eager "
            f"--seed {self.seed} --output {self._at('practice')} --logging_steps 2"
        )
        return shlex.split(words)
