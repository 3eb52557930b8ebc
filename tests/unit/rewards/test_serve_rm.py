"""`rlhf serve-rm` over real sockets: scores equal to the model's, limits, keys, and batched requests."""

import asyncio
import http.client
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from reward_models import save_reward_model
from served_rewards import KEY, serve
from server_requests import ask, request
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlhf_cli import cli
from rlhf_cli.config.model import ModelConfig
from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.config.serve import ServeConfig, ServedModelConfig
from rlhf_cli.errors import RunError, UsageError
from rlhf_cli.models.reward_model import read_reward_model
from rlhf_cli.rewards.records import Score, ScoreRequest
from rlhf_cli.rewards.remote.client import RemoteRewards, check_servers
from rlhf_cli.rewards.server.app import StoppableServer, reward_app
from rlhf_cli.rewards.server.batching import ScoreJobs
from rlhf_cli.rewards.server.connections import BoundedConnection
from rlhf_cli.rewards.server.text_model import TextRewardModel
from rlhf_cli.runs.reward_server import scoring
from rlhf_cli.runs.server_address import is_loopback, listening, server_key

TEXTS = ["the weather", "a", "<|im_start|>user\n1+1?<|im_end|>\n", "the other <|im_end|>", "x" * 40]


@pytest.fixture(scope="module")
def reward_dir(tmp_path_factory) -> Path:
    return save_reward_model(tmp_path_factory.mktemp("reward"), reward_mean=0.5, reward_std=2.0)


