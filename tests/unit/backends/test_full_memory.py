"""Out-of-memory errors of all sources are recognised."""

import pickle
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import ray
import torch
from ray.exceptions import RayTaskError
from torch import nn

from rlhf_cli.backends.cluster.placement import ENGINE
from rlhf_cli.backends.cluster.ray_cluster import death_reason
from rlhf_cli.backends.process.killed import is_shm_full, num_killed, usable_memory
from rlhf_cli.backends.process.launch import check_killed
from rlhf_cli.backends.rollout.engine import EngineDead, EngineSettings
from rlhf_cli.backends.rollout.engine_failures import cause_of, reason_of
from rlhf_cli.backends.rollout.vllm_start import _memory_fix, _shortage, start_failure
from rlhf_cli.backends.training.memory import named_shortage
from rlhf_cli.data.packing.packs import TokenSequence, pack
from rlhf_cli.errors import OutOfMemory, RunError, Shortage, full_memory

CUDA = "CUDA out of memory. Tried to allocate 2.32 GiB. GPU 0 has a total capacity of 23.52 GiB of which 1.1 GiB is"
RAY = "Task was killed due to the node running low on memory.\nMemory on the node was 22.90GB / 24.00GB (0.954)"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError(CUDA), "GPU memory"),
        (RuntimeError(f"worker failed: {CUDA}"), "GPU memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "GPU memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"), "host memory"),
        (ValueError("No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"), "GPU memory"),
        (ValueError("4.0 GiB KV cache is needed, which is larger than the available KV cache memory"), "GPU memory"),
        (ValueError("Free memory on device (9.1/23.5 GiB) on startup is less than desired GPU memory utilization"),
         "GPU memory"),
        (RuntimeError("CUDA Error: out of memory at csrc/cumem_allocator.cpp:62"), "GPU memory"),
        (RuntimeError("ncclUnhandledCudaError: Cuda failure 2 'out of memory'"), "GPU memory"),
        (RuntimeError("Error while creating shared memory segment /dev/shm/nccl-aBc (size 9637888)"),
         "space in /dev/shm"),
        (RuntimeError("std::bad_alloc"), "host memory"),
        (RuntimeError("could not create a primitive"), "host memory"),
        (RuntimeError("could not create a primitive descriptor for a matmul primitive"), None),
        (ray.exceptions.OutOfMemoryError(RAY), "host memory"),
        (ValueError("Memory on node 0 (0.5/24 GiB) is less than requested memory for kv (1.0 GiB)"), "host memory"),
        (MemoryError(), "host memory"),
        (RuntimeError("Resource temporarily unavailable"), "host memory"),
        (BlockingIOError(11, "Resource temporarily unavailable"), None),
        (OSError(12, "Cannot allocate memory"), "host memory"),
        (OSError(28, "No space left on device", "/dev/shm/rlhf-1"), "space in /dev/shm"),
        (RuntimeError("DataLoader worker is killed by signal: Bus error. It is possible that"), "space in /dev/shm"),
        (OSError(28, "No space left on device", "/data/run/metrics.jsonl"), None),
        (ValueError("something else"), None),
    ],
)  # fmt: skip
def test_the_kind_of_memory_is_read_from_a_librarys_error(error, kind):
    assert full_memory(error) == kind


def pack_of(*lengths):
    return pack([TokenSequence(np.ones(length, np.int32), np.arange(length) > 0) for length in lengths])


class Layers(nn.Module):
    def __init__(self, *, recomputes: bool) -> None:
        super().__init__()
        self.gradient_checkpointing = recomputes


@pytest.mark.parametrize(
    ("lengths", "recomputes", "end"),
    [
        ((30, 30, 40), False, "100 tokens: set --gradient_checkpointing or --train_max_tokens_per_gpu 50"),
        ((30, 30, 40), True, "100 tokens: set --train_max_tokens_per_gpu 50"),
        ((80, 20), True, "100 tokens: set --train_max_tokens_per_gpu 80"),
        ((100,), True, "one sequence: set --max_len 50, or --sequence_parallel_size 2 on two GPUs"),
    ],
)
def test_a_step_without_memory_names_phase_tokens_and_flag(lengths, recomputes, end):
    model = Layers(recomputes=recomputes)
    with pytest.raises(OutOfMemory) as caught, named_shortage("training", model, pack_of(*lengths)):
        raise torch.OutOfMemoryError(CUDA)
    assert str(caught.value).startswith("out of GPU memory while training on a pack of 100 tokens: ")
    assert str(caught.value).endswith(end)


