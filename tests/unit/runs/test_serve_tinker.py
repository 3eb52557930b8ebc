"""`rlhf serve-tinker` over real sockets, without Tinker's client: results, order, checkpoints, limits and errors."""

import asyncio
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from safetensors.torch import load_file
from tinker_server import KEY, NAME, TRAINED, TinkerServer, output, sampled, tinker_server, training_request
from transformers import PretrainedConfig

from rlhf_cli.backends.rollout.engine import Arrivals
from rlhf_cli.commands.serve_tinker import ServeTinkerConfig
from rlhf_cli.config.tinker import TinkerServerConfig
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams
from rlhf_cli.errors import UsageError
from rlhf_cli.models.finding import FoundModel
from rlhf_cli.runs.server_address import server_key
from rlhf_cli.runs.tinker.checkpoints import CheckpointPath, SavedWeights
from rlhf_cli.runs.tinker.futures import Futures, Result
from rlhf_cli.runs.tinker.run import check_push, running_service
from rlhf_cli.runs.tinker.sampler import Sampler
from rlhf_cli.runs.tinker.wire import SampledTokens, read_forward_backward, sample_response

ADAM = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
RECORDED = bytes.fromhex(
    "0a09733a747261696e3a3010031a6a0a0c0a0a0a0801000000020000000a080a060a040300000012300a0d7461726765745f"
    "746f6b656e73121f0a180200000000000000030000000000000004000000000000001802220103121e0a0777656967687473"
    "12130a0c0000803f000000000000003f18012201031a670a0c0a0a0a08080000000900000012570a0d7461726765745f746f"
    "6b656e731246123e0a1005000000000000000700000000000000121800000000000000000100000000000000020000000000"
    "00001a1001000000000000000200000000000000180222020209220370706f2a1d0a12636c69705f6c6f775f746872657368"
    "6f6c6411000000000000000030013a1f0a12636c69705f6c6f775f7468726573686f6c6412090900000000000000003a0b0a"
    "046d6f64651203120178"
)
"""A request as tinker 0.38.0 sends it: two datums, the second with sparse targets."""


@pytest.fixture(scope="module")
def output_folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("served") / "tinker"


@pytest.fixture(scope="module")
def server(tiny_llama_dir, output_folder):
    with tinker_server(tiny_llama_dir, output_folder, max_models=6, max_snapshots=3, max_len=64) as served:
        yield served


@pytest.fixture
def session(server: TinkerServer):
    """Return a session that ends with the test, so that later tests can take the places of its models."""
    session_id = server.session()
    yield session_id
    server.send(f"sessions/{session_id}/finish", {"reason": {"type": "success"}})


def step(server: TinkerServer, model: str, seq: int, **others: Any) -> float:
    """Train once with requests `seq` and `seq + 1`; return the loss before."""
    content = server.result("forward_backward", training_request(model, seq, **others))
    server.result("optim_step", {"model_id": model, "seq_id": seq + 1, "adam_params": ADAM})
    return output(content)[1]["loss:sum"]


def sample_request(session_id: str, seq: int = 0, **others: Any) -> dict:
    params = {"max_tokens": 6} | others.pop("params", {})
    prompt = {"chunks": [{"type": "encoded_text", "tokens": tokens} for tokens in others.pop("prompt", [[5, 6], [7]])]}
    body = {"sampling_session_id": session_id, "seq_id": seq, "num_samples": 2, "type": "sample"}
    return body | {"prompt": prompt, "sampling_params": params} | others


def snapshot(server: TinkerServer, model: str, seq: int, number: int, **others) -> str:
    body = {"model_id": model, "seq_id": seq, "sampling_session_seq_id": number, "kind": "snapshot"} | others
    return server.result("save_weights_for_sampler", body)["sampling_session_id"]


def test_a_recorded_request_is_read_with_sparse_targets_and_all_settings():
    found = read_forward_backward(RECORDED)
    assert (found.model_id, found.seq_id, found.loss_fn, found.forward_only) == ("s:train:0", 3, "ppo", True)
    assert found.loss_fn_config == {"clip_low_threshold": 0.0, "mode": "x"}
    first, second = found.data
    assert first.token_ids.tolist() == [1, 2, 3]
    assert first.inputs["target_tokens"].tolist() == [2, 3, 4]
    assert first.inputs["weights"].tolist() == [1, 0, 0.5]
    assert second.inputs["target_tokens"].tolist() == [[0, 5, 0, 0, 0, 0, 0, 0, 0], [0, 0, 7, 0, 0, 0, 0, 0, 0]]


