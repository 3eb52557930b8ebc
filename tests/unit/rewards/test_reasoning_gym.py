"""reasoning-gym prompts and rewards match the package."""

import importlib.util
import json

import pytest

from rlhf_cli.command_table import COMMANDS
from rlhf_cli.config.procedural import INSTRUCTION
from rlhf_cli.config.row_rewards import verifier_of
from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.data.reading.reasoning_gym import read_problems
from rlhf_cli.data.reading.sources import first_rows, load_rows
from rlhf_cli.errors import UsageError
from rlhf_cli.options import build_config
from rlhf_cli.rewards.probes.labels import answer_of
from rlhf_cli.rewards.records import ScoreRequest
from rlhf_cli.rewards.scorer import Scorer
from rlhf_cli.rewards.verifiers.reasoning_gym import _ARITHMETIC, _checked, reasoning_gym

SUMS = "reasoning_gym:chain_sum?size=6&seed=1"
needs_package = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="pip install 'rlhf-cli[environments]'"
)


def grpo(**given):
    required = {"pretrain": "model", "output": "run", "prompt_data": SUMS}
    return build_config(COMMANDS["grpo"].config_class, required | given)


def test_the_reward_and_its_instruction_are_defaults_of_these_prompts():
    config = grpo()
    assert config.reward.reward_funcs == ["reasoning_gym"]
    assert config.template.system_prompt == INSTRUCTION
    assert grpo(reward_funcs="reasoning_gym(tags=0),format").reward.reward_funcs == ["reasoning_gym(tags=0)", "format"]
    assert grpo(system_prompt="Answer.").template.system_prompt == "Answer."
    assert grpo(apply_chat_template="false").template.system_prompt is None
    assert grpo(reward_pretrain="rm").reward.reward_funcs == []
    assert grpo(environment="mcp:python server.py").reward.reward_funcs == ["reasoning_gym"]


def test_other_prompts_keep_their_defaults():
    assert grpo(prompt_data=f"rows.jsonl,{SUMS}", reward_funcs="by_row").template.system_prompt is None
    with pytest.raises(UsageError, match="reward"):
        grpo(prompt_data=f"rows.jsonl,{SUMS}")
    assert verifier_of("reasoning_gym/chain_sum", {}) == "reasoning_gym"


def test_a_missing_package_is_named_with_its_command(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"reasoning-gym is not installed: pip install 'rlhf-cli\[environments\]'"):
        first_rows(SUMS, split="train")


@pytest.mark.parametrize("label", ["12", "{}", '{"reasoning_gym": "chain_sum"}', "[1]"])
def test_other_labels_fail_the_reward(label):
    assert reasoning_gym("<answer>12</answer>", label, tags=1, partial=1).status == "failed"


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "[open('file', 'w')]",
        "(lambda: 1)()",
        "().__class__",
        "[x for x in 'ab']",
        "9**9**9",
        "9**1000",
        "eval",
    ],
)
def test_answers_are_never_run_as_code(text):
    run: list[str] = []
    with pytest.raises((ValueError, SyntaxError)):
        _checked(run.append, _ARITHMETIC)(text)
    assert run == []


def test_lists_and_sums_in_answers_are_evaluated():
    assert _checked(eval, _ARITHMETIC)("['a', -1, 2 * (3 + 0x10) // 2]") == ["a", -1, 19]


@needs_package
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("chain_sums", "has no dataset 'chain_sums': did you mean chain_sum"),
        ("chain_sum?min_term=3", r"no parameter 'min_term' \(did you mean min_terms\?\): min_terms, max_terms"),
        ("chain_sum?min_terms=two", "min_terms must be an integer, not 'two'"),
        ("chain_sum?min_terms=true", "min_terms must be an integer, not 'true'"),
        ("chain_sum?seed=x", "seed must be an integer, not 'x'"),
        ("CHAIN_SUM", "did you mean chain_sum"),
        ("chain_sum?allow_negation=1", "allow_negation must be true or false, not '1'"),
        ("chain_sum?min_terms=9&max_terms=3", "max_terms must be >= min_terms"),
        ("chain_sum?size=1&size=2", "size is given twice"),
        ("composite", "separate several datasets with commas"),
    ],
)
def test_a_wrong_name_or_value_says_what_there_is(name, message):
    from rlhf_cli.data.reading.problems import dataset_of

    with pytest.raises(UsageError, match=message):
        dataset_of(name)


