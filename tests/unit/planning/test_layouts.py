"""The layout of an online command without placement flags: the fastest candidate whose plan fits, with its reason."""

import json
import re
import time
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from plans import LARGE, SMALL, plan_config, plan_of

from rlhf_cli.backends.cluster import ray_cluster
from rlhf_cli.backends.cluster.default_layout import fill_layout
from rlhf_cli.backends.cluster.placement import ENGINE
from rlhf_cli.backends.doctor.gpus import Gpu
from rlhf_cli.config.plan import PlanConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.models.fused import is_installed
from rlhf_cli.planning import hardware as hardware_module
from rlhf_cli.planning.calibration import calibration_file, key_of, seconds_of
from rlhf_cli.planning.hardware import GPUS, Hardware, hardware_of_run
from rlhf_cli.planning.layouts import choose_layout
from rlhf_cli.planning.memory import GIB, USABLE
from rlhf_cli.planning.online import layout_needs, online_models
from rlhf_cli.planning.phases import batching_of, shortage
from rlhf_cli.planning.planner import Plan, make_plan, placement, shapes_of
from rlhf_cli.runs.memory import online_workload, shortage_notice
from rlhf_cli.runs.plan import planner_of

MODELS = [f"Qwen/Qwen2.5-{size}" for size in ("0.5B", "1.5B", "7B", "32B")] + ["meta-llama/Llama-3.1-70B"]
COMMANDS = {"ppo": {}, "grpo": {}, "async grpo": {"async_train": "true"}}
NODES = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (16, 8))
SPLIT_GPUS = 8
SLOW_MACHINE = 4
"""Factor for machines in CI; about 0.25 s on a core of a server."""


def on(gpu: str, nodes: int, gpus: int) -> Hardware:
    return replace(GPUS[gpu], num_nodes=nodes, num_gpus=gpus)  # type: ignore[index]


@cache
def settings_of(title: str, pretrain: str, stage: int = 2) -> Any:
    command = title.removeprefix("async ")
    return plan_config(command, pretrain=pretrain, zero_stage=stage, **COMMANDS[title])


def planned(config: Any, hardware: Hardware) -> Plan:
    return make_plan(config, PlanConfig(), hardware, has_critic=config.command == "ppo")


def chosen(config: Any, hardware: Hardware | None, **options: Any) -> Any:
    nodes = options.pop("node_gpus", None) or (hardware.node_gpus if hardware else [8])
    critic = config.command == "ppo"
    return choose_layout(config, hardware, shapes_of(config), has_critic=critic, node_gpus=nodes, **options)


def balance(plan: Plan) -> float:
    """Return the ratio of the longer to the shorter of sampling and training."""
    sampling, training = plan.times["generate"].seconds, plan.times["forward"].seconds + plan.times["train"].seconds
    return max(sampling, training) / min(sampling, training)


@pytest.mark.parametrize("pretrain", MODELS)
@pytest.mark.parametrize("title", COMMANDS)
def test_each_layout_fits_or_says_what_is_missing_and_leaves_no_gpu_idle_in_silence(title, pretrain):
    for gpu in ("rtx4090", "a100-40", "h100", "h200"):
        for nodes, gpus in NODES:
            hardware = on(gpu, nodes, gpus)
            if (title, nodes * gpus) == ("async grpo", 1):
                with pytest.raises(UsageError, match="remove --async_train"):
                    planned(settings_of(title, pretrain), hardware)
                continue
            plan = planned(settings_of(title, pretrain), hardware)
            assert plan.fits == ("no layout fits" not in plan.work.reason), plan.work.reason
            layout = plan.work.layout
            unused = [line for line in placement(plan.work) if "unused" in line]
            assert layout.num_gpus == nodes * gpus or unused
            if not plan.fits:
                continue
            assert f"{plan.seconds:.1f} s per iteration planned" in plan.work.reason
            assert layout.num_gpus >= 0.9 * nodes * gpus
            if title == "async grpo":
                assert not any(seat.shared for seat in layout.of(ENGINE))
                # The slowest network and the largest engines leave the fewest choices.
                assert nodes * gpus < 8 or nodes > 1 or balance(plan) < 1.6, plan.work.reason


@pytest.mark.parametrize("pretrain", MODELS)
@pytest.mark.parametrize("title", ["ppo", "grpo"])
def test_zero_3_fits_where_enough_gpus_hold_the_states(title, pretrain):
    # 16 bytes per parameter of each trained model, in parts of 128 GPUs, and engines on up to 8 GPUs.
    plan = planned(settings_of(title, pretrain, 3), on("h200", 16, 8))
    assert plan.fits
    assert plan.work.layout.num_gpus == 128


