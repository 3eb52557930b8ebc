"""Tests of the examples: solutions of word problems as preference pairs, and the multi-node launchers."""

import csv
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from test_docs_parse import commands_in

from rlhf_cli.algorithms.estimators.table import ESTIMATORS
from rlhf_cli.backends.cluster.placement import plan_layout
from rlhf_cli.commands.ppo import PPOConfig
from rlhf_cli.config.data import PreferenceDataConfig
from rlhf_cli.config.model import ModelConfig
from rlhf_cli.data.preference_data import PAIRS
from rlhf_cli.models.tokenizers import load_tokenizer
from rlhf_cli.options import build_config
from rlhf_cli.rewards.verifiers.code_tests import AssertTests, FunctionTests, StdinTests, parse_tests
from rlhf_cli.runs.online.checks import check_batches

EXAMPLES = Path(__file__).parents[2] / "examples"
PAIRS_SCRIPT = EXAMPLES / "gsm8k" / "pairs.py"


def solution(text: str, is_correct: bool) -> dict:
    return {"solution": text, "is_correct": is_correct}


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def convert(folder: Path, rows: list[dict]) -> tuple[list[dict], list[dict]]:
    """Return the training and evaluation pairs of the script."""
    source = write(folder / "solutions.jsonl", rows)
    files = [folder / "train.jsonl", folder / "eval.jsonl"]
    subprocess.run([sys.executable, str(PAIRS_SCRIPT), str(source), *map(str, files)], check=True, capture_output=True)
    train, evaluation = ([json.loads(line) for line in file.open()] for file in files)
    return train, evaluation


def test_every_right_solution_meets_every_wrong_one_of_its_question(tmp_path):
    row = {
        "question": "2 + 3?",
        "ground_truth": "A: 5",
        "small": solution("2 + 3 is 5\nA: 5", True),
        "large": solution("five\nA: 5", True),
        "same": solution("five\nA: 5", True),
        "wrong": solution("A: B\nA: 6", False),
    }
    train, evaluation = convert(tmp_path, [row])
    assert train + evaluation == [
        {"prompt": "2 + 3?", "chosen": "2 + 3 is 5\n#### 5", "rejected": "#### B\n#### 6"},
        {"prompt": "2 + 3?", "chosen": "five\n#### 5", "rejected": "#### B\n#### 6"},
    ]


def test_no_question_is_in_both_files_and_one_without_a_contrast_in_neither(tmp_path):
    rows = [
        {"question": f"{number} + 1?", "a": solution(f"A: {number + 1}", True), "b": solution("A: 0", number % 5 == 0)}
        for number in range(200)
    ]
    train, evaluation = convert(tmp_path, rows + rows[:50])
    questions = [{pair["prompt"] for pair in pairs} for pairs in (train, evaluation)]
    assert not questions[0] & questions[1]
    assert questions[0] | questions[1] == {row["question"] for number, row in enumerate(rows) if number % 5}
    assert 5 < len(questions[1]) < 30


def test_the_pairs_are_read_by_the_program(tmp_path, tiny_model_dir):
    rows = [{"question": f"{n}?", "a": solution("A: 1", True), "b": solution("A: 2", False)} for n in range(20)]
    convert(tmp_path, rows)
    config = PreferenceDataConfig(dataset=str(tmp_path / "train.jsonl"), max_len=64)
    tokenizer = load_tokenizer(ModelConfig(pretrain=tiny_model_dir))
    pairs = PAIRS.load(config, tokenizer, dataset=config.dataset, split="train", seed=0)
    assert len(pairs.items) > 10


