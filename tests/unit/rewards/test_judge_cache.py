"""Verdicts in a file, with real HTTP servers in this process."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from http_servers import Server, running
from judge_answers import MODELS, says, verdict
from server_requests import request
from test_rewards_judge import config, judged, refused

from rlhf_cli.rewards.scorer import Scorer


@pytest.fixture
def server() -> Iterator[Server]:
    with running(Server(lambda _: verdict(7), MODELS)) as started:
        yield started


@pytest.fixture
def file(tmp_path) -> str:
    return str(tmp_path / "verdicts.db")


def test_equal_questions_are_asked_once_also_in_a_later_run_and_elsewhere(server, file):
    settings = config(server, judge_cache=file, judge_concurrency=1)
    first = judged(settings, request("same"), request("same"), request("other"))
    assert len(server.asked) == 2
    with running(Server(lambda _: verdict(1), MODELS)) as elsewhere:
        later = judged(config(elsewhere, judge_cache=file), request("same"), request("new"))
        assert [score.value for score in later] == [0.7, 0.1]
        assert len(elsewhere.asked) == 1
    assert later[0].judgements == first[0].judgements == [{"score": 0.7, "reason": "because"}]


@pytest.mark.parametrize(
    "changed",
    [
        {"judge_model": "another"},
        {"judge_args": '{"temperature": 0.5}'},
        {"judge_score_range": (0, 7)},
    ],
)
def test_other_questions_are_asked(server, file, changed):
    judged(config(server, judge_cache=file), request("same"))
    judged(config(server, judge_cache=file, **changed), request("same"))
    assert len(server.asked) == 2


def test_answers_without_a_verdict_and_the_key_are_not_stored(server, file, monkeypatch):
    monkeypatch.setenv("RLHF_JUDGE_API_KEY", "sk-very-secret")
    server.answer = lambda _: says("well") if len(server.asked) == 1 else verdict(3, "sk-very-secret \ud800")
    settings = config(server, judge_cache=file)
    assert [judged(settings, request("same"))[0].value for _ in range(3)] == [None, 0.3, 0.3]
    assert len(server.asked) == 2
    assert b"very-secret" not in Path(file).read_bytes()


def test_a_file_that_is_no_cache_is_refused_and_one_that_breaks_is_not_used_any_more(server, file, caplog):
    Path(file).write_text("no database" * 100)
    assert refused(lambda: Scorer(config(server, judge_cache=file))) == (
        f"--judge_cache {file} cannot be used: file is not a database"
    )
    Path(file).unlink()
    with Scorer(config(server, judge_cache=file)) as scorer:
        with sqlite3.connect(file) as other:
            other.execute("DROP TABLE completions")
        other.close()
        assert [score.value for score in scorer.score([request("a"), request("b")])] == [0.7, 0.7]
    assert caplog.text.count("is not used any more: no such table: completions") == 1
