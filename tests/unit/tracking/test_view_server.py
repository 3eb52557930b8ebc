"""The server of `rlhf view`: key, host names, files, and answers while runs go on."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer
from viewed_runs import add_image, make_run, sample, write

from rlhf_cli.errors import UsageError
from rlhf_cli.tracking.sinks import METRICS_FILE, RUN_FILE, SAMPLES_FILE
from rlhf_cli.tracking.view import explanations
from rlhf_cli.tracking.view.app import view_app
from rlhf_cli.tracking.view.front_end import PAGE
from rlhf_cli.tracking.view.runs import ViewedRuns, checked_folders

KEY = "the-key"


def answers(folder: Path, *paths: str, key: str = KEY, **options):
    """Return (status, headers, body) for each path below the key."""

    async def get():
        runs = ViewedRuns([folder])
        async with TestClient(TestServer(view_app(runs, key=KEY))) as client:
            found = []
            for path in paths:
                answer = await client.get(f"/{key}/{path}", **options)
                found.append((answer.status, answer.headers, await answer.read()))
        runs.close()
        return found

    return asyncio.run(get())


def data(folder: Path, *paths: str):
    """Return the JSON at each path. The runs are listed first, as the page does."""
    found = answers(folder, "api/runs", *paths)
    assert [status for status, _, _ in found] == [200] * len(found), found
    return [json.loads(body) for _, _, body in found][1:]


PATHS = ["", "page/main.js", "page/view.css", "api/runs", "api/metrics?run=0", "api/samples?run=0", "api/image?run=0"]


@pytest.mark.parametrize("key", ["wrong", "the-ke", "the-keys", "%20"])
def test_nothing_answers_without_the_key(tmp_path, key):
    make_run(tmp_path / "run")
    for status, _, body in answers(tmp_path, *PATHS, key=key):
        assert status == 403
        assert body == b"open the address that rlhf view printed: it contains a key"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:7000", 200),
        ("localhost", 200),
        ("[::1]:7", 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example:1", 421),
    ],
)
def test_other_host_names_are_refused_even_with_the_key(tmp_path, host, status):
    make_run(tmp_path / "run")
    found = answers(tmp_path, "api/runs", "", headers={"Host": host})
    assert [one[0] for one in found] == [status, status]


def test_the_page_loads_only_its_own_files_and_no_inline_script(tmp_path):
    make_run(tmp_path / "run")
    (_, headers, page), (status, *_) = answers(tmp_path, "", "page/none.js")
    assert status == 404
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    named = re.findall(r'(?:src|href)="([^"]+)"', page.decode()) + re.findall(r'"(\./[^"]+)"', page.decode())
    assert len(named) > 5
    assert {one[0] for one in answers(tmp_path, *named)} == {200}
    scripts = [path.read_text() for path in PAGE.glob("*.js")]
    imports = {name for text in scripts for name in re.findall(r'from "([^"]+)"', text)}
    (mapped,) = re.findall(r'<script type="importmap">(.*?)</script>', page.decode(), re.DOTALL)
    assert imports == set(json.loads(mapped)["imports"])


def test_files_outside_the_runs_are_out_of_reach(tmp_path):
    run = make_run(tmp_path / "runs" / "one")
    (tmp_path / "secret.png").write_bytes(b"secret")
    (run / "sample_images").mkdir()
    (run / "sample_images" / "link.png").symlink_to(tmp_path / "secret.png")
    (run / SAMPLES_FILE).unlink()
    (run / SAMPLES_FILE).symlink_to(tmp_path / "secret.png")
    names = [
        "sample_images/link.png",
        "sample_images/../../../secret.png",
        "../secret.png",
        str(tmp_path / "secret.png"),
    ]
    paths = [f"api/image?run=0&name={name}" for name in names]
    paths += ["api/samples?run=0", "api/samples?run=0&file=config.yaml", "page/..%2f..%2fapp.py", "api/metrics?run=7"]
    first, *found = answers(tmp_path / "runs", "api/runs", *paths)
    assert first[0] == 200
    assert [status for status, _, _ in found] == [404] * len(paths)
    assert all(b"secret" not in body.replace(b"secret.png", b"") for _, _, body in found)


def test_secrets_of_the_environment_are_in_no_answer(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "HF_TOKEN", "RLHF_RM_API_KEY"):
        monkeypatch.setenv(name, "planted-secret")
    make_run(tmp_path / "run")
    paths = [
        *PATHS,
        "api/settings?run=0",
        "api/sample?run=0&number=1",
        "api/groups?run=0",
        "api/none",
        "api/sample?run=0",
    ]
    for _, headers, body in answers(tmp_path, "api/runs", *paths):
        assert b"planted-secret" not in body + str(headers).encode()


def test_metrics_arrive_from_where_the_last_answer_ended(tmp_path):
    run = make_run(tmp_path / "run", steps=2)
    (first,) = data(tmp_path, "api/metrics?run=0")
    assert [record["step"] for record in first["records"]] == [1, 2]
    assert first["prominent"] == ["reward"]
    assert first["titles"]["reward"] == "reward"
    with (run / METRICS_FILE).open("a") as lines:
        lines.write('{"step": 3, "reward": "NaN"}\n{"step": 4, "rew')
    (second,) = data(tmp_path, f"api/metrics?run=0&cursor={first['cursor']}")
    assert (second["records"], second["is_first"]) == ([{"step": 3, "reward": "NaN"}], False)
    with (run / METRICS_FILE).open("a") as lines:
        lines.write('ard": 1.0}\n')
    (third,) = data(tmp_path, f"api/metrics?run=0&cursor={second['cursor']}")
    assert third["records"] == [{"step": 4, "reward": 1.0}]
    # A resumed run replaces the file, so that the page must start again.
    (run / METRICS_FILE).rename(run / "before")
    write(run / METRICS_FILE, [{"step": 1, "reward": 0.5}] * 9)
    (fourth,) = data(tmp_path, f"api/metrics?run=0&cursor={third['cursor']}")
    assert (fourth["is_first"], len(fourth["records"])) == (True, 9)


def test_long_metrics_arrive_in_parts(tmp_path, monkeypatch):
    make_run(tmp_path / "run", steps=20)
    monkeypatch.setattr("rlhf_cli.tracking.view.runs._METRICS_BYTES", 100)
    cursor, steps = "", []
    while True:
        (part,) = data(tmp_path, f"api/metrics?run=0&cursor={cursor}")
        steps += [record["step"] for record in part["records"]]
        cursor = part["cursor"]
        if not part["has_more"]:
            break
    assert steps == list(range(1, 21))


def test_samples_are_listed_with_the_beginning_of_their_text_and_read_in_full(tmp_path):
    run = make_run(tmp_path / "run")
    write(run / SAMPLES_FILE, [sample(12, response="long " * 1000)])
    listed, full = data(tmp_path, "api/samples?run=0&order=number&descending=1&limit=2", "api/sample?run=0&number=13")
    assert [len(row["response"]) for row in listed["rows"]] == [240, 9]
    assert (listed["next"], listed["total"], listed["indexed"]) == (2, 13, 1.0)
    assert full["response"] == "long " * 1000


PROGRAM = """
import json, sys
values = dict(word.split("=", 1) for word in sys.argv[2:])
if values["--sample"].endswith("5.1@0"):
    sys.exit("rlhf why: no such iteration")