def test_wrong_usage_is_told(tmp_path):
    done = subprocess.run([sys.executable, str(PAIRS_SCRIPT), str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 1
    assert "usage: " in done.stderr


@pytest.mark.parametrize("name", sorted(str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.sh")))
def test_scripts_are_valid_shell_and_say_what_they_need(name):
    script = str(EXAMPLES / name)
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    done = subprocess.run(["bash", script], capture_output=True, text=True)
    assert done.returncode != 0
    assert "usage: " in done.stderr


def test_the_reward_of_eight_words_grows_towards_eight(tmp_path):
    """Runs the script with a stub for `rlhf` that records its arguments, and tests its reward file."""
    (tmp_path / "rlhf").write_text('#!/bin/sh\necho "$@" >> "$CALLS"\n')
    (tmp_path / "rlhf").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(tmp_path / "calls")}
    script = str(EXAMPLES / "eight_words" / "grpo.sh")
    subprocess.run(["bash", script, "MODEL", str(tmp_path / "run")], check=True, env=environment)
    prompts = [(tmp_path / "run" / name).read_text().splitlines() for name in ("train.jsonl", "eval.jsonl")]
    assert [len(lines) for lines in prompts] == [32, 8]
    assert not set(prompts[0]) & set(prompts[1])
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call.split()[0] for call in calls] == ["grpo", "compare"]
    assert all(f"--reward_func {EXAMPLES}/eight_words/eight_words.py:reward_func --output" in call for call in calls)
    functions = runpy.run_path(str(EXAMPLES / "eight_words" / "eight_words.py"))
    reward_func, naming_reward = functions["reward_func"], functions["naming_reward"]
    given = ["One two three four five six seven eight.", "one two - three 4 five six seven", "word " * 20, ""]
    assert [result["reward"] for result in reward_func(given)] == [1, 1 / 2, 1 / 13, 1 / 9]
    assert [result["exact"] for result in reward_func(given)] == [1, 0, 0, 0]
    bread = [json.loads(line)["prompt"] for line in prompts[0] if "loaf of bread" in line] * 2
    named = naming_reward(["Warm bread with a crust of golden seeds", "Provide a brief summary"], bread)
    assert [result["reward"] for result in named] == [1, 0]


def test_held_out_tickets_share_no_item_and_no_sentence_with_those_for_training(tmp_path):
    """Tickets repeat number and item from the message."""
    files = [str(tmp_path / name) for name in ("train.csv", "held_out.csv")]
    subprocess.run([sys.executable, EXAMPLES / "tickets" / "tickets.py", *files], check=True)
    splits = [list(csv.DictReader(Path(file).read_text().splitlines())) for file in files]
    assert [len(rows) for rows in splits] == [120, 40]
    items: list[set[str]] = [set(), set()]
    sentences: list[set[str]] = [set(), set()]
    for split, rows in enumerate(splits):
        for row in rows:
            number, item, _, _ = row["ticket"].split(" | ")
            assert number in row["message"]
            assert item in row["message"]
            items[split].add(item)
            text = row["message"].replace(number, "N").replace(item, "ITEM")
            sentences[split].update(re.findall(r"[A-Z(][^.!?]*", text))
    assert not items[0] & items[1]
    assert not sentences[0] & sentences[1]
    assert len(sentences[0]) > 30


def test_the_tasks_of_code_rl_have_tests_that_can_be_used(tmp_path):
    """`rlhf` is replaced by a stub that records its arguments."""
    (tmp_path / "rlhf").write_text('#!/bin/sh\necho "$@" >> "$CALLS"\n')
    (tmp_path / "rlhf").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(tmp_path / "calls")}
    script = str(EXAMPLES / "scripts" / "code_rl.sh")
    subprocess.run(["bash", script, "MODEL", str(tmp_path / "run")], check=True, env=environment)
    rows = [json.loads(line) for line in (tmp_path / "run" / "tasks.jsonl").open()]
    assert len({row["prompt"] for row in rows}) == 20
    kinds = Counter(type(parse_tests(row["label"])) for row in rows)
    assert kinds == {FunctionTests: 10, StdinTests: 5, AssertTests: 5}
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call.split()[0] for call in calls] == ["grpo", "eval"]
    assert all("--reward_funcs code(timeout=5, memory_mb=512) " in call for call in calls)


@pytest.mark.parametrize(
    ("script", "given", "shares"),
    [
        ("long_context_sft.sh", {}, [(131072, 8, 16384)]),
        ("long_context_sft.sh", {"RANKS_PER_SEQUENCE": "3", "MAX_LEN": "1000"}, [(1000, 3, 334)]),
        ("skywork_or1.sh", {}, [(10240, 1, 10240), (18432, 1, 18432), (34816, 2, 17408)]),
        ("skywork_or1.sh", {"GPUS": "1", "STAGES": "32768"}, [(34816, 1, 34816)]),
    ],
)
def test_ranks_that_share_long_sequences_hold_one_whole_sequence(tmp_path, script, given, shares):
    """`rlhf` is replaced by a stub that records its arguments."""
    (tmp_path / "rlhf").write_text('#!/bin/sh\necho "$@" >> "$CALLS"\n')
    (tmp_path / "rlhf").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(tmp_path / "calls")}
    words = ["bash", str(EXAMPLES / "scripts" / script), "MODEL", "DATA", str(tmp_path / "run")]
    subprocess.run(words, check=True, env=environment | given)
    found = []
    for call in (tmp_path / "calls").read_text().splitlines():
        flags = call.split()
        names = ("--max_len", "--sequence_parallel_size", "--train_max_tokens_per_gpu")
        found.append(tuple(int(flags[flags.index(name) + 1]) for name in names))
    assert found == shares
    assert all(ranks * tokens >= max_len for max_len, ranks, tokens in found)


