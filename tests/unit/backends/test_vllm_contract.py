"""What the program needs of vLLM, checked in the sources of the installed vLLM and of the CUDA wheel."""

import ast
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from registry import pinned, unpacked
from vllm_calls import PROGRAM, WEIGHT_TRANSFER, Sources, engine_argument_sets, environment_names, type_errors

from rlhf_cli.backends.rollout.vllm_batch import _FIRST_WEIGHTS
from rlhf_cli.environment import user_cache
from rlhf_cli.errors import _SHORTAGES

WORKER = "vllm.v1.worker.gpu_worker"
FROM_CUDA = re.compile(r"CUDA|Cuda|CUBLAS")


def installed() -> Path:
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("vLLM is not installed")
    return Path(found.origin).parents[1]


@pytest.fixture(scope="module", params=["installed", pytest.param("CUDA wheel", marks=pytest.mark.slow)])
def sources(request: pytest.FixtureRequest) -> Sources:
    return Sources(installed() if request.param == "installed" else unpacked(*pinned("vllm")))


def test_the_checked_calls_are_those_of_the_program():
    names = {name for found in engine_argument_sets() for name in found}
    assert names >= {"enable_lora", "limit_mm_per_prompt", "enable_sleep_mode", "enable_return_routed_experts"}
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" in environment_names()


@pytest.mark.slow  # mypy reads two hundred modules
@pytest.mark.timeout(600)
def test_calls_overrides_and_attributes_have_the_types_of_vllm(sources: Sources, tmp_path):
    cache = user_cache("tests") / "mypy" / sources.folder.name
    assert type_errors(sources, tmp_path, cache) == ""


def test_environment_variables_exist(sources: Sources):
    keys = {node.value for node in ast.walk(sources.tree("vllm.envs")) if isinstance(node, ast.Constant)}
    assert environment_names() <= keys


def test_level_1_moves_weights_to_the_host_and_level_2_drops_them(sources: Sources, monkeypatch):
    kept: list[tuple[str, ...]] = []
    allocator = SimpleNamespace(sleep=lambda offload_tags: kept.append(offload_tags))
    stand_in = SimpleNamespace(get_mem_allocator_instance=lambda: allocator)
    monkeypatch.setitem(sys.modules, "vllm.device_allocator", stand_in)
    backend = sources.run("vllm.device_allocator.sleep_mode_backend", "CuMemBackend", SleepModeBackend=object)()
    backend.suspend(1)
    backend.suspend(2)
    assert ["weights" in tags for tags in kept] == [True, False]
    assert not any("kv_cache" in tags for tags in kept)


def worker() -> SimpleNamespace:
    """Return the attributes of a worker that its `sleep` and `wake_up` use."""
    calls: list[object] = []
    model = torch.nn.Module()
    model.register_buffer("rope", torch.ones(2))
    return SimpleNamespace(
        calls=calls,
        model_runner=SimpleNamespace(model=model),
        sleep_mode_backend=SimpleNamespace(suspend=calls.append, resume=calls.append),
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(enable_nccl_comm_suspend=False)),
        get_draft_model=lambda: None,
        synchronize_device=lambda: None,
        _save_sleep_parameters=lambda model: None,
        _sleep_saved_parameters={},
        _sleep_saved_buffers={},
        _sleep_saved_draft_buffers={},
    )


def names_of_a_worker(free: list[int]) -> dict[str, Any]:
    """Return names for a worker's methods, on a device with these free bytes at each question."""
    accelerator = SimpleNamespace(synchronize=lambda: None, get_memory_info=lambda: (free.pop(0), 100))
    return {
        "torch": SimpleNamespace(accelerator=accelerator),
        "time": SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda _: None),
        "current_platform": SimpleNamespace(is_rocm=lambda: False),
        "logger": SimpleNamespace(info=lambda *_: None),
        "format_gib": str,
    }


def test_sleep_fails_if_memory_in_use_grows_and_buffers_survive_level_2(sources: Sources):
    made = worker()
    rope = made.model_runner.model.rope
    sources.run(WORKER, "Worker.sleep", **names_of_a_worker([10, 60]))(made, 2)
    rope.zero_()
    wake = sources.run(WORKER, "Worker.wake_up", **names_of_a_worker([]))
    wake(made, ["kv_cache"])
    assert not rope.any()
    wake(made, ["weights"])
    assert rope.tolist() == [1, 1]
    assert made.calls == [2, ["kv_cache"], ["weights"]]
    with pytest.raises(AssertionError):
        sources.run(WORKER, "Worker.sleep", **names_of_a_worker([10, 9]))(worker(), 1)


@pytest.mark.parametrize("engine", ["ipc_engine.IPCWeightTransferEngine", "nccl_engine.NCCLWeightTransferEngine"])
def test_receiving_uses_nothing_of_the_model_but_load_weights(sources: Sources, engine: str):
    """`Watching` puts an object with this method only in the place of the model."""
    module, name = engine.split(".")
    body = sources.definition(f"{WEIGHT_TRANSFER}.{module}", f"{name}.receive_weights")
    uses = {ast.unparse(node) for node in ast.walk(body) if isinstance(node, ast.Attribute)}
    assert {use for use in uses if use.startswith("self.model.")} == {"self.model.load_weights"}


def test_an_update_is_received_by_the_method_that_the_program_overrides(sources: Sources):
    update = sources.definition(f"{WEIGHT_TRANSFER}.base", "WeightTransferEngine.update_weights")
    assert "self.receive_weights(" in ast.unparse(update)
    for method in ("start_weight_update", "update_weights", "finish_weight_update"):
        assert f"weight_transfer_engine.{method}(" in ast.unparse(sources.definition(WORKER, "Worker"))


def test_the_senders_offset_is_1(sources: Sources):
    """`EngineClient` adds the workers of earlier engines to it."""
    trainer = sources.definition(f"{WEIGHT_TRANSFER}.nccl_engine", "NCCLTrainerWeightTransferEngine")
    assert "rank_offset=1" in ast.unparse(trainer)


def test_sentences_that_the_program_recognises_are_those_of_vllm(sources: Sources):
    ours = [part for part in re.split(r"\|(?![^(]*\))", _SHORTAGES["GPU memory"]) if not FROM_CUDA.search(part)]
    assert "larger than the available KV cache" in ours
    # Of the worker's error, the logger of reloads, and the first weights.
    more = ("stack trace above for the root cause", "Failed to load weights", "', please", _FIRST_WEIGHTS)
    missing = [text for text in (*ours, *more) if text not in sources.text]
    assert not missing, json.dumps(missing)


@pytest.mark.parametrize("kind", ["Stopping", "AsyncStopping"])
def test_the_schedulers_method_has_the_parameters_of_vllm(sources: Sources, kind: str):
    """vLLM passes some by name, which mypy does not compare."""
    module, base = ("async_scheduler", "AsyncScheduler") if kind == "AsyncStopping" else ("scheduler", "Scheduler")
    theirs = sources.definition(f"vllm.v1.core.sched.{module}", f"{base}._update_request_with_output")
    own = Sources(PROGRAM.parent).definition(
        "rlhf_cli.backends.rollout.vllm_scheduler", f"{kind}Scheduler._update_request_with_output"
    )
    assert isinstance(own, ast.FunctionDef)
    assert isinstance(theirs, ast.FunctionDef)
    assert ast.unparse(own.args) == ast.unparse(theirs.args)