def expected_scores(folder: Path, texts: Sequence[str]) -> list[float]:
    """Compute scores with transformers, one text at a time, at the end of the sequence."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    plain = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    rows = [tokenizer(text.removesuffix("<|im_end|>") + "<|im_end|>").input_ids for text in texts]
    with torch.no_grad():
        return [plain(input_ids=torch.tensor([row])).logits.item() for row in rows]


def text_model(folder: Path, *, normalize: bool = False, max_len: int = 64, max_tokens: int = 64) -> TextRewardModel:
    found, tokenizer = read_reward_model(ModelConfig(pretrain=str(folder), param_dtype="fp32"), normalize=normalize)
    return TextRewardModel(found, tokenizer, max_len=max_len, max_tokens=max_tokens)


def test_a_text_has_the_score_of_transformers_at_its_end_of_sequence_however_it_is_packed(reward_dir):
    expected = expected_scores(reward_dir, TEXTS)
    assert max(expected) - min(expected) > 0.1
    for max_tokens in (64, 1000):
        assert text_model(reward_dir, max_tokens=max_tokens).scores(TEXTS) == pytest.approx(expected, abs=1e-5)


def test_scores_of_texts_are_normalised_where_it_is_asked_for(reward_dir):
    expected = [(score - 0.5) / 2.0 for score in expected_scores(reward_dir, TEXTS)]
    assert text_model(reward_dir, normalize=True).scores(TEXTS) == pytest.approx(expected, abs=1e-5)


def test_texts_that_cannot_be_read_have_no_score_and_cost_the_others_nothing(reward_dir):
    scores = text_model(reward_dir, max_len=10).scores(["y" * 10, "", "a", "<|im_end|>"])
    assert scores[0] == "the text has 11 tokens, more than --max_len 10"
    assert scores[1] == scores[3] == "the text is empty"
    assert scores[2] == pytest.approx(expected_scores(reward_dir, ["a"])[0], abs=1e-5)


@contextmanager
def served(
    score: ScoreJobs,
    *,
    connection: type[BoundedConnection] = BoundedConnection,
    max_connections: int = 1024,
    takes_images: bool = False,
    **config: Any,
) -> Iterator[str]:
    """Run a server in a thread and yield its URL; stop it as a signal would."""
    settings, stop = ServeConfig(port=0, **config), threading.Event()
    with listening(settings.host, settings.port) as listener:
        app = reward_app(score, settings, key=KEY, takes_images=takes_images)
        server = StoppableServer(app, stop.is_set, connection, max_connections=max_connections)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/get_reward"
        finally:
            stop.set()
            thread.join()


def lengths(jobs: Sequence[Sequence[ScoreRequest]]) -> list[list[Score]]:
    return [[Score(float(len(request.query)), "scored") for request in job] for job in jobs]


def send(url: str, body: Any, *, key: str | None = KEY, path: str = "/get_reward") -> tuple[int, Any, dict[str, str]]:
    """Return status, body and headers of a response."""
    connection = http.client.HTTPConnection(url.split("/")[2], timeout=30)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST" if path == "/get_reward" else "GET", path, data, headers)
    response = connection.getresponse()
    said = json.loads(response.read())
    connection.close()
    return response.status, said, {name.lower(): value for name, value in response.getheaders()}


def client_of(url: str) -> RemoteRewards:
    return RemoteRewards([url], key=KEY, timeout=30, retries=0, batch_size=2)


def test_a_served_reward_model_gives_the_scores_of_the_model(reward_dir):
    reward = RewardConfig(reward_pretrain=str(reward_dir), reward_model_weight=2.0, reward_max_failures=1.0)
    model = ServedModelConfig(param_dtype="fp32", max_len=64, max_tokens_per_gpu=64)
    with scoring(reward, model) as score, served(score) as url, client_of(url) as client:
        check_servers([url], key=KEY, timeout=10)
        outcomes = ask(client, [request(text) for text in [*TEXTS, "z" * 80]])
    expected = [2.0 * score for score in expected_scores(reward_dir, TEXTS)]
    assert [outcome.value for outcome in outcomes[:-1]] == pytest.approx(expected, abs=1e-5)
    assert outcomes[-1].failure is not None
    assert outcomes[-1].failure.reason == f"{url} failed: the text has 81 tokens, more than --max_len 64"


def values_of(scores: Sequence[list[Score] | RunError]) -> list[list[float | None]]:
    """Return the values by request, none of which may be rejected."""
    return [[each.value for each in job] for job in scores if not isinstance(job, RunError)]


def test_more_failures_than_allowed_fail_a_request_for_the_reason_they_have(reward_dir):
    reward = RewardConfig(reward_pretrain=str(reward_dir), reward_max_failures=0.5)
    model = ServedModelConfig(param_dtype="fp32", max_len=10, max_tokens_per_gpu=64)
    with scoring(reward, model) as score:
        assert values_of(score([[request("a"), request("z" * 20)]]))[0][1] is None
        jobs = [[request("a"), request("z" * 20), request("y" * 20)], [request("a")], [request("a"), request("b")]]
        refused, *others = score(jobs)
        assert isinstance(refused, RunError)
        assert str(refused) == (
            "2 of 3 rewards failed, more than --reward_max_failures 0.5 allows: "
            "the text has 21 tokens, more than --max_len 10"
        )
        assert [[value is None for value in job] for job in values_of(others)] == [[False], [False, False]]


def test_a_file_is_asked_about_several_requests_at_a_time(reward_file):
    path = reward_file("""
        import pathlib, time
        def reward_func(queries, prompts, labels):
            me, other = map(pathlib.Path, labels[0].split())
            me.touch()
            while not other.exists():
                time.sleep(0.01)
            return [float(len(queries))] * len(queries)
    """)
    folder = Path(path).parent
    reward = RewardConfig(reward_func=path, reward_num_workers=2, reward_timeout=20, reward_max_failures=1.0)
    with scoring(reward, ServedModelConfig()) as score:
        jobs = [[request("q", label=f"{folder}/{one} {folder}/{other}")] for one, other in (("a", "b"), ("b", "a"))]
        assert values_of(score(jobs)) == [[1.0], [1.0]]


def test_verifiers_and_a_file_are_served_with_labels_and_weights(tmp_path):
    file = tmp_path / "reward.py"
    file.write_text(
        "def reward_func(queries, prompts, labels):\n    return [len(p) - min(map(len, prompts)) for p in prompts]\n"
    )
    reward = RewardConfig(reward_funcs=["exact"], reward_weights=[10.0], reward_func=str(file), reward_max_failures=1.0)
    with scoring(reward, ServedModelConfig()) as score:
        one = [
            replace(request("2+2=4", prompt="2+2=", label="4"), group="one", sample=0, group_size=2),
            replace(request("12+2=4", prompt="12+2=", label="14"), group="one", sample=1, group_size=2),
        ]
        other = [request("112+2=4", prompt="112+2=", label="4")]
        scores = score([one, other])
    assert values_of(scores) == [[10.0, 1.0], [10.0]], "a file compares within a request"


def test_a_verifier_without_a_label_fails_by_itself_and_says_why():
    with (
        scoring(RewardConfig(reward_funcs=["exact"], reward_max_failures=1.0), ServedModelConfig()) as score,
        served(score) as url,
    ):
        status, said, _ = send(url, {"query": ["a", "b"], "labels": ["a", None]})
    assert (status, said["rewards"]) == (200, [1.0, None])
    assert said["details"][0] == ""
    assert "exact" in said["details"][1]


@pytest.mark.parametrize("key", [None, "wrong", ""])
def test_nothing_is_scored_without_the_key(key):
    asked: list[Any] = []

    def score(jobs: Any) -> Any:
        asked.append(jobs)
        return lengths(jobs)

    with served(score) as url:
        status, said, _ = send(url, {"query": ["a"]}, key=key)
        assert status == 401
        assert KEY not in json.dumps(said)
        _, health, _ = send(url, b"", key=key, path="/health")
        assert (health["service"], health["authorised"]) == ("rlhf serve-rm", False)
        with pytest.raises(UsageError, match="rejects this key, or requires one"):
            check_servers([url], key=key, timeout=10)
    assert not asked


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"x" * 20_001, 413, "the request is larger than 0.02 MB (--max_body_mb)"),
        ({"query": ["a"] * 5}, 413, "query has 5 texts, more than 4 (--max_texts)"),
        ({"query": ["a", "b" * 101]}, 422, "query text 1 has 101 characters, more than 100 (--max_chars)"),
        ({"query": ["a", "b"], "labels": ["1"]}, 422, "labels has 1 entries, but query has 2 texts"),
        ({"query": ["a", "b"], "labels": []}, 422, "labels has 0 entries, but query has 2 texts"),
        ({"query": ["a"], "prompts": []}, 422, "prompts has 0 entries, but query has 1 texts"),
        ({"query": []}, 422, "query: List should have at least 1 item after validation, not 0"),
        ({"query": "a"}, 422, "query: Input should be a valid array"),
        ({"query": [1]}, 422, "query.0: Input should be a valid string"),
        ({"prompts": ["a"]}, 422, "query: Field required"),
        (b"{not json", 422, "Invalid JSON: key must be a string at line 1 column 2"),
    ],
)
def test_a_request_out_of_bounds_is_refused_in_one_sentence(body, status, said):
    with served(lengths, max_body_mb=0.02, max_texts=4, max_chars=100) as url:
        assert send(url, body)[:2] == (status, {"detail": said})
        assert send(url, {"query": ["good"]})[:2] == (200, {"rewards": [4.0], "details": [""]})


class FewConnections(BoundedConnection):
    head_seconds = 1.0
    max_per_address = 4


def open_with(url: str, first_bytes: bytes) -> socket.socket:
    """Open a connection and send only these bytes."""
    host, port = url.split("/")[2].split(":")
    client = socket.create_connection((host, int(port)), timeout=20)
    client.sendall(first_bytes)
    return client


def is_closed(client: socket.socket) -> bool:
    """Wait until the server closes the connection and check that it sent no response."""
    with client:
        try:
            return client.recv(1) == b""
        except ConnectionResetError:
            return True


def test_connections_without_a_complete_head_are_closed_and_lock_nobody_out():
    with served(lengths, connection=FewConnections) as url:
        halves = [open_with(url, b"POST /get_reward HTTP/1.1\r\nHost: a\r\n") for _ in range(4)]
        assert is_closed(open_with(url, b"")), "the fifth connection of an address"
        assert all(map(is_closed, halves))
        assert send(url, {"query": ["good"]})[0] == 200


class PatientConnections(BoundedConnection):
    head_seconds = 60.0


def test_a_full_server_closes_the_oldest_connection_without_a_head_for_a_new_one():
    with served(lengths, connection=PatientConnections, max_connections=4) as url:
        halves = []
        for _ in range(3):
            halves.append(open_with(url, b"POST /get_reward HTTP/1.1\r\nHost: a\r\n"))
            time.sleep(0.2)  # so that the order of acceptance is known
        assert send(url, {"query": ["good"]})[0] == 200
        assert is_closed(halves[0])
        for half in halves[1:]:
            half.settimeout(0.2)
            with half, pytest.raises(TimeoutError):
                half.recv(1)


def test_the_time_for_a_head_counts_for_each_request_of_a_connection_and_not_for_its_answer():
    gate = Gate()
    with served(gate, connection=FewConnections) as url:
        body = json.dumps({"query": ["a"]}).encode()
        head = f"POST /get_reward HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(body)}"
        client = open_with(url, head.encode() + b"\r\n\r\n" + body)
        time.sleep(2 * FewConnections.head_seconds)
        gate.open.set()
        answer = b""
        while b"details" not in answer:  # head and body may arrive separately
            answer += client.recv(1000)
        assert answer.startswith(b"HTTP/1.1 200")
        client.sendall(b"POST /get_reward")
        assert is_closed(client)


def test_a_body_of_unsaid_length_is_bounded_too():
    with served(lengths, max_body_mb=0.02) as url:
        connection = http.client.HTTPConnection(url.split("/")[2], timeout=30)
        connection.request(
            "POST", "/get_reward", iter([b"x" * 5_000] * 5), {"Authorization": f"Bearer {KEY}"}, encode_chunked=True
        )
        assert connection.getresponse().status == 413
        connection.close()


def test_what_goes_wrong_in_scoring_is_told_and_the_server_lives_on(caplog):
    def score(jobs: Sequence[Sequence[ScoreRequest]]) -> list[list[Score] | RunError]:
        if jobs[0][0].query == "run":
            raise RunError("3 of 4 rewards failed")
        if jobs[0][0].query == "bug":
            raise KeyError("no such thing")
        refused = RunError("2 of 2 rewards failed")
        return [refused if job[0].query == "this" else scores for job, scores in zip(jobs, lengths(jobs), strict=True)]

    with served(score) as url:
        assert send(url, {"query": ["run"]})[:2] == (500, {"detail": "3 of 4 rewards failed"})
        assert send(url, {"query": ["this", "too"]})[:2] == (500, {"detail": "2 of 2 rewards failed"})
        assert send(url, {"query": ["bug"]})[:2] == (500, {"detail": "unexpected KeyError: 'no such thing'"})
        assert send(url, {"query": ["good"]})[0] == 200
    assert "Traceback" in caplog.text


class Gate:
    """Scores lengths once it is opened; records the texts of each call."""

    def __init__(self) -> None:
        self.open, self.entered = threading.Event(), threading.Event()
        self.calls: list[list[list[str]]] = []

    def __call__(self, jobs: Sequence[Sequence[ScoreRequest]]) -> list[list[Score]]:
        self.calls.append([[request.query for request in job] for job in jobs])
        self.entered.set()
        assert self.open.wait(20)
        return lengths(jobs)


def in_thread(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    """Start a call in a thread and return a function that waits for the result."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function(*arguments)))
    thread.start()

    def result() -> Any:
        thread.join()
        return results[0]

    return result