@pytest.fixture
def programs(tmp_path):
    """Return an environment in which the cluster programs only append their arguments to `calls`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    note = f'#!/bin/bash\necho "$(basename "$0") $*" >>{tmp_path}/calls\n'
    for name in ("ray", "srun"):
        (folder / name).write_text(note)
    joined = f"until grep -q ^srun {tmp_path}/calls; do sleep 0.02; done\n"  # it waits for the other nodes
    (folder / "python").write_text(note + joined)
    (folder / "hostname").write_text("#!/bin/bash\necho node-0\n")
    (folder / "rlhf").write_text(
        note
        + f"""
trap 'echo saved >>{tmp_path}/calls; exit 130' TERM
[ "$FAIL" ] && exit 1
for _ in $(seq "${{TENTHS:-0}}"); do sleep 0.1; done
"""
    )
    for file in folder.iterdir():
        file.chmod(0o755)
    return os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(tmp_path)}


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []


def slurm(folder: Path, programs: dict, **environment: str) -> subprocess.Popen:
    words = ["bash", str(EXAMPLES / "scripts" / "slurm_ppo.sh"), "model", "prompts.jsonl", str(folder / "run")]
    job = {"SLURM_JOB_NUM_NODES": "4", "SLURM_GPUS_ON_NODE": "8"}
    return subprocess.Popen(words, env=programs | job | environment, stderr=subprocess.PIPE, text=True)


def test_a_slurm_job_joins_its_nodes_and_trains_on_all_of_them(tmp_path, programs):
    assert slurm(tmp_path, programs).wait(timeout=60) == 0
    called = calls(tmp_path)
    assert called[0] == "ray start --head --port 6379 --include-dashboard false"
    assert "srun --nodes 3 --ntasks 3 --exclude node-0 ray start --address node-0:6379 --block" in called
    run = next(call for call in called if call.startswith("rlhf ppo"))
    assert "--actor_num_nodes 4 --actor_num_gpus_per_node 8" in run
    assert "--vllm_num_engines 32" in run
    assert called[-1] == "ray stop"
    token = tmp_path / "run" / "ray_token"
    assert len(token.read_text()) == 64
    assert token.stat().st_mode & 0o077 == 0


def test_a_slurm_job_has_the_status_of_its_run(tmp_path, programs):
    assert slurm(tmp_path, programs, FAIL="1").wait(timeout=60) == 1
    assert calls(tmp_path)[-1] == "ray stop"


def test_a_slurm_job_near_its_time_limit_lets_the_run_save(tmp_path, programs):
    job = slurm(tmp_path, programs, TENTHS="300")
    while not any(call.startswith("rlhf ppo") for call in calls(tmp_path)):
        time.sleep(0.02)
    time.sleep(0.3)  # wait until the shell of the job has set its trap
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=60) == 130
    assert calls(tmp_path)[-2:] == ["saved", "ray stop"]


def test_machines_join_by_hand_and_a_run_is_submitted(tmp_path, programs):
    script = str(EXAMPLES / "scripts" / "ray_nodes_ppo.sh")
    for words in (["head"], ["worker", "10.0.0.1"], ["submit", "model", "prompts", "run", "4"]):
        subprocess.run(["bash", script, *words], env=programs, check=True, capture_output=True)
    assert calls(tmp_path)[:3] == [
        "ray get-auth-token --generate",
        "ray start --head --port 6379 --dashboard-host 127.0.0.1 --dashboard-port 8265",
        "ray start --address 10.0.0.1:6379",
    ]
    assert "-- rlhf ppo --pretrain model --prompt_data prompts --output run" in calls(tmp_path)[3]
    assert "--actor_num_nodes 4" in calls(tmp_path)[3]


def test_the_settings_of_the_launchers_fit_the_nodes_they_are_for():
    for name in ("slurm_ppo.sh", "ray_nodes_ppo.sh"):
        text = (EXAMPLES / "scripts" / name).read_text().replace('"$((NODES * GPUS))"', "32")
        (command,) = commands_in(name, text.replace('"$NODES"', "4").replace('"$GPUS"', "8"))
        values: dict[str, str] = {}
        for word in command.words[1:]:
            if word.startswith("--"):
                flag = word[2:]
                values[flag] = "true"
            else:
                values[flag] = word
        config = build_config(PPOConfig, values)
        check_batches(config, ESTIMATORS["ppo"])
        layout = plan_layout(config.layout_settings(("actor", "critic", "ref")), node_gpus=[8, 8, 8, 8])
        assert layout.num_gpus == 32


def test_a_curve_reaches_from_the_first_to_the_last_step_and_from_zero_to_the_highest_mark():
    names = runpy.run_path(str(EXAMPLES / "curves.py"))
    assert names["ticks"](0.97) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert names["ticks"](3.2) == [0, 1, 2, 3, 4]
    image = names["chart"]({"reward & more": [(1, 0.0), (11, 1.0)]}, "step", "a note")
    assert 'points="48.0,270.0 708.0,30.0"' in image
    assert "reward &amp; more" in image