def test_no_split_by_flags_is_faster_with_async_train():
    hardware = on("h100", 1, SPLIT_GPUS)
    best = planned(settings_of("async grpo", LARGE), hardware)
    by_flags = {
        models: planned(
            plan_config(
                "grpo",
                async_train="true",
                colocate_actor_ref="true",
                actor_num_gpus_per_node=models,
                ref_num_gpus_per_node=models,
                vllm_num_engines=SPLIT_GPUS - models,
            ),
            hardware,
        )
        for models in range(1, SPLIT_GPUS)
    }
    fitting = {models: plan.seconds for models, plan in by_flags.items() if plan.fits}
    assert min(fitting.values()) == pytest.approx(best.seconds)
    assert fitting[len(best.work.layout.of("actor"))] == pytest.approx(best.seconds)
    assert len(fitting) < len(by_flags)  # ZeRO-2 states need several GPUs


def test_the_reason_compares_the_best_layouts_on_shared_and_separate_gpus():
    config, hardware = settings_of("grpo", LARGE), on("h100", 1, 8)
    plan = planned(config, hardware)
    found = re.fullmatch(
        r"models and engines take turns on 8 GPUs: ([\d.]+) s per iteration planned; "
        r"([\d.]+) s if (\d) GPUs are for models and (\d) for engines",
        plan.work.reason,
    )
    assert found
    assert f"{plan.seconds:.1f}" == found[1]
    models, engines = int(found[3]), int(found[4])
    assert models + engines == 8
    sizes = {"actor_num_gpus_per_node": models, "ref_num_gpus_per_node": models, "vllm_num_engines": engines}
    apart = planned(plan_config("grpo", colocate_actor_ref="true", **sizes), hardware)
    assert f"{apart.seconds:.1f}" == found[2]


def test_a_layout_that_lacks_memory_is_named_with_what_it_needs():
    reason = planned(settings_of("ppo", LARGE), on("h100", 1, 4)).work.reason
    lack = rf"actor \+ ref need [\d.]+ of {USABLE * 79.1:.1f} GiB"
    assert re.search(f"if 2 GPUs are for models and 2 for engines, {lack}", reason)


def test_little_host_memory_leaves_no_room_for_sleep():
    hardware = on("h100", 1, 8)
    assert planned(settings_of("grpo", LARGE), hardware).work.models_sleep
    awake = planned(settings_of("grpo", LARGE), replace(hardware, host_memory=200 * 2**30))
    assert awake.fits
    assert not awake.work.models_sleep
    assert "GiB of host memory" in awake.work.reason


def test_engines_get_more_gpus_only_where_a_model_needs_them():
    # 61.0 GiB of weights in 32B parameters: 0.6 of 79.1 GiB do not hold them, 0.9 hold 26 sequences of 1,024 tokens.
    config = plan_config("grpo", pretrain="Qwen/Qwen2.5-32B", zero_stage=3, adam_offload="true")
    layout, reason = chosen(config, on("h100", 1, 8))
    assert (layout.together, layout.engine_size, layout.num_engines) == (True, 2, 4)
    assert "take turns on 8 GPUs, 2 for each engine" in reason
    assert chosen(settings_of("grpo", LARGE), on("h100", 1, 8))[0].engine_size == 1
    # A given size is kept, also where it does not fit.
    given = plan_config("grpo", pretrain="Qwen/Qwen2.5-32B", zero_stage=3, vllm_tensor_parallel_size=1)
    assert chosen(given, on("h100", 2, 8))[0].engine_size == 1
    # 7B has 4 key heads, so that no engine has 8 GPUs.
    assert chosen(plan_config("grpo", vllm_tensor_parallel_size=8), on("h100", 1, 8))[0].engine_size == 8


@pytest.mark.parametrize(
    "flags",
    [
        {"colocate_all_models": "true"},
        {"deepspeed_enable_sleep": "false"},
        {"vllm_enable_sleep": "true"},
        {"colocate_actor_ref": "true"},
        {"vllm_num_engines": 2},
        {"actor_num_gpus_per_node": 2},
    ],
)
def test_with_a_placement_flag_the_rest_is_filled_in_without_a_plan(flags):
    config = plan_config("grpo", pretrain=MODELS[1], **flags)
    models = list(online_models(config, has_critic=False))
    filled = fill_layout(config.layout_settings(models), node_gpus=[8], needs=layout_needs(config, models))
    assert chosen(config, on("h200", 1, 8)) == filled


