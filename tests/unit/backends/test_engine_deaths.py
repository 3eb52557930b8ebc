"""A real rollout engine that dies in a batch with images, with fakes of Ray and of the process."""

import asyncio
import pickle
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import cloudpickle
from pictured_engines import SAMPLING, change_tower, pictured_requests, sent_weights, shm_sender, trainer_of
from ray.exceptions import RayActorError
from remote_calls import FakeCall, FakeRay, recorded
from tiny_vision import save_tiny_vision

from rlhf_cli.backends.rollout import engine_failures, engine_group
from rlhf_cli.backends.rollout.engine import EngineSettings
from rlhf_cli.backends.rollout.engine_group import EngineGroup
from rlhf_cli.backends.rollout.engine_host import EngineHost, make_engine
from rlhf_cli.backends.weight_sync.transfer import PushReport
from rlhf_cli.event_loop import LoopThread
from rlhf_cli.trainers.online.rollout import generate

SETTINGS = EngineSettings(max_model_len=256, dtype="fp32", max_images_per_prompt=2)
VERSION = 3


class Worker:
    """Runs a transformers engine; calls and results are pickled, as with Ray.

    Args:
        dies: exit during the first batch
    """

    def __init__(self, folder: str, *, dies: bool) -> None:
        self.host = EngineHost(make_engine("transformers", folder, SETTINGS))
        self.alive, self.dies = True, dies
        self.call = SimpleNamespace(remote=self._remote)
        self._thread = LoopThread("engine")

    def _remote(self, *call: Any) -> FakeCall:
        sent, method = cloudpickle.dumps(call), recorded(*call)[0]
        return FakeCall(lambda: self._answer(sent, method), waits=method in ("begin", "collect"))

    def _answer(self, sent: bytes, method: str) -> object:
        if not self.alive:
            return RayActorError()
        function, *args = pickle.loads(sent)
        answer = self._thread.run(function(self.host, *args))
        if method == "begin" and self.dies:
            self.alive = False
            return RayActorError()
        return pickle.loads(pickle.dumps(answer))


class Actor:
    """Sends a trainer's weights through shared memory."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.sender, self.pushes = trainer, shm_sender(), 0
        self.group = SimpleNamespace(all=self._all, address=lambda: ("host", 1))

    def awake(self) -> Any:
        return nullcontext()

    def _all(self, call: Any) -> list[object]:
        method, args = recorded(call)
        if method != "push_weights":
            return [None]
        self.pushes += 1
        manifest = sent_weights(self.trainer, self.sender, *args)
        return [PushReport(args[0], 8, 1.0, 1, 1, manifest)]


def test_an_engine_that_dies_at_prompts_with_pictures_is_replaced_and_answers_as_an_unharmed_one(tmp_path, monkeypatch):
    for module in (engine_group, engine_failures):
        monkeypatch.setattr(module, "ray", FakeRay())
    folder, trainer = save_tiny_vision("qwen2_5_vl", tmp_path), trainer_of(tmp_path)
    change_tower(trainer)

    def answers(*, dying: bool) -> tuple[Any, int, int]:
        started: list[Worker] = []

        def start(number: int) -> tuple[Worker, FakeCall]:
            started.append(Worker(str(folder), dies=dying and not started))
            return started[-1], FakeCall(lambda: None, waits=False)

        group = EngineGroup(start, num_engines=1, settings=EngineSettings(max_model_len=16))
        actor = Actor(trainer)
        group.connect(actor)  # type: ignore[arg-type]
        group.receive_weights(VERSION)
        found = asyncio.run(generate(group, pictured_requests(folder), SAMPLING))
        group.shutdown()
        actor.sender.close()
        return found, len(started), actor.pushes

    unharmed, *once = answers(dying=False)
    harmed, *twice = answers(dying=True)
    assert (once, twice) == ([1, 1], [2, 2])
    assert harmed == unharmed
    assert {one.weight_version for one in harmed} == {VERSION}