def test_sampled_sequences_are_written_as_the_client_reads_them():
    content = sample_response([SampledTokens([7, 8], [-0.5, -1.0], True), SampledTokens([], [], False)], None)
    # Field 1 is a sequence: stop reason 0 is not written, 1 is length; tokens int32 and log-probs float32.
    first = b"\x12\x08\x07\0\0\0\x08\0\0\0\x1a\x08\0\0\0\xbf\0\0\x80\xbf"
    assert content == b"\x0a" + bytes([len(first)]) + first + b"\x0a\x02\x08\x01"


def test_training_lowers_the_loss_and_info_names_the_model(server, session):
    model = server.model(session, rank=2)
    info = server.ask("get_info", {"model_id": model})
    assert info["model_data"]["model_name"] == NAME
    assert (info["is_lora"], info["lora_rank"]) == (True, 2)
    losses = [step(server, model, seq) for seq in (1, 3, 5)]
    assert losses[2] < losses[1] < losses[0]
    content = server.result("forward_backward", training_request(model, 7, forward_only=True))
    logprobs, metrics = output(content)
    assert metrics["loss:sum"] == pytest.approx(-float((logprobs * TRAINED).sum()), rel=1e-5)
    # A forward pass leaves no gradient.
    adam = {"model_id": model, "seq_id": 8, "adam_params": ADAM}
    assert server.result("optim_step", adam)["metrics"] == {"grad_norm": 0, "skipped": 1}


def test_requests_run_in_the_order_of_their_numbers_and_repeated_ones_once(server, session):
    model, other = server.model(session), server.model(session, 1, seed=9)
    late = server.ask("optim_step", {"model_id": model, "seq_id": 2, "adam_params": ADAM})["request_id"]
    early = [server.ask("forward_backward", training_request(model, 1))["request_id"] for _ in range(2)]
    assert early[0] == early[1]
    server.retrieved(late)
    before = output(server.retrieved(early[0]))[1]["loss:sum"]
    after = output(server.result("forward_backward", training_request(model, 3)))[1]["loss:sum"]
    assert after < before
    assert output(server.result("forward_backward", training_request(other, 1)))[1]["loss:sum"] == before


def test_samples_agree_with_the_trainer_and_repeat_with_a_seed(server, session):
    model = server.model(session)
    step(server, model, 1)
    sampler = snapshot(server, model, 3, 0)
    sent = sample_request(sampler, params={"stop": [], "seed": 5}, prompt_logprobs=True)
    tokens, logprobs, prompt = sampled(server.result("asample", sent))
    assert [len(one) for one in tokens] == [6, 6]
    assert tokens[0] != tokens[1]
    assert sampled(server.result("asample", sent | {"seq_id": 1}))[0] == tokens
    whole = [5, 6, 7, *tokens[0]]
    inputs = {"target_tokens": whole[1:], "weights": [1.0] * (len(whole) - 1)}
    request = training_request(model, 4, tokens=whole[:-1], inputs=inputs, forward_only=True)
    trainer = output(server.result("forward_backward", request))[0]
    np.testing.assert_allclose(logprobs[0], trainer[2:], atol=1e-4)
    assert np.isnan(prompt[0])
    np.testing.assert_allclose(prompt[1:], trainer[:2], atol=1e-4)
    last = sampled(server.result("asample", sent | {"seq_id": 2, "prompt_logprobs_last_n": 1}))[2]
    assert np.isnan(last[:2]).all()
    assert last[2] == pytest.approx(prompt[2])


