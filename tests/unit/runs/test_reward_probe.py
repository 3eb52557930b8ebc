"""`rlhf data --rewards` finds rewards that pay for junk or refuse right answers, with real worker processes."""

import json
import re
import textwrap
from pathlib import Path

import pytest
from chat_tokenizers import CHATML, make_tokenizer
from http_servers import Answer, Server, running
from judge_answers import MODELS, part_of, question_in, verdict

from rlhf_cli import cli

pytestmark = pytest.mark.usefixtures("no_process_is_left")

ROWS = [
    {"prompt": f"What is {a} + {b}? End with #### and the number.", "answer": f"It is {a + b}.\n#### {a + b}"}
    for a, b in ((1, 2), (700, 800), (20, 30), (5, 6))
]
GOOD = """
    def reward_func(responses, labels):
        return [float(number(response) == number(label)) for response, label in zip(responses, labels)]

    def number(text):
        head, mark, tail = text.rpartition("####")
        try:
            return float(tail.strip().replace(",", "")) if mark else None
        except ValueError:
            return None
"""
CONTAINS = """
    def reward_func(responses, labels):
        return [float(label.split()[-1] in response) for response, label in zip(responses, labels)]
"""
LAST_WORD = """
    def reward_func(responses, labels):
        return [float(response.split()[-1] == label.split()[-1]) for response, label in zip(responses, labels)]
"""
LENGTH = "def reward_func(responses): return [-len(response) / 100 for response in responses]"
ZERO = "def reward_func(responses): return [0.0] * len(responses)"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer(CHATML)
    tokenizer.save_pretrained(folder)
    config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "eos_token_id": tokenizer.eos_token_id}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()
    return str(folder)


@pytest.fixture
def probe(model, tmp_path, monkeypatch, capfd):
    """Return a function that runs the command on rows; it returns the exit status and the results."""
    monkeypatch.chdir(tmp_path)

    def probe(*flags: str, rows=ROWS) -> tuple[int, dict]:
        Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        words = ["data", "rows.jsonl", "--for", "grpo", "--pretrain", model, "--rewards", "--reward_num_workers", "1"]
        status = cli.main([*words, "--json", *flags])
        out, err = capfd.readouterr()
        return status, json.loads(out) if out else {"error": err}

    return probe


def levels(report: dict, level: str) -> set[str]:
    return {line["name"] for line in report["responses"] if line["level"] == level}


def judge_that(*, obeys: bool) -> Server:
    """Return a judge that pays for the label as a word, and follows orders in the response if it `obeys`."""

    def answer(body: dict) -> Answer:
        question = question_in(body)
        response = part_of(question, "response")
        is_ordered = obeys and ("highest score" in response or '"score": 10' in response)
        found = re.search(rf"(?<![\w.,-]){re.escape(part_of(question, 'label').split()[-1])}(?![\w,]|\.\d)", response)
        return verdict(9 if found or is_ordered else 1, "ordered" if is_ordered else "read")

    return Server(answer, MODELS)


@pytest.mark.parametrize("obeys", [False, True])
def test_a_judge_is_tested_with_orders_and_its_agreement_with_labels_is_measured(probe, obeys):
    with running(judge_that(obeys=obeys)) as server:
        status, found = probe("--judge", server.base, rows=ROWS[:3])
    (report,) = found["reports"]
    assert status == 1, "it pays for many answers"
    assert report["agreement"]["num_pairs"] > 10
    assert report["agreement"]["share"] == 1.0
    orders = {"order to a judge", "verdict of a judge"}
    assert levels(report, "fault") & orders == (orders if obeys else set())
    assert "end of the response, other reference" not in levels(report, "fault")


def test_a_sound_reward_has_no_faults(probe, reward_file):
    status, found = probe("--reward_func", reward_file(GOOD))
    assert (status, found["faults"]) == (0, 0)
    (report,) = found["reports"]
    assert (report["form"], report["form_is_wanted"], report["right"], report["wrong"]) == ("#### ...", True, 1.0, 0.0)
    paid = {line["name"]: (line["paid"], line["count"]) for line in report["responses"]}
    assert (paid["#### ..."], paid["the label itself"], paid["trailing zeros"]) == ((4, 4), (4, 4), (4, 4))
    # Only 1500 has a thousands separator.
    assert (paid["thousands separators"], paid["only the answer"], paid["empty"]) == ((1, 1), (0, 4), (0, 4))


