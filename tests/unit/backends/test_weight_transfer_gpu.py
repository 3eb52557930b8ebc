"""The logic of nccl and ipc weight updates: calls, their order, and verification."""

import json
import os
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from remote_calls import recorded

from rlhf_cli.backends.rollout.engine import EngineSettings
from rlhf_cli.backends.rollout.vllm_batch import sampled_logprobs
from rlhf_cli.backends.rollout.vllm_start import engine_environment
from rlhf_cli.backends.weight_sync.transfer import (
    WeightSender,
    check_sync_backend,
    choose_sync_backend,
    weights_checksum,
)
from rlhf_cli.backends.weight_sync.vllm_checksum import Reconnecting, Watching
from rlhf_cli.backends.weight_sync.vllm_trainer import EngineClient, PushSource, TensorSpec, VllmTransport, buffer_bytes
from rlhf_cli.errors import RunError, UsageError


@pytest.mark.parametrize(
    ("chosen", "engine", "on_gpu", "shares_gpus", "found"),
    [
        ("auto", "vllm", False, False, "shm"),
        ("auto", "vllm", False, True, "shm"),
        ("auto", "vllm", True, True, "ipc"),
        ("auto", "vllm", True, False, "nccl"),
        ("shm", "vllm", True, False, "shm"),
        ("ipc", "vllm", True, True, "ipc"),
        ("auto", "transformers", True, True, "shm"),
        ("auto", "transformers", True, False, "shm"),
        ("shm", "transformers", True, True, "shm"),
    ],
)
def test_the_way_of_weights_follows_engine_and_placement(chosen, engine, on_gpu, shares_gpus, found):
    assert choose_sync_backend(chosen, engine=engine, on_gpu=on_gpu, shares_gpus=shares_gpus) == found


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_way_that_needs_gpus_is_refused_before_ray_starts_unless_a_cluster_may_have_them(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    check_sync_backend("auto", engine="vllm")
    check_sync_backend("shm", engine="vllm")
    for chosen in ("nccl", "ipc"):
        with pytest.raises(UsageError, match=f"--vllm_sync_backend {chosen} requires a GPU; use shm"):
            check_sync_backend(chosen, engine="vllm")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    check_sync_backend("nccl", engine="vllm")


@pytest.mark.parametrize(
    ("chosen", "on_gpu", "shares_gpus", "words"),
    [
        ("nccl", False, False, "nccl requires a GPU; use shm"),
        ("nccl", True, True, "nccl does not work if actor and engines share GPUs; use ipc"),
        ("ipc", True, False, "ipc does not work if actor and engines are on different GPUs; use nccl"),
    ],
)
def test_a_way_that_cannot_work_is_refused_with_the_one_that_does(chosen, on_gpu, shares_gpus, words):
    with pytest.raises(UsageError, match=words):
        choose_sync_backend(chosen, engine="vllm", on_gpu=on_gpu, shares_gpus=shares_gpus)


@pytest.mark.parametrize("chosen", ["nccl", "ipc"])
def test_the_engine_of_transformers_takes_weights_from_shared_memory_alone(chosen):
    with pytest.raises(UsageError, match=f"{chosen} requires vLLM; --rollout_backend transformers supports only shm"):
        choose_sync_backend(chosen, engine="transformers", on_gpu=True, shares_gpus=True)


@pytest.mark.parametrize(("way", "allowed"), [("ipc", "1"), ("nccl", None), ("shm", None)])
def test_handles_may_be_pickled_for_as_long_as_the_engine_lives(monkeypatch, way, allowed):
    monkeypatch.delenv("VLLM_ALLOW_INSECURE_SERIALIZATION", raising=False)
    before = dict(os.environ)
    with engine_environment(EngineSettings(max_model_len=8, sync_backend=way), on_cpu=False):
        assert os.environ.get("VLLM_ALLOW_INSECURE_SERIALIZATION") == allowed
    # Handles are encoded in this process at each update, long after the engine has started.
    assert os.environ.pop("VLLM_ALLOW_INSECURE_SERIALIZATION", None) == allowed
    assert dict(os.environ) == before


class Calls:
    def __init__(self):
        self.made = []

    def __call__(self, call, given):
        found = [recorded(call, value) for value in given]
        self.made.append((found[0][0], [arguments for _, arguments in found]))


def test_workers_of_several_engines_get_consecutive_ranks():
    calls = Calls()
    client = EngineClient(calls, num_engines=3, ranks_per_engine=2)
    client.init_weight_transfer_engine({"rank_offset": 1, "world_size": 7})
    ((method, arguments),) = calls.made
    assert method == "init_weight_transfer"
    assert [info["rank_offset"] for (info,) in arguments] == [1, 3, 5]
    assert client.num_workers == 6


def test_ipc_engines_all_get_the_same_agreement():
    calls = Calls()
    EngineClient(calls, num_engines=2).init_weight_transfer_engine({"packed": True})
    assert calls.made == [("init_weight_transfer", [({"packed": True},), ({"packed": True},)])]


class FakeTrainerEngine:
    """Runs an update like vLLM's trainer engines: metadata, one pass over the source, then the closing call."""

    def __init__(self, client, source):
        self.client, self.source = client, source
        self.sent, self.open = [], True

    def send_weights(self):
        self.client.start_weight_update()
        self.client.update_weights({"names": [meta.name for meta in self.source.metadata()]})
        self.sent = list(self.source)
        self.client.finish_weight_update()

    def shutdown(self):
        self.open = False


def test_a_push_reaches_every_engine_with_its_version():
    calls, weights = Calls(), {"a": torch.randn(3), "b": torch.randn(2, 2)}
    client = EngineClient(calls, num_engines=2)
    source = PushSource([TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items()])
    engine = FakeTrainerEngine(client, source)
    sender = WeightSender(VllmTransport(engine, source, client))
    report = sender.send(weights.items(), version=4)
    assert calls.made == [
        ("start_weight_update", [(), ()]),
        ("update_weights", [({"names": ["a", "b"]},)] * 2),
        ("finish_weight_update", [(4,), (4,)]),
    ]
    assert report.checksum == weights_checksum(weights.items())
    assert (report.num_bytes, report.num_tensors, report.manifest) == (28, 2, None)
    sender.close()
    assert not engine.open


def test_tensors_may_be_freed_when_the_next_one_is_asked_for():
    weights = {"a": torch.ones(3), "b": torch.ones(2)}

    def gathered():
        for name, tensor in weights.items():
            yield name, tensor
            tensor.zero_()

    source = PushSource([])
    source.named_tensors = gathered()
    assert [float(tensor.sum()) for _, tensor in list(source)] == [3.0, 2.0]


def test_the_largest_tensor_fits_the_buffer():
    assert buffer_bytes([TensorSpec("w", torch.bfloat16, (10, 10))]) == 256 << 20
    assert buffer_bytes([TensorSpec("w", torch.bfloat16, (1 << 20, 1 << 10))]) == 2 << 30


class FakeEngine:
    """The methods of vLLM's worker engines that are used, with a dict as model."""

    def __init__(self, checkpoint: Path):
        self.loaded: dict[str, torch.Tensor] = {}
        self.steps: list[str] = []
        self.model: Any = SimpleNamespace(load_weights=self.loaded.update)
        config = SimpleNamespace(tie_word_embeddings=False)
        self.model_config: Any = SimpleNamespace(model=str(checkpoint), hf_config=config)

    def start_weight_update(self):
        self.steps.append("start")

    def receive_weights(self, update_info):
        for chunk in update_info:
            self.model.load_weights(iter(chunk))

    def finish_weight_update(self):
        self.steps.append("finish")


class WatchedEngine(Watching, FakeEngine):
    pass


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    header = json.dumps({name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 0]} for name in "ab"}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return tmp_path


