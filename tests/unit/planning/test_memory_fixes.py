"""Out-of-memory errors name what else is in the memory, and flags with which the plan needs less than there was."""

import re

import pytest
import torch
from plans import LARGE, SMALL, engine_of, plan_config

from rlhf_cli import cli
from rlhf_cli.backends.doctor.gpus import Gpu
from rlhf_cli.command_table import COMMANDS
from rlhf_cli.commands.plan import planned_class
from rlhf_cli.errors import OutOfMemory, RunError, Shortage, UsageError
from rlhf_cli.flags import flags_of
from rlhf_cli.options import build_config
from rlhf_cli.planning.fixes import explained, size_in
from rlhf_cli.planning.hardware import hardware_of
from rlhf_cli.planning.memory import GIB, USABLE
from rlhf_cli.planning.planner import HOST, Plan
from rlhf_cli.runs.memory_fixes import with_memory_fixes
from rlhf_cli.runs.plan import planner_of

TORCH = (
    "CUDA out of memory. Tried to allocate 2.32 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.10 GiB is free."
    " Process 12 has 11.00 GiB memory in use. Including non-PyTorch memory, this process has 66.00 GiB memory in use."
)
CPU = "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"
NO_CACHE = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when"
SMALL_CACHE = (
    "ValueError: To serve at least one request with the model's max seq len (16384), (4.0 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (1.5 GiB). Based on the available memory, the estimated "
    "maximum model length is 6144. Try increasing"
)
BUSY = (
    "ValueError: Free memory on device cuda:0 (39.1/79.1 GiB) on startup is less than desired GPU memory utilization "
    "(0.9, 71.19 GiB). Decrease GPU memory utilization"
)
TRAINING = "while training on a pack of 8192 tokens"


def fixed(command: str, shortage: Shortage, **values) -> tuple[str, Plan, Plan]:
    """Return the message, the plan of the run that failed, and that with the flags of the message."""
    config = plan_config(command, **values)
    hardware = hardware_of(config.plan)
    planner = planner_of(config, config.plan)
    where, fix = explained(shortage, config, hardware, planner)
    assert fix is not None
    flags = re.match(r"set ((?:--\w+(?: [^-(]\S*)?\s?)+)", fix)
    assert flags, fix
    given: dict[str, object] = {}
    for name, value in re.findall(r"--(\w+)(?: ([^-(]\S*))?", flags[1]):
        given |= {name.removeprefix("no_"): "false" if name.startswith("no_") else value or "true"}
    assert given.keys() <= {flag.name for flag in flags_of(planned_class(command)).values()}
    changed = build_config(planned_class(command), {"pretrain": LARGE, "gpu": "h100"} | values | given)
    return str(OutOfMemory(Shortage(shortage.kind, where, fix))), planner(config, hardware), planner(changed, hardware)


def test_fewer_tokens_per_micro_batch_are_not_proposed_for_a_pack_of_one_sequence():
    """A run splits packs until each has one sequence, here of 162 tokens."""
    # The default type depends on the CPU.
    given = {"pretrain": "HuggingFaceTB/SmolLM2-135M", "param_dtype": "fp32", "gradient_checkpointing": "true"}
    config = plan_config("sft", gpu="cpu", **given)
    words = {"kind": "host memory", "where": "while training on a pack of 162 tokens", "detail": f"{CPU} 900000 bytes"}
    hardware, planner = hardware_of(config.plan), planner_of(config, config.plan)
    fixes = [explained(Shortage(**words, tokens=size), config, hardware, planner)[1] for size in (0, 162)]  # type: ignore[arg-type]
    assert fixes[0] is not None
    assert fixes[1] is not None
    assert fixes[0].startswith("set --train_max_tokens_per_gpu ")
    assert fixes[1].startswith("set --lora_rank 16 (")