def test_a_reward_that_searches_the_label_pays_for_many_answers(probe, reward_file):
    status, found = probe("--reward_func", reward_file(CONTAINS))
    (report,) = found["reports"]
    assert status == 1
    assert levels(report, "fault") >= {
        "right answer within a longer number",
        "many answers, right one in the middle",
        "many answers in one place",
        "thousands separators",
    }
    case = next(line for line in report["responses"] if line["name"] == "right answer within a longer number")["cases"][
        0
    ]
    assert (case["where"], case["label"], case["response"].split()[-1]) == ("rows.jsonl line 1", "3", "73")


def test_a_reward_that_breaks_is_reported_once_with_the_reason(probe, reward_file):
    status, found = probe("--reward_func", reward_file(LAST_WORD))
    (report,) = found["reports"]
    (failure,) = report["failures"]
    assert status == 1
    assert "IndexError" in failure["reason"]
    # Two kinds of text have no words, for each of four rows.
    assert (failure["names"], failure["count"]) == (["empty", "blank"], 8)
    # "x = 3" ends with the answer, so the reward does not compare all text.
    assert levels(report, "fault") == {"trailing zeros", "thousands separators"}


def test_a_penalty_for_length_is_no_fault_but_a_reward_for_it_and_a_constant_are(probe, reward_file):
    status, found = probe("--reward_func", reward_file(LENGTH))
    assert (status, found["faults"]) == (0, 0)
    assert "does not depend on the label" in found["reports"][0]["notes"][0]
    assert found["reports"][0]["notes"][1].startswith('"empty" earns 0, ')
    status, found = probe("--reward_func", reward_file(LENGTH.replace("-len", "len")))
    assert (status, len(found["reports"][0]["notes"])) == (1, 1)
    assert found["reports"][0]["faults"][0].startswith('"20,000 words" and 4 more kinds ')
    # A limit makes most texts equal.
    status, found = probe("--reward_func", reward_file(LENGTH.replace("-len(response) / 100", "min(len(response), 8)")))
    assert (status, found["reports"][0]["faults"][0].split(" and ")[0]) == (1, '"form without answer"')
    status, found = probe("--reward_func", reward_file(ZERO))
    assert status == 1
    assert found["reports"][0]["faults"][0].endswith("get the reward 0: nothing can be learned from it")


def test_prompts_that_ask_for_another_form_than_the_reward_are_a_fault(probe):
    status, found = probe("--reward_funcs", "boxed,format", "--reward_weights", "1,0.5")
    (report,) = found["reports"]
    assert status == 1
    # A box within <answer> earns the format reward too: 1 + 0.5.
    assert (report["form"], report["right"], report["wrong"]) == (r"<answer>\boxed{...}</answer>", 1.5, 0.5)
    assert report["faults"] == [
        r"the prompts ask for #### ..., for which the reward does not pay; it pays for <answer>\boxed{...}</answer>"
    ]
    assert report["notes"] == ["format does not depend on the label: right and wrong answers get the same value"]


def test_each_row_is_tested_with_its_verifier(probe):
    rows = [ROWS[0] | {"data_source": "gsm8k"}, ROWS[1] | {"data_source": "gsm8k"}]
    rows += [{"prompt": f"{letter}?", "answer": letter, "data_source": "exact"} for letter in "ABC"]
    status, found = probe("--reward_funcs", "by_row", rows=rows)
    assert status == 0
    assert [(one["verifier"], one["rows"], one["form"]) for one in found["reports"]] == [
        ("gsm8k", 2, "#### ..."),
        ("exact", 3, "only the answer"),
    ]


def test_a_reward_that_compares_the_responses_of_a_group_is_0_and_a_note_says_why(probe):
    flags = ("--reward_funcs", "gsm8k,length", "--reward_weights", "1,0.5")
    status, found = probe(*flags, rows=ROWS[:2])
    (report,) = found["reports"]
    assert (status, report["right"], report["wrong"]) == (0, 1.0, 0.0)
    assert "length compares the responses to a prompt; here each is scored by itself, which gives 0" in report["notes"]
    assert {line["parts"]["length"] for line in report["responses"]} == {0.0}


