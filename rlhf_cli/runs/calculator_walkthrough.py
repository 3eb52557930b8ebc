"""Quickstart with tools: sums with larger numbers, an environment with a calculator, and training without it."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rlhf_cli.agents import calculator
from rlhf_cli.agents.environment_class import described, tool_schemas
from rlhf_cli.data.long_sums import write_long_sums
from rlhf_cli.runs.walkthroughs import Measured, Step, Walkthrough

ENVIRONMENT_FILE = "data/calculator.py"


@dataclass(frozen=True)
class CalculatorWalkthrough(Walkthrough):
    """Sums too large for the model: SFT learns the tool call syntax, RL learns when to call."""

    algorithm: str = "grpo"
    max_new_tokens: ClassVar[int] = 48
    measured: ClassVar[dict[str, Measured]] = {
        "accuracy with calculator": Measured("eval", "data/held_out.jsonl"),
        "accuracy alone": Measured("eval_alone", "data/held_out.jsonl"),
    }

    @property
    def folders(self) -> dict[str, Path]:
        """Run directories by stage, including training without the calculator."""
        return {**super().folders, f"{self.algorithm} alone": self.root / "practice_alone"}

    @property
    def introduction(self) -> str:
        return (
            f"[bold]Sums[/] such as 4821+7937+6056= in {self.root / 'data'}; held-out ones are never seen.\n"
            f"The calculator in {self.root / ENVIRONMENT_FILE} is a tool. The demonstrations use it one time in three "
            "and round most of the other sums: imitation learns both, practice learns when to call."
        )

    def write_data(self) -> None:
        write_long_sums(self.root / "data", tool_schemas(described(calculator.Environment)), seed=self.seed)
        # A copy, so that users can edit the environment without touching the package.
        (self.root / ENVIRONMENT_FILE).write_text(Path(calculator.__file__).read_text(encoding="utf-8"))

    def scratch(self) -> list[str]:
        shape = "--hidden_size 128 --intermediate_size 384 --num_hidden_layers 3 --num_attention_heads 4"
        size = "--num_key_value_heads 2 --max_position_embeddings 160 --initializer_range 0.08 --vocab_size 400"
        data = self._at("data/demonstrations.jsonl")
        words = f"scratch --dataset {data} {shape} {size} --seed {self.seed} --output {self._at('untrained')}"
        return shlex.split(words)

    def sft(self) -> list[str]:
        words = (
            f"sft --pretrain {self._at('untrained')} --dataset {self._at('data/demonstrations.jsonl')} --max_len 160 "
            f"--param_dtype fp32 --train_batch_size 64 --max_epochs 4 --learning_rate 2e-3 --l2 0.1 "
            f"--seed {self.seed} --output {self._at('sft')} --logging_steps 50"
        )
        return shlex.split(words)

    def practice(self) -> list[str]:
        return self._practice("practice") + self._with_calculator()

    def practice_alone(self) -> list[str]:
        """Return the training command without the calculator, with the same number of iterations."""
        return self._practice("practice_alone")

    def _practice(self, output: str) -> list[str]:
        words = (
            f"{self.algorithm} --pretrain {self._at('sft')} --prompt_data {self._at('data/train.jsonl')} "
            f"--label_key answer --reward_funcs exact --param_dtype fp32 --max_len 160 "
            f"--max_new_tokens {self.max_new_tokens} --rollout_batch_size 32 --n_samples_per_prompt 8 "
            f"--train_batch_size 64 --max_iterations 16 --actor_learning_rate 2e-4 --lr_warmup_ratio 0.05 "
            f"--enforce_eager --seed {self.seed} --output {self._at(output)} --logging_steps 2"
        )
        return shlex.split(words)

    def evaluation(self) -> list[str]:
        """Return the evaluation command for models with the calculator."""
        return self._evaluation("practice", "eval") + self._with_calculator()

    def evaluation_alone(self) -> list[str]:
        """Return the evaluation command for models without the calculator."""
        return self._evaluation("practice_alone", "eval_alone")

    def _evaluation(self, practised: str, output: str) -> list[str]:
        words = (
            f"eval --pretrain {self._at('sft', practised)} --prompt_data {self._at('data/held_out.jsonl')} "
            f"--label_key answer --reward_funcs exact --max_len 160 --max_new_tokens {self.max_new_tokens} "
            f"--rollout_backend transformers --output {self._at(output)}"
        )
        return shlex.split(words)

    def _with_calculator(self) -> list[str]:
        return shlex.split(f"--environment {self._at(ENVIRONMENT_FILE)} --max_turns 3")

    def steps(self) -> list[Step]:
        """Return all commands in order."""
        alone = f"{self.algorithm} alone"
        return [
            *self._first_steps(),
            Step(f"Practise with a verifier and the calculator ({self._parts})", self.practice(), self.algorithm),
            Step("Practise as long without the calculator", self.practice_alone(), alone),
            Step("How often is it right on sums it has never seen, with the calculator?", self.evaluation()),
            Step("How often without the calculator?", self.evaluation_alone()),
        ]
