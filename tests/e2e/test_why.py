"""`rlhf why` gives the numbers of the run for all commands, an adapter, images and two ranks."""

import json

import pytest
from forked import run_rlhf
from picture_rows import write_rows
from tiny_vision import save_tiny_vision

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

RUNS = {
    "reinforce++": ("reinforce++ --gamma 0.9", "REINFORCE++, arXiv 2501.03262"),
    "reinforce++ group": ("reinforce++ --baseline group", "REINFORCE++ with baseline"),
    "grpo": ("grpo --use_kl_loss --kl_estimator k3", "GRPO, arXiv 2402.03300"),
    "dr_grpo": ("grpo --preset dr_grpo", "Dr. GRPO, arXiv 2503.20783"),
    "gspo": ("grpo --preset gspo", "GSPO, arXiv 2507.18071"),
    "cispo": ("grpo --preset cispo", "CISPO, arXiv 2506.13585"),
    "sapo": ("grpo --preset sapo", "SAPO, arXiv 2511.20347"),
    "gdpo": ("grpo --aggregate normalize_then_sum --init_kl_coef 0", "whitened over all responses"),
    "rloo": ("rloo --rollout_correction seq_mask", "RLOO, arXiv 2402.14740"),
    "remax": ("remax --policy_loss reinforce", "ReMax, arXiv 2310.10505"),
    "adapter": ("grpo --lora_rank 4", "GRPO, arXiv 2402.03300"),
    "two ranks": ("grpo --actor_num_gpus_per_node 2 --zero_stage 2", "GRPO, arXiv 2402.03300"),
    "two ranks a sequence": (
        "grpo --actor_num_gpus_per_node 2 --sequence_parallel_size 2 --init_kl_coef 0",
        "GRPO, arXiv 2402.03300",
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_response_is_explained_with_the_numbers_of_the_run(name, model, problems, tmp_path):
    command, paper = RUNS[name]
    reward, output = tmp_path / "digits.py", tmp_path / "run"
    reward.write_text(
        "def reward_func(queries, prompts, labels):\n"
        "    answers = [query[len(prompt):] for query, prompt in zip(queries, prompts)]\n"
        "    return [sum(c.isdigit() for c in a) / max(len(a), 1) for a in answers]\n"
    )
    run_rlhf(
        *command.split(),
        *f"--pretrain {model} --prompt_data {problems} --label_key answer --max_len 64 --max_new_tokens 6".split(),
        *["--rollout_batch_size", "4", "--n_samples_per_prompt", "3", "--train_batch_size", "6"],
        *["--max_iterations", "3"],
        *f"--actor_learning_rate 1e-3 --output {output} --rollout_backend transformers --save_steps 1".split(),
        *["--reward_func", reward],
    )
    rows = [json.loads(line) for line in (output / "samples.jsonl").open()]
    printed = run_rlhf("why", output, "--sample", rows[-1]["id"], "--token", "0")
    assert "Equal to the run: all " in printed
    assert paper in printed
    assert ("share of the gradient norm: g_t . g" in printed) == (name != "two ranks a sequence")
    # From the start of the run, over two iterations.
    for checkpoint in (output / "checkpoints").iterdir():
        checkpoint.rename(checkpoint.with_name(f"aside_{checkpoint.name}"))
    printed = run_rlhf("why", output, "--sample", next(row["id"] for row in rows if row["step"] == 2))
    assert "Equal to the run: all " in printed
    assert "Optimizer step " in printed


SMALL = (
    "--max_len 64 --max_new_tokens 6 --rollout_batch_size 4 --n_samples_per_prompt 2 --train_batch_size 4 "
    "--max_iterations 2 --num_episodes 2 --actor_learning_rate 1e-3 --rollout_backend transformers --param_dtype fp32 "
    "--save_steps 1"
)


def explained_last(output):
    """Explain a token of the run's last response, and return what is printed."""
    *_, last = (output / "samples.jsonl").open()
    return run_rlhf("why", output, "--sample", json.loads(last)["id"], "--token", "0")


def test_a_student_on_two_ranks_is_explained(tiny_model_dir, tiny_llama_dir, problems, tmp_path):
    teacher = f"--pretrain {tiny_model_dir} --teacher_pretrain {tiny_llama_dir} --prompt_data {problems}"
    ranks = "--actor_num_gpus_per_node 2 --zero_stage 2"
    run_rlhf(*f"gkd {teacher} {ranks} {SMALL} --lmbda 1 --output {tmp_path / 'run'}".split())
    printed = explained_last(tmp_path / "run")
    assert "Equal to the run: all " in printed
    assert "GKD, arXiv 2306.13649" in printed
    assert "share of the gradient norm: g_t . g" in printed


def test_a_response_to_images_is_explained(tmp_path):
    vision = save_tiny_vision("qwen2_5_vl", tmp_path / "tiny")
    rows = write_rows(
        tmp_path, *({"prompt": f"<image>{number}?", "images": ["a.png"], "answer": "1"} for number in "1234")
    )
    reward, output = tmp_path / "reward.py", tmp_path / "run"
    reward.write_text(
        "def reward_func(queries, prompts, labels):\n    return [sum(map(ord, q)) % 7 for q in queries]\n"
    )
    run_rlhf(*f"grpo --pretrain {vision} --prompt_data {rows} --reward_func {reward} {SMALL} --output {output}".split())
    printed = explained_last(output)
    assert "Equal to the run: all " in printed
    assert "share of the gradient norm: g_t . g" in printed


PAIR, RESPONSE = ("chosen", "rejected"), ("desirable",)
ROWS: dict[str, tuple[str, dict[str, object], tuple[str, ...]]] = {
    "sft": ("--lora_rank 4 --lora_dropout 0.2", {"response": "2"}, ("read", "trained")),
    "sft packed": ("--pretrain_mode --micro_train_batch_size 1", {"response": "2"}, ("trained",)),
    "dpo": ("--ref_sync_steps 2 --ref_mixup_alpha 0.5", {"chosen": "2", "rejected": "3"}, PAIR),
    "dpo aot": ("--loss aot", {"chosen": "2", "rejected": "3"}, PAIR),
    "rm": ("--optim adamw_bf16 --param_dtype bf16", {"chosen": "2", "rejected": "3"}, PAIR),
    "kto": ("", {"completion": "2", "label": True}, RESPONSE),
    "prm": ("", {"completions": ["1+1", "2"], "labels": [True, False]}, ("step 1", "step 0")),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_explained_with_the_numbers_of_the_run(name, model, tmp_path):
    more, row, titles = ROWS[name]
    data, output = tmp_path / "rows.jsonl", tmp_path / "run"
    # Every second response is undesirable.
    labels: list[dict[str, object]] = [{"label": True}, {"label": False}] if "label" in row else [{}, {}]
    rows = [{"prompt": f"{number}+1=", **row, **labels[number % 2]} for number in range(24)]
    data.write_text("".join(json.dumps(one) + "\n" for one in rows))
    run_rlhf(
        *f"{name.split()[0]} --pretrain {model} --dataset {data} --train_batch_size 8 --max_epochs 2".split(),
        *f"--learning_rate 1e-2 --output {output} --save_steps 2 --no_use_tensorboard {more}".split(),
    )
    printed = run_rlhf("why", output, "--sample", "rows.jsonl:5")
    last = printed.partition("trained in steps ")[2].split()[2]  # "2 and 5"
    for text in (printed, run_rlhf("why", output, "--sample", "rows.jsonl:5", "--step", last)):
        assert "Equal to the run: all " in text
        assert all(f"  {title}" in text for title in titles)
        assert "By itself, with the weights before the step\n  loss " in text