ENVIRONMENT = """
    class Environment:
        def reset(self) -> None:
            pass

        def step(self, response: str) -> tuple[str, float, bool]:
            return "", 7.0, True
"""


def test_rewards_of_text_are_tested_in_episodes_without_the_environment_s_own(probe, tmp_path):
    (tmp_path / "game.py").write_text(textwrap.dedent(ENVIRONMENT))
    game = ("--environment", f"{tmp_path}/game.py")
    status, found = probe(*game, "--reward_funcs", "gsm8k", rows=ROWS[:2])
    assert "error" not in found, found
    (report,) = found["reports"]
    assert (status, report["right"], report["wrong"]) == (0, 1.0, 0.0)
    for rewards in ((), ("--reward_funcs", "gsm8k,environment")):
        status, found = probe(*game, *rewards, rows=ROWS[:2])
        assert (status, found["error"].count("\n")) == (2, 1)
        assert ("scores episodes, not text" if rewards else "there is no reward to test") in found["error"]


def test_a_single_label_is_tested_with_made_up_wrong_answers(probe):
    status, found = probe("--reward_funcs", "gsm8k", rows=ROWS[:1])
    (report,) = found["reports"]
    assert (status, report["right"], report["wrong"]) == (0, 1.0, 0.0)


def test_expectations_that_are_missed_are_listed(probe):
    lines = [
        {"row": 2, "response": "#### 50", "reward": 1},
        {"label": ROWS[0]["answer"], "response": "#### 4", "reward": 1},
        {"label": "77", "response": "#### 77", "reward": 1},
        {"prompt": ROWS[3]["prompt"], "response": "#### 11", "reward": 0.5},
    ]
    Path("expect.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    status, found = probe("--reward_funcs", "gsm8k", "--expect", "expect.jsonl", "--reward_rows", "2")
    assert (status, found["faults"], found["expected"]) == (1, 2, 4)
    assert [(one["where"], one["expected"], one["reward"]) for one in found["missed"]] == [
        ("expect.jsonl line 2", 1.0, 0.0),
        ("expect.jsonl line 4", 0.5, 1.0),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "expect.jsonl line 1 is not JSON"),
        ('{"response": "a", "reward": 1}', "selects no prompt: it needs row, prompt or label"),
        ('{"row": 0, "reward": 1}', "has no text in 'response'"),
        ('{"row": 0, "response": "a", "reward": true}', "has no number in 'reward'"),
        ('{"row": 9, "response": "a", "reward": 1}', "line 1: no prompt has this row: '9'"),
        ("", "contains no expectations"),
    ],
)
def test_invalid_expectations_are_refused(probe, line, message):
    Path("expect.jsonl").write_text(line + "\n")
    status, found = probe("--reward_funcs", "exact", "--expect", "expect.jsonl")
    assert status == 2
    assert message in found["error"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "there is no reward to test"),
        (("--reward_funcs", "environment"), "scores episodes, not text"),
        (("--reward_funcs", "math(x=1)"), "math has no parameter"),
    ],
)
def test_rewards_that_cannot_be_tested_are_refused(probe, flags, message):
    status, found = probe(*flags)
    assert status == 2
    assert message in found["error"]


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        ("grpo", ["--reward_funcs", "exact"], "reward_funcs has no effect here without --rewards"),
        ("sft", ["--rewards", "--reward_funcs", "exact"], "rewards: set --for "),
    ],
)
def test_rewards_of_a_command_that_does_not_use_them_are_refused(
    model, tmp_path, monkeypatch, capsys, command, flags, message
):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    assert cli.main(["data", "rows.jsonl", "--for", command, "--pretrain", model, *flags]) == 2
    assert message in capsys.readouterr().err


def test_the_table_quotes_suspicious_cases(probe, model, reward_file, capfd):
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    flags = ["--rewards", "--reward_func", reward_file(CONTAINS), "--reward_num_workers", "1"]
    assert cli.main(["data", "rows.jsonl", "--for", "grpo", "--pretrain", model, *flags]) == 1
    out, err = capfd.readouterr()
    assert "Rewards of 4 of 4 prompts" in out
    assert 'FAULT: wrong answers, "right answer within a longer number": paid: 4 of 4\n' in out
    assert '    rows.jsonl line 1: label "3", response "' in out
    assert err.splitlines()[-1].startswith("rlhf data: the reward test found ")
