"""The page of `rlhf view` in a headless Chromium: what it shows, its keys, and that it loads nothing from elsewhere."""

import asyncio
import json
import re
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestServer
from headless import CHROMIUM, Page, accessibility_problems, chromium, new_page
from viewed_runs import add_image, make_run, sample, write

from rlhf_cli.tracking.sinks import METRICS_FILE, RUN_FILE, SAMPLES_FILE
from rlhf_cli.tracking.view import explanations
from rlhf_cli.tracking.view.app import view_app
from rlhf_cli.tracking.view.export import write_report
from rlhf_cli.tracking.view.runs import ViewedRuns

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt install chromium")

HOSTILE = "<img src=x onerror=\"document.title='owned'\"></script><script>document.title='owned'</script>"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("chromium")) as address:
        yield address


def viewed(browser: str, folder: Path, fragment: str, check: Callable[[Page], Awaitable[None]]) -> None:
    """Open the page on the runs in a folder and check it. Errors and requests to other servers fail."""

    async def view() -> None:
        runs = ViewedRuns([folder])
        async with TestServer(view_app(runs, key="key")) as server, ClientSession() as session:
            page = await new_page(session, browser)
            await page.open(f"{server.make_url('/key/')}#{fragment}")
            await page.until("document.querySelectorAll('main [role=tabpanel] > *').length > 0")
            await check(page)
            assert page.problems == []
            assert len(page.requests) > 5
            assert all(url.startswith(str(server.make_url("/key/"))) for url in page.requests)
        runs.close()

    asyncio.run(view())


TEXT = "document.querySelector('main').innerText"


def test_curves_of_runs_are_overlaid_and_follow_a_live_run(browser, tmp_path):
    make_run(tmp_path / "one")
    live = make_run(tmp_path / "two", outcome="running")

    async def check(page: Page) -> None:
        label = "document.querySelector('[aria-label^=\"reward. \"]')?.getAttribute('aria-label')"
        assert await page.until(label) == (
            "reward. one: 0.25 to 0.75 from iteration 1 to 3. two: 0.25 to 0.75 from iteration 1 to 3. "
            "Arrow keys read values."
        )
        await page.until("document.querySelectorAll('canvas').length > 0")
        write(live / METRICS_FILE, [{"step": 4, "reward": 1.0}])
        await page.until(f"{label}.includes('two: 0.25 to 1 from iteration 1 to 4')")
        await page.value("document.querySelector('[aria-label^=\"reward. \"]').focus()")
        await page.press("ArrowRight", "ArrowRight")
        await page.until("document.querySelector('.readout').textContent === 'iteration 2: one 0.5, two 0.5'")

    viewed(browser, tmp_path, "curves", check)


def test_a_curve_of_nearly_equal_values_is_drawn(browser, tmp_path):
    run = make_run(tmp_path / "run")
    write(run / METRICS_FILE, [{"step": step, "reward": 1 + step * 4e-8} for step in (-1, 0, 1)], "w")

    async def check(page: Page) -> None:
        await page.until("document.querySelectorAll('canvas').length > 0")
        await page.value("document.querySelector('.controls [type=checkbox]').click()")  # logarithmic
        await page.until("document.querySelector('.controls [type=checkbox]').checked")
        await page.until("document.querySelectorAll('canvas').length > 0")

    viewed(browser, tmp_path, "curves", check)


