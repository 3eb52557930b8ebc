"""The order in which engines and roles start, with a synchronous fake of Ray."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from online_settings import resolve
from ray.exceptions import ActorDiedError
from remote_calls import recorded

from rlhf_cli.algorithms.estimators.table import ESTIMATORS
from rlhf_cli.backends.cluster.placement import Layout, Seat, plan_layout
from rlhf_cli.backends.roles.start import Processes
from rlhf_cli.errors import ProcessDied
from rlhf_cli.runs.online.models import find_models
from rlhf_cli.runs.online.start_roles import OnlineRoles
from rlhf_cli.trainers.online.update_plan import StepCounts

SHARED: dict[str, Any] = {"colocate_all_models": "true", "deepspeed_enable_sleep": "true", "vllm_enable_sleep": "true"}


@dataclass
class Places:
    """A reservation that records which process has each place."""

    layout: Layout

    def options(self, seat: Seat) -> dict[str, Any]:
        return {"name": f"{seat.role}-{seat.rank}"}


@dataclass(eq=False)
class Call:
    """A remote call."""

    process: str
    method: str
    result: Any = None


@dataclass
class FakeProcesses:
    """Records the calls to the processes of a run; `dying` dies during construction."""

    dying: str = ""
    events: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    environments: dict[str, dict[str, str]] = field(default_factory=dict)

    def remote(self, kind: type) -> Any:
        return SimpleNamespace(
            options=lambda *, name, **others: SimpleNamespace(remote=lambda **given: self._process(name))
        )

    def _process(self, name: str) -> Any:
        self.events.append(f"{name} starts")

        def build(environment: dict[str, str], factory: str, *args: Any) -> Call:
            self.environments[name], self.settings[name] = environment, (factory, *args)
            return self._begun(name, "build")

        def call(function: Any, *args: Any) -> Call:
            return self._begun(name, recorded(function, *args)[0])

        methods = {
            "build": build,
            "call": call,
            "address": lambda: Call(name, "address", ("host", 1)),
            "visible_gpus": lambda: Call(name, "visible_gpus", f"gpu of {name}"),
        }
        return SimpleNamespace(**{method: SimpleNamespace(remote=do) for method, do in methods.items()})

    def _begun(self, name: str, method: str) -> Call:
        self.events.append(f"{name} {method}")
        return Call(name, method)

    def wait(self, calls: list[Call], **_: Any) -> tuple[list[Call], list[Call]]:
        return calls[:1], calls[1:]

    def get(self, call: Any) -> Any:
        if isinstance(call, list):
            return [one.result for one in call]
        if call.method == "build":
            if call.process == self.dying:
                raise ActorDiedError()
            self.events.append(f"{call.process} is built")
        return call.result


def started(
    folder: Path, model: str, monkeypatch: pytest.MonkeyPatch, *, gpus: int = 0, dying: str = "", **given: Any
) -> FakeProcesses:
    """Start `rlhf ppo` with a reference on a node with this many GPUs; 0 means CPU processes."""
    processes = FakeProcesses(dying)
    for name in ("remote", "get", "wait"):
        monkeypatch.setattr(ray, name, getattr(processes, name))
    settings = {"init_kl_coef": "0.1", "vllm_sync_backend": "shm"}
    config = resolve("ppo", pretrain=model, output=str(folder), **settings | given)
    models = find_models(config, ESTIMATORS["ppo"])
    layout = plan_layout(config.layout_settings(models.by_role), node_gpus=[gpus or 8])
    cluster: Any = SimpleNamespace(has_gpus=bool(gpus), threads=lambda count: 1)
    places: Any = Places(layout)
    OnlineRoles(
        config,
        Processes(cluster, places, folder),
        "transformers",
        models,
        total_steps=StepCounts(3, 4),
        end_ids=(7,),
    )
    return processes


def test_engines_start_first_and_all_models_are_built_together(tmp_path, tiny_model_dir, monkeypatch):
    found = started(tmp_path, tiny_model_dir, monkeypatch, gpus=8, critic_num_gpus_per_node="2")
    ranks = ("actor-0", "critic-0", "critic-1", "ref-0")
    assert found.events == [
        "engine-0 starts",
        "engine-0 build",
        *(f"{rank} starts" for rank in ranks),
        *(f"{rank} build" for rank in ranks),
        *(f"{rank} is built" for rank in ranks),
        "engine-0 is built",
        "actor-0 connect_engines",
    ]


def test_on_shared_gpus_each_model_sleeps_before_the_next_and_engines_start_last(tmp_path, tiny_model_dir, monkeypatch):
    found = started(tmp_path, tiny_model_dir, monkeypatch, gpus=1, **SHARED)
    ranks = ("actor-0", "critic-0", "ref-0")
    assert found.events == [
        *(f"{rank} starts" for rank in ranks),
        *(f"{rank} {event}" for rank in ranks for event in ("build", "is built", "sleep")),
        "engine-0 starts",
        "engine-0 build",
        "engine-0 is built",
        "actor-0 connect_engines",
    ]


def test_without_gpus_models_that_take_turns_are_built_together_and_then_sleep(tmp_path, tiny_model_dir, monkeypatch):
    found = started(tmp_path, tiny_model_dir, monkeypatch, **SHARED)
    ranks = ("actor-0", "critic-0", "ref-0")
    assert found.events == [
        "engine-0 starts",
        "engine-0 build",
        *(f"{rank} {event}" for event in ("starts", "build", "is built", "sleep") for rank in ranks),
        "engine-0 is built",
        "actor-0 connect_engines",
    ]


def test_a_process_that_dies_while_it_is_built_is_named(tmp_path, tiny_model_dir, monkeypatch):
    with pytest.raises(ProcessDied, match=r"critic rank 0 died \(.*\); its log is .*critic-0\.log"):
        started(tmp_path, tiny_model_dir, monkeypatch, dying="critic-0")


def test_an_engine_over_several_shared_gpus_sees_those_of_the_actor(tmp_path, tiny_model_dir, monkeypatch):
    two = {"actor_num_gpus_per_node": "2", "vllm_tensor_parallel_size": "2"}
    found = started(tmp_path, tiny_model_dir, monkeypatch, gpus=2, **SHARED, **two)
    assert found.environments["engine-0"] == {"CUDA_VISIBLE_DEVICES": "gpu of actor-0,gpu of actor-1"}
    assert found.environments["actor-1"]["WORLD_SIZE"] == "2"


def test_each_role_and_engine_gets_its_settings(tmp_path, tiny_model_dir, monkeypatch):
    found = started(tmp_path, tiny_model_dir, monkeypatch, gpus=8, critic_learning_rate="0.5", ref_zero_stage="3")
    roles = {name: args[1] for name, args in found.settings.items() if name != "engine-0"}
    assert [role.total_steps for role in roles.values()] == [3, 4, 3]
    assert roles["critic-0"].learning_rate == 0.5
    assert roles["ref-0"].deepspeed.zero_stage == 3
    assert {role.end_ids for role in roles.values()} == {(7,)}
    backend, model, settings = found.settings["engine-0"][1:]
    assert (backend, model) == ("transformers", tiny_model_dir)
    assert (settings.max_model_len, settings.seed, settings.num_threads) == (2048, 42, 1)
    assert (settings.sync_backend, settings.enable_sleep) == ("shm", False)
    assert settings.gpu_memory_utilization == pytest.approx(0.9)


def test_a_judge_that_takes_turns_sleeps_before_engines_measure_memory(tmp_path, tiny_model_dir, monkeypatch):
    found = started(tmp_path, tiny_model_dir, monkeypatch, gpus=1, **SHARED, judge=tiny_model_dir)
    of_engines = [event for event in found.events if event.startswith(("judge", "engine"))]
    assert of_engines == [
        *(f"judge-0 {event}" for event in ("starts", "build", "is built", "sleep")),
        *(f"engine-0 {event}" for event in ("starts", "build", "is built")),
        "judge-0 is built",
    ]
    assert found.events.index("ref-0 sleep") < found.events.index("judge-0 starts")
    settings = found.settings["judge-0"][-1]
    assert (settings.role, settings.enable_sleep, settings.gpu_memory_utilization) == ("judge", True, 0.6)


def test_a_judge_on_its_own_gpus_starts_with_the_engines_and_stays_awake(tmp_path, tiny_model_dir, monkeypatch):
    found = started(tmp_path, tiny_model_dir, monkeypatch, gpus=8, judge=tiny_model_dir, judge_num_engines="2")
    assert found.events[:6] == [
        f"{name} {event}" for name in ("engine-0", "judge-0", "judge-1") for event in ("starts", "build")
    ]
    assert not any(event.startswith("judge") and event.endswith("sleep") for event in found.events)
    assert found.settings["judge-1"][-1].gpu_memory_utilization == pytest.approx(0.9)
