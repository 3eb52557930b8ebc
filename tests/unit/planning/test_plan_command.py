"""`rlhf plan` as users run it: output, exit status, JSON, changes that help, and messages for mistakes."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plans import LARGE, SMALL, plan_config, plan_of, plans_of

from rlhf_cli import cli
from rlhf_cli.commands.plan import PLANNED
from rlhf_cli.planning.architectures import published
from rlhf_cli.planning.changes import best_changes, candidates, with_values
from rlhf_cli.planning.hardware import hardware_of
from rlhf_cli.planning.memory import GIB
from rlhf_cli.planning.times import PhaseTime, phase_times, step_seconds
from rlhf_cli.runs.plan import DOES_NOT_FIT, planner_of

MEASURED: dict[int, dict[str, object]] = {
    36_679: {},
    30_906: {"gradient_checkpointing": "true"},
    27_097: {"zero_stage": 3},
}
"""Trained tokens per second of benchmarks/gpu.py with a 1.5B model on one H200 (docs/benchmarks.md)."""


def run(capsys, *words):
    """Run `rlhf plan`. Returns exit status, output and errors."""
    try:
        status: object = cli.main(["plan", *words])
    except SystemExit as end:
        status = end.code
    found = capsys.readouterr()
    return status, found.out, found.err


def test_a_plan_shows_placement_memory_times_and_price(capsys):
    words = ["grpo", "--pretrain", LARGE, "--gpu", "h100", "--num_gpus", "8", "--price_per_gpu_hour", "2.5"]
    status, out, err = run(capsys, *words, "--num_rows", "1280")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == f"rlhf grpo with {LARGE} (7.62B parameters) on 8 x H100 (79 GiB)"
    assert "  node 0: 8 GPUs for actor + ref + engine" in lines
    assert [line.split()[0] for line in lines if line.startswith("    ")] == [
        *("phase", "generate", "forward", "train", "transfer")
    ]
    (run_line,) = (line for line in lines if line.startswith("Run: "))
    assert run_line.startswith("Run: 10 iterations, ")
    (price,) = (line for line in lines if line.startswith("Price: "))
    plan = plan_of("grpo", num_gpus=8)
    assert f"{2.5 * 8 * plan.seconds / 3600:,.4g} per iteration" in price


def test_short_steps_on_a_cpu_are_marked_as_uncertain(capsys, tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "tie_word_embeddings": True} | sizes))
    words = ["sft", "--max_len", "256", "--train_batch_size", "2", "--no_calibration", "--gpu", "cpu"]
    _, short, _ = run(capsys, *words, "--pretrain", str(tmp_path))
    _, long, _ = run(capsys, *words, "--pretrain", SMALL)
    assert "\nSteps this short last up to four times as long on a CPU: " in short
    assert "Steps this short" not in long


def test_the_page_shows_what_its_first_command_prints(capsys):
    page = (Path(cli.__file__).parents[1] / "docs" / "commands" / "plan.md").read_text()
    joined = page.replace("\\\n", " ")
    command, shown = re.search(r"^rlhf plan (.+)$", joined, re.M), re.search(r"```text\n(.+?)```", page, re.S)
    assert command is not None
    assert shown is not None
    assert run(capsys, *command[1].split())[1] == shown[1]


def test_the_exit_status_tells_whether_a_command_fits(capsys):
    assert run(capsys, "sft", "--pretrain", SMALL, "--gpu", "h100")[0] == 0
    status, out, _ = run(capsys, "sft", "--pretrain", LARGE, "--gpu", "h100")
    assert status == DOES_NOT_FIT == 3
    assert "DOES NOT FIT. It fits with:" in out


def test_flags_of_the_plan_may_precede_the_command(capsys):
    words = ["--pretrain", SMALL, "--json"]
    first = run(capsys, "--gpu", "h100", "sft", *words)
    assert first == run(capsys, "sft", *words, "--gpu", "h100")
    assert first[0] == 0


def test_a_recipe_is_planned_from_its_file(capsys, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(f"pretrain: {SMALL}\nzero_stage: 3\ngpu: h200\nnum_gpus: 4\n")
    status, out, _ = run(capsys, "sft", "--config", str(file))
    assert status == 0
    assert "on 4 x H200 (140 GiB)" in out
    assert "  node 0: 4 GPUs for model" in out


def test_json_has_every_number_of_the_plan(capsys):
    status, out, _ = run(capsys, "ppo", "--pretrain", SMALL, "--gpu", "h100", "--num_gpus", "2", "--json")
    plan = json.loads(out)
    assert status == 0
    assert plan["fits"] is True
    assert plan.keys() == {
        *("command", "fits", "hardware", "parameters", "placement", "gradient_checkpointing", "gpus", "engine"),
        *("train_max_tokens_per_gpu", "gpu_memory_gib", "host_memory_gib", "disk_gib", "seconds", "limits"),
        *("shared_memory_gib", "calibrated_by"),
        *("bottleneck", "tokens_per_second", "steps", "price_per_step", "changes"),
    }
    for gpu in plan["gpus"]:
        for parts in gpu["memory_gib"].values():
            assert sum(parts.values()) - parts["total"] == pytest.approx(parts["total"], abs=0.1)
    assert plan["seconds"].keys() == plan["limits"].keys() == {"generate", "forward", "train", "transfer"}
    for change in plan["changes"]:
        assert change.keys() == {"flags", "fits", "gpu_peak_gib", "seconds"}


@pytest.mark.parametrize("name", PLANNED)
def test_every_command_has_a_plan(name):
    teacher = {"teacher_pretrain": SMALL} if name in ("distill", "gkd") else {}
    models: dict[str, str | None] = {"pretrain": SMALL}
    if name == "serve-rm":
        models = {"pretrain": None, "reward_pretrain": SMALL}
    plan = plan_of(name, num_gpus=4, **models, **teacher)
    assert plan.fits
    assert plan.seconds > 0
    assert all(gpu.peak > 0 for gpu in plan.gpus)


CASES = [
    ("sft", {}),
    ("sft", {"gpu": "rtx4090", "pretrain": SMALL}),
    ("dpo", {"num_gpus": 2}),
    ("grpo", {}),
    ("grpo", {"num_gpus": 8}),
    ("ppo", {"pretrain": "Qwen/Qwen2.5-32B", "num_gpus": 8, "num_nodes": 2}),
    ("gkd", {"pretrain": SMALL, "teacher_pretrain": LARGE, "gpu": "l40s"}),
    ("generate", {"pretrain": "Qwen/Qwen2.5-72B", "num_gpus": 2}),
    ("sft", {"pretrain": "Qwen/Qwen2.5-72B", "gpu": "a100-40"}),
]


@pytest.mark.parametrize(("command", "given"), CASES)
def test_flags_of_a_change_make_the_command_fit_or_faster(command, given, capsys):
    plan, changes = plans_of(command, **given)
    assert plan.fits or changes
    for change in changes:
        words = [
            command,
            *(f"--{name}={value}" for name, value in ({"pretrain": LARGE, "gpu": "h100"} | given).items()),
        ]
        # Later flags of the same name would be refused, so a change replaces the given ones.
        changed = change.flags.split()
        names = {word.removeprefix("--") for word in changed if word.startswith("--")}
        words = [word for word in words if word.partition("=")[0].removeprefix("--") not in names]
        status, out, err = run(capsys, *words, *changed, "--json")
        assert (status, err) == (0, ""), change.flags
        found = json.loads(out)
        assert found["fits"]
        assert sum(found["seconds"].values()) == pytest.approx(change.plan.seconds, abs=0.01)
        assert not plan.fits or change.plan.seconds < 0.97 * plan.seconds


APART = {
    "num_gpus": 4,
    "actor_num_gpus_per_node": 1,
    "critic_num_gpus_per_node": 1,
    "vllm_num_engines": 1,
    "colocate_actor_ref": "true",
}


def test_models_compute_one_after_another_on_separate_gpus_too():
    plan = plan_of("ppo", pretrain=SMALL, **APART)
    work = replace(plan.work, tokens=replace(plan.work.tokens, forward={}))
    of_actor = replace(work, roles={name: role for name, role in work.roles.items() if name != "critic"})
    of_critic = replace(work, roles={"critic": work.roles["critic"]})
    single = [phase_times(one, plan.batching)["train"].seconds for one in (of_actor, of_critic)]
    assert plan.times["train"].seconds == pytest.approx(sum(single))
    assert min(single) > 1


def test_with_async_train_the_longer_of_sampling_and_training_counts():
    times = {"generate": 5.0, "forward": 2.0, "train": 2.0, "transfer": 1.0}
    phases = {name: PhaseTime(seconds, "compute") for name, seconds in times.items()}
    work = plan_of("ppo", pretrain=SMALL, **APART).work
    assert step_seconds(work, phases) == 10
    assert step_seconds(replace(work, samples_ahead=True), phases) == 6
    assert plan_of("ppo", pretrain=SMALL, async_train="true", **APART).work.samples_ahead
    longer = phases | {"train": PhaseTime(4.0, "compute")}
    assert step_seconds(replace(work, samples_ahead=True), longer) == 7


def test_times_of_rewards_are_named_as_missing_except_for_a_reward_model(capsys):
    words = ["grpo", "--pretrain", SMALL, "--gpu", "h100", "--num_gpus", "4"]
    head = "Not included, because their duration is unknown: "
    remote = run(capsys, *words, "--remote_rm_url", "http://127.0.0.1:5000/score", "--reward_funcs", "math")[1]
    assert f"{head}reward_funcs and remote_rm_url\n" in remote
    plan = plan_of("grpo", pretrain=SMALL, num_gpus=4, reward_pretrain=SMALL)
    assert plan.work.tokens.forward["reward"] > 0
    assert head not in run(capsys, *words, "--reward_pretrain", SMALL)[1]
    assert head not in run(capsys, *words, "--judge", SMALL)[1]
    assert f"{head}judge\n" in run(capsys, *words, "--judge", "http://127.0.0.1:5000/v1")[1]


def test_changes_that_train_the_same_weights_come_before_adapters():
    _, changes = plans_of("sft", pretrain="Qwen/Qwen2.5-72B", num_gpus=8)
    assert [one.flags for one in changes] == ["--adam_offload --zero_stage 3", "--lora_rank 16 --load_in_4bit"]


def test_a_larger_gpu_is_named_if_nothing_else_helps():
    plan, changes = plans_of("chat", pretrain="Qwen/Qwen2.5-72B")
    assert not plan.fits
    assert [one.flags for one in changes] == ["--gpu b200"]
    assert plan_of("chat", pretrain="Qwen/Qwen2.5-72B", gpu="b200").fits
    # --gpu would not replace the given memory.
    assert plans_of("chat", pretrain="Qwen/Qwen2.5-72B", gpu_memory_gib=80)[1] == []


@pytest.mark.parametrize(("num_nodes", "most"), [(1, 150), (64, 30)])
def test_changes_of_the_largest_models_are_found_with_few_plans(num_nodes, most):
    # Each takes up to 40 ms. Engines of fewer than 8 GPUs have no room for the weights, with whatever other change.
    config = plan_config("ppo", pretrain="Qwen/Qwen3-235B-A22B", num_gpus=8, num_nodes=num_nodes)
    planner, tried = planner_of(config, config.plan), list[Any]()

    def counted(changed: Any, hardware: Any) -> Any:
        tried.append(changed.engine)
        return planner(changed, hardware)

    changes = best_changes(config, planner(config, hardware_of(config.plan)), counted)
    assert [one.values["vllm_tensor_parallel_size"] for one in changes] == [8]
    assert {engine.vllm_tensor_parallel_size for engine in tried} == {None, 8}
    assert len(tried) < most


def test_no_change_combines_settings_that_a_run_rejects():
    _, changes = plans_of("sft", gpu="rtx4090", zero_stage=3)
    assert "--lora_rank 16 --load_in_4bit --zero_stage 2" in [one.flags for one in changes]
    # A combination is reduced to what is needed; without the stage, a run rejects this one.
    _, changes = plans_of("grpo", pretrain="Qwen/Qwen2.5-14B", gpu="rtx4090", zero_stage=3)
    assert [one.flags for one in changes] == ["--num_gpus 4 --lora_rank 16 --load_in_4bit --zero_stage 2"]
    _, changes = plans_of("sft", num_gpus=2, compile_model="true")
    assert changes
    assert not [one.flags for one in changes if "--zero_stage 3" in one.flags]


def test_a_plan_warns_of_rows_that_no_micro_batch_holds(capsys):
    words = ["sft", "--pretrain", SMALL, "--gpu", "h100", "--max_len", "65536"]
    warning = "rows that need more than 16,192 tokens of a GPU stop the run: set --train_max_tokens_per_gpu 65536 "
    assert warning in run(capsys, *words)[1]
    assert warning not in run(capsys, *words, "--train_max_tokens_per_gpu", "65536")[1]


def test_assumed_speed_of_an_own_gpu_is_stated(capsys):
    words = ["sft", "--pretrain", SMALL, "--gpu_memory_gib", "48"]
    assumed = "Time per step (forecast; own GPU is planned with the speed of an A100)"
    assert assumed in run(capsys, *words)[1]
    assert assumed not in run(capsys, *words, "--gpu_tflops", "200", "--gpu_bandwidth", "0.9")[1]


def test_a_change_has_no_setting_without_an_effect():
    plan, changes = plans_of("sft", pretrain="Qwen/Qwen2.5-0.5B", gpu="h200")
    assert not plan.batching.recomputes
    # Doubles the tokens per micro-batch; checkpointing is off already.
    assert [one.flags for one in changes] == [f"--train_max_tokens_per_gpu {2 * plan.batching.max_tokens}"]


def test_changes_keep_the_rules_of_the_command():
    config = plan_config("sft", zero_stage=3)
    assert with_values(config, {"zero_stage": 2, "param_offload": True}) is None
    changed: Any = with_values(config, {"param_offload": True})
    assert changed.deepspeed.param_offload
    assert changed.model == config.model


def test_forecasts_are_near_the_measured_speeds_of_an_h200():
    page = (Path(cli.__file__).parents[1] / "docs" / "commands" / "plan.md").read_text()
    for measured, given in MEASURED.items():
        values = {"gradient_checkpointing": "false", "row_tokens": 382, "train_max_tokens_per_gpu": 16_384}
        plan = plan_of("sft", pretrain=SMALL, gpu="h200", **(values | given))
        print(f"{given or 'ZeRO 2'}: {plan.tokens_per_second:,.0f} tokens/s, measured {measured:,}")
        assert plan.tokens_per_second == pytest.approx(measured, rel=0.03)
        assert f"| {measured:,} | {plan.tokens_per_second:,.0f} |" in page


def test_more_gpus_and_faster_ones_take_less_time():
    cases: dict[str, dict[str, object]] = {
        "a100": {"gpu": "a100-80"},
        "h100": {},
        "b200": {"gpu": "b200"},
        "8 h100": {"num_gpus": 8},
        "own": {"gpu": None, "gpu_memory_gib": 80, "gpu_tflops": 2000, "gpu_bandwidth": 10},
    }
    times = {name: plan_of("sft", pretrain=SMALL, **given).seconds for name, given in cases.items()}
    assert times["8 h100"] < times["b200"] < times["h100"] < times["a100"]
    assert times["own"] < times["h100"]


def test_the_bottleneck_follows_from_the_workload():
    long = plan_of("grpo", num_gpus=8, max_new_tokens=30_000, max_len=32_000)
    assert (long.bottleneck, long.times["generate"].limit) == ("generate", "memory bandwidth")
    offloaded = plan_of("sft", adam_offload="true", train_batch_size=8)
    assert offloaded.times["train"].limit == "host link"


def test_a_plan_on_a_cpu_that_needs_the_last_twentieth_of_memory_does_not_fit():
    """A 135M model in grpo with packs of 16,192 tokens was planned with 23.4 of 23.6 GiB, and was killed."""
    given = {"pretrain": "HuggingFaceTB/SmolLM2-135M", "gpu": "cpu", "train_max_tokens_per_gpu": 16_192}
    given |= {"gradient_checkpointing": "false"}
    needed = plan_of("grpo", **given, host_memory_gib=100).peak_in("host") / GIB
    for memory, fits in ((needed / 0.94, True), (needed / 0.96, False)):
        plan = plan_of("grpo", **given, host_memory_gib=memory)
        assert plan.peak_in("host") == pytest.approx(needed * GIB)
        assert plan.fits is fits


def test_micro_batches_on_a_cpu_shrink_to_fit_before_layers_are_recomputed():
    def planned(memory: float, **given: object) -> tuple[bool, int, bool]:
        plan = plan_of("grpo", pretrain="HuggingFaceTB/SmolLM2-135M", gpu="cpu", host_memory_gib=memory, **given)
        return plan.batching.recomputes, plan.batching.max_tokens, plan.fits

    assert planned(100) == (False, 16_192, True)
    recomputes, tokens, fits = planned(20)
    assert (recomputes, fits) == (False, True)
    assert tokens < 16_192
    # The longest sequence has no room without checkpointing.
    assert planned(11.5) == (True, 16_192, True)
    assert planned(20, train_max_tokens_per_gpu=16_192) == (True, 16_192, True)
    assert planned(20, gradient_checkpointing="false", train_max_tokens_per_gpu=16_192) == (False, 16_192, False)
    assert planned(5) == (True, 2560, False)


def test_host_memory_of_a_node_is_checked_if_it_is_known():
    assert plan_of("grpo", num_gpus=8).fits
    small = plan_of("grpo", num_gpus=8, host_memory_gib=20)
    assert not small.fits
    assert small.excess > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "set the command to plan, with its flags: rlhf plan sft"),
        (["doctor"], "rlhf doctor has no plan; the commands with one are sft"),
        (["stf", "--pretrain", SMALL], "rlhf stf has no plan; the commands with one are sft"),
        (["sft"], "missing --pretrain"),
        (["sft", "--pretrain", "no/such-model", "--gpu", "h100"], "a plan needs only a folder with the model's config"),
        (["sft", "--pretrain", SMALL, "--gpu", "h900"], "--gpu h900: must be a100-40"),
        (["sft", "--pretrain", SMALL, "--num_gpus", "8"], "this machine has no GPU: set --gpu a100-40"),
        (["sft", "--pretrain", SMALL, "--gpu_tflops", "200"], "this machine has no GPU: set --gpu a100-40"),
        (["sft", "--pretrain", SMALL, "--gpu", "cpu", "--num_gpus", "2"], "--num_gpus describes GPUs, which --gpu cpu"),
        (["sft", "--pretrain", SMALL, "--gpu", "h100", "--num_gpus", "0"], "rlhf plan: --num_gpus 0: must be an int"),
        (["sft", "--pretrain", SMALL, "--gpu", "h100", "--num_gpus", "9000"], "a plan has at most 8,192 GPUs"),
        (["sft", "--pretrain", SMALL, "--gpu", "h100", "--row_tokens", "4096"], "is more than --max_len 2048"),
        (["grpo", "--pretrain", SMALL, "--gpu", "h100", "--max_len", "32768"], "cannot fit one sequence of --max_len"),
        (["ppo", "--pretrain", SMALL, "--gpu", "h100", "--train_batch_size", "100"], "does not divide the 1024"),
        (
            ["sft", "--pretrain", SMALL, "--gpu", "h100", "--lora_rank", "8", "--target_modules", "nothing"],
            "--target_modules nothing selects none of all-linear, q_proj",
        ),
        (
            ["sft", "--pretrain", SMALL, "--gpu", "h100", "--num_gpus", "3", "--sequence_parallel_size", "2"],
            "--sequence_parallel_size 2 does not divide the 3 ranks of model",
        ),
        (
            ["eval", "--pretrain", SMALL, "--gpu", "h100", "--tasks", "lm_eval:gsm8k"],
            "rlhf plan cannot forecast --tasks",
        ),
        (["eval", "--pretrain", SMALL, "--gpu", "h100", "--max_len", "1000000"], "positions, which is the limit in vL"),
        (
            ["sft", "--pretrain", SMALL, "--gpu", "h100", "--zero_stage", "3", "--compile_model"],
            "--compile_model cannot be combined with --zero_stage 3",
        ),
        (["sft", "--pretrain", SMALL, "--zero_stag", "3"], "unknown flag --zero_stag (did you mean --zero_stage?)"),
        (
            ["sft", "--pretrain", SMALL, "--gpu", "h100", "--num_gpus", "2", "--num_processes", "4"],
            "--num_processes 4 needs as many GPUs, but the plan has 2: lower it, or set --num_gpus 4",
        ),
        (["sft", "--pretrain", SMALL, "--zpg", "2"], "zpg needs --zero_stage 3"),
        (
            ["grpo", "--pretrain", SMALL, "--gpu", "h100", "--async_train", "--reward_funcs", "math"],
            "--async_train samples while the models train",
        ),
    ],
)
def test_a_mistake_is_one_sentence_with_the_way_out(words, message, capsys):
    status, out, err = run(capsys, *words)
    assert (status, out) == (2, "")
    assert err.startswith("rlhf plan: ")
    assert message in err


def test_published_and_plain_models_are_planned_without_torch(tmp_path):
    """Importing torch and transformers takes longer than the plan may take."""
    (tmp_path / "config.json").write_text(json.dumps(published()[SMALL]["config"]))
    words = [
        "plan",
        "grpo",
        "--pretrain",
        LARGE,
        "--gpu",
        "h100",
        "--num_gpus",
        "8",
        "--reward_pretrain",
        str(tmp_path),
    ]
    code = f"import sys\nfrom rlhf_cli import cli\nassert cli.main({words}) == 0\n"
    code += "print(sorted({'torch', 'transformers', 'ray', 'deepspeed', 'vllm'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_an_adapter_folder_is_planned_with_its_base(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": SMALL, "r": 8}))
    role = plan_of("sft", pretrain=str(tmp_path)).work.roles["model"]
    assert role.num_trained == plan_of("sft", pretrain=SMALL, lora_rank=8).work.roles["model"].num_trained


def test_a_cpu_gets_no_advice_to_split_engines():
    for gpu, splits in (("cpu", False), ("h100", True)):
        plan = plan_of("grpo", pretrain=SMALL, gpu=gpu, num_gpus=None if gpu == "cpu" else 8)
        proposed = [values for values in candidates(plan.work.config, plan) if "vllm_tensor_parallel_size" in values]
        assert bool(proposed) is splits