def test_samples_are_filtered_and_chosen_by_keys(browser, tmp_path):
    run = make_run(tmp_path / "run")
    image = add_image(run)
    write(run / SAMPLES_FILE, [sample(12, step=9, response=HOSTILE, prompt=HOSTILE, images=[image])])

    async def check(page: Page) -> None:
        items = "[...document.querySelectorAll('.item')].map(item => item.innerText.split('\\n')[1])"
        button = "[...document.querySelectorAll('button')].find(one => one.textContent"
        await page.until(f"{items}.length === 13")
        await page.until("document.querySelector('.detail img')?.naturalWidth === 4")
        assert HOSTILE in await page.value("[...document.querySelectorAll('.detail pre')].map(pre => pre.textContent)")
        assert await page.value("document.title") == "Samples · rlhf view"
        await page.value("document.querySelector('.item').focus()")
        await page.press("ArrowDown", "ArrowDown")
        await page.until("document.querySelector('.detail pre')?.textContent === 'question 5'")
        assert await page.value("document.activeElement.innerText.includes('answer 10')")
        await page.value("location.hash = 'samples?reward_min=1&length_max=4&order=length'")
        await page.until(f"JSON.stringify({items}) === JSON.stringify(['answer 1', 'answer 3'])")
        await page.value("document.querySelectorAll('.item')[1].click()")
        await page.until("document.querySelector('.detail pre')?.textContent === 'question 1'")

        await page.value(f"{button} === 'Same prompt').click()")
        await page.until(f"JSON.stringify({items}) === JSON.stringify(['answer 2', 'answer 3'])")
        await page.value(f"{button} === 'Show all prompts').click()")
        await page.until(f"{items}.length === 13")

    viewed(browser, tmp_path, "samples", check)


def test_an_open_sample_stays_while_samples_are_added(browser, tmp_path):
    run = make_run(tmp_path / "run", outcome="running", samples=2)

    async def check(page: Page) -> None:
        await page.until("document.querySelector('.detail')?.innerText.includes('answer 1')")
        write(run / SAMPLES_FILE, [sample(2)])
        await page.until("document.querySelectorAll('.item').length === 3")
        assert await page.value("document.querySelector('.item').innerText.includes('answer 2')")
        assert await page.value("document.querySelector('.detail').innerText.includes('answer 1')")
        assert "answer 1" in await page.value("document.querySelector('[aria-current=true]').innerText")

    viewed(browser, tmp_path, "samples", check)


def test_turns_of_an_episode_have_their_rewards(browser, tmp_path):
    run = make_run(tmp_path / "run", samples=1)
    call = {"function": {"name": "run", "arguments": {"program": "a = 1\nprint(a)", "limit": 2}}}
    messages = [
        {"role": "assistant", "content": "let me see", "tool_calls": [call]},
        {"role": "tool", "name": "run", "content": "1"},
        {"role": "assistant", "content": "it is 1"},
    ]
    # A program's own prompt contains an example, whose turn has no reward.
    own = [{"role": role, "content": f"part {place}"} for place, role in enumerate(["user", "assistant"] * 3)]
    rows = [
        sample(1, messages=own, turn_rewards=[1, 2], branches=[[{"role": "user", "content": "early"}]], response=""),
        sample(2, messages=messages, turn_rewards=[0.0, 0.75], response="", finish_reason="length"),
    ]
    write(run / SAMPLES_FILE, rows)

    async def check(page: Page) -> None:
        await page.until("document.querySelector('.detail').innerText.includes('it is 1')")
        shown = await page.value("document.querySelector('.detail').innerText")
        parts = ["Turn 1", "let me see", "Call of run", "program: a = 1\nprint(a)\nlimit: 2", "Result of run", "Turn 2",
                 "reward 0.75", "it is 1", "truncated"]  # fmt: skip
        places = [shown.index(part) for part in parts]
        assert places == sorted(places)
        await page.value("location.hash = 'samples?number=2'")
        await page.until("document.querySelector('.detail').innerText.includes('part 5')")
        shown = await page.value("[...document.querySelectorAll('.message h4')].map(one => one.innerText)")
        assert shown == [
            "Message of the user",
            *("Message of the user", "Turn 1"),
            *("Message of the user", "Turn 2 reward 1"),
            *("Message of the user", "Turn 3 reward 2"),
        ]

    viewed(browser, tmp_path, "samples", check)


