"""The use of time from a command to its first step or iteration, and from its last line to its end.

    python benchmarks/startup_time.py [COMMAND ...]

Trains a tiny model for two steps or iterations with each command: sft, ppo and grpo, or the named ones. Prints
the seconds of the wall until each line, and for each process when it began and the CPU time that it took. To be run
with nothing beside it.
"""

import json
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from setting import RLHF, machine

POLL_SECONDS = 0.1
MARKS = {  # start of a line -> the event it reports
    "Starting on": "Ray has started",
    "  Output": "everything is built",
    "step 1": "the first step is done",
    "iteration 1": "the first iteration is done",
    "Finished": "training is done",
}
ONLINE = (
    "--prompt_data {data} --label_key label --reward_funcs exact --rollout_batch_size 8 --train_batch_size 8 "
    "--max_len 64 --max_new_tokens 16 --num_episodes 1 --max_iterations 2"
)
COMMANDS = {
    "sft": "--dataset {data} --train_batch_size 8 --max_len 64 --max_steps 2",
    "ppo": ONLINE,
    "grpo": ONLINE,
}


@dataclass
class Life:
    """One process of the run: seconds since the command, and seconds of a CPU."""

    name: str
    begin: float
    cpu: float


def main() -> None:
    """Print a table for each command."""
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        model, data = Path(folder) / "model", Path(folder) / "rows.jsonl"
        rows = [{"prompt": f"Say {n}", "response": str(n), "label": str(n)} for n in range(64)]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        scratch = f"scratch --dataset {data} --output {model} --hidden_size 128 --num_attention_heads 4".split()
        subprocess.run([*RLHF, *scratch], check=True, stdout=subprocess.DEVNULL)
        for command in sys.argv[1:] or COMMANDS:
            words = COMMANDS[command].format(data=data).split()
            output = Path(folder) / command
            measure([command, "--pretrain", str(model), *words, "--output", str(output), "--overwrite"])


def measure(words: list[str]) -> None:
    """Run a command once and print its table."""
    begin = time.time()
    process = subprocess.Popen([*RLHF, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lives: dict[int, Life] = {}
    watch = threading.Thread(target=watch_processes, args=(process, begin, lives))
    watch.start()
    print(f"\nrlhf {words[0]}")
    assert process.stdout is not None
    for line in process.stdout:
        for mark, fact in MARKS.items():
            if line.startswith(mark):
                print(f"{time.time() - begin:7.1f} s  {fact}")
    status = process.wait()
    watch.join()
    print(f"{time.time() - begin:7.1f} s  the process has ended with status {status}")
    for life in sorted(lives.values(), key=lambda life: life.begin):
        print(f"          {life.name:<24} from {life.begin:5.1f} s, {life.cpu:5.1f} s of a CPU")
    print(f"          {'all processes':<24} {sum(life.cpu for life in lives.values()):20.1f} s of a CPU")


def watch_processes(command: subprocess.Popen, begin: float, lives: dict[int, Life]) -> None:
    """Note the processes below a command until it ends."""
    root = psutil.Process(command.pid)
    while command.poll() is None:
        try:
            for process in [root, *root.children(recursive=True)]:
                note(process, begin, lives)
        except psutil.Error:
            pass  # the command has just ended
        time.sleep(POLL_SECONDS)


def note(process: psutil.Process, begin: float, lives: dict[int, Life]) -> None:
    """Write down the present name of a process and the CPU time that it has taken."""
    try:
        title, times = " ".join(process.cmdline()), process.cpu_times()
    except psutil.Error:
        return
    if title:  # a process that is ending has none
        name = title.split()[0].rsplit("/")[-1]
        life = lives.setdefault(process.pid, Life(name, process.create_time() - begin, 0.0))
        life.name, life.cpu = name, times.user + times.system


if __name__ == "__main__":
    main()