def test_an_optimizer_step_and_a_forward_pass_have_other_fixes():
    model = Layers(recomputes=False)
    step, forward = "taking an optimizer step", "computing a forward pass"
    with pytest.raises(OutOfMemory, match=f"while {step}: set --optim adamw_bf16"), named_shortage(step, model, None):
        raise torch.OutOfMemoryError(CUDA)
    with pytest.raises(OutOfMemory) as caught, named_shortage(forward, model, pack_of(2, 3)):
        raise torch.OutOfMemoryError(CUDA)
    assert str(caught.value).endswith("forward pass on a pack of 5 tokens: set --train_max_tokens_per_gpu 3")


def test_other_errors_of_a_step_stay_what_they_are():
    with pytest.raises(ZeroDivisionError), named_shortage("training", Layers(recomputes=True), pack_of(4)):
        raise ZeroDivisionError


def test_a_process_that_rays_monitor_ended_has_died_of_memory():
    reason = death_reason(ray.exceptions.OutOfMemoryError(RAY), "critic")
    assert reason == Shortage("host memory", role="critic")
    assert str(reason).startswith("out of host memory: stop other programs")


def test_an_engine_that_died_of_memory_says_so_through_ray():
    died = EngineDead(Shortage("GPU memory", "in vLLM", "set less", role=ENGINE))
    assert reason_of(died) == died.shortage
    assert cause_of(RayTaskError("generate", "", died)) is died
    (raised,) = (cause_of(RayTaskError("wake", "", torch.OutOfMemoryError(CUDA))),)
    assert str(raised).startswith("out of GPU memory in a rollout engine: ")


def test_a_shortage_keeps_its_parts_in_another_process_until_the_plan_explains_it():
    error = pickle.loads(pickle.dumps(OutOfMemory("rank 0: ", Shortage("host memory", "there", role="actor"), "; log")))
    assert error.shortage.role == "actor"
    error.explain("there, sharing it", "set --flag")
    assert str(error) == "rank 0: out of host memory there, sharing it: set --flag; log"
    assert str(RunError("plain")) == "plain"


def test_an_engine_that_does_not_start_is_told_both_ways_to_set_its_share():
    fix = _memory_fix(EngineSettings(max_model_len=4096, gpu_memory_utilization=0.6))
    assert "raise --vllm_gpu_memory_utilization to 0.8" in fix
    assert "lower it to 0.3" in fix
    assert "--vllm_tensor_parallel_size 2" in fix


def test_vllms_cache_on_a_cpu_is_host_memory():
    settings = EngineSettings(max_model_len=4096)
    on_cpu, on_gpu = (_shortage("GPU memory", "text", "m", settings, on_cpu=here) for here in (True, False))
    assert str(on_cpu).startswith("out of host memory while vLLM started with m: stop other programs")
    assert str(on_gpu).startswith("out of GPU memory while vLLM started with m: vLLM may use ")


def test_a_rank_that_the_kernel_killed_for_memory_is_told_from_one_that_a_person_killed():
    with pytest.raises(OutOfMemory, match="out of host memory on this machine, where the kernel has killed a rank"):
        check_killed(247, for_memory=True)
    with pytest.raises(OutOfMemory, match="out of space in /dev/shm in a rank: remove leftover files"):
        check_killed(249, for_memory=False)
    with pytest.raises(OutOfMemory, match="a rank was killed with signal 9, probably out of host memory: stop other"):
        check_killed(247, for_memory=False)
    for status in (0, 1, 2, 130):
        check_killed(status, for_memory=False)