def test_verdicts_of_judges_are_shown_with_their_reasons(browser, tmp_path):
    run = make_run(tmp_path / "run", samples=0)
    rubric = [
        {"criterion": "States 42.", "weight": 3.0, "met": True, "reason": "it does"},
        {"criterion": "Names a dose.", "weight": -2.0, "met": True, "reason": HOSTILE},
    ]
    pairs = [
        {"against": 0, "shown": "second", "won": 0.0, "reason": "shorter"},
        {"against": 2, "shown": "first", "failed": "http://judge/v1 gave no verdict in JSON: ?"},
    ]
    other = [{"score": 0.25, "reason": ""}, {"rank": 2, "of": 3, "reason": "clear"}, {"failed": "sent nothing"}]
    write(run / SAMPLES_FILE, [sample(place, judgements=found) for place, found in enumerate((rubric, pairs, other))])
    expected = {
        1: [["met", "States 42. (weight 3)\nit does"], ["met", f"Names a dose. (weight -2)\n{HOSTILE}"]],
        2: [
            ["worse than", "sample 0, shown second\nshorter"],
            ["failed", "sample 2, shown first\nhttp://judge/v1 gave no verdict in JSON: ?"],
        ],
        3: [["score 0.25", ""], ["rank 2 of 3", "clear"], ["failed", "sent nothing"]],
    }

    async def check(page: Page) -> None:
        table = "document.querySelector('[aria-label=\"Verdicts of the judge\"]')"
        cells = f"[...{table}.rows].map(row => [...row.cells].map(cell => cell.innerText))"
        for number, shown in expected.items():
            await page.value(f"location.hash = 'samples?number={number}'")
            await page.until(f"{table}?.innerText.includes({json.dumps(shown[0][0])})")
            assert await page.value(cells) == shown
            assert await accessibility_problems(page) == []
        await page.value("location.hash = 'samples?number=1'")
        await page.until(f"{table}.innerText.includes('dose')")
        tones = f"[...{table}.querySelectorAll('.chip')].map(chip => chip.className)"
        # What a response must not do is bad if it is met.
        assert await page.value(tones) == ["chip good", "chip bad"]

    viewed(browser, tmp_path, "samples?number=1", check)


def test_tabs_are_chosen_by_keys_and_runs_can_be_hidden(browser, tmp_path):
    message = "kl-spike in iteration 2: <b>too far</b>"
    write(make_run(tmp_path / "one") / "alarms.jsonl", [{"step": 2, "alarm": "kl-spike", "message": message}])
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / RUN_FILE).write_text(json.dumps({"command": "sft", "outcome": "failed"}))

    async def check(page: Page) -> None:
        assert await page.value("[...document.querySelectorAll('.runs b')].map(one => one.textContent)") == [
            "one",
            "two",
        ]
        alarms = "[...document.querySelectorAll('.runs details')].map(one => one.textContent)"
        assert await page.value(alarms) == [f"1 alarm{message}"]
        await page.value("document.querySelector('[role=tab]').focus()")
        await page.press("ArrowRight")
        await page.until("document.querySelector('[role=tab][aria-selected=true]').textContent === 'Samples'")
        assert await page.value("document.activeElement.textContent") == "Samples"
        unnamed = """[...document.querySelectorAll('button, input, select, a[href]')].filter(node => !(
            node.textContent.trim() || node.getAttribute('aria-label') || node.closest('label')?.textContent.trim()))"""
        assert await page.value(f"{unnamed}.map(node => node.outerHTML)") == []
        await page.value("document.querySelectorAll('.runs input').forEach(input => input.click())")
        await page.until(f"{TEXT}.includes('No run is selected')")

    viewed(browser, tmp_path, "curves", check)


def test_groups_are_next_to_each_other_with_their_common_beginning_faint(browser, tmp_path):
    make_run(tmp_path / "run")

    async def check(page: Page) -> None:
        await page.until("document.querySelectorAll('.column .card').length === 2")
        faint = "[...document.querySelectorAll('.column article pre .faint')].map(part => part.textContent)"
        assert await page.value(faint) == ["", "answer "]
        await page.value(
            "[...document.querySelectorAll('.item')].find(item => item.innerText.includes('group 4')).click()"
        )
        await page.until("document.querySelectorAll('.column').length === 2")
        await page.until("document.querySelectorAll('.column .card').length === 4")
        assert await page.value("[...document.querySelectorAll('.column .prompt')].map(part => part.textContent)") == [
            "question 0",
            "question 4",
        ]
        await page.value("document.querySelector('[aria-label=\"Open sample 1\"]').click()")
        await page.until("document.querySelector('.detail')?.innerText.includes('answer 1')")

    viewed(browser, tmp_path, "groups?open=1.0", check)