def wait_until_waiting(url: str, count: int) -> None:
    while send(url, b"", path="/health")[1]["waiting"] < count:
        pass


def test_requests_that_wait_are_scored_together_and_answered_apart():
    gate = Gate()
    with served(gate) as url:
        first = in_thread(send, url, {"query": ["a"]})
        gate.entered.wait(20)
        others = [in_thread(send, url, {"query": ["b" * n, "c" * n]}) for n in (2, 3, 4)]
        wait_until_waiting(url, 6)
        gate.open.set()
        assert first()[1]["rewards"] == [1.0]
        assert [other()[1]["rewards"] for other in others] == [[2.0, 2.0], [3.0, 3.0], [4.0, 4.0]]
    assert [len(call) for call in gate.calls] == [1, 3]


def test_a_full_queue_is_told_to_come_again_and_the_client_does():
    gate = Gate()
    with served(gate, max_queue=2, max_texts=2) as url, client_of(url) as client:
        first = in_thread(send, url, {"query": ["a"]})
        gate.entered.wait(20)
        second = in_thread(send, url, {"query": ["b", "c"]})
        wait_until_waiting(url, 2)
        status, said, headers = send(url, {"query": ["d"]})
        assert (status, headers["retry-after"]) == (503, "1")
        assert said["detail"] == "queue full: 2 texts are waiting, no room for 1 more (--max_queue)"
        later = client.submit([request("eeee")])
        gate.open.set()
        assert later[0].result(timeout=20).value == 4.0
        assert (first()[0], second()[0]) == (200, 200)