def test_a_rank_that_ray_lost_without_a_word_was_probably_killed_for_memory():
    error = ray.exceptions.RayActorError(
        error_msg="Worker unexpectedly exits with a connection error code 2. End of file."
    )
    reason = str(death_reason(error, "actor"))
    assert reason.startswith(
        "killed from outside, or crashed with an error at the end of its log, probably out of host"
    )
    other = ray.exceptions.RayActorError(error_msg="The actor was ended by ray.kill")
    assert death_reason(other, "actor") == "The actor was ended by ray.kill"


def test_a_rank_that_ray_lost_while_shared_memory_was_full_had_a_bus_error(monkeypatch):
    monkeypatch.setattr("rlhf_cli.backends.cluster.ray_cluster.is_shm_full", lambda: True)
    reason = death_reason(ray.exceptions.RayActorError(error_msg="exits with a connection error code 2"), "actor")
    assert str(reason).startswith("ended while /dev/shm was full, probably out of space in /dev/shm: remove leftover")


def test_shared_memory_is_full_without_room_for_a_page(monkeypatch):
    for num_free, full in ((0, True), (511, True), (512, False)):
        sizes = SimpleNamespace(f_bavail=num_free, f_frsize=4096)
        monkeypatch.setattr("os.statvfs", lambda folder, sizes=sizes: sizes)
        assert is_shm_full() == full


def files(root, **texts):
    for name, text in texts.items():
        path = root / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_kills_for_memory_are_counted_by_the_container_or_the_machine(tmp_path):
    assert num_killed(tmp_path) == 0
    files(tmp_path, proc__vmstat="nr_free_pages 5\noom_kill 3\n", proc__self__cgroup="0::/job\n")
    assert num_killed(tmp_path) == 3
    # Other containers do not count.
    files(tmp_path, sys__fs__cgroup__job__memory_DOT_events="oom 9\noom_kill 1\noom_group_kill 0\n")
    assert num_killed(tmp_path) == 1
    files(tmp_path, proc__self__cgroup="9:name=systemd:/\n4:memory:/docker/abc\n")
    files(tmp_path, sys__fs__cgroup__memory__memory_DOT_oom_control="under_oom 0\noom_kill 2\n")
    assert num_killed(tmp_path) == 2


def test_a_container_may_use_less_memory_than_the_machine_has(tmp_path):
    total = psutil.virtual_memory().total
    assert usable_memory(tmp_path) == total
    files(tmp_path, proc__self__cgroup="0::/\n", sys__fs__cgroup__memory_DOT_max="max\n")
    assert usable_memory(tmp_path) == total
    files(tmp_path, sys__fs__cgroup__memory_DOT_max="1048576\n")
    assert usable_memory(tmp_path) == 2**20
    files(tmp_path, proc__self__cgroup="4:memory:/\n")
    files(tmp_path, sys__fs__cgroup__memory__memory_DOT_limit_in_bytes="2097152\n")
    assert usable_memory(tmp_path) == 2**21


LOGGED = """
(EngineCore pid=4164) ERROR 11-27 07:53:15 [core.py:1510]   File "core.py", line 1482, in run_engine_core
(EngineCore pid=4164) ERROR 11-27 07:53:15 [core.py:1510] ModuleNotFoundError: No module named 'flashinfer'
Process EngineCore:
Traceback (most recent call last):
"""
OF_A_WORKER = """
(Worker_TP1 pid=7) ERROR 11-27 07:53:15 [multiproc_executor.py:900] ValueError: 3 heads on 2 GPUs
(EngineCore pid=5) ERROR 11-27 07:53:16 [core.py:1510] Exception: WorkerProc initialization failed due to an exception \
in a background process. See stack trace for root cause.
""".replace("\\\n", "")


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (LOGGED, "ModuleNotFoundError: No module named 'flashinfer'"),
        (OF_A_WORKER, "ValueError: 3 heads on 2 GPUs"),
        (
            "ValueError: first\n  File x\npackage.OtherError: second",
            "package.OtherError: second",
        ),
        ("INFO no Error: here", "Engine core initialization failed. See root cause above."),
    ],
)
def test_a_failed_start_is_explained_by_the_engines_own_process(log, reason):
    error = RuntimeError("Engine core initialization failed. See root cause above.\nmore")
    assert start_failure(error, log) == reason
