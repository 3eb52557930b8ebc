"""The body of `rlhf quickstart`: write problems, run the real commands one after the other, sum up."""

import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.table import Table

from rlhf_cli.backends.process.output_lock import output_lock
from rlhf_cli.backends.process.signals import stop_signals
from rlhf_cli.config.commands.quickstart import QuickstartGroup
from rlhf_cli.data.arithmetic import write_problems
from rlhf_cli.errors import RunError, UsageError
from rlhf_cli.tracking.figures import duration, number
from rlhf_cli.tracking.report.page import write_report
from rlhf_cli.tracking.summary import Summary, summarise

PARTS = ("data", "untrained", "sft", "practice", "eval", "report.html")

CRITIC = "--critic_learning_rate 5e-4"


@dataclass(frozen=True)
class Walkthrough:
    """The places of the parts of a quickstart, and the commands that make them."""

    root: Path
    seed: int
    algorithm: str = "ppo"

    @property
    def train(self) -> str:
        """Problems to train on."""
        return self._at("data/train.jsonl")

    @property
    def held_out(self) -> str:
        """Problems to evaluate on."""
        return self._at("data/held_out.jsonl")

    def scratch(self) -> list[str]:
        """Make the untrained model."""
        shape = "--hidden_size 128 --intermediate_size 384 --num_hidden_layers 4 --num_attention_heads 4"
        size = "--num_key_value_heads 2 --max_position_embeddings 64 --initializer_range 0.08 --vocab_size 300"
        words = f"scratch --dataset {self.train} {shape} {size} --seed {self.seed} --output {self._at('untrained')}"
        return shlex.split(words)

    def sft(self) -> list[str]:
        """Imitate the demonstrations, rounded sums included."""
        words = (
            f"sft --pretrain {self._at('untrained')} --dataset {self.train} --output_key demonstration --max_len 64 "
            f"--param_dtype fp32 --train_batch_size 64 --max_epochs 16 --learning_rate 2e-3 --l2 0.1 "
            f"--eval_dataset {self._at('data/validation.jsonl')} --eval_steps 50 --stop_eval_loss 0.15 "
            f"--seed {self.seed} --output {self._at('sft')} --logging_steps 50"
        )
        return shlex.split(words)

    def practice(self) -> list[str]:
        """Practise with a verifier."""
        words = (
            f"{self.algorithm} --pretrain {self._at('sft')} --prompt_data {self.train} --label_key answer "
            f"--reward_funcs exact --param_dtype fp32 --max_len 64 --max_new_tokens 8 --rollout_batch_size 256 "
            f"--n_samples_per_prompt 4 --train_batch_size 256 --max_iterations 16 --actor_learning_rate 3e-4 "
            f"{CRITIC if self.algorithm == 'ppo' else ''} --lr_warmup_ratio 0.05 --enforce_eager "
            f"--seed {self.seed} --output {self._at('practice')} --logging_steps 2"
        )
        return shlex.split(words)

    def evaluation(self) -> list[str]:
        """Let both models answer the held-out problems."""
        words = (
            f"eval --pretrain {self._at('sft')},{self._at('practice')} --prompt_data {self.held_out} "
            f"--label_key answer --reward_funcs exact --max_len 64 --max_new_tokens 8 "
            f"--rollout_backend transformers --output {self._at('eval')}"
        )
        return shlex.split(words)

    def _at(self, part: str) -> str:
        """Return a path as a shell takes it."""
        return shlex.quote(str(self.root / part))


def run_quickstart(settings: QuickstartGroup) -> None:
    """Run all stages and print the table; raise RunError naming the stage that failed."""
    with output_lock(Path(settings.output)):
        _run_stages(settings)


def _run_stages(settings: QuickstartGroup) -> None:
    walk = Walkthrough(Path(settings.output), settings.seed, settings.algorithm)
    algorithm = settings.algorithm
    console = Console(highlight=False)
    _make_room(walk.root, overwrite=settings.overwrite)
    write_problems(walk.root / "data", seed=settings.seed)
    console.print(
        f"[bold]Problems[/] such as 27+58= in {walk.root / 'data'}; held-out ones are never trained on.\n"
        f"The demonstrations in it round most of the larger sums: imitation copies that, practice unlearns it."
    )
    seconds: dict[str, float] = {}
    for title, words in (
        ("Make an untrained model and its tokenizer", walk.scratch()),
        ("Imitate demonstrations, their flaws included (supervised fine-tuning)", walk.sft()),
        (f"Practise with a verifier ({algorithm}: Ray, DeepSpeed, rollout engine)", walk.practice()),
        ("How often is it right on problems it has never seen, before and after?", walk.evaluation()),
    ):
        begin = time.perf_counter()
        _run(console, title, words)
        seconds[words[0]] = time.perf_counter() - begin
    folders = {"sft": walk.root / "sft", algorithm: walk.root / "practice"}
    accuracies = _accuracies(walk, folders)
    headline = {f"accuracy after {stage}": accuracy for stage, accuracy in accuracies.items()}
    report = write_report(walk.root, stages=list(folders.values()), headline=headline)
    console.print()
    console.print(_results(folders, accuracies, seconds))
    console.print(f"Report   {report}")
    console.print(f"Model    {walk.root / 'practice' / 'model'}")


def _make_room(root: Path, *, overwrite: bool) -> None:
    left = [root / part for part in PARTS if (root / part).exists()]
    if left and not overwrite:
        raise UsageError(f"--output {root} holds an earlier quickstart: replace it with --overwrite, or choose another")
    for path in left:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _run(console: Console, title: str, words: list[str]) -> None:
    console.print(f"\n[bold cyan]{title}[/]")
    console.print(f"$ rlhf {shlex.join(words)}", style="dim", soft_wrap=True, markup=False)
    command = subprocess.Popen([sys.executable, "-m", "rlhf_cli", *words])

    def pass_on(signum: int, frame: FrameType | None) -> None:
        if signum != signal.SIGINT:  # Ctrl-C reaches the command too, and a second one would end it at once
            command.send_signal(signum)

    # The command finishes its step and saves; this process waits for it.
    previous = {signum: signal.signal(signum, pass_on) for signum in stop_signals()}
    try:
        status = command.wait()
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
    if status == 130:
        raise KeyboardInterrupt
    if status:
        raise RunError(f"the step above ended with status {status}; its message says why")


def _accuracies(walk: Walkthrough, folders: dict[str, Path]) -> dict[str, float]:
    results = json.loads((walk.root / "eval" / "eval.json").read_text())["results"]
    by_model = {result["pretrain"]: float(result["figures"]["accuracy"]["value"]) for result in results}
    return {stage: by_model[str(folder)] for stage, folder in folders.items()}


def _results(folders: dict[str, Path], accuracies: dict[str, float], seconds: dict[str, float]) -> Table:
    table = Table(box=None, pad_edge=False, title="Quickstart", title_justify="left", title_style="bold")
    for column in ("stage", "accuracy on held-out problems", "time", "of which", "tokens/s"):
        table.add_column(column, justify="left" if column in ("stage", "of which") else "right")
    for stage, folder in folders.items():
        summary = summarise(folder)
        speed = summary.tokens_per_second
        table.add_row(
            f"after {stage}",
            f"{accuracies[stage]:.1%}",
            duration(seconds[stage]),
            _phases(summary),
            number(speed) if speed is not None else "",
        )
    return table


def _phases(summary: Summary) -> str:
    longest = sorted(summary.phases.items(), key=lambda item: -item[1])[:4]
    return ", ".join(f"{name} {duration(spent)}" for name, spent in longest if spent >= 0.5)
