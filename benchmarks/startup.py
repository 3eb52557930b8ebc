"""Measure the time until commands train, show help, print a plan, or report a mistake.

    python benchmarks/startup.py run [sft ppo grpo]
    python benchmarks/startup.py help [--runs 7]
    python benchmarks/startup.py plans [--runs 3]
    python benchmarks/startup.py mistakes

run       wall time until each output line in a two-step run on a tiny model, and start and CPU time by process.
          Needs an idle machine.
help      CPU time of `rlhf --help` and of each command's help, in new processes. Exits with 1 above 0.4 s.
plans     CPU time of easy and hard plans in new processes, and of imports. Exits with 1 above 3 s.
mistakes  CPU time from a mistake in flags, paths, columns or ports to its message. Exits with 1 above 0.6 s, or if a
          command ends with a status other than 2.
"""

import argparse
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from common import RLHF, cpu_seconds, machine, make_model, make_parser, table, watched_processes, write_rows

from rlhf_cli.cli import COMMANDS
from rlhf_cli.runs.plan import DOES_NOT_FIT

HELP_LIMIT, MISTAKE_LIMIT, PLAN_LIMIT = 0.4, 0.6, 3.0
"""Seconds of CPU time."""
EVENTS = {
    "Starting on": "Ray has started",
    "  Output": "all roles are built",
    "step 1": "first step",
    "iteration 1": "first iteration",
    "Finished": "training has finished",
}
"""Prefix of an output line -> event."""
ONLINE = (
    "--prompt_data {data} --label_key label --reward_funcs exact --rollout_batch_size 8 --train_batch_size 8 "
    "--max_len 64 --max_new_tokens 16 --num_episodes 1 --max_iterations 2"
)
RUNS = {"sft": "--dataset {data} --train_batch_size 8 --max_len 64 --max_steps 2", "ppo": ONLINE, "grpo": ONLINE}
LARGEST = "--pretrain Qwen/Qwen3-235B-A22B --gpu h100 --num_gpus"
PLANS = (
    "sft --pretrain Qwen/Qwen2.5-7B --gpu h100 --num_gpus 8",
    "grpo --pretrain Qwen/Qwen2.5-7B --gpu h100 --num_gpus 8",
    *(f"{command} {LARGEST} {gpus}" for command in ("ppo", "grpo") for gpus in ("1", "8", "8 --num_nodes 64")),
    f"ppo {LARGEST} 8 --num_nodes 1024",
)
"""Plans with little work and with the most work."""
SHOWN = 70
"""Characters of a message."""
GRPO = "grpo --pretrain model --prompt_data rows.jsonl --reward_funcs exact --output run"
SFT = "sft --pretrain model --dataset rows.jsonl --output run"
MISTAKES = (
    f"{SFT} --lerning_rate 1e-5",
    f"{SFT} --learning_rate fast",
    "sft --config nothing.yaml",
    "sft --config rows.jsonl",
    "sft --pretrain nothing/here/at/all --dataset rows.jsonl --output run",
    "sft --pretrain ./nothing --dataset rows.jsonl --output run",
    "sft --pretrain empty --dataset rows.jsonl --output run",
    "sft --pretrain broken --dataset rows.jsonl --output run",
    "sft --pretrain model --dataset nothing.jsonl --output run",
    "sft --pretrain model --dataset empty --output run",
    "sft --pretrain model --dataset broken.jsonl --output run",
    f"{SFT} --input_key question",
    f"{SFT} --eval_dataset nothing.csv",
    f"{SFT} --overwrite --output rows.jsonl",
    f"{SFT} --save_path rows.jsonl/model",
    "sft --pretrain model --dataset rows.jsonl --output used",
    "sft --pretrain model --dataset rows.jsonl --output used_up --load_checkpoint",
    "dpo --pretrain model --dataset rows.jsonl --output run",
    "kto --pretrain model --dataset rows.jsonl --label_key truth --output run",
    "prm --pretrain model --dataset rows.jsonl --output run",
    "rm --pretrain model --dataset table.parquet --output run",
    "distill --pretrain model --teacher_pretrain ./nothing --dataset rows.jsonl --output run",
    "grpo --pretrain ./nothing --prompt_data rows.jsonl --reward_funcs exact --output run",
    f"{GRPO} --prompt_data nothing.jsonl",
    f"{GRPO} --label_key truth",
    f"{GRPO} --eval_dataset nothing.jsonl",
    f"{GRPO} --train_batch_size 7",
    f"{GRPO} --reward_func nothing.py",
    f"{GRPO} --reward_func broken.py",
    f"{GRPO} --reward_pretrain ./nothing",
    f"{GRPO} --environment nothing.py",
    "ppo --pretrain model --critic_pretrain ./nothing --prompt_data rows.jsonl --reward_funcs exact --output run",
    "generate --pretrain ./nothing --prompt_data rows.jsonl --output run",
    "generate --pretrain model --prompt_data rows.jsonl --output used",
    "eval --pretrain model,./nothing --prompt_data rows.jsonl --reward_funcs exact",
    "chat ./nothing",
    "merge --model ./nothing --output merged",
    "merge --model model --output used",
    "scratch --dataset nothing.jsonl --output new",
    "data nothing.jsonl --for sft --pretrain model",
    "data rows.jsonl --for dpo --pretrain model",
    "serve-rm --reward_funcs exact --port {port}",
    "serve-rm --reward_funcs exact --host 0.0.0.0",
)