def test_histograms_times_settings_and_merged_metrics_are_shown(browser, tmp_path):
    write(make_run(tmp_path / "one") / METRICS_FILE, [{"step": 3, "kl": 0.5}])
    write(make_run(tmp_path / "two", lr=0.2) / METRICS_FILE, [{"step": 3, "accuracy": 0.5}])
    (tmp_path / "two" / SAMPLES_FILE).write_text("")

    async def check(page: Page) -> None:
        await page.until("document.querySelectorAll('.heat canvas').length === 1")
        label = await page.value("document.querySelector('.heat [role=img]').getAttribute('aria-label')")
        assert label == "length of one: from 1 to 12, iteration 1 to 3. Darker: more samples."
        assert "Indexing" not in await page.value(TEXT)
        await page.value("location.hash = 'time'")
        await page.until(f"{TEXT}.includes('Time by phase: one')")
        cells = "[...document.querySelectorAll('tbody tr')].map(row => [...row.cells].map(cell => cell.innerText))"
        rows = await page.value(cells)
        assert rows[:2] == [["train", "3 s", "1 s", "50.0 %"], ["other", "3 s", "1 s", "50.0 %"]]
        await page.value("location.hash = 'settings'")
        await page.until(f"{TEXT}.includes('actor_learning_rate')")
        assert await page.value("[...document.querySelectorAll('td')].map(cell => cell.innerText)") == ["0.1", "0.2"]
        await page.value("document.querySelectorAll('.controls [type=checkbox]')[0].click()")
        await page.until(f"{TEXT}.includes('pretrain')")
        await page.value("location.hash = 'curves'")
        headings = "[...document.querySelectorAll('figure h3')].map(one => one.textContent).join()"
        # First what is first in one of the runs.
        await page.until(f"{headings} === 'reward,accuracy,KL from reference'")

    viewed(browser, tmp_path, "distribution?column=length", check)


EXPLANATION = {
    "lines": [],
    "equality": ["Equal to the run."],
    "tokens": [
        {"text": "an", "lines": ["r = 1"], "values": {"anchor": -1.0, "rollout": -1.5, "ratio": 1.0, "entropy": 0.5}},
        {"text": "swer", "lines": ["r = 2", "clipped"], "values": {"anchor": -1.0, "rollout": -0.75, "ratio": 2.0}},
    ],
}


def test_tokens_are_explained_on_request_and_colored(browser, tmp_path, monkeypatch):
    make_run(tmp_path / "run")
    program = f"import sys; open(sys.argv[-1].split('=')[1], 'w').write({json.dumps(EXPLANATION)!r})"
    monkeypatch.setattr(explanations, "_COMMAND", (sys.executable, "-c", program))

    async def check(page: Page) -> None:
        await page.until("[...document.querySelectorAll('button')].some(one => one.textContent === 'Explain tokens')")
        await page.value("document.querySelector('.explain button').click()")
        await page.until("document.querySelectorAll('.tokens button').length === 2")
        labels = "[...document.querySelectorAll('.tokens button')].map(one => one.getAttribute('aria-label'))"
        assert await page.value(labels) == [
            "token 0 an, log-prob difference, trainer - engine 0.5",
            "token 1 swer, log-prob difference, trainer - engine -0.25",
        ]
        colors = "[...document.querySelectorAll('.tokens button')].map(one => one.style.background)"
        blue, red = await page.value(colors)
        assert ("--c1) 70%" in blue, "--bad) 35%" in red) == (True, True)
        await page.value("document.querySelector('.tokens button').focus()")
        await page.press("ArrowRight")
        await page.until(f"{TEXT}.includes('clipped')")
        assert "Equal to the run." in await page.value(TEXT)

    viewed(browser, tmp_path, "samples?number=3", check)


