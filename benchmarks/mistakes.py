"""CPU time from a mistake at the terminal to its sentence, user and system time of the process with its children.

    python benchmarks/mistakes.py

Exits with 1 if one takes longer than the limit, or ends with another status than 2. A busy machine changes little.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from setting import RLHF, machine

LIMIT = 0.6  # seconds of CPU time
SHOWN = 70  # characters of a sentence
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


def main() -> int:
    """Print the table; 0 if every line is within the limit."""
    print(machine())
    print(f"\n{'CPU s':>6}  {'command and its sentence':<40}   limit {LIMIT} s")
    slow = 0
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as taken:
        write_files(Path(folder))
        for command in MISTAKES:
            words = command.format(port=taken.getsockname()[1]).split()
            seconds, status, sentence = answered(last_given(words), folder)
            is_wrong = seconds > LIMIT or status != 2
            slow += is_wrong
            print(f"{seconds:>6.2f}  rlhf {command}{'  <--' if is_wrong else ''}\n        {sentence[:SHOWN]}")
    return int(slow > 0)


def write_files(folder: Path) -> None:
    """Write the files that the commands name: some are right, so that only one thing in each command is wrong."""
    import pyarrow as pa
    import pyarrow.parquet

    rows = [{"prompt": f"Say {n}", "response": str(n), "label": str(n)} for n in range(200)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "broken.jsonl").write_text('{"prompt": "Say 1", \n')
    (folder / "broken.py").write_text("def reward_func(queries, prompts, labels)\n    return 0\n")
    pa.parquet.write_table(pa.Table.from_pylist(rows), folder / "table.parquet")
    for name in ("model", "empty", "used/checkpoints/step_000001", "used_up/model", "broken"):
        (folder / name).mkdir(parents=True)
    for name, config in (("model", "{}"), ("used_up/model", "{}"), ("broken", '{"model_type": ')):
        (folder / name / "config.json").write_text(config)
        (folder / name / "model.safetensors").touch()
    (folder / "used" / "config.yaml").touch()


def last_given(words: list[str]) -> list[str]:
    """Return the words with the last value of each flag only, so that a mistake may stand behind the right value."""
    given: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            given.pop(name := word, None)
        given.setdefault(name, []).append(word)
    return [word for kept in given.values() for word in kept]


def answered(words: list[str], folder: str) -> tuple[float, int, str]:
    """Return the seconds of CPU time of a command, its exit status and the last line that it wrote."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen([*RLHF, *words], cwd=folder, stdout=output, stderr=output)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        lines = output.read().strip().splitlines() or [""]
    return usage.ru_utime + usage.ru_stime, process.returncode, lines[-1]


if __name__ == "__main__":
    sys.exit(main())