def test_an_inflight_sampler_follows_the_model_and_a_snapshot_does_not(server, session):
    model = server.model(session)
    base = server.ask(
        "create_sampling_session", {"session_id": session, "sampling_session_seq_id": 9, "base_model": NAME}
    )["sampling_session_id"]
    fixed, moving = snapshot(server, model, 1, 0), snapshot(server, model, 2, 1, kind="inflight")

    def scores(sampler: str, seq: int) -> list[float]:
        content = server.result("asample", sample_request(sampler, seq, prompt_logprobs=True))
        return sampled(content)[2][1:].tolist()

    assert scores(fixed, 0) == scores(moving, 0) == scores(base, 0)
    step(server, model, 3)
    snapshot(server, model, 5, 2, kind="inflight")
    assert scores(fixed, 1) == scores(base, 1)
    assert scores(moving, 1) != scores(base, 2)
    # Three snapshots are kept; the first is the fourth newest after this one.
    snapshot(server, model, 6, 3)
    status, said = server.send("asample", sample_request(fixed, 2))
    assert status == 400
    assert "--max_snapshots keeps the newest" in said["detail"]


def test_stops_end_responses_and_none_means_the_models_own(server, session):
    sampler = server.ask(
        "create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "base_model": NAME}
    )["sampling_session_id"]
    free = sampled(server.result("asample", sample_request(sampler, 0, params={"stop": [], "seed": 3})))[0][0]
    stopped = sample_request(sampler, 1, params={"stop": [free[2]], "seed": 3})
    assert sampled(server.result("asample", stopped))[0][0] == free[: free.index(free[2]) + 1]
    greedy = sample_request(sampler, 2, params={"temperature": 0, "stop": []})
    first, second = sampled(server.result("asample", greedy))[0]
    assert first == second


def test_a_checkpoint_continues_exactly_also_on_another_server(server, session, output_folder, tiny_llama_dir):
    model = server.model(session)
    step(server, model, 1)
    saved = server.result("save_weights", {"model_id": model, "seq_id": 3, "path": "half"})["path"]
    assert saved == f"tinker://{model}/weights/half"
    straight = [step(server, model, seq) for seq in (4, 6)]

    def resumed(server: TinkerServer, session: str, optimizer: bool) -> list[float]:
        body = {"session_id": session, "model_seq_id": 1 + optimizer, "path": saved, "optimizer": optimizer}
        loaded = server.result("load_weights", body)["model_id"]
        return [step(server, loaded, seq) for seq in (1, 3)]

    assert resumed(server, session, True) == straight
    assert resumed(server, session, False)[0] == straight[0]
    with tinker_server(tiny_llama_dir, output_folder, max_len=64) as other:
        assert resumed(other, other.session(), True) == straight
        info = other.ask("weights_info", {"tinker_path": saved})
        assert info == {
            "base_model": NAME, "is_lora": True, "lora_rank": 4,
            "train_unembed": False, "train_mlp": True, "train_attn": True,
        }  # fmt: skip
    sampler = server.result("save_weights_for_sampler", {"model_id": model, "seq_id": 8, "path": "s"})["path"]
    body = {"session_id": session, "model_seq_id": 9, "path": sampler, "optimizer": True}
    said = server.result("load_weights", body)
    assert "has no optimizer states: save it with save_state" in said["error"]
    assert server.send("get_info", {"model_id": f"{session}:train:9"})[0] == 400
    # The folder is an adapter for other commands.
    (folder,) = output_folder.glob(f"{session}*/weights/half")
    assert len(load_file(folder / "adapter_model.safetensors")) == 2 * 14
    assert (folder / "adapter_config.json").is_file()