FRAGMENTS = (
    "curves",
    "samples?order=number+1",
    "samples?order=reward+1&length_min=2&length_max=9",
    "samples?text=ANSWER+1&order=advantage",
    "samples?file=eval_samples.jsonl&order=length",
    "groups?order=spread&open=1.0,2.3&step_max=2",
    "distribution?column=length&reward_min=1",
    "evaluations",
    "time",
    "settings",
)


async def text_at(page: Page, fragment: str) -> str:
    """Return the text of the panel at a fragment, once it stays the same."""
    await page.value(f"location.hash = {json.dumps(fragment)}")
    before, text = None, ""
    while before != text:
        before = text
        await page.value("new Promise(done => setTimeout(done, 150))")
        text = await page.value("document.querySelector('[role=tabpanel]').innerText")
    return text


def texts_of_report(browser: str, report: Path) -> list[str]:
    """Return the text of report.html at each fragment. Errors and requests to other addresses fail."""

    async def view() -> list[str]:
        async with ClientSession() as session:
            page = await new_page(session, browser)
            await page.open(report.as_uri())
            assert await page.until("document.querySelector('.tiles')?.innerText") == "Accuracy after grpo\n0.5"
            texts = [await text_at(page, fragment) for fragment in FRAGMENTS]
            assert page.problems == []
            assert {url for url in page.requests if not url.startswith("data:")} == {report.as_uri()}
            return texts

    return asyncio.run(view())


# Only the server explains tokens.
EXPLAINED = re.compile(r"Tokens\s+Explain tokens\s+Runs [^.]*\.[^.]*\.|To explain its tokens: .*")


def test_the_report_shows_what_the_server_shows(browser, tmp_path):
    run = make_run(tmp_path / "run")
    rows = [
        sample(12, step=9, prompt=HOSTILE, response=HOSTILE, images=[add_image(run)]),
        sample(13, reward=None, response=""),
    ]
    write(run / SAMPLES_FILE, rows)
    write(run / "eval_samples.jsonl", map(sample, range(5)))
    evaluation = {"eval/accuracy": 0.5, "eval/accuracy_low": 0.25, "eval/accuracy_high": 0.75}
    write(run / METRICS_FILE, [{"step": 3, **evaluation, "kl": "NaN", "entropy": 0.0, "loss_ratio": 1.0}])
    (run / "plan.json").write_text(json.dumps({"assumed": "planned for H100", "values": {"train, s": [2.0, 2.5]}}))
    (run / RUN_FILE).write_text((run / RUN_FILE).read_text().replace('"facts": {}', '"facts": {"Model": "tiny"}'))
    report = write_report(run, headline={"accuracy after grpo": 0.5})
    served = []

    async def check(page: Page) -> None:
        for fragment in FRAGMENTS:
            served.append(await text_at(page, fragment))
            assert await accessibility_problems(page) == [], fragment

    viewed(browser, tmp_path, "curves", check)
    exported = texts_of_report(browser, report)
    for fragment, *texts in zip(FRAGMENTS, served, exported, strict=True):
        one, other = (EXPLAINED.sub("", text).split() for text in texts)
        assert one == other, fragment
    found = dict(zip(FRAGMENTS, exported, strict=True))
    # Charts of zeros are last.
    headings = [
        "Evaluation accuracy",
        "Reward",
        "KL from reference",
        "Not finite: iteration 3",
        "Loss ratio",
        "Entropy",
    ]
    places = [found["curves"].index(heading) for heading in headings]
    assert places == sorted(places)
    assert "train, s 2 2.5 -20 % planned for H100" in " ".join(found["time"].split())
    assert "Model\ttiny" in found["settings"]
    assert "3\t0.5 (0.25 to 0.75)" in found["evaluations"]
    assert HOSTILE in found["samples?order=number+1"]