@dataclass
class Life:
    """A process: seconds from the start of the command to its start, and its CPU seconds."""

    name: str
    begin: float
    cpu: float


def data_rows(count: int) -> list[dict[str, str]]:
    """Return rows that work for all commands; labels 0 and 1 would select `rlhf kto`."""
    return [{"prompt": f"Say {n}", "response": str(n), "label": str(n)} for n in range(2, count + 2)]


def runs(args: argparse.Namespace) -> int:
    """Measure short runs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = write_rows(folder / "rows.jsonl", data_rows(64))
        model = make_model(folder, data, shape="--hidden_size 128 --num_attention_heads 4")
        status = 0
        for command in args.commands:
            words = RUNS[command].format(data=data).split()
            line = [command, "--pretrain", str(model), *words, "--output", str(folder / command), "--overwrite"]
            status = measure_run(line) or status
    return status


def measure_run(words: list[str]) -> int:
    """Run a command once, print events and processes, and return the exit status."""
    begin, lives = time.time(), dict[int, Life]()
    print(f"\nrlhf {words[0]}")

    def look(processes: Sequence[psutil.Process]) -> None:
        for process in processes:
            with suppress(psutil.Error):
                title, times = " ".join(process.cmdline()), process.cpu_times()
                if title:  # an exiting process has no title
                    life = lives.setdefault(process.pid, Life("", process.create_time() - begin, 0.0))
                    life.name, life.cpu = title.split()[0].rsplit("/")[-1], times.user + times.system

    with (
        watched_processes(look),
        subprocess.Popen([*RLHF, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process,
    ):
        line = ""
        for line in process.stdout or ():
            for event in (event for start, event in EVENTS.items() if line.startswith(start)):
                print(f"{time.time() - begin:7.1f} s  {event}")
        status = process.wait()
        print(f"{time.time() - begin:7.1f} s  the process has ended with status {status}\n{line * bool(status)}")
    found = sorted(lives.values(), key=lambda life: life.begin)
    rows = [(life.name, f"{life.begin:.1f}", f"{life.cpu:.1f}") for life in found]
    print(table("process | start, s | CPU, s", [*rows, ("all", "", f"{sum(life.cpu for life in found):.1f}")]))
    return status


def helps(args: argparse.Namespace) -> int:
    """Measure the help of all commands."""
    slow, rows = 0, []
    for words in (["--help"], *([name, "--help"] for name in COMMANDS)):
        found = [cpu_seconds([*RLHF, *words], output=subprocess.DEVNULL) for _ in range(args.runs + 1)]
        if any(status for _, status in found):
            raise SystemExit(f"rlhf {' '.join(words)} failed")
        seconds = statistics.median(seconds for seconds, _ in found[1:])  # the first run compiles to .pyc
        slow += seconds > HELP_LIMIT
        rows.append((f"rlhf {' '.join(words)}", f"{seconds:.3f}{'  too slow' * (seconds > HELP_LIMIT)}"))
    print(table("command | CPU, s", rows))
    return int(slow > 0)


def plans(args: argparse.Namespace) -> int:
    """Measure plans, and the imports of the first one."""
    slow, rows = 0, []
    for command in PLANS:
        words = [*RLHF, "plan", *command.split()]
        found = [cpu_seconds(words, output=subprocess.DEVNULL) for _ in range(args.runs + 1)]
        if any(status not in (0, DOES_NOT_FIT) for _, status in found):
            raise SystemExit(f"rlhf plan {command} failed")
        seconds = statistics.median(seconds for seconds, _ in found[1:])  # the first run compiles to .pyc
        slow += seconds > PLAN_LIMIT
        rows.append((f"rlhf plan {command}", f"{seconds:.2f}{'  too slow' * (seconds > PLAN_LIMIT)}"))
    imports = [
        sys.executable,
        "-c",
        "import rlhf_cli.__main__, rlhf_cli.cli, rlhf_cli.commands.sft, rlhf_cli.runs.plan",
    ]
    seconds = statistics.median(cpu_seconds(imports, output=None)[0] for _ in range(args.runs))
    print(table("command | CPU, s", [*rows, ("imports of a plan", f"{seconds:.2f}")]))
    return int(slow > 0)


def mistakes(args: argparse.Namespace) -> int:
    """Measure all mistakes."""
    wrong = 0
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as taken:
        write_files(Path(folder))
        for command in MISTAKES:
            words = command.format(port=taken.getsockname()[1]).split()
            with tempfile.TemporaryFile("w+") as output:
                seconds, status = cpu_seconds([*RLHF, *last_values(words)], output=output, folder=Path(folder))
                output.seek(0)
                message = (output.read().strip().splitlines() or [""])[-1]
            is_wrong = seconds > MISTAKE_LIMIT or status != 2
            wrong += is_wrong
            print(f"{seconds:>6.2f}  rlhf {command}{'  <--' * is_wrong}\n        {message[:SHOWN]}", flush=True)
    return int(wrong > 0)


def write_files(folder: Path) -> None:
    """Write the files for the commands, so that each command has exactly one mistake."""
    import pyarrow as pa
    import pyarrow.parquet

    rows = data_rows(200)
    write_rows(folder / "rows.jsonl", rows)
    (folder / "broken.jsonl").write_text('{"prompt": "Say 1", \n')
    (folder / "broken.py").write_text("def reward_func(queries, prompts, labels)\n    return 0\n")
    pa.parquet.write_table(pa.Table.from_pylist(rows), folder / "table.parquet")
    for name in ("model", "empty", "used/checkpoints/step_000001", "used_up/model", "broken"):
        (folder / name).mkdir(parents=True)
    for name, config in (("model", "{}"), ("used_up/model", "{}"), ("broken", '{"model_type": ')):
        (folder / name / "config.json").write_text(config)
        (folder / name / "model.safetensors").touch()
    (folder / "used" / "config.yaml").touch()


def last_values(words: list[str]) -> list[str]:
    """Keep only the last value for each flag, so that a mistake may follow the correct value."""
    given: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            given.pop(name := word, None)
        given.setdefault(name, []).append(word)
    return [word for kept in given.values() for word in kept]


def main() -> int:
    parser = make_parser(__doc__)
    parts = parser.add_subparsers(required=True)
    part = parts.add_parser("run")
    part.add_argument("commands", nargs="*", default=list(RUNS), metavar="COMMAND", help=", ".join(RUNS))
    part.set_defaults(run=runs)
    part = parts.add_parser("help")
    part.add_argument("--runs", type=int, default=7)
    part.set_defaults(run=helps)
    part = parts.add_parser("plans")
    part.add_argument("--runs", type=int, default=3)
    part.set_defaults(run=plans)
    parts.add_parser("mistakes").set_defaults(run=mistakes)
    args = parser.parse_args()
    print(machine(), flush=True)
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
