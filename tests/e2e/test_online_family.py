"""End-to-end tests of the online commands without a critic: real Ray actors and DeepSpeed engines on a tiny model."""

import json
from pathlib import Path
from statistics import mean, median

import pytest
from extending_page import page_file
from forked import run_rlhf
from safetensors.torch import load_file

from rlhf_cli.tracking.sinks import read_metrics

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

WITHOUT_KL = "--init_kl_coef 0.0"
EVALUATED = "--eval_dataset {problems} --eval_max_samples 5 --eval_steps 1 --best_metric_key eval/reward"
TEACHER = "--teacher_pretrain {model} --teacher_num_gpus_per_node 2 --teacher_zero_stage 3 --param_dtype fp32"
MEASURED = ("time/", "perf/", "memory/")


@pytest.fixture(scope="module")
def reward(tmp_path_factory) -> Path:
    """Return a reward that varies for an untrained model: the share of digits."""
    path = tmp_path_factory.mktemp("reward") / "digits.py"
    path.write_text(
        "def reward_func(queries, prompts, labels):\n"
        "    answers = [query[len(prompt):] for query, prompt in zip(queries, prompts)]\n"
        "    return [sum(c.isdigit() for c in a) / max(len(a), 1) for a in answers]\n"
    )
    return path


def train(command: str, model: Path, problems: Path, reward: Path, output: Path) -> dict[int, dict[str, float]]:
    """Train for two iterations and return the metrics that must be equal between runs; a teacher has one rank."""
    run_rlhf(
        *command.format(problems=problems, model=model).split(),
        *([] if TEACHER in command else ["--reward_func", reward]),
        *f"--pretrain {model} --prompt_data {problems} --label_key answer --max_len 64".split(),
        *["--max_new_tokens", "6", "--rollout_batch_size", "4", "--n_samples_per_prompt", "3", "--max_iterations", "2"],
        *f"--actor_learning_rate 1e-3 --output {output} --rollout_backend transformers".split(),
    )
    others = {"teacher-0", "teacher-1"} if TEACHER in command else set() if WITHOUT_KL in command else {"ref-0"}
    assert {path.stem for path in (output / "logs").glob("*-*.log")} == {"actor-0", "engine-0"} | others
    return {
        step: {name: value for name, value in metrics.items() if not name.startswith(MEASURED)}
        for step, metrics in read_metrics(output).items()
    }


@pytest.fixture
def run(model, problems, reward, tmp_path):
    return lambda command, name="run": train(command, model, problems, reward, tmp_path / name)


@pytest.mark.parametrize(
    "command",
    [
        f"rloo --train_batch_size 12 --entropy_target 1 --overlong_buffer_len 3 {EVALUATED}",
        f"remax --train_batch_size 12 --stop_properly_penalty_coef 0.5 {WITHOUT_KL}",
        f"reinforce++ --baseline group --train_batch_size 6 --entropy_loss_coef 0.1 {TEACHER}",
    ],
    ids=lambda command: command.split()[0],
)
def test_commands_without_a_critic_train_the_actor(command, run, model, tmp_path):
    metrics = run(command)
    if EVALUATED in command:
        assert_best_is_kept(metrics, tmp_path / "run")
        metrics.pop(0)  # the evaluation before the first update has a line by itself
    assert sorted(metrics) == [1, 2]
    assert not any(name.startswith("critic") for name in metrics[1])
    assert ("kl" in metrics[1]) == (WITHOUT_KL not in command and TEACHER not in command)
    assert ("greedy_reward" in metrics[1]) == command.startswith("remax")
    if TEACHER in command:
        assert_teacher_was_the_policy_at_first(metrics)
    assert metrics[2 if TEACHER in command else 1]["advantage_abs"] > 0
    if "train_batch_size 12" in command:  # one step per iteration: the model is its own anchor
        assert metrics[1]["ratio_mean"] == metrics[1]["ratio_max"] == metrics[2]["ratio_max"] == 1.0
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "run" / "model"))
    assert any(not weight.equal(after[name].to(weight.dtype)) for name, weight in before.items())


def assert_teacher_was_the_policy_at_first(metrics: dict[int, dict[str, float]]) -> None:
    """Check that the two ranks of the teacher at ZeRO-3 give the log-probs of the actor's single rank.

    Later the entropy bonus moves the policy away from the teacher.
    """
    assert abs(metrics[1]["teacher_kl"]) < 1e-6
    assert abs(metrics[2]["teacher_kl"]) > 1e-4
    assert metrics[1]["teacher_logprob"] < -1
    assert "reward" not in metrics[1]


def assert_best_is_kept(metrics: dict[int, dict[str, float]], output: Path) -> None:
    rewards = {step: found["eval/reward"] for step, found in metrics.items()}
    assert sorted(rewards) == [0, 1, 2]
    assert {found["eval/num_prompts"] for found in metrics.values()} == {5.0}
    best = json.loads((output / "best" / "best.json").read_text())
    first_of_best = min(step for step, reward in rewards.items() if reward == max(rewards.values()))
    assert best == {"metric": "eval/reward", "iteration": first_of_best, "value": max(rewards.values())}
    weights = load_file(output / "best" / "model.safetensors")
    last = load_file(output / "model" / "model.safetensors")
    assert all(weight.equal(last[name]) for name, weight in weights.items()) == (first_of_best == 2)
    assert (output / "best" / "tokenizer.json").exists()