def test_without_gpus_or_their_memory_no_plan_chooses():
    config = settings_of("grpo", MODELS[0])
    unknown, reason = chosen(config, None)
    assert unknown.together
    assert reason == "models and engines take turns on all GPUs, because no placement flag is set"
    assert chosen(config, None, node_gpus=[8])[0].models_sleep


@pytest.mark.parametrize(("backend", "together"), [("nccl", False), ("ipc", True)])
def test_a_given_way_of_weight_transfer_determines_whether_gpus_are_shared(backend, together):
    # Without the flag, 128 H100 are split and 8 are shared.
    for nodes in (1, 16):
        layout, _ = chosen(plan_config("grpo", vllm_sync_backend=backend), on("h100", nodes, 8))
        assert layout.together is together


def test_models_that_cannot_sleep_here_stay_awake():
    layout, reason = chosen(settings_of("grpo", MODELS[1]), on("h200", 1, 8), can_sleep=False)
    assert not layout.models_sleep
    assert "s per iteration planned" in reason


def test_where_nothing_fits_the_layout_is_the_default_and_a_run_names_flags_that_fit():
    config, hardware = settings_of("grpo", LARGE), on("a100-40", 1, 4)
    plan = planned(config, hardware)
    models = list(online_models(config, has_critic=False))
    filled, _ = fill_layout(config.layout_settings(models), node_gpus=[4], needs=layout_needs(config, models))
    assert chosen(config, hardware)[0] == filled
    work = online_workload(plan.work.config, plan.work.layout, hardware=hardware, has_critic=False)  # type: ignore[arg-type]
    notice = shortage_notice(config, work, batching_of(work))
    assert notice.startswith("The plan does not fit: actor + ref + engine need ")
    flags = notice.rpartition("it fits with ")[2].split()
    assert flags == ["--adam_offload"]
    assert planned(plan_config("grpo", adam_offload="true"), hardware).fits
    fitting = online_workload(plan.work.config, plan.work.layout, hardware=on("h200", 1, 4), has_critic=False)  # type: ignore[arg-type]
    assert shortage_notice(config, fitting, batching_of(fitting)) == ""


def test_the_layout_depends_on_no_measurement_of_earlier_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("RLHF_CALIBRATION", str(tmp_path / "folder" / "calibration.jsonl"))
    config, hardware = settings_of("async grpo", LARGE), on("h100", 1, 8)
    plan = planner_of(config, PlanConfig())(config, hardware)
    slow = {seconds_of(phase): [time.seconds, 10 * time.seconds] for phase, time in plan.times.items()}
    slow[seconds_of("generate")] = [1, 1]
    calibration_file().parent.mkdir(parents=True)
    calibration_file().write_text(json.dumps(key_of(plan) | {"values": slow}) + "\n")
    later = planner_of(config, PlanConfig())(config, hardware)
    assert later.times["train"].seconds == pytest.approx(10 * plan.times["train"].seconds)
    assert (later.work.layout, later.work.reason) == (plan.work.layout, plan.work.reason)


def test_lengths_of_a_plan_do_not_change_the_layout_of_the_run():
    short, long = (plan_of("grpo", num_gpus=8, async_train="true", response_tokens=count) for count in (64, 1024))
    assert short.seconds < long.seconds
    of_run = planned(settings_of("async grpo", LARGE), on("h100", 1, 8)).work.layout
    assert short.work.layout == long.work.layout == of_run


def test_a_layout_for_a_thousand_gpus_is_chosen_in_half_a_second():
    config, hardware = settings_of("async grpo", LARGE), on("h100", 128, 8)
    begin = time.process_time()
    layout, _ = chosen(config, hardware)
    assert time.process_time() - begin < 0.5 * SLOW_MACHINE
    assert layout.shapes["actor"][0] * layout.shapes["actor"][1] + layout.num_engines == 1024


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (["H100"], GPUS["h100"]),
        (["A100"], GPUS["a100-40"]),
        (["A100-80G"], GPUS["a100-80"]),
        (["GeForce-RTX-4090", "H100"], GPUS["rtx4090"]),
        (["T4"], None),
        (["H100", "T4"], None),
        ([], None),
    ],
)
def test_gpus_on_other_nodes_are_known_by_their_name_in_ray(kinds, expected, monkeypatch):
    monkeypatch.setattr(hardware_module, "gpus", list)
    found = hardware_of_run([8, 4], kinds)
    assert found == (None if expected is None else replace(expected, num_gpus=8, num_nodes=2, has_liger=is_installed()))