@needs_package
def test_the_message_reaches_the_command():
    with pytest.raises(UsageError, match=r"reasoning_gym:chain_sums\?size=2: reasoning_gym has no dataset"):
        read_problems("reasoning_gym:chain_sums?size=2")


@needs_package
def test_a_list_is_given_value_by_value():
    from rlhf_cli.data.reading.problems import dataset_of

    config = vars(dataset_of("basic_arithmetic?operators=%2B&operators=-&min_terms=3&seed=4"))["config"]
    assert list(config.operators) == ["+", "-"]
    assert (config.min_terms, config.seed) == (3, 4)
    assert vars(dataset_of("basic_arithmetic"))["config"].seed == 0


def asked(number, response, label):
    return ScoreRequest(
        "", "", response, json.dumps(label), 1, truncated=False, group=str(number), sample=0, group_size=1
    )


@needs_package
def test_workers_score_the_problems_of_the_rows_with_the_functions_of_the_package(monkeypatch):
    """word_ladder problems depend on the hash seed: a worker with a random seed would generate different problems."""
    import reasoning_gym as package

    monkeypatch.setenv("PYTHONHASHSEED", "1")
    rows = load_rows(f"{SUMS},reasoning_gym:word_ladder?size=3", split="train", seed=0)
    sums, games = package.create_dataset("chain_sum", size=6, seed=1), package.create_dataset("countdown", seed=0)
    assert [(row["question"], row["answer"]) for row in rows[:6]] == [(e["question"], e["answer"]) for e in sums]
    assert (rows[8].where, rows[8]["data_source"]) == (
        "reasoning_gym:word_ladder?size=3 problem 2",
        "reasoning_gym/word_ladder",
    )
    answers = [answer_of(json.dumps(row["label"])) for row in rows]
    assert [answer and answer.text for answer in answers] == [row["answer"] for row in rows]
    third = rows[2]["label"]
    game = {"reasoning_gym": "countdown", "row": 0, "expected": games[0]["answer"]}
    asks = [
        *((f"<answer>{row['answer']}</answer>", row["label"]) for row in rows[6:]),
        (f"<answer>{games[0]['answer']}</answer>", game),
        ("5 <answer>5</answer> no, <answer> 214 </answer>", third),
        ("<answer>-214</answer>", third),
        ("214", third),
        ("<answer>__import__('os').getpid()</answer>", game),
        ("<answer>214</answer>", third | {"expected": "215"}),
    ]
    monkeypatch.setenv("PYTHONHASHSEED", "2")
    config = RewardConfig(reward_funcs=["reasoning_gym"], reward_num_workers=1, reward_max_failures=1)
    with Scorer(config) as scorer:
        scorer.check_labels([json.dumps(label) for _, label in asks])
        scores = scorer.score([asked(number, *ask) for number, ask in enumerate(asks)])
    assert [score.status for score in scores] == ["correct"] * 5 + ["wrong", "invalid", "wrong", "failed"]
    assert scores[5].value == sums.score_answer("-214", sums[2]) > 0
    assert (scores[6].value, scores[7].value) == (0.0, games.score_answer("no expression", games[0]))
    assert "another answer for problem 2" in scores[8].detail


@needs_package
def test_the_parameters_read_bare_answers_and_drop_partial_credit():
    label = json.dumps({"reasoning_gym": "chain_sum?size=6&seed=1", "row": 2, "expected": "214"})
    assert reasoning_gym("<think>57 + 87</think> 214", label, tags=0, partial=1).status == "correct"
    verdict = reasoning_gym("<answer>-214</answer>", label, tags=1, partial=0)
    assert (verdict.status, verdict.value) == ("wrong", None)


@needs_package
def test_another_version_of_the_package_is_refused_with_the_way_out(monkeypatch, tmp_path):
    (tmp_path / "reasoning_gym").mkdir()
    (tmp_path / "reasoning_gym" / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"ImportError: .*pip install 'rlhf-cli\[environments\]'"):
        read_problems("reasoning_gym:chain_sum")