def test_a_worker_adds_up_what_arrives_in_chunks(checkpoint):
    weights = [("a", torch.randn(2)), ("b", torch.randn(2))]
    engine = WatchedEngine(checkpoint)
    model = engine.model
    for _ in range(2):  # a second update starts from zero
        engine.start_weight_update()
        engine.receive_weights([weights[:1], weights[1:]])
        engine.finish_weight_update()
    assert engine.pushed_checksum == weights_checksum(weights)
    assert engine.loaded.keys() == {"a", "b"}
    assert engine.steps == ["start", "finish"] * 2
    assert engine.model is model


def test_a_worker_names_what_did_not_arrive(checkpoint):
    engine = WatchedEngine(checkpoint)
    engine.start_weight_update()
    engine.receive_weights([[("a", torch.zeros(2))]])
    with pytest.raises(RunError, match="missing b"):
        engine.finish_weight_update()


def test_a_worker_names_what_its_model_does_not_have(checkpoint):
    engine = WatchedEngine(checkpoint)
    engine.start_weight_update()
    engine.receive_weights([[(name, torch.zeros(2)) for name in "abc"]])
    with pytest.raises(RunError, match="unknown c"):
        engine.finish_weight_update()


class FakeCommunicator:
    """The communicator of vLLM's nccl engine: opened by a handshake, closed by `shutdown`."""

    def __init__(self):
        self.open: list[str] = []
        self.ended: list[str] = []

    def init_transfer_engine(self, init_info):
        self.open.append(init_info)

    def shutdown(self):
        self.ended += self.open
        self.open = []


class ReconnectingEngine(Reconnecting, FakeCommunicator):
    pass


def test_a_second_handshake_ends_the_first_communicator():
    engine = ReconnectingEngine()
    engine.init_transfer_engine("first")
    engine.init_transfer_engine("second")
    assert (engine.open, engine.ended) == (["second"], ["first"])


def test_log_probs_of_sampled_tokens_stand_first_at_their_positions():
    logprobs = pytest.importorskip("vllm.logprobs")
    flat = logprobs.FlatLogprobs()
    flat.append_fast([7, 9], [-1.5, -0.5], [2, 1], [None, None])  # the likeliest token was not sampled
    flat.append_fast([4], [-0.25], [1], [None])
    assert sampled_logprobs(flat, [7, 4]) == [-1.5, -0.25]
    with pytest.raises(AssertionError, match="other tokens"):
        sampled_logprobs(flat, [9, 4])