token = {"text": values["--sample"], "lines": [sys.argv[1]], "values": {}}
open(values["--json_file"], "w").write(json.dumps({"lines": [], "equality": [], "tokens": [token]}))
"""


def explained(folder: Path, number: int):
    """Return the states of a sample's explanation before and after it is requested, until it is done."""

    async def get():
        runs = ViewedRuns([folder])
        async with TestClient(TestServer(view_app(runs, key=KEY))) as client:
            await client.get(f"/{KEY}/api/runs")
            path = f"/{KEY}/api/explanation?run=0&number={number}"
            found = [await (await client.get(path)).json(), await (await client.post(path)).json()]
            while found[-1]["state"] != "done":
                await asyncio.sleep(0.02)
                found.append(await (await client.get(path)).json())
        runs.close()
        return found

    return asyncio.run(get())


def test_an_explanation_runs_in_the_background(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run")
    monkeypatch.setattr(explanations, "_COMMAND", (sys.executable, "-c", PROGRAM))
    before, requested, *_, done = explained(tmp_path, 3)
    assert before == {"state": "none"}
    assert requested["state"] in ("waiting", "running")
    assert done["tokens"] == [{"text": "data.jsonl:1/1.0@0", "lines": [str(run)], "values": {}}]
    assert explained(tmp_path, 12)[-1] == {"state": "done", "error": "rlhf why: no such iteration"}


def test_an_explanation_in_progress_ends_with_the_server(tmp_path, monkeypatch):
    make_run(tmp_path / "run")
    program = "import os, pathlib, time; pathlib.Path(__import__('sys').argv[1], 'pid').write_text(str(os.getpid()))"
    monkeypatch.setattr(explanations, "_COMMAND", (sys.executable, "-c", f"{program}; time.sleep(60)"))

    async def get():
        runs = ViewedRuns([tmp_path])
        async with TestClient(TestServer(view_app(runs, key=KEY))) as client:
            await client.get(f"/{KEY}/api/runs")
            await client.post(f"/{KEY}/api/explanation?run=0&number=1")
            while not (tmp_path / "run" / "pid").exists() or not (tmp_path / "run" / "pid").read_text():
                await asyncio.sleep(0.02)
        runs.close()

    asyncio.run(get())
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "run" / "pid").read_text()), 0)