def test_a_request_whose_client_is_gone_is_not_scored():
    gate = Gate()
    with served(gate) as url:
        first = in_thread(send, url, {"query": ["a"]})
        gate.entered.wait(20)
        gone = http.client.HTTPConnection(url.split("/")[2], timeout=30)
        gone.request("POST", "/get_reward", json.dumps({"query": ["gone"]}), {"Authorization": f"Bearer {KEY}"})
        wait_until_waiting(url, 1)
        gone.close()
        waiting = in_thread(send, url, {"query": ["still there"]})
        wait_until_waiting(url, 2)
        gate.open.set()
        assert first()[0] == waiting()[0] == 200
    assert gate.calls == [[["a"]], [["still there"]]]


def test_what_was_begun_is_answered_when_the_server_is_stopped():
    gate = Gate()
    settings, stop = ServeConfig(port=0), threading.Event()
    with listening(settings.host, settings.port) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/get_reward"
        server = StoppableServer(reward_app(gate, settings, key=KEY), stop.is_set)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        answer = in_thread(send, url, {"query": ["abc"]})
        gate.entered.wait(20)
        stop.set()
        gate.open.set()
        assert answer()[1]["rewards"] == [3.0]
        thread.join()
        with pytest.raises(ConnectionRefusedError):
            send(url, {"query": ["late"]})


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_is_told_to_stop_ends_with_its_status_and_all_its_processes(stop):
    server = serve("--reward_funcs", "exact")
    try:
        assert send(server.url, {"query": ["4"], "labels": ["4"]})[1]["rewards"] == [1.0]
        workers = psutil.Process(server.process.pid).children(recursive=True)
        assert workers
        if stop == signal.SIGINT:
            os.killpg(server.process.pid, stop)  # a terminal signals the whole process group
        else:
            server.process.send_signal(stop)
        server.process.communicate(timeout=20)
    finally:
        server.process.kill()
    assert server.process.returncode == 130
    assert psutil.wait_procs(workers, timeout=5)[1] == []


