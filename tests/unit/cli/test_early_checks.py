"""Mistakes in the settings are reported before heavy imports, with the same messages as in a run."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from rlhf_cli.data.reading.sources import COLUMN_ROWS, first_rows, load_rows
from rlhf_cli.errors import UsageError
from rlhf_cli.runs.early_checks import _check_ray_address

HEAVY = ("torch", "transformers", "datasets", "ray", "deepspeed", "vllm", "peft")
SFT = "sft --pretrain model --output run --dataset"
GRPO = "grpo --pretrain model --output run --reward_funcs exact --prompt_data"
MISTAKES = {
    f"{SFT} rows.jsonl --lerning_rate 1": "unknown flag --lerning_rate (did you mean --learning_rate?)",
    "sft --config none.yaml": "--config none.yaml: no such file or directory",
    "sft --pretrain ./none --dataset rows.jsonl --output run": "pretrain './none': there is no such folder",
    f"{SFT} none.jsonl": "no file 'none.jsonl'",
    f"{SFT} rows.jsonl --eval_dataset none.csv": "no file 'none.csv'",
    f"{SFT} rows.jsonl --input_key q": "rows.jsonl: no column 'q' (--input_key); columns present: prompt, response",
    f"{SFT} rows.jsonl --save_path rows.jsonl/model": "rows.jsonl is a file, not a folder",
    "dpo --pretrain model --dataset rows.jsonl --output run": "no column for the chosen response",
    "kto --pretrain model --dataset rows.jsonl --output run": "no column of labels, desirable or not (label)",
    "prm --pretrain model --dataset rows.jsonl --output run": "no format fits",
    f"{GRPO} none.jsonl": "no file 'none.jsonl'",
    f"{GRPO} rows.jsonl --label_key truth": "no column 'truth' (--label_key)",
    f"{GRPO} rows.jsonl --eval_dataset none.jsonl": "no file 'none.jsonl'",
    f"{GRPO} rows.jsonl --train_batch_size 7": "--train_batch_size 7 does not divide the 1024 responses",
    f"{GRPO} rows.jsonl --reward_func none.py": "--reward_func none.py: there is no such file",
    f"{GRPO} rows.jsonl --reward_func broken.py": "--reward_func broken.py is not valid Python: line 1",
    f"{GRPO} rows.jsonl --reward_pretrain ./none": "--reward_pretrain: pretrain './none': there is no such folder",
    f"{GRPO} rows.jsonl --environment none.py": "--environment none.py: there is no such file",
    "ppo --pretrain model --critic_pretrain ./none --prompt_data rows.jsonl --reward_funcs exact --output run": (
        "--critic_pretrain: pretrain './none': there is no such folder"
    ),
    "generate --pretrain model --prompt_data rows.jsonl --output used": "--output used contains other files",
    "eval --pretrain model,./none --prompt_data rows.jsonl --reward_funcs exact": "pretrain './none': there is no such",
    "chat ./none": "pretrain './none': there is no such folder",
    "merge --model ./none --output merged": "--model ./none: there is no such folder",
    "scratch --dataset none.jsonl --output new": "no file 'none.jsonl'",
    "data rows.jsonl --for dpo --pretrain model": "no column for the chosen response",
    "serve-rm --reward_funcs exact --host 0.0.0.0": "--host 0.0.0.0 is reachable from other machines",
    "serve-tinker --pretrain model --host 0.0.0.0": "--host 0.0.0.0 is reachable from other machines",
    "serve-tinker --pretrain ./none": "pretrain './none': there is no such folder",
    "serve-rm --reward_funcs exact --host 192.0.2.1": "--host 192.0.2.1 is reachable from other machines",
}
PROGRAM = """
import json, sys
from rlhf_cli import cli
for words in json.load(sys.stdin):
    status = cli.main(words)
    heavy = [name for name in sys.argv[1:] if name in sys.modules]
    print(f"{status} {heavy}", file=sys.stderr)
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[str, tuple[str, str]]:
    """Return the message of each mistake, its status, and the heavy modules imported by then."""
    folder = tmp_path_factory.mktemp("mistakes")
    write_rows(folder / "rows.jsonl", 8)
    (folder / "broken.py").write_text("def reward_func(queries, prompts, labels)\n")
    (folder / "used").mkdir()
    (folder / "used" / "config.yaml").touch()
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (folder / "model" / "model.safetensors").touch()
    calls = json.dumps([mistake.split() for mistake in MISTAKES])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *HEAVY], input=calls, capture_output=True, text=True, cwd=folder, check=True
    )
    lines = done.stderr.splitlines()
    assert len(lines) == 2 * len(MISTAKES), done.stderr  # one message each
    return dict(zip(MISTAKES, zip(lines[::2], lines[1::2], strict=True), strict=True))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_before_anything_heavy_is_imported(answers, mistake):
    sentence, end = answers[mistake]
    assert sentence.startswith(f"rlhf {mistake.split()[0]}: ")
    assert MISTAKES[mistake] in sentence
    assert end == "2 []"


def write_rows(path: Path, count: int) -> None:
    rows = [{"prompt": f"Say {number}", "response": str(number)} for number in range(count)]
    kind = path.suffixes[0]
    if kind == ".parquet":
        pa.parquet.write_table(pa.Table.from_pylist(rows), path)
        return
    lines = {
        ".jsonl": "\n\n".join(map(json.dumps, rows)),
        ".json": json.dumps(rows),
        ".csv": "\n".join(["prompt,response", *(f"{row['prompt']},{row['response']}" for row in rows)]),
    }[kind]
    path.write_bytes(gzip.compress(lines.encode()) if path.suffix == ".gz" else lines.encode())


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
@pytest.mark.parametrize("count", [1, COLUMN_ROWS, 3 * COLUMN_ROWS])
def test_the_first_rows_of_a_file_are_those_of_all_rows(tmp_path, kind, count):
    path = tmp_path / f"rows.{kind}"
    write_rows(path, count)
    (first,) = first_rows(str(path), split="train")
    rows = load_rows(str(path), split="train", seed=0)
    assert len(first) == min(count, COLUMN_ROWS + 1)
    assert [first.row(number) for number in range(len(first))] == rows[: len(first)]
    assert [first.where(number) for number in range(len(first))] == [row.where for row in rows[: len(first)]]


def test_the_first_rows_of_a_folder_come_from_as_few_files_as_give_them(tmp_path):
    for number, count in enumerate((COLUMN_ROWS - 1, 1, 5)):
        write_rows(tmp_path / f"part{number}.jsonl", count)
    (tmp_path / "part3.jsonl").write_text("broken")
    (first,) = first_rows(str(tmp_path), split="train")
    assert len(first) == COLUMN_ROWS + 1
    assert len(first.tables) == 3


def test_what_takes_long_to_open_is_left_to_the_run(tmp_path):
    write_rows(tmp_path / "rows.jsonl.gz", 3)
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").touch()
    spec = f"{tmp_path}/rows.jsonl.gz,{tmp_path}/saved,owner/name"
    assert first_rows(spec, split="train") == []
    with pytest.raises(UsageError, match="no file"):
        first_rows(f"{tmp_path}/missing.jsonl.gz", split="train")


def test_an_address_where_no_cluster_listens_is_named_at_once():
    with pytest.raises(UsageError, match=r"RAY_ADDRESS=127\.0\.0\.1:1: no Ray cluster responds"):
        _check_ray_address("127.0.0.1:1")
    for other in (None, "auto", "ray://nowhere:10001"):
        _check_ray_address(other)