def test_an_unknown_gpu_has_the_speed_of_an_a100_and_the_reason_says_so(monkeypatch):
    monkeypatch.setattr(hardware_module, "gpus", lambda: [Gpu("NVIDIA L4", 23034, "580", "8.9")])
    hardware = hardware_of_run([2], ["H100"])
    assert hardware is not None
    assert (hardware.memory, hardware.flops) == (23034 * 2**20, GPUS["a100-80"].flops)
    assert hardware.host_memory is not None
    _, reason = chosen(settings_of("grpo", MODELS[0]), replace(hardware, host_memory=None))
    assert reason.endswith("; NVIDIA L4 is planned with the speed of an A100")


def test_ray_names_the_kinds_of_gpus(monkeypatch):
    node = {"Alive": True, "NodeID": "a", "Resources": {"CPU": 8.0, "GPU": 8.0, "accelerator_type:H100": 1.0}}
    head = {"Alive": True, "NodeID": "b", "Resources": {"CPU": 8.0}}
    monkeypatch.setattr(ray_cluster.ray, "nodes", lambda: [head, node])
    cluster = ray_cluster._describe_cluster(is_local=False)
    assert (cluster.node_gpus, cluster.gpu_kinds) == ([8, 0], ("H100",))


def seats(plan: Plan, role: str) -> list[str]:
    """Return who shares the GPUs of a role."""
    return [
        " + ".join(plan.work.layout.users(seat.island, gpu)) for seat in plan.work.layout.of(role) for gpu in seat.gpus
    ]


def test_a_judge_model_is_placed_and_its_weights_and_cache_are_planned():
    judge = {"pretrain": SMALL, "judge": LARGE, "n_samples_per_prompt": 8}
    plan = plan_of("grpo", num_gpus=4, **judge)
    assert seats(plan, "judge") == ["actor + ref + engine + judge"] * 4
    (gpu,) = plan.gpus
    weights = 7.6e9 * 2
    assert gpu.phases["judge"]["weights"] == pytest.approx(weights, rel=0.02)
    assert gpu.phases["judge"]["cache"] > 20 * GIB
    # Asleep, a judge keeps only its process on the GPU, and its weights in host memory.
    assert gpu.phases["generate"]["weights"] < weights / 4
    assert plan.host["sleeping judge"] == pytest.approx(4 * weights, rel=0.02)
    assert seats(plan_of("grpo", num_gpus=4, async_train="true", **judge), "judge") == ["judge"]
    filtering = plan_of("grpo", num_gpus=4, dynamic_filtering="true", **judge)
    assert seats(filtering, "judge") == ["judge"]
    assert "sleeping judge" not in filtering.host
    assert filtering.work.layout.num_gpus == 4
    large = plan_of("grpo", num_gpus=8, judge_num_engines=2, judge_tensor_parallel_size=2, **judge)
    assert seats(large, "judge") == ["judge"] * 4
    assert seats(large, "actor") == ["actor + ref + engine"] * 4


def test_a_judge_that_does_not_fit_is_named():
    plan = plan_of("grpo", pretrain=SMALL, judge="Qwen/Qwen2.5-32B", gpu="rtx4090", num_gpus=1)
    assert not plan.fits
    assert shortage(plan.work, plan.gpus, plan.batching).startswith(
        "a judge on 1 GPU has no room for a question and answer"
    )


@pytest.mark.parametrize(
    ("gpus", "engines", "judges"), [(1, ["engine + judge"], ["engine + judge"]), (4, ["engine"] * 3, ["judge"])]
)
def test_a_judge_of_generate_has_its_own_gpu_if_there_is_one(gpus, engines, judges):
    plan = plan_of("generate", pretrain=SMALL, judge=LARGE, num_gpus=gpus, prompt_data="x")
    assert (seats(plan, ENGINE), seats(plan, "judge")) == (engines, judges)
    assert plan.fits


def test_a_judge_on_a_cpu_adds_its_weights_and_a_process():
    plans = [plan_of("grpo", pretrain=SMALL, gpu="cpu", **judge) for judge in ({}, {"judge": SMALL})]
    added = {name: plans[1].host[name] - plans[0].host[name] for name in ("models", "processes")}
    assert added["models"] > 1.5e9 * 2
    assert added["processes"] > GIB / 2
    assert "judge" in [seat.role for seat in plans[1].work.layout.seats]