def test_other_machines_need_a_given_key(monkeypatch):
    monkeypatch.delenv("RLHF_RM_API_KEY", raising=False)
    made, is_made = server_key(ServeConfig())
    assert is_made
    assert len(made) >= 32
    assert made != server_key(ServeConfig())[0]
    with pytest.raises(
        UsageError, match=r"--host 0\.0\.0\.0 is reachable from other .* set a key in .* RLHF_RM_API_KEY"
    ):
        server_key(ServeConfig(host="0.0.0.0"))
    monkeypatch.setenv("OWN", "given")
    assert server_key(ServeConfig(host="0.0.0.0", api_key_env="OWN")) == ("given", False)
    monkeypatch.setenv("OWN", "two\nlines")
    with pytest.raises(UsageError, match="the key in OWN must be printable ASCII without spaces"):
        server_key(ServeConfig(api_key_env="OWN"))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_addresses_of_this_machine_alone(host):
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "gpu-1", ""])
def test_addresses_that_others_reach(host):
    assert not is_loopback(host)


def test_a_port_that_is_taken_or_an_address_that_is_not_here_is_told():
    with listening("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1, --port {port}: Address already"):
            listening("127.0.0.1", port).__enter__()
    with pytest.raises(UsageError, match="cannot listen on"):
        listening("192.0.2.1", 0).__enter__()


def test_a_reward_that_goes_by_rows_is_refused_and_has_no_settings_here(capsys):
    assert cli.main(["serve-rm", "--reward_funcs", "by_row"]) == 2
    assert "by_row requires dataset rows, which requests do not contain" in capsys.readouterr().err
    for flag in ("--reward_key", "--reward_by_source"):
        assert cli.main(["serve-rm", "--reward_funcs", "math", flag, "x"]) == 2
        assert f"unknown flag {flag}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "funcs", [["math", "cosine(max_len=9)"], ["soft_overlong(max_len=9,buffer=2)"], ["exact", "length"]]
)
def test_rewards_that_go_by_tokens_are_refused_in_one_sentence(funcs, capsys):
    assert cli.main(["serve-rm", "--reward_funcs", ",".join(funcs)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    name = funcs[-1].partition("(")[0]
    assert line.startswith(f"rlhf serve-rm: reward_funcs {name} requires the response length in tokens, which requests")


def test_a_model_that_is_no_reward_model_is_refused(tiny_model_dir):
    with pytest.raises(UsageError, match="is Qwen2ForCausalLM, not a sequence-classification model with one label"):
        scoring(RewardConfig(reward_pretrain=tiny_model_dir, reward_max_failures=1.0), ServedModelConfig()).__enter__()