def test_grpo_measures_the_kl_divergence_in_the_loss_and_adapts_its_entropy_bonus(run, tmp_path):
    metrics = run("grpo --preset gspo --init_kl_coef 0.1 --train_batch_size 6 --entropy_target 10")
    assert len((tmp_path / "run" / "samples.jsonl").read_text().splitlines()) == 24
    assert "policy_loss: gspo" in (tmp_path / "run" / "config.yaml").read_text()
    assert metrics[2]["kl"] > 0
    # The entropy of an untrained model is below 10 nats, so its bonus grows with each step.
    assert [metrics[step]["entropy_coef"] for step in (1, 2)] == pytest.approx([0.0, 2e-4])


def test_code_outside_the_program_decides_a_run_in_all_its_processes(model, tmp_path):
    """Data, advantages, loss, engine and tracker are the examples of docs/extending.md; the reward is another file."""
    (tmp_path / "digits.py").write_text(
        "def digits(response, label):\n    return sum(c.isdigit() for c in response) / max(len(response), 1)\n"
    )
    rows = [
        {"q": f"{a}+{b}=", "options": {"a": str(a + b), "b": "0"}, "right": "a"} for a in (10, 11) for b in (12, 13)
    ]
    (tmp_path / "quiz.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code = (
        ("data_format", "quiz_rows.py", "of_quiz"),
        ("advantage_estimator", "median_baseline.py", "less_median"),
        ("policy_loss", "damped_loss.py", "damped"),
        ("rollout_backend", "patient_engine.py", "PatientEngine"),
        ("tracker", "csv_tracker.py", "CsvTracker"),
    )
    files = {name: page_file(tmp_path, name) for _, name, _ in code}
    with files["patient_engine.py"].open("a") as engine:
        engine.write(
            "\n    async def begin(self, requests, sampling):\n"
            f"        open({str(tmp_path / 'begun')!r}, 'a').write(f'{{len(requests)}} ')\n"
            "        await super().begin(requests, sampling)\n"
        )
    output = tmp_path / "run"
    run_rlhf(
        *f"rloo --pretrain {model} --prompt_data {tmp_path}/quiz.jsonl --max_len 64 --max_new_tokens 6".split(),
        *f"--reward_funcs {tmp_path}/digits.py:digits --rollout_batch_size 4 --n_samples_per_prompt 3".split(),
        *f"--train_batch_size 12 --max_iterations 1 --init_kl_coef 0 --loss_agg token_mean --output {output}".split(),
        *(word for name, file, found in code for word in (f"--{name}", f"{files[file]}:{found}")),
    )
    metrics = read_metrics(output)[1]
    samples = [json.loads(line) for line in (output / "samples.jsonl").open()]
    assert {sample["prompt"].split("\n")[2] for sample in samples} == {"a) 22", "a) 23", "a) 24"}
    assert metrics["reward"] == metrics["reward/digits"] > 0
    leads = [lead for start in range(0, 12, 3) for lead in leads_over_median(samples[start : start + 3])]
    assert metrics["advantage_abs"] == pytest.approx(mean(map(abs, leads)))
    # The ratio is 1 in the only step, so the loss is twice that of REINFORCE up to the rollout correction.
    assert metrics["policy_loss"] == pytest.approx(-2 * mean(leads), rel=0.01)
    assert (tmp_path / "begun").read_text().split() == ["12"]
    assert (output / "course.csv").read_text().split() == [f"1,reward,{metrics['reward']}"]


def leads_over_median(group: list[dict]) -> list[float]:
    """Return each token's reward minus the median reward of its prompt's group."""
    middle = median(sample["reward"] for sample in group)
    return [sample["reward"] - middle for sample in group for _ in range(sample["length"])]


def test_models_that_cannot_be_built_cost_no_earlier_run(model, problems, reward, tmp_path):
    earlier = tmp_path / "earlier"
    (earlier / "checkpoints" / "step_000002").mkdir(parents=True)
    for name in ("config.yaml", "run.json", "metrics.jsonl", "checkpoints/step_000002/manifest.json"):
        (earlier / name).write_text("{}")
    before = {path: path.read_bytes() for path in earlier.rglob("*") if path.is_file()}
    words = (
        f"rloo --pretrain {model} --prompt_data {problems} --label_key answer --reward_func {reward} --max_len 64 "
        "--max_new_tokens 6 --rollout_batch_size 4 --n_samples_per_prompt 2 --train_batch_size 8 --max_iterations 1 "
        "--rollout_backend transformers --use_liger_kernel --output"
    )
    printed = run_rlhf(*words.split(), str(earlier), "--overwrite", status=2)
    assert "use_liger_kernel needs an NVIDIA GPU" in printed
    assert {path: path.read_bytes() for path in before} == before
    left = {"config.yaml", "run.json", "metrics.jsonl", "checkpoints", "logs", ".lock"}
    assert {path.name for path in earlier.iterdir()} == left
