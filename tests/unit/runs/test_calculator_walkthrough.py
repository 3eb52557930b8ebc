"""The quickstart with a calculator: valid commands, and an environment that matches the demonstrations."""

import asyncio
import json
from pathlib import Path

import pytest
from rich.console import Console
from viewed_runs import exported

from rlhf_cli import cli
from rlhf_cli.agents.file_environments import FileEnvironments
from rlhf_cli.agents.records import Calls, Reply, Reset
from rlhf_cli.command_table import POLICY_GRADIENT
from rlhf_cli.commands.quickstart import QuickstartGroup
from rlhf_cli.data.formats.conversations import ToolCall
from rlhf_cli.options import build_config
from rlhf_cli.runs.calculator_walkthrough import ENVIRONMENT_FILE, CalculatorWalkthrough
from rlhf_cli.runs.quickstart import run_quickstart, walkthrough


@pytest.fixture(scope="module")
def walk(tmp_path_factory):
    found = CalculatorWalkthrough(tmp_path_factory.mktemp("quickstart"), seed=1)
    found.write_data()
    return found


def settings_of(words: list[str]) -> dict[str, str]:
    """Return the flags of a command with their values; a flag without a value is true."""
    values: dict[str, str] = {}
    for word in words[1:]:
        if word.startswith("--"):
            name = word.removeprefix("--")
            values[name] = "true"
        else:
            values[name] = word
    return values


@pytest.mark.parametrize("algorithm", POLICY_GRADIENT)
def test_all_commands_are_valid(walk, algorithm):
    settings = QuickstartGroup(output=str(walk.root), environment="calculator", algorithm=algorithm)
    steps = walkthrough(settings).steps()
    assert [step.words[0] for step in steps] == ["scratch", "sft", algorithm, algorithm, "eval", "eval"]
    for step in steps:
        build_config(cli.COMMANDS[step.words[0]].config_class, settings_of(step.words))


def test_practice_with_and_without_the_calculator_differ_by_the_environment_alone(walk):
    with_calculator, alone = settings_of(walk.practice()), settings_of(walk.practice_alone())
    assert with_calculator.pop("environment") == str(walk.root / ENVIRONMENT_FILE)
    assert with_calculator.pop("max_turns")
    assert with_calculator.pop("output") != alone.pop("output")
    assert with_calculator == alone


def test_each_stage_is_measured_in_the_column_that_belongs_to_it(walk):
    models = {
        what: {
            stage
            for words in (walk.evaluation(), walk.evaluation_alone())
            if settings_of(words)["output"] == str(walk.root / measured.evaluation)
            for stage, folder in walk.folders.items()
            if str(folder) in settings_of(words)["pretrain"].split(",")
        }
        for what, measured in walk.measured.items()
    }
    assert models == {"accuracy with calculator": {"sft", "grpo"}, "accuracy alone": {"sft", "grpo alone"}}


@pytest.mark.usefixtures("no_process_is_left")
def test_the_calculator_of_the_run_answers_the_calls_of_the_demonstrations(walk):
    rows = map(json.loads, (walk.root / "data" / "demonstrations.jsonl").read_text().splitlines())
    tools, (_, call, result, _) = next((row["tools"], row["messages"]) for row in rows if len(row["messages"]) > 2)
    function = call["tool_calls"][0]["function"]
    with FileEnvironments(str(walk.root / ENVIRONMENT_FILE), timeout=30, num_workers=1) as environments:
        assert list(environments.description.tools) == tools
        assert asyncio.run(environments.answer(0, Reset({"prompt": "1+2=", "answer": "3"}, 0))) == Reply()
        terms = (json.loads(function["arguments"])["terms"], "4821*2")
        calls = Calls(tuple(ToolCall(function["name"], {"terms": one}) for one in terms))
        reply = asyncio.run(environments.answer(0, calls))
    refusal = "Error: write numbers with + between them, as in 12+34"
    assert reply == Reply(observations=(result["content"], refusal))


def test_the_table_and_the_report_have_each_accuracy_at_its_stage_alone(tmp_path, monkeypatch, capsys):
    """Commands are replaced by their results."""
    accuracies = {("eval", "sft"): 0.03, ("eval", "practice"): 0.97}
    accuracies |= {("eval_alone", "sft"): 0.02, ("eval_alone", "practice_alone"): 0.01}

    def leave_results(console: Console, title: str, words: list[str]) -> None:
        settings = settings_of(words)
        output = Path(settings["output"])
        output.mkdir()
        if words[0] != "eval":
            return
        values = {model: accuracies[output.name, Path(model).name] for model in settings["pretrain"].split(",")}
        results = [
            {"pretrain": model, "source": settings["prompt_data"], "figures": {"accuracy": {"value": value}}}
            for model, value in values.items()
        ]
        (output / "eval.json").write_text(json.dumps({"results": results}))

    monkeypatch.setattr("rlhf_cli.runs.quickstart._run", leave_results)
    monkeypatch.setenv("COLUMNS", "200")
    run_quickstart(QuickstartGroup(output=str(tmp_path / "run"), environment="calculator"))
    printed = capsys.readouterr().out
    rows = [line.split("  ") for line in printed.splitlines() if line.startswith("after ")]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert [row[:-1] for row in cells] == [
        ["after sft", "3.0%", "2.0%"],
        ["after grpo", "97.0%"],
        ["after grpo alone", "1.0%"],
    ]
    places = [row.index("%") for row in printed.splitlines() if row.startswith("after grpo")]
    assert places[0] < places[1]  # in different columns
    report = exported(tmp_path / "run" / "report.html")
    assert [run["name"] for run in report["runs"]] == ["sft", "grpo", "grpo alone"]
    assert dict(report["headline"]) == {
        "accuracy with calculator after sft": 0.03,
        "accuracy alone after sft": 0.02,
        "accuracy with calculator after grpo": 0.97,
        "accuracy alone after grpo alone": 0.01,
    }