def test_checkpoints_are_listed_replaced_only_if_asked_and_deleted(server, session):
    model = server.model(session)
    save = {"model_id": model, "path": "one", "user_metadata": {"a": "b"}}
    server.result("save_weights", save | {"seq_id": 1})
    assert "exists: set overwrite" in server.result("save_weights", save | {"seq_id": 2})["error"]
    server.result("save_weights", save | {"seq_id": 3, "overwrite": True})
    sampler = server.result("save_weights_for_sampler", {"model_id": model, "seq_id": 4, "path": "two"})["path"]
    run = server.ask(f"training_runs/{model}", method="GET")
    assert run["last_checkpoint"]["user_metadata"] == {"a": "b"}
    assert run["last_sampler_checkpoint"]["tinker_path"] == sampler
    server.ask(f"training_runs/{model}/checkpoints/weights/one", method="DELETE")
    left = server.ask(f"training_runs/{model}/checkpoints", method="GET")["checkpoints"]
    assert [one["checkpoint_id"] for one in left] == ["sampler_weights/two"]
    status, said = server.send("create_sampling_session", {
        "session_id": session, "sampling_session_seq_id": 0, "model_path": f"tinker://{model}/weights/one",
    })  # fmt: skip
    assert (status, said["detail"]) == (400, f"checkpoint tinker://{model}/weights/one does not exist")


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"loss": "ppoo"}, "loss_fn 'ppoo' is unknown (did you mean ppo?)"),
        ({"config": {"beta": 1.0}}, "cross_entropy has no parameter 'beta'"),
        ({"inputs": {"target_tokens": [6, 7, 8, 9]}}, "data[0]: loss_fn_inputs lacks weights"),
        ({"loss": "ppo"}, "data[0]: loss_fn_inputs lacks advantages"),
        (
            {"inputs": {"target_tokens": [6, 7, 8, 9], "weights": [1.0] * 4, "mask": [1.0] * 4}},
            "loss_fn_inputs has mask, which this loss does not read",
        ),
        ({"inputs": {"target_tokens": [6], "weights": [1.0]}}, "target_tokens has shape (1,), not (4,) or (4, K)"),
        ({"inputs": {"target_tokens": [6, 7, 8, 9], "weights": [1.0] * 3}}, "weights must be float32 of shape (4,)"),
        ({"inputs": {"target_tokens": [6.0] * 4, "weights": [1.0] * 4}}, "target_tokens must be int64"),
        ({"inputs": {"target_tokens": [6, 7, 8, 999], "weights": [1.0] * 4}}, "a token id outside the vocabulary"),
        ({"inputs": {"target_tokens": [6, 7, 8, 9], "weights": [float("nan")] * 4}}, "weights contains NaN"),
        ({"tokens": [5] * 65}, "data[0] has 65 tokens; between 1 and 64 (--max_len) are supported"),
    ],
)  # fmt: skip
def test_wrong_training_data_fails_its_request_and_no_other(server, session, others, message):
    model = server.model(session)
    said = server.result("forward_backward", training_request(model, 1, **others))
    assert said["category"] == "user"
    assert message in said["error"]
    assert step(server, model, 2) > 0


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("create_model", {"base_model": "other/model", "lora_config": {"rank": 4}}, 400, "'other/model' is not served"),
        ("create_model", {"base_model": NAME}, 400, "lora_config is missing"),
        ("create_model", {"base_model": NAME, "lora_config": {"rank": 0}}, 422, "lora_config.rank: Input should be"),
        ("create_model", {"optimizer_config": {"type": "dimuon"}}, 422, "optimizer_config.type"),
        ("asample", sample_request("x", topk_prompt_logprobs=3), 422, "topk_prompt_logprobs"),
        ("asample", sample_request("x", params={"min_p": 0.1}), 422, "min_p: Extra inputs are not permitted (this"),
        ("asample", sample_request("x"), 400, "sampling session x does not exist"),
        ("save_weights", {"model_id": "m", "path": "../up"}, 422, "path: use letters, digits, '.', '_' and '-'"),
        ("save_weights", {"model_id": "m", "path": "up"}, 400, "model m is not in training on this server"),
        ("weights_info", {"tinker_path": "tinker://../weights/x"}, 400, "is not of the form tinker://MODEL_ID"),
        ("forward_backward", b"\xff", 400, "no ForwardBackwardRequest"),
        ("telemetry", b"x" * 10, 200, ""),
        ("save_weights_external", {}, 404, "rlhf serve-tinker does not have save_weights_external of the Tinker API"),
        ("create_session", b"x" * 1_100_000, 413, "larger than 1 MB (--max_body_mb)"),
    ],
)  # fmt: skip
def test_wrong_requests_get_a_status_and_a_sentence(server, session, path, body, status, message):
    if path == "create_model":
        body = {"session_id": session, "model_seq_id": 0, "base_model": NAME} | body
    found, said = server.send(path, body)
    assert found == status
    assert message in said.get("detail", "")