@pytest.mark.parametrize(
    ("command", "values", "shortage", "phase"),
    [
        ("sft", {"pretrain": SMALL}, Shortage("GPU memory", TRAINING, detail=TORCH), "train"),
        ("sft", {"num_gpus": 8}, Shortage("GPU memory", TRAINING, detail=TORCH), "train"),
        ("dpo", {"num_gpus": 8}, Shortage("GPU memory", TRAINING, detail=TORCH), "train"),
        ("sft", {}, Shortage("GPU memory", "while taking an optimizer step", detail=TORCH), "train"),
        ("rm", {"pretrain": SMALL}, Shortage("GPU memory"), "train"),
        ("grpo", {"num_gpus": 8}, Shortage("GPU memory", TRAINING, role="actor", detail=TORCH), "train"),
        ("ppo", {"num_gpus": 2, "pretrain": SMALL}, Shortage("GPU memory", TRAINING, role="critic"), "train"),
        ("grpo", {"num_gpus": 8}, Shortage("host memory", role="actor"), HOST),
        ("sft", {"pretrain": SMALL, "gpu": "cpu"}, Shortage("host memory", TRAINING, detail=f"{CPU} 9000000000 bytes"),
         HOST),
    ],
)  # fmt: skip
def test_the_flags_save_what_was_missing(command, values, shortage, phase):
    message, before, after = fixed(command, shortage, **values)
    missing = max(size_in(shortage.detail, r"tried to allocate ([\d.]+) (bytes|GiB)") - 1.1 * GIB, 0)
    assert after.peak_in(phase) <= min(USABLE * before.peak_in(phase), before.peak_in(phase) - missing)
    assert after.fits
    assert f"({after.peak_in(phase) / GIB:.1f} instead of {before.peak_in(phase) / GIB:.1f} GiB planned)" in message


def test_what_else_is_on_the_gpu_is_named_with_its_planned_memory():
    shortage = Shortage("GPU memory", TRAINING, role="critic", detail=TORCH)
    message, _, _ = fixed("ppo", shortage, num_gpus=2, pretrain=SMALL)
    # Sleeping models keep a context and communicators (0.55 + 0.9 GiB), an engine a context and graphs (0.55 + 1.5).
    assert message.startswith(
        f"out of GPU memory {TRAINING}, sharing the GPU with actor (1.5 GiB planned), ref (1.5 GiB planned), engine "
        "(2.0 GiB planned) and processes that use 11.0 GiB: set --gradient_checkpointing ("
    )


@pytest.mark.parametrize(
    ("detail", "share"),
    [
        # 39.1 / 79.1 is 0.494, less 0.01 for processes that grow.
        (BUSY, 0.48),
        # 2.5 of 79.1 GiB are missing: 0.0316, and 0.01 for rounding.
        (SMALL_CACHE, 0.65),
        # A death while generating leaves a tenth more to activations.
        ("", 0.5),
    ],
)
def test_an_engine_is_given_the_share_that_vllm_has_room_for(detail, share):
    shortage = Shortage("GPU memory", "in vLLM", role="engine", detail=detail)
    message, before, after = fixed("grpo", shortage, num_gpus=8)
    assert engine_of(before).share == 0.6
    assert engine_of(after).share == share
    assert after.fits
    assert f": set --vllm_gpu_memory_utilization {share:g} (KV cache for {engine_of(after).cache_tokens:,}" in message


def test_an_engine_whose_weights_fill_its_share_gets_more_gpus_or_shorter_sequences():
    shortage = Shortage("GPU memory", "in vLLM", role="engine", detail=NO_CACHE)
    message, before, after = fixed("grpo", shortage, num_gpus=8)
    assert "set --vllm_tensor_parallel_size 2 " in message
    assert engine_of(after).cache > engine_of(before).cache + engine_of(before).max_len * engine_of(before).token_bytes
    full = {"pretrain": SMALL, "max_len": 16_384, "vllm_gpu_memory_utilization": 0.94}
    message, _, after = fixed("generate", Shortage("GPU memory", "in vLLM", role="engine", detail=SMALL_CACHE), **full)
    assert "set --max_len 6144 " in message
    assert after.fits


def test_an_engine_on_a_cpu_with_a_small_cache_gets_shorter_sequences():
    shortage = Shortage("host memory", "while vLLM started", role="engine", detail=SMALL_CACHE)
    message, before, after = fixed("generate", shortage, gpu="cpu", pretrain=SMALL, max_len=16_384)
    assert message.endswith(": set --max_len 6144 (a sequence needs 4.0 GiB of KV cache, which has 1.5 GiB)")
    assert engine_of(after).max_len == 6144 < engine_of(before).max_len


def test_a_weight_push_in_files_counts_where_it_is_set():
    config = plan_config("grpo", num_gpus=8, pretrain=SMALL, vllm_sync_backend="shm")
    shortage = OutOfMemory("weight push: ", Shortage("space in /dev/shm", "for 256 MiB in /dev/shm or /tmp")).shortage
    assert shortage is not None
    _, fix = explained(shortage, config, hardware_of(config.plan), planner_of(config, config.plan))
    # 1.54 billion weights of 2 bytes, and a quarter more.
    assert fix is not None
    assert re.match(r"start the container with --shm-size \dg \(.*weight push 2\.9 GiB", fix)


