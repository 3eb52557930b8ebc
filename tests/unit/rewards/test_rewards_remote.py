"""The client of reward servers, tested with real HTTP servers in this process."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from http_servers import HANG_UP, Answer, Server, dead_url, lengths, rewards, running
from pydantic import ValidationError
from scoring import finished
from server_requests import ask, request

from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.errors import RunError, UsageError
from rlhf_cli.rewards.records import Score, ScoreRequest
from rlhf_cli.rewards.remote import state
from rlhf_cli.rewards.remote.call import SERVICE
from rlhf_cli.rewards.remote.client import REWARD_SERVERS, RemoteRewards, check_servers
from rlhf_cli.rewards.scorer import Scorer
from rlhf_cli.rewards.workers.pool import ItemOutcome


@pytest.fixture
def server() -> Iterator[Server]:
    with running(Server()) as started:
        yield started


@pytest.fixture(autouse=True)
def short_absence(monkeypatch):
    monkeypatch.setattr(state, "FIRST_ABSENCE", 0.02)


def asking(*servers: Server | str, retries: int = 1, timeout: float = 10.0, batch_size: int = 4) -> RemoteRewards:
    urls = [each if isinstance(each, str) else each.url for each in servers]
    return RemoteRewards(urls, key=None, timeout=timeout, retries=retries, batch_size=batch_size)


def requests(count: int) -> list[ScoreRequest]:
    """Return requests; query n has n + 1 characters."""
    return [request("x" * (n + 1), prompt="x" * n) for n in range(count)]


def values(outcomes: list[ItemOutcome]) -> list[float | None]:
    return [None if outcome.failure else outcome.value for outcome in outcomes]


def reasons(outcomes: list[ItemOutcome]) -> set[tuple[str, str]]:
    return {(outcome.failure.kind, outcome.failure.reason) for outcome in outcomes if outcome.failure}


def test_the_wire_format_is_that_of_openrlhf(server):
    with asking(server, batch_size=8) as client:
        ask(client, [request("Q: 2+2? A: 4", prompt="Q: 2+2? ", label="4"), request("a", prompt="a")])
    (body,) = server.asked
    assert body == {"query": ["Q: 2+2? A: 4", "a"], "prompts": ["Q: 2+2? ", "a"], "labels": ["4", None]}


def test_rewards_come_back_in_order_from_batches_of_bounded_size(server):
    with asking(server, batch_size=4) as client:
        assert values(ask(client, requests(30))) == list(range(1, 31))
    assert sum(server.num_queries) == 30
    assert max(server.num_queries) == 4


def test_several_servers_are_asked_at_the_same_time():
    asked = [threading.Event(), threading.Event()]

    def answers_after_the_other_was_asked(number: int) -> Callable[[dict], Answer]:
        def answer(body: dict) -> Answer:
            asked[number].set()
            return lengths(body) if asked[1 - number].wait(20) else (500, b"", {})

        return answer

    first, second = (Server(answers_after_the_other_was_asked(number)) for number in (0, 1))
    with running(first), running(second), asking(first, second, retries=0, timeout=60) as client:
        assert values(ask(client, requests(20))) == list(range(1, 21))


def test_the_key_travels_in_a_header_alone(server):
    with RemoteRewards([server.url], key="secret", timeout=10, retries=0, batch_size=4) as client:
        ask(client, requests(2))
    assert server.keys == {"Bearer secret"}
    assert "secret" not in json.dumps(server.asked)


def test_a_slow_server_has_failed_after_its_timeout_and_is_named(server, caplog):
    released = threading.Event()

    def slow(body: dict) -> Answer:
        released.wait(20)
        return lengths(body)

    server.answer = slow
    with asking(server, retries=0, timeout=0.2) as client:
        outcomes = ask(client, requests(3))
        released.set()
    assert reasons(outcomes) == {("timeout", f"{server.url} did not answer within 0.2 s")}
    assert f"the reward server {server.url} did not answer within 0.2 s: it is skipped" in caplog.text


@pytest.mark.parametrize(
    ("answer", "kind", "reason"),
    [
        (rewards([1.0]), "bad_result", "returned 1 values for 2 responses"),
        (rewards([1.0, float("nan")]), "bad_result", "returned nan"),
        (rewards([None, float("inf")]), "bad_result", "returned inf"),
        (rewards([True, "0.5"]), "bad_result", "returned str '0.5', not a number"),
        ((200, b'{"rewards": 3}', {}), "bad_result", "returned int, not a list of numbers"),
        ((200, b'{"score": [1, 2]}', {}), "bad_result", 'sent a response without {"rewards": [...]}'),
        ((200, b"[" * 100_000, {}), "bad_result", "sent a response that is not JSON: " + "[" * 200),
        ((200, b"<html> no", {}), "bad_result", "sent a response that is not JSON: <html> no"),
        ((500, b'{"detail": "out of\\n memory"}', {}), "raised", "returned status 500: out of memory"),
        ((401, b"", {}), "raised", "returned status 401"),
        ((302, b"", {"Location": "http://127.0.0.1:9/"}), "raised", "returned status 302"),
        (HANG_UP, "crashed", "dropped the connection (ServerDisconnectedError)"),
    ],
)
def test_a_wrong_answer_is_a_failure_with_its_kind_and_never_a_reward(server, answer, kind, reason):
    server.answer = lambda _: answer
    with asking(server, retries=0) as client:
        outcomes = ask(client, requests(2))
    assert outcomes[1].failure is not None
    assert (kind, f"{server.url} {reason}") in reasons(outcomes)


def test_one_bad_value_does_not_cost_the_others_of_its_batch(server):
    server.answer = lambda body: rewards(
        [None if query == "xx" else 1.0 for query in body["query"]], details=["no label" for _ in body["query"]]
    )
    with asking(server) as client:
        outcomes = ask(client, requests(4))
    assert values(outcomes) == [1.0, None, 1.0, 1.0]
    assert reasons(outcomes) == {("bad_result", f"{server.url} failed: no label")}
    assert [len(query) for body in server.asked for query in body["query"]] == [1, 2, 3, 4, 2], "asked once more alone"


def test_a_failed_call_is_tried_again_within_the_budget(server):
    def fails_twice(body: dict) -> Answer:
        return (500, b"", {}) if len(server.asked) <= 2 else lengths(body)

    server.answer = fails_twice
    with asking(server, retries=2) as client:
        assert values(ask(client, requests(1))) == [1]
    server.asked.clear()
    with asking(server, retries=1) as client:
        assert values(ask(client, requests(1))) == [None]
    assert len(server.asked) == 2


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405])
def test_a_refusal_is_reported_once_and_not_repeated(server, status):
    server.answer = lambda body: (status, b'{"detail": "no such field"}', {})
    told: list[str] = []
    with RemoteRewards([server.url], key=None, timeout=10, retries=5, batch_size=4, tell=told.append) as client:
        outcomes = ask(client, requests(8))
    reason = f"{server.url} returned status {status}: no such field"
    assert reasons(outcomes) == {("raised", reason)}
    assert len(outcomes) == 8
    assert len(server.asked) == 2, "two batches of four, each asked once"
    assert told == [f"the reward server {reason}: rejected requests are not retried there"]


def test_what_one_server_refuses_another_one_may_take(server):
    with running(Server()) as refusing:
        refusing.answer = lambda body: (403, b"", {})
        with asking(refusing, server, retries=0) as client:
            assert values(ask(client, requests(20))) == list(range(1, 21))


def test_a_passing_refusal_is_repeated(server):
    server.answer = lambda body: (408, b"", {}) if len(server.asked) == 1 else lengths(body)
    with asking(server, retries=1) as client:
        assert values(ask(client, requests(1))) == [1]


def test_a_response_that_a_server_cannot_stand_fails_alone(server):
    server.answer = lambda body: HANG_UP if "xxx" in body["query"] else lengths(body)
    with asking(server, batch_size=8) as client:
        assert values(ask(client, requests(6))) == [1, 2, None, 4, 5, 6]


def test_a_dead_server_costs_nothing_beside_a_living_one(server):
    with asking(dead_url(), server, retries=0) as client:
        assert values(ask(client, requests(20))) == list(range(1, 21))


def test_a_server_that_fails_is_replaced_by_the_other_one(server):
    with running(Server(lambda _: (500, b"", {}))) as broken, asking(broken, server) as client:
        assert values(ask(client, requests(20))) == list(range(1, 21))


def test_a_server_that_dies_midway_hands_its_work_to_the_other_one(server):
    dying = Server()
    dying.answer = lambda body: lengths(body) if len(dying.asked) < 2 else HANG_UP
    with running(dying), asking(dying, server) as client:
        assert values(ask(client, requests(40))) == list(range(1, 41))


def test_a_server_that_comes_back_is_asked_again(caplog):
    url = dead_url()
    with asking(url) as client:
        waiting = client.submit(requests(3))
        while "is skipped" not in caplog.text:
            time.sleep(0.01)
        with running(Server(), port=int(url.split(":")[2].split("/")[0])):
            assert values([future.result(timeout=20) for future in waiting]) == [1, 2, 3]
    assert f"the reward server {url} is available again" in caplog.text


def test_a_lone_server_that_falls_silent_is_told_and_not_asked_again_before_it_answers_a_probe(server):
    told: list[str] = []
    released = threading.Event()

    def silent(body: dict) -> Answer:
        released.wait(60)
        return lengths(body)

    server.answer, server.health = silent, (503, b"", {})
    with RemoteRewards([server.url], key=None, timeout=2.0, retries=5, batch_size=4, tell=told.append) as client:
        outcomes = ask(client, requests(2))
        assert reasons(outcomes) == {("raised", f"{server.url} returned status 503")}  # the status of the last probe
        assert server.num_queries == [2]  # including all retries
        assert told == [
            f"the reward server {server.url} did not answer within 2 s: it is skipped until it passes a health check; "
            "if no server does within 2 s, rewards fail"
        ]
        server.answer, server.health = lengths, (200, b"{}", {})
        while len(told) < 2:
            time.sleep(0.01)
        assert values(ask(client, requests(2))) == [1, 2]
        assert told[1:] == [f"the reward server {server.url} is available again"]
    released.set()


def test_what_waits_fails_when_no_server_was_there_for_the_timeout():
    url = dead_url()
    with asking(url, timeout=2.0) as client:
        first = ask(client, requests(3))
        second = ask(client, requests(1))
    for kind, reason in reasons(first + second):
        assert kind == "unreachable"
        assert reason.startswith(f"{url} cannot be reached (")
    assert values(first + second) == [None] * 4


def test_a_full_server_is_asked_again_later_and_that_is_no_failed_try(server):
    def full_at_first(body: dict) -> Answer:
        return (503, b"", {"Retry-After": "0.1"}) if len(server.asked) <= 4 else lengths(body)

    server.answer = full_at_first
    with asking(server, retries=0) as client:
        assert values(ask(client, requests(9))) == list(range(1, 10))


def test_a_server_that_stays_full_fails_in_the_end(server):
    server.answer = lambda _: (503, b"", {"Retry-After": "0.1"})
    with asking(server, timeout=0.3) as client:
        assert reasons(ask(client, requests(2))) == {("timeout", f"{server.url} was overloaded for 0.3 s")}


def test_a_batch_that_is_too_large_is_sent_in_pieces(server):
    server.answer = lambda body: (413, b"", {}) if len(body["query"]) > 1 else lengths(body)
    with asking(server, retries=0) as client:
        assert values(ask(client, requests(4))) == [1, 2, 3, 4]


def test_a_text_that_is_too_long_fails_alone(server):
    def picky(body: dict) -> Answer:
        return (422, b'{"detail": "text 0 is too long"}', {}) if "xxx" in body["query"] else lengths(body)

    server.answer = picky
    with asking(server) as client:
        outcomes = ask(client, requests(4))
    assert values(outcomes) == [1, 2, None, 4]
    assert reasons(outcomes) == {("bad_result", f"{server.url} returned status 422: text 0 is too long")}


def test_an_endless_answer_is_not_read_to_its_end(server, monkeypatch):
    monkeypatch.setattr("rlhf_cli.rewards.remote.call.MAX_ANSWER_BYTES", 10)
    server.answer = lambda _: (200, b" " * 100_000, {})
    with asking(server, retries=0) as client:
        assert reasons(ask(client, requests(1))) == {
            ("bad_result", f"{server.url} sent a response larger than 4,106 bytes")
        }


def test_closing_ends_the_thread_and_lets_nobody_wait(server):
    released = threading.Event()

    def slow(body: dict) -> Answer:
        released.wait(20)
        return lengths(body)

    server.answer = slow
    client = asking(server, batch_size=1)
    waiting = client.submit(requests(5))
    client.close()
    client.close()
    released.set()
    assert reasons([future.result(timeout=1) for future in waiting]) == {("crashed", "was cancelled")}
    assert all(future.result().failure for future in waiting)
    assert "remote-rewards" not in {thread.name for thread in threading.enumerate()}


def test_a_defect_is_logged_and_lets_nobody_wait(server, caplog):
    async def broken(*given: object, **settings: object) -> list[ItemOutcome]:
        raise ZeroDivisionError("a defect")

    wire = replace(REWARD_SERVERS, post=broken)
    with RemoteRewards([server.url], key=None, timeout=10, retries=1, batch_size=4, wire=wire) as client:
        assert reasons(ask(client, requests(5))) == {("crashed", "was cancelled")}
        client.close()
        with pytest.raises(AssertionError, match="has ended"):
            client.submit(requests(1))
    assert "ZeroDivisionError: a defect" in caplog.text


def test_servers_that_answer_in_whatever_way_are_there(server):
    server.health = (501, b"GET is not for me", {})
    check_servers([server.url], key=None, timeout=10)


def test_servers_that_are_not_there_are_named_before_anything_starts(server):
    url = dead_url()
    with pytest.raises(UsageError) as caught:
        check_servers([server.url, url], key=None, timeout=10)
    assert str(caught.value).startswith(f"--remote_rm_url {url} cannot be reached (")
    server.health = (502, b"no backend", {})
    with pytest.raises(UsageError, match="returned status 502: no backend"):
        check_servers([server.url], key=None, timeout=10)


def test_a_server_of_ours_that_does_not_take_the_key_is_named_before_anything_starts(server):
    server.health = (200, json.dumps({"service": SERVICE, "authorised": False}).encode(), {})
    with pytest.raises(UsageError, match="rejects this key, or requires one"):
        check_servers([server.url], key="wrong", timeout=10)
    server.health = (200, json.dumps({"service": SERVICE, "authorised": True}).encode(), {})
    check_servers([server.url], key="right", timeout=10)


def config(*servers: Server, **settings: Any) -> RewardConfig:
    given = {"remote_rm_url": [server.url for server in servers], "remote_rm_timeout": 10.0, "reward_retries": 0}
    return RewardConfig.model_validate(given | settings)


def test_the_score_of_the_servers_is_a_part_with_a_weight(server):
    settings = config(server, remote_rm_weight=0.5, reward_funcs=["exact"], reward_weights=[10.0])
    with Scorer(settings) as scorer:
        scores = scorer.score([request("2+2=4", prompt="2+2=", label="4"), request("1+1=3", prompt="1+1=", label="2")])
    assert [score.value for score in scores] == [10.0 + 0.5 * 5, 0.5 * 5]
    assert [score.parts for score in scores] == [{"exact": 1.0, "remote_rm": 5.0}, {"exact": 0.0, "remote_rm": 5.0}]
    assert [score.status for score in scores] == ["correct", "wrong"]


def test_servers_alone_give_a_score(server):
    with Scorer(config(server)) as scorer:
        scores = scorer.score(requests(5))
    assert [(score.value, score.status) for score in scores] == [(float(n + 1), "scored") for n in range(5)]


def test_responses_are_sent_when_they_are_added_and_scores_come_as_they_are_ready(server):
    with Scorer(config(server)) as scorer, scorer.session() as session:
        session.add(requests(2))
        found: list[tuple[int, float | None]] = []
        while len(found) < 2:
            found += [(number, score.value) for number, score in session.ready()]
        assert sorted(found) == [(0, 1.0), (1, 2.0)]
        session.add([request("abc")])
        assert [score.value for score in finished(session)] == [1.0, 2.0, 3.0]
        assert [number for number, _ in session.ready()] == [2]


def test_a_score_waits_for_the_servers_where_all_else_is_there(server):
    released = threading.Event()

    def slow(body: dict) -> Answer:
        released.wait(20)
        return lengths(body)

    server.answer = slow
    settings = config(server, reward_funcs=["soft_overlong(max_len=4,buffer=2)"])
    with Scorer(settings) as scorer, scorer.session() as session:
        session.add([request("abcd")])
        assert session.ready() == []
        released.set()
        (score,) = finished(session)
        assert session.ready() == [(0, score)]
    assert score.parts == {"soft_overlong": -1.0, "remote_rm": 4.0}
    assert score.value == 3.0


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_a_score_has_the_parts_of_workers_and_servers_whichever_answer_first(server, seconds):
    def answer(body: dict) -> Answer:
        time.sleep(seconds)
        return lengths(body)

    server.answer = answer
    settings = config(server, reward_funcs=["exact", "tag_count", "soft_overlong(max_len=4,buffer=2)"])
    asked = [request("4444", label="4"), request("4", label="4"), request("444", label="444")]
    with Scorer(settings) as scorer, scorer.session() as session:
        session.add(asked[:1])
        session.add(asked[1:])
        ready: list[tuple[int, Score]] = []
        while len(ready) < 3:
            ready += session.ready()
        assert [score for _, score in sorted(ready, key=lambda found: found[0])] == finished(session)
        assert session.ready() == []
    assert {number: score.parts for number, score in ready} == {
        0: {"exact": 0.0, "tag_count": 0.0, "soft_overlong": -1.0, "remote_rm": 4.0},
        1: {"exact": 1.0, "tag_count": 0.0, "soft_overlong": 0.0, "remote_rm": 1.0},
        2: {"exact": 1.0, "tag_count": 0.0, "soft_overlong": -0.5, "remote_rm": 3.0},
    }


def test_every_kind_of_reward_keeps_to_its_response_in_whatever_order_they_are_compared(server, tmp_path):
    file = tmp_path / "reward.py"
    file.write_text("def reward_func(queries, prompts, labels):\n    return list(range(len(queries)))\n")
    settings = config(
        server, remote_rm_batch_size=1, reward_funcs=["exact", "length"], reward_func=str(file), remote_rm_weight=10.0
    )
    asked = [request("p=44", prompt="p=", label="44"), request("p=4", prompt="p=", label="4")]
    asked.append(request("p=4444", prompt="p=", label="4"))
    first, *others = [
        replace(one, group="g", sample=sample, group_size=3) for one, sample in zip(asked, (2, 0, 1), strict=True)
    ]
    with Scorer(settings) as scorer, scorer.session() as session:
        session.add([first])
        session.add(others)
        scores = finished(session)
    # Lengths 2, 1 and 4: 0.5 - 1/3 and 0.5 - 0 for right answers, at most 0.5 - 1 for the wrong one.
    assert [score.parts for score in scores] == [
        {"exact": 1.0, "length": pytest.approx(1 / 6), "reward_func": 2.0, "remote_rm": 4.0},
        {"exact": 1.0, "length": 0.5, "reward_func": 0.0, "remote_rm": 3.0},
        {"exact": 0.0, "length": -0.5, "reward_func": 1.0, "remote_rm": 6.0},
    ]
    assert [score.value for score in scores] == pytest.approx([1 + 1 / 6 + 2 + 40, 1.5 + 30, 0.5 + 60])


def test_a_session_that_ends_early_asks_no_further(server):
    released = threading.Event()

    def slow(body: dict) -> Answer:
        released.wait(20)
        return lengths(body)

    server.answer = slow
    with Scorer(config(server, remote_rm_batch_size=1)) as scorer:
        with scorer.session() as session:
            session.add(requests(10))
        released.set()
        assert [score.value for score in scorer.score([request("four")])] == [4.0]
    assert len(server.asked) < 10


def test_too_many_failures_stop_the_run_and_name_the_server(server):
    server.answer = lambda body: rewards([None if len(query) % 2 else 1.0 for query in body["query"]])
    with Scorer(config(server, reward_max_failures=0.5)) as scorer:
        scores = scorer.score(requests(4))
        assert [score.status for score in scores] == ["failed", "scored", "failed", "scored"]
        assert scores[0].detail == f"remote_rm {server.url} returned None"
        with pytest.raises(RunError) as caught:
            scorer.score(requests(3))
    assert str(caught.value) == (
        f"2 of 3 rewards failed, more than --reward_max_failures 0.5 allows: remote_rm {server.url} returned None"
    )


def test_a_scorer_needs_its_servers_and_shows_them_the_key_of_the_environment(server, monkeypatch):
    monkeypatch.setenv("OWN_KEY", "of the environment".replace(" ", "-"))
    with Scorer(config(server, remote_rm_api_key_env="OWN_KEY")) as scorer:
        scorer.score(requests(1))
    assert server.keys == {"Bearer of-the-environment"}
    with pytest.raises(UsageError, match=r"--remote_rm_url http://127\.0\.0\.1:\d+/get_reward cannot be reached"):
        Scorer(RewardConfig(remote_rm_url=[dead_url()]))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"remote_rm_url": ["10.0.0.5:5000"]}, "'10.0.0.5:5000' does not begin with http:// or https://"),
        ({"remote_rm_url": ["http://"]}, "'http://' names no host; use a URL such as http://"),
        ({"remote_rm_url": ["http://a:99999/"]}, "is no URL (Port out of range"),
        ({"remote_rm_url": ["http://me:secret@a/get_reward"]}, "has a name or password in it"),
        ({"remote_rm_url": ["http://a/get_reward?key=1"]}, "has a query or fragment"),
        ({"remote_rm_url": ["http://a", "http://a"]}, "lists a server twice"),
    ],
)
def test_bad_settings_of_reward_servers_are_refused(settings, said):
    with pytest.raises(ValidationError) as caught:
        RewardConfig.model_validate(settings)
    assert said in str(caught.value)