def test_prompts_that_do_not_fit_are_refused(server, session):
    sampler = server.ask(
        "create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "base_model": NAME}
    )["sampling_session_id"]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"prompt": [[5] * 60]}, "prompt has 60 tokens, which with max_tokens 6 exceeds 64 (--max_len)"),
        ({"prompt": []}, "prompt has no tokens"),
        ({"prompt": [[-1]]}, "prompt contains a token id outside the vocabulary, 0 to 299"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 3}, "must be below the 3 tokens of the prompt"),
    ]
    for others, message in cases:
        status, said = server.send("asample", sample_request(sampler, **others))
        assert status == 400
        assert message in said["detail"]
    # Without max_tokens, a response may fill the rest.
    body = sample_request(sampler, params={"max_tokens": None, "stop": []}, prompt=[[5] * 60])
    assert [len(one) for one in sampled(server.result("asample", body))[0]] == [4, 4]


def test_only_the_key_opens_the_routes(server):
    for key in ("", "tml-other"):
        assert server.send("create_session", {"tags": []}, key=key)[0] == 401
        assert server.send("get_server_capabilities", key=key, method="GET")[0] == 401
    assert server.send("healthz", key="", method="GET") == (200, {"status": "ok"})
    assert server.ask("get_server_capabilities", method="GET")["supported_models"][0]["model_name"] == NAME
    assert server.ask("client/config", {"sdk_version": "0"})["pjwt_auth_enabled"] is False


def test_unknown_results_and_finished_sessions_are_named(server):
    assert "the server has restarted" in server.retrieved("none")["error"]
    session = server.session()
    model = server.model(session)
    server.ask("session_heartbeat", {"session_id": session})
    assert server.send(f"sessions/{session}/finish", {})[0] == 204
    status, said = server.send("forward_backward", training_request(model, 1))
    assert status == 400
    assert "has finished" in said["detail"]


def test_places_of_finished_sessions_are_taken_and_others_are_not(tiny_llama_dir, tmp_path):
    with tinker_server(tiny_llama_dir, tmp_path / "out", max_models=1) as server:
        first, second = server.session(), server.session()
        server.model(first)
        body = {"session_id": second, "model_seq_id": 0, "base_model": NAME, "lora_config": {"rank": 1}}
        assert (
            "this server has 1 models in training, the limit: finish another session"
            in server.result("create_model", body)["error"]
        )
        server.ask(f"sessions/{first}/finish", {})
        assert server.model(second, 1)


def test_a_checkpoint_of_another_model_is_refused(server, session, output_folder, tiny_model_dir):
    saved = server.result("save_weights", {"model_id": server.model(session), "seq_id": 1, "path": "mine"})["path"]
    with tinker_server(tiny_model_dir, output_folder) as other:
        body = {"session_id": other.session(), "model_seq_id": 0, "path": saved, "optimizer": True}
        status, said = other.send("load_weights", body)
    assert (status, said["detail"].partition(" was ")[2]) == (
        400,
        "trained on another base model than this server's --pretrain",
    )


@pytest.mark.parametrize(
    "path", ["tinker://a:train:0/other/x", "tinker://a:train:0/weights/.x", "file://a", "tinker://a/weights/x"]
)
def test_paths_of_other_forms_are_refused(path):
    with pytest.raises(UsageError, match="is not of the form"):
        CheckpointPath.parse(path)


def test_keys_start_as_tinkers_client_requires(monkeypatch):
    config = TinkerServerConfig()
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    key, is_made = server_key(config, prefix="tml-")
    assert is_made
    assert key.startswith("tml-")
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    assert server_key(config, prefix="tml-") == (KEY, False)
    monkeypatch.setenv("TINKER_API_KEY", "mine")
    with pytest.raises(UsageError, match="the key in TINKER_API_KEY must start with tml-"):
        server_key(config, prefix="tml-")