def test_a_container_gets_a_size_of_dev_shm():
    config = plan_config("sft", gpu="cpu", pretrain=SMALL, num_processes=2)
    shortage = Shortage("space in /dev/shm", "in a rank")
    _, fix = explained(shortage, config, hardware_of(config.plan), planner_of(config, config.plan))
    # Two ranks with 66 MiB each.
    assert fix is not None
    assert fix.startswith("start the container with --shm-size 1g (ranks 0.1 GiB planned)")


def test_the_command_line_explains_errors_of_libraries(monkeypatch, tmp_path):
    def fail(config: object) -> None:
        raise torch.OutOfMemoryError(TORCH)

    monkeypatch.setattr("rlhf_cli.planning.hardware.gpus", lambda: [Gpu("H100", 80_994, "580", "9.0")])
    values = {"pretrain": SMALL, "dataset": "rows", "output": str(tmp_path), "param_dtype": "bf16"}
    config = build_config(COMMANDS["sft"].config_class, values)
    with pytest.raises(RunError) as caught:
        cli._with_trace(fail, checks=False)(config)
    assert str(caught.value).startswith(
        "out of GPU memory sharing the GPU with processes that use 11.0 GiB: set --gradient_checkpointing ("
    )
    assert str(caught.value).endswith(f" (trace in {tmp_path / 'error.log'})")
    assert "torch.OutOfMemoryError" in (tmp_path / "error.log").read_text()


def test_an_error_keeps_its_own_fix_if_no_plan_is_possible(monkeypatch):
    def refuse(*words: object) -> None:
        raise UsageError("no such model")

    monkeypatch.setattr("rlhf_cli.planning.planner.find_shape", refuse)
    config = plan_config("sft")
    with pytest.raises(OutOfMemory) as caught, with_memory_fixes(config):
        raise OutOfMemory(Shortage("GPU memory", TRAINING, "set --own_flag"))
    assert str(caught.value) == f"out of GPU memory {TRAINING}: set --own_flag"


def test_a_lost_rank_while_shared_memory_is_full_names_its_size(monkeypatch):
    monkeypatch.setattr("rlhf_cli.runs.memory_fixes.is_shm_full", lambda: True)
    config = build_config(
        COMMANDS["sft"].config_class, {"pretrain": SMALL, "dataset": "rows", "output": "run", "num_processes": 2}
    )
    with pytest.raises(OutOfMemory) as caught, with_memory_fixes(config):
        raise RuntimeError("Read error [127.0.0.1]:19346: Connection reset by peer.")
    assert str(caught.value).startswith(
        "the connection to a rank was lost while /dev/shm was full, probably out of space in /dev/shm: start the "
        "container with --shm-size 1g (ranks 0.1 GiB planned)"
    )


def test_a_plan_is_possible_where_no_memory_is_left_to_measure_the_cpu(monkeypatch):
    def fail() -> None:
        raise RuntimeError(f"{CPU} 33554432 bytes")

    monkeypatch.setattr("rlhf_cli.planning.hardware._measured_speed", fail)
    config = build_config(COMMANDS["sft"].config_class, {"pretrain": SMALL, "dataset": "rows", "output": "run"})
    with pytest.raises(OutOfMemory, match=r"out of host memory: set --.* GiB planned\)"), with_memory_fixes(config):
        raise RuntimeError(f"{CPU} 17000000 bytes")


@pytest.mark.parametrize(
    ("command", "role", "where"),
    [
        ("dpo", "", "while computing a forward pass on a pack of 8192 tokens"),
        ("kto", "", "while computing a forward pass on a pack of 8192 tokens"),
        ("ppo", "reward", "while computing a forward pass on a pack of 8192 tokens"),
        ("ppo", "critic", "while computing a forward pass on a pack of 8192 tokens"),
        ("ppo", "ref", "while computing a forward pass on a pack of 8192 tokens"),
        ("ppo", "actor", "while taking an optimizer step"),
        ("ppo", "actor", ""),
        ("grpo", "engine", "in vLLM"),
    ],
)
def test_a_flag_is_named_for_each_role_and_phase(command, role, where):
    message, before, after = fixed(command, Shortage("GPU memory", where, role=role), num_gpus=8, pretrain=SMALL)
    phase = "forward" if "forward" in where else "train" if "step" in where else None
    peaks = [
        plan.peak_in(phase) if phase else sum(plan.peak_in(one) for one in plan.gpus[0].phases)
        for plan in (before, after)
    ]
    assert message.count(": ") == 1
    assert after.fits
    assert peaks[1] < peaks[0] or (role == "engine" and engine_of(after).share < engine_of(before).share)