def test_parameters_that_are_invalid_are_refused(tmp_path):
    make_run(tmp_path / "run")
    paths = ["samples?run=0&order=id;DROP", "samples?run=0&step_min=nan", "samples?run=x", "histogram?run=0&column=id"]
    found = answers(tmp_path, "api/runs", *(f"api/{path}" for path in paths))
    assert [status for status, _, _ in found[1:]] == [404] * 4


def test_images_of_samples_are_answered(tmp_path):
    name = add_image(make_run(tmp_path / "run"))
    _, (status, headers, body) = answers(tmp_path, "api/runs", f"api/image?run=0&name={name}")
    assert (status, headers["Content-Type"], body[:4]) == (200, "image/png", b"\x89PNG")


def test_new_runs_in_a_folder_appear_and_keep_their_numbers(tmp_path):
    make_run(tmp_path / "b")
    runs = ViewedRuns([tmp_path])
    assert [(run.number, run.path.name) for run in runs.current()] == [(0, "b")]
    make_run(tmp_path / "a")
    assert [(run.number, run.path.name) for run in runs.current()] == [(0, "b"), (1, "a")]


def test_the_state_of_a_run_that_has_not_written_its_end_is_looked_up(tmp_path):
    make_run(tmp_path / "a", outcome="running")
    make_run(tmp_path / "b", outcome="failed")
    runs = ViewedRuns([tmp_path], lambda path: f"{path.name} killed")
    assert [run.description()["outcome"] for run in runs.current()] == ["a killed", "failed"]


def test_a_damaged_run_does_not_hide_the_others(tmp_path):
    for name, text in (("a", "{torn"), ("b", "[1, 2]"), ("c", None)):
        run = make_run(tmp_path / name)
        if text is not None:
            (run / RUN_FILE).write_text(text)
    (status, _, body), *_ = answers(tmp_path, "api/runs")
    found = {run["name"]: (run["command"], run["outcome"]) for run in json.loads(body)}
    assert (status, found) == (
        200,
        {"a": ("damaged run.json", "unknown"), "b": ("damaged run.json", "unknown"), "c": ("grpo", "finished")},
    )


def test_folders_without_a_run_are_named(tmp_path):
    with pytest.raises(UsageError, match="none: there is no such folder"):
        checked_folders([str(tmp_path / "none")])
    with pytest.raises(UsageError, match="is no run directory and contains none"):
        checked_folders([str(tmp_path)])


def test_the_command_prints_an_address_and_ends_with_a_signal(tmp_path):
    make_run(tmp_path / "a")
    make_run(tmp_path / "b")
    words = [sys.executable, "-m", "rlhf_cli", "view", str(tmp_path / "a"), str(tmp_path / "b")]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, env={**os.environ, "WANDB_API_KEY": "planted"}
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"Open (http://127\.0\.0\.1:\d+/[\w-]{32}/) ", line)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 130
    assert found, line
    assert "planted" not in line