class _Engine:
    """Answers requests in pairs, when the test allows it."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.gate = asyncio.Semaphore(0)
        self.open: list[int] = []
        self.fails = False

    async def begin(self, requests: list[GenerationRequest], sampling: SamplingParams) -> None:
        if self.fails:
            raise UsageError("no")
        self.batches.append([])
        self.count = 0
        await self.add(requests)

    async def add(self, requests: list[GenerationRequest]) -> None:
        self.batches[-1] += [request.seed for request in requests]
        self.open += range(self.count, self.count + len(requests))
        self.count += len(requests)

    async def collect(self) -> Arrivals:
        await self.gate.acquire()
        number = self.open.pop(0)
        return Arrivals([(number, Generation([self.batches[-1][number]], [0.0], "stop", 0))], not self.open)


def test_requests_with_equal_weights_and_settings_share_a_batch_in_order():
    async def run() -> None:
        engine, pushed = _Engine(), []
        saved = SavedWeights(CheckpointPath("a:train:0", "weights", "x"), 1.0)

        async def push(_: object, weights: SavedWeights | None, version: int) -> None:
            pushed.append((weights, version))

        sampler = Sampler(cast("Any", engine), push)
        serving = asyncio.create_task(sampler.run())

        def ask(weights: SavedWeights | None, *seeds: int, temperature: float = 1.0) -> asyncio.Task:
            requests = [GenerationRequest([1], seed) for seed in seeds]
            return asyncio.create_task(sampler.sample(weights, requests, SamplingParams(9, temperature=temperature)))

        first, second = ask(None, 1, 2), ask(None, 3)
        await asyncio.sleep(0.01)
        joining = ask(None, 4)
        await asyncio.sleep(0.01)
        other, after = ask(saved, 5), ask(None, 6)
        await asyncio.sleep(0.01)
        for _ in range(6):
            engine.gate.release()
        found = await asyncio.gather(first, second, joining, other, after)
        assert [[one.token_ids[0] for one in each] for each in found] == [[1, 2], [3], [4], [5], [6]]
        # The last one waited for the other weights, although it could have joined the first batch.
        assert engine.batches == [[1, 2, 3, 4], [5], [6]]
        assert pushed == [(saved, 1), (None, 2)]
        engine.fails = True
        with pytest.raises(UsageError):
            await ask(None, 7)
        serving.cancel()

    asyncio.run(run())


def test_a_checkpoint_with_the_name_of_a_deleted_one_is_another(server, session):
    model = server.model(session)

    def scores(seq: int) -> list[float]:
        saved = server.result("save_weights_for_sampler", {"model_id": model, "seq_id": seq, "path": "same"})["path"]
        body = {"session_id": session, "sampling_session_seq_id": seq, "model_path": saved}
        sampler = server.ask("create_sampling_session", body)["sampling_session_id"]
        content = server.result("asample", sample_request(sampler, prompt_logprobs=True, params={"stop": []}))
        return [*sampled(content)[2][1:].tolist(), *sampled(content)[1][0].tolist()]

    first = scores(1)
    server.ask(f"training_runs/{model}/checkpoints/sampler_weights/same", method="DELETE")
    step(server, model, 2)
    assert scores(4)[:2] != first[:2]


def test_an_adapter_is_no_base_model(tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(UsageError, match="is an adapter: merge it into its base with `rlhf merge`"):
        asyncio.run(_started(str(tmp_path / "adapter"), tmp_path / "out"))


def test_a_length_beyond_the_models_positions_is_refused(tiny_llama_dir, tmp_path):
    with pytest.raises(UsageError, match="--max_len 1000 exceeds the 512 positions of the model"):
        asyncio.run(_started(tiny_llama_dir, tmp_path / "out", max_len=1000))


def test_full_memory_is_named_with_the_settings_that_help():
    async def run() -> Result | None:
        async def work() -> Result:
            raise RuntimeError("CUDA out of memory. Tried to allocate")

        futures = Futures()
        futures.start("a:1", work)
        return await futures.result("a:1", seconds=5)

    found = asyncio.run(run())
    assert found is not None
    sentence = "out of GPU memory: lower --max_tokens_per_gpu, or set --gradient_checkpointing"
    assert found.content == {"error": sentence, "category": "server"}


@pytest.mark.parametrize(
    ("backend", "kind", "message"),
    [
        ("transformers", "LlamaForCausalLM", "requires vLLM; --rollout_backend transformers supports only merged"),
        ("vllm", "GptOssForCausalLM", "does not support GptOssForCausalLM; use --lora_push merged"),
    ],
)
def test_adapter_pushes_need_an_engine_that_applies_adapters(backend, kind, message):
    config = ServeTinkerConfig(model={"pretrain": "model"}, adapters={"lora_push": "adapter"})
    found = FoundModel("model", PretrainedConfig(architectures=[kind]))
    with pytest.raises(UsageError, match=message):
        check_push(config, found, backend)


async def _started(model: str, output: Path, **settings: Any) -> None:
    config = ServeTinkerConfig(model={"pretrain": model}, adapters={"output": str(output)} | settings)
    async with running_service(config):
        pass
