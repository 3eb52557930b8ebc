"""Engines that die during a batch, with fakes of Ray, of the engines and of the actor."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError
from remote_calls import FakeCall, FakeRay, recorded

from rlhf_cli.backends.rollout import engine_failures, engine_group
from rlhf_cli.backends.rollout.engine import Arrivals, EngineSettings
from rlhf_cli.backends.rollout.engine_group import EngineGroup, balanced_shares
from rlhf_cli.backends.weight_sync.transfer import PushReport
from rlhf_cli.data.rollouts import GenerationRequest, SamplingParams
from rlhf_cli.errors import ProcessDied
from rlhf_cli.trainers.online.interfaces import TurnEngines
from rlhf_cli.trainers.online.joined_engines import JoinedEngines
from rlhf_cli.trainers.online.lent_actor import LentActor, NotWanted
from rlhf_cli.trainers.online.rollout import generate

REQUESTS = [GenerationRequest([number], seed=number) for number in range(6)]
VERSION = 4
HAS_DIED = RayActorError()


class FakeWorker:
    """Returns its share in two parts; each response is the version of the weights.

    Responses to added requests are returned one by one.
    """

    def __init__(self, number, *, dies_in_batch=False):
        self.number, self.dies_in_batch, self.dies_in_push = number, dies_in_batch, False
        self.alive, self.asleep, self.version, self.level = True, False, 0, 0
        self.tags: list[str] | None = []
        self.share: list[GenerationRequest] = []
        self.done = 0
        self.has_added = False
        self.limits: list[int] = []
        self.call = SimpleNamespace(remote=self._remote)

    def _remote(self, call, *given):
        method, args = recorded(call, *given)

        def do():
            return getattr(self, method)(*args) if self.alive else HAS_DIED

        return FakeCall(do, waits=method == "collect")

    @property
    def is_generating(self):
        return self.done < len(self.share)

    def begin(self, batch, share, sampling, max_tokens):
        assert not self.asleep
        assert not self.is_generating, "the engine still generates"
        self.batch, self.share, self.done, self.has_added = batch, share, 0, False
        if self.dies_in_batch:
            self.alive = False
            return HAS_DIED
        return self._answers(1)

    def add(self, batch, first, requests):
        assert (batch, first) == (self.batch, len(self.share))
        self.share, self.has_added = [*self.share, *requests], True

    def collect(self, batch, count):
        assert batch == self.batch
        return self._answers(self.done + 1 if self.has_added else len(self.share))

    def _answers(self, count):
        first, self.done = self.done, min(max(count, self.done), len(self.share))
        found = [(place, (self.share[place].seed, self.version)) for place in range(first, self.done)]
        return Arrivals(found, not self.is_generating)  # type: ignore[arg-type]

    def cut(self, batch, max_tokens):
        assert batch == self.batch
        self.limits.append(max_tokens)
        self.share = self.share[: self.done]

    def sleep(self, level):
        assert not self.is_generating, "an engine sleeps that still generates"
        self.asleep, self.level = True, level

    def wake(self, tags):
        self.asleep, self.tags = self.asleep and tags == ["weights"], tags

    def check_alive(self):
        pass

    def take_push(self, manifest, version):
        if self.dies_in_push:
            self.alive = False
            return HAS_DIED
        self.version = version
        return None


class FakeActor:
    """Sends weights to all engines at once, like nccl and ipc, or leaves a manifest."""

    def __init__(self, workers, backend):
        self.workers, self.backend, self.links = workers, backend, 0
        self.is_awake = True
        self.within_batches = False  # whether weight updates may arrive during generation
        self.group = SimpleNamespace(all=self._all, address=lambda: ("host", 1))

    @contextmanager
    def awake(self):
        yield

    def sleep(self):
        self.is_awake = False

    def wake_weights(self):
        self.is_awake = True

    def _all(self, call):
        method, args = recorded(call)
        if method == "connect_engines":
            self.links += 1
            assert self.backend == "shm" or all(worker.alive for worker in self.workers.values()), "one is dead"
        if method != "push_weights":
            return [None]
        if self.backend != "shm":
            generating = any(worker.is_generating for worker in self.workers.values())
            assert self.within_batches or not generating, "a push came to an engine that generates"
            for worker in self.workers.values():
                worker.version = args[0]
        manifest: dict[str, Any] | None = {"files": []} if self.backend == "shm" else None
        return [PushReport(args[0], 8, 1.0, 1, 1, manifest)]


@pytest.fixture(autouse=True)
def fake_ray(monkeypatch):
    for module in (engine_group, engine_failures):
        monkeypatch.setattr(module, "ray", FakeRay())


def make_group(backend, *, takes_turns, dying, max_lora_rank=None, **options):
    """Return a group of three engines at VERSION, some of which die in the next batch, and all started engines."""
    started: list[FakeWorker] = []
    present: dict[int, FakeWorker] = {}

    def start(number):
        worker = FakeWorker(number, dies_in_batch=number in dying and number not in present)
        started.append(worker)
        present[number] = worker
        return worker, FakeCall(lambda: None, waits=False)

    settings = EngineSettings(
        max_model_len=16, enable_sleep=takes_turns, sync_backend=backend, max_lora_rank=max_lora_rank
    )
    group = EngineGroup(start, num_engines=3, settings=settings, **options)
    group.connect(FakeActor(present, backend))  # type: ignore[arg-type]
    group.receive_weights(VERSION)
    group.wake_cache()
    return group, started


def actor_of(group):
    assert isinstance(group._actor, FakeActor)
    return group._actor


@pytest.mark.parametrize("dying", [{1}, {0, 2}])
@pytest.mark.parametrize(("backend", "takes_turns"), [("ipc", True), ("nccl", False), ("shm", True), ("shm", False)])
def test_after_the_death_of_engines_every_request_has_one_response_by_the_present_weights(backend, takes_turns, dying):
    group, started = make_group(backend, takes_turns=takes_turns, dying=dying)
    assert generated(group) == [(number, VERSION) for number in range(len(REQUESTS))]
    assert [worker.number for worker in started[3:]] == sorted(dying)
    assert not any(worker.asleep for worker in started if worker.alive)


@pytest.mark.parametrize("takes_turns", [True, False])
def test_an_engine_is_started_again_before_a_push_while_the_actor_sleeps_if_they_share_gpus(takes_turns):
    group, started = make_group("ipc", takes_turns=takes_turns, dying=set())
    actor, start, seen = actor_of(group), group._start, list[bool]()

    def watched(number):
        seen.append(actor.is_awake)
        return start(number)

    group._start = watched
    group.sleep()
    started[1].alive = False
    group.receive_weights(VERSION + 1)
    assert seen == [not takes_turns]
    assert actor.is_awake
    assert {worker.version for worker in started if worker.alive} == {VERSION + 1}


@pytest.mark.parametrize(("backend", "pushed"), [("shm", {1}), ("nccl", {0, 1, 2})])
def test_an_engine_that_dies_beside_a_training_actor_gets_the_weights_that_the_actor_has_when_it_is_free(
    backend, pushed
):
    lent = LentActor()
    group, started = make_group(backend, takes_turns=False, dying={1}, borrowed_actor=lent.borrowed)
    shares = balanced_shares(REQUESTS, 3)
    with ThreadPoolExecutor(1) as thread:
        sampling = thread.submit(generated, group)
        while len(started) == 3:  # the new engine starts while the actor trains
            assert not sampling.done()
        assert started[3].version == 0
        lent.version = VERSION + 1
        lent.wait(sampling)
        found = dict(sampling.result(30))
    assert all(found[number] == VERSION + 1 for number in shares[1])
    assert {engine for engine in range(3) if found[shares[engine][-1]] == VERSION + 1} == pushed


@pytest.mark.parametrize(("backend", "within"), [("shm", False), ("shm", True), ("nccl", False)])
def test_an_engine_that_is_dead_when_weights_come_in_the_middle_of_a_batch_repeats_its_share(backend, within):
    """With `within`, the engine dies from the weight update itself."""
    group, started = make_group(backend, takes_turns=False, dying=set())
    actor_of(group).within_batches = True
    shares = balanced_shares(REQUESTS, 3)
    group.begin(REQUESTS, SamplingParams(1))
    started[1].alive, started[1].dies_in_push = within, within
    links = actor_of(group).links
    group.receive_weights(VERSION + 1)
    assert actor_of(group).links == links + 1
    found = dict(collected(group))
    assert [worker.number for worker in started[3:]] == [1]
    assert sorted(found) == list(range(len(REQUESTS)))
    assert {found[number] for number in shares[1]} == {(number, VERSION + 1) for number in shares[1]}


def test_turns_go_to_an_engine_that_died_at_rest_and_that_a_push_has_started_again():
    group, started = make_group("shm", takes_turns=False, dying=set())
    group.begin([turn(episode, 0, [episode]) for episode in range(3)], SamplingParams(1))
    found = collected(group)
    started[1].alive = False
    group.receive_weights(VERSION + 1)
    group.add([turn(episode, 1, [episode, 5]) for episode in range(3)])
    found += collected(group)
    assert sorted(number for number, _ in found) == list(range(6))
    (again,) = started[3:]
    assert [request.seed % 100 for request in again.share] == [1]


def test_an_actor_in_training_hears_nothing_of_an_engine_that_is_started_again():
    lent = LentActor()
    group, started = make_group("shm", takes_turns=False, dying={1}, borrowed_actor=lent.borrowed)
    actor = actor_of(group)
    links = actor.links
    with ThreadPoolExecutor(1) as thread:
        sampling = thread.submit(generated, group)
        while len(started) == 3:
            assert not sampling.done()
        assert actor.links == links
        lent.version = VERSION
        lent.wait(sampling)
        sampling.result()
    assert actor.links == links + 1


def test_a_run_that_ends_does_not_wait_for_an_engine_that_waits_for_the_actor():
    lent = LentActor()
    group, started = make_group("shm", takes_turns=False, dying={1}, borrowed_actor=lent.borrowed)
    with ThreadPoolExecutor(1) as thread:
        sampling = thread.submit(generated, group)
        while len(started) == 3:
            assert not sampling.done()
        lent.end()
        with pytest.raises(NotWanted):
            sampling.result(30)
    assert started[3].version == 0


def test_engines_that_have_finished_are_not_asked_again_when_another_one_dies():
    group, started = make_group("ipc", takes_turns=True, dying=set())
    group.begin(REQUESTS, SamplingParams(1))
    finished, dead, _ = started
    found = []
    for _ in range(4):  # the first part of each engine's share, then the rest of the first engine's
        found += asyncio.run(group.collect())
    assert not finished.is_generating
    assert dead.is_generating
    dead.alive = False
    finished.begin = None  # type: ignore[assignment]
    while group.is_generating:
        found += asyncio.run(group.collect())
    assert sorted(found) == [(number, (number, VERSION)) for number in range(len(REQUESTS))]


@pytest.mark.parametrize(
    ("options", "level", "tags"),
    [({}, 2, ["kv_cache"]), ({"max_lora_rank": 8}, 1, ["kv_cache"]), ({"keeps_weights": True}, 1, None)],
)
def test_engines_drop_their_weights_while_they_sleep_unless_no_push_replaces_them(options, level, tags):
    group, started = make_group("shm", takes_turns=True, dying=set(), **options)
    group.sleep()
    assert [(worker.asleep, worker.level) for worker in started] == [(True, level)] * 3
    group.wake_cache()
    assert [(worker.asleep, worker.tags) for worker in started] == [(False, tags)] * 3


def test_an_engine_that_died_has_its_adapter_again_without_an_actor():
    started: list[FakeWorker] = []

    def start(number):
        started.append(FakeWorker(number, dies_in_batch=len(started) == 1))
        return started[-1], FakeCall(lambda: None, waits=False)

    group = EngineGroup(start, num_engines=2, settings=EngineSettings(max_model_len=16))
    group.take_adapter({"tensors": []}, VERSION)
    assert generated(group) == [(number, VERSION) for number in range(len(REQUESTS))]
    assert [worker.number for worker in started] == [0, 1, 1]
    started[0].alive = False
    group.take_adapter({"tensors": []}, VERSION + 1)
    assert [worker.version for worker in started[2:]] == [VERSION + 1] * 2


def test_engines_that_die_again_and_again_end_the_run():
    group, started = make_group("ipc", takes_turns=True, dying={1})
    group._restarts = engine_group.MAX_RESTARTS
    with pytest.raises(ProcessDied, match="most recently engine 1"):
        generated(group)
    assert len(started) == 3


def turn(episode, number, prompt_ids):
    return GenerationRequest(prompt_ids, seed=100 * episode + number, episode=episode)


def generated(group):
    return asyncio.run(generate(group, REQUESTS, SamplingParams(1)))


def collected(group):
    found = []
    while group.is_generating:
        found += asyncio.run(group.collect())
    return found


def test_turns_of_an_episode_join_the_batch_on_the_engine_that_has_their_beginning():
    group, started = make_group("shm", takes_turns=False, dying=set())
    group.begin([turn(0, 0, [1]), turn(1, 0, [2, 2, 2])], SamplingParams(1))
    homes = {request.episode: worker for worker in started for request in worker.share}
    group.add([turn(2, 0, [3]), turn(3, 0, [3])])  # samples of one prompt, for the idle third engine
    group.add([turn(1, 1, [2, 2, 2, 7])])
    assert collected(group)
    group.add([turn(0, 1, [1, 8]), turn(3, 1, [3, 9])])  # after all responses have arrived
    assert group.is_generating
    assert [number for number, _ in collected(group)] in ([5, 6], [6, 5])
    third = next(worker for worker in started if worker not in homes.values())
    shares = {worker: [request.seed for request in worker.share] for worker in started}
    assert shares == {homes[0]: [0, 1], homes[1]: [100, 101], third: [200, 300, 301]}


def test_a_new_prompt_joins_the_engine_that_has_the_least_to_do():
    group, started = make_group("shm", takes_turns=False, dying=set())
    group.begin([GenerationRequest([number] * 9, seed=number) for number in range(3)], SamplingParams(1))
    assert len(collected(group)) == 3
    group.add([GenerationRequest([7] * length, seed=length) for length in (5, 2, 1, 1)])
    lengths = [[len(request.prompt_ids) for request in worker.share[1:]] for worker in started]
    assert lengths == [[5], [2], [1, 1]]


def test_a_batch_that_is_joined_again_and_again_keeps_open_requests_only():
    group, started = make_group("shm", takes_turns=False, dying=set())
    group.begin([GenerationRequest([number], seed=number) for number in range(6)], SamplingParams(1))
    found = asyncio.run(group.collect())
    for first in range(6, 60, 6):
        group.add([GenerationRequest([number // 2], seed=number) for number in range(first, first + 6)])
        batch, before = group._batch, len(found)
        assert set(batch.requests) == set(range(first + 6)) - {number for number, _ in found}
        assert batch.homes.keys() <= {request.prompt for request in batch.requests.values()}
        while len(found) < before + 6:
            found += asyncio.run(group.collect())
    found += collected(group)
    assert sorted(found) == [(number, (number, VERSION)) for number in range(60)]
    assert not group._batch.requests
    assert not group._batch.homes
    assert group._batch._loads == [0, 0, 0]
    assert len({len(worker.share) for worker in started}) == 1


@pytest.mark.parametrize(("backend", "takes_turns"), [("ipc", True), ("nccl", False), ("shm", True), ("shm", False)])
def test_an_engine_that_dies_repeats_what_is_unfinished_of_its_own_and_nothing_else(backend, takes_turns):
    group, started = make_group(backend, takes_turns=takes_turns, dying=set())
    group.begin([turn(episode, 0, [episode]) for episode in range(3)], SamplingParams(1))
    found = collected(group)
    group.add([turn(episode, 1, [episode, 5]) for episode in range(3)])
    found += asyncio.run(group.collect())
    ((finished, _),) = found[3:]
    victim = next(worker for worker in started if worker.share[0].episode != finished % 3)
    group.add([turn(episode, 2, [episode, 6]) for episode in (0, 1, 2)])
    victim.alive = False
    found += collected(group)
    assert sorted(number for number, _ in found) == list(range(9))
    assert {number: seed for number, (seed, _) in found} == {
        3 * number + episode: 100 * episode + number for episode in range(3) for number in range(3)
    }
    (again,) = started[3:]
    assert again.number == victim.number
    assert [request.seed % 100 for request in again.share] == [1, 2]
    assert {version for _, (_, version) in found} == {VERSION}


def test_an_engine_that_dies_while_two_batches_are_in_flight_repeats_open_requests_of_both():
    group, started = make_group("shm", takes_turns=False, dying=set())
    assert isinstance(group, TurnEngines), "no batch joins another one"
    engines, sampling = JoinedEngines(group), SamplingParams(1)
    second = [GenerationRequest([number], seed=number) for number in range(6, 12)]
    engines.begin(REQUESTS, sampling)
    found = asyncio.run(engines.collect())
    engines.join(second, sampling)
    victim = next(worker for worker in started if worker.done == len(worker.share) - 3)
    (seen,) = victim.share[: victim.done]
    victim.alive = False
    found += collected(engines)
    assert sorted(found) == [(number, (number, VERSION)) for number in range(6)]
    engines.begin(second, sampling)
    assert sorted(collected(engines)) == [(number, (number + 6, VERSION)) for number in range(6)]
    (again,) = started[3:]
    assert {request.seed for request in again.share} == {request.seed for request in victim.share} - {seen.seed}


def test_requests_join_an_engine_that_died_while_it_had_nothing_to_do():
    group, started = make_group("shm", takes_turns=False, dying=set())
    group.begin([turn(episode, 0, [episode]) for episode in range(3)], SamplingParams(1))
    assert len(collected(group)) == 3
    started[1].alive = False
    group.add([turn(episode, 1, [episode, 5]) for episode in range(3)])
    assert sorted(number for number, _ in collected(group)) == [3, 4, 5]
    assert [worker.number for worker in started[3:]] == [1]


def test_engines_that_got_other_weights_within_a_batch_begin_anew_with_what_joins_them():
    group, started = make_group("nccl", takes_turns=False, dying=set())
    group.begin([turn(episode, 0, [episode]) for episode in range(3)], SamplingParams(1))
    assert len(collected(group)) == 3
    idle, victim = started[0], started[1]
    group.add([turn(victim.share[0].episode, 1, [1, 5])])
    victim.alive = False
    assert len(collected(group)) == 1
    before = idle.batch
    group.add([turn(idle.share[0].episode, 1, [0, 5])])
    assert len(collected(group)) == 1
    assert idle.batch > before
    assert [request.seed % 100 for request in idle.share] == [1]


def test_a_cut_reaches_engines_that_have_finished_and_may_be_joined():
    group, started = make_group("shm", takes_turns=False, dying=set())
    group.begin([turn(episode, 0, [episode]) for episode in range(2)], SamplingParams(1))
    assert len(collected(group)) == 2
    group.cut(7)
    assert [worker.limits for worker in started] == [[7], [7], []]


class SlowRay(FakeRay):
    """No call is ready at the first `misses` looks, each of which costs `seconds`; later all are ready."""

    def __init__(self, misses, seconds):
        self.misses, self.seconds, self.now = misses, seconds, 0.0
        self.num_looks = 0

    def wait(self, calls, num_returns, timeout):
        self.num_looks, self.now = self.num_looks + 1, self.now + self.seconds
        return ([], calls) if self.num_looks <= self.misses else (calls, [])


@pytest.mark.parametrize(
    ("seconds", "expected"),
    # Pauses double from 1 to 10 ms, but a look of 2 ms is followed by 200 times as much.
    [(0.0, [0.001, 0.002, 0.004, 0.008, 0.01, 0.01]), (0.002, [0.4] * 6)],
)
def test_pauses_between_looks_grow_with_the_cost_of_a_look(monkeypatch, seconds, expected):
    ray, pauses = SlowRay(6, seconds), list[float]()

    async def sleep(pause):
        pauses.append(pause)

    group, _ = make_group("shm", takes_turns=False, dying=set())
    monkeypatch.setattr(engine_group, "ray", ray)
    monkeypatch.setattr(engine_group, "time", SimpleNamespace(monotonic=lambda: ray.now))
    monkeypatch.setattr(engine_group, "asyncio", SimpleNamespace(sleep=sleep))
    group.begin(REQUESTS, SamplingParams(1))
    asyncio.run(group.collect())
    assert pauses == pytest.approx(expected)


def test_a_call_that_an_earlier_one_of_the_same_look_consumed_is_skipped(monkeypatch):
    """An engine dies, which stops the others. Their calls were ready at the same look, and stopping waited for them."""
    group, started = make_group("ipc", takes_turns=True, dying={0})
    monkeypatch.setattr(engine_group, "ray", SlowRay(0, 0.0))
    group.begin(REQUESTS, SamplingParams(1))
    calls = [*group._batch.calls]
    found = asyncio.run(group.collect())
    assert found == []
    assert not set(calls) & set(group._batch.calls)
    found = collected(group)
    assert sorted(number for number, _ in found) == list(range(len(REQUESTS)))
    assert [worker.number for worker in started[3:]] == [0]
