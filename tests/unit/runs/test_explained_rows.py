"""`rlhf why` for offline commands: parts of the loss by hand, and what is refused."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from rlhf_cli.commands.sft import SFTConfig
from rlhf_cli.config.replay import WhyGroup
from rlhf_cli.data.packing.packs import TokenSequence
from rlhf_cli.errors import UsageError
from rlhf_cli.options import build_config, to_yaml
from rlhf_cli.runs.offline.why import ExplainedRow, explain_row, explanation, lines

TOKENIZER = SimpleNamespace(is_fast=True, decode=lambda ids, **_: "".join(map(chr, ids)))
ITEM = TokenSequence(np.array([72, 105, 33, 79, 75]), np.array([False, False, True, True, False]))


def explained(recorded, *, logprobs=(-1.0, -3.0)):
    """Return a row with two of the eight trained tokens of a step."""
    metrics = {"loss": 0.8, "grad_norm": 2.0, "num_tokens": 8.0, "num_sequences": 3.0}
    values = {"log-prob": list(logprobs)}
    return ExplainedRow("rows.jsonl:4", 2, [2, 7], recorded, metrics, {"loss": 2.0}, ITEM, [([33, 79], values)])


def test_a_row_has_its_part_of_the_mean_over_the_tokens_of_the_step():
    text = "\n".join(lines(explained({"loss": 0.8, "time/step": 1.0}), "sft", TOKENIZER, None))
    assert text.startswith("rows.jsonl:4, optimizer step 2 of rlhf sft; trained in steps 2 and 7\n")
    assert "\n  read        'Hi'\n  trained     '!O'\n  read        'K'\n" in text
    # (1 + 3) / 8 = 0.5, and 0.5 / 0.8 = 62.5 %.
    assert "-sum of log-probs / tokens of the step = 4 / 8 = 0.5, 62.50%" in text
    assert "sum of log-prob: -4" in text
    assert text.endswith("Equal to the run: all 1 metrics of step 2.")


def test_one_token_has_its_own_part():
    text = "\n".join(lines(explained({}), "sft", TOKENIZER, 1))
    assert "= 3 / 8 = 0.375, 46.88%" in text
    assert "'!'" not in text
    with pytest.raises(UsageError, match=r"--token 2: 2 tokens are trained, 0 to 1"):
        list(lines(explained({}), "sft", TOKENIZER, 2))


def test_a_token_that_only_one_response_of_a_pair_has_is_shown():
    row = explained({})
    pair = replace(row, item=None, sequences=[*row.sequences, ([33], {"log-prob": [-2.0]})])
    text = "\n".join(lines(pair, "dpo", TOKENIZER, 1))
    assert text.count("'O'") == 1
    with pytest.raises(UsageError, match=r"--token 2: 2 tokens are trained, 0 to 1"):
        list(lines(pair, "dpo", TOKENIZER, 2))


def test_metrics_that_differ_from_the_run_are_named():
    recorded = {"loss": 0.75, "grad_norm": 2.0, "lr": 1e-5, "perf/tokens_per_second": 3.0}
    text = "\n".join(lines(explained(recorded), "sft", TOKENIZER, None))
    assert text.endswith("Different from the run: loss 0.75 in the run, 0.8 here; lr 1e-05 in the run, nan here.")


def test_the_explanation_as_json_has_all_tokens():
    found = explanation(explained({"loss": 0.8}, logprobs=(-1.0, -math.inf)), "sft", TOKENIZER)
    assert found["tokens"] == [
        {"text": "!", "values": {"sequence": 0, "log-prob": -1.0}},
        {"text": "O", "values": {"sequence": 0, "log-prob": None}},
    ]
    assert found["equality"] == ["Equal to the run: all 1 metrics of step 2."]
    json.dumps(found, allow_nan=False)


@pytest.fixture
def run(tmp_path, tiny_model_dir):
    """Return the directory of a run with two steps of two rows."""
    data, root = tmp_path / "rows.jsonl", tmp_path / "run"
    data.write_text("".join(json.dumps({"prompt": f"{number}+1=", "response": "2"}) + "\n" for number in range(8)))
    values = {"pretrain": tiny_model_dir, "dataset": str(data), "output": str(root), "train_batch_size": 2}
    root.mkdir()
    (root / "config.yaml").write_text(to_yaml(build_config(SFTConfig, values)))
    (root / "run.json").write_text(json.dumps({"command": "sft"}))
    (root / "metrics.jsonl").write_text("".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in (1, 2)))
    return root


def refusals(run, **settings):
    """Return the message for each row."""
    found = {}
    for number in range(1, 10):
        with pytest.raises(UsageError) as error:
            explain_row(WhyGroup(run=str(run), sample=f"rows.jsonl:{number}", **settings))
        found[number] = str(error.value)
    return found


def test_rows_and_steps_that_the_run_has_not_trained_are_refused(run):
    messages = refusals(run, step=9)
    trained = {number: text for number, text in messages.items() if text.startswith("--step 9 did not train")}
    # Two steps of two rows; four rows are for later steps, and the ninth does not exist.
    assert sorted(text.rpartition(" ")[2] for text in trained.values()) == ["1", "1", "2", "2"]
    assert sum(text.endswith("yet: it has 2 optimizer steps") for text in messages.values()) == 4
    assert "no trained row has this file and line; the first is " in messages[9]


def test_a_step_or_row_is_required(run):
    with pytest.raises(UsageError, match=r"^set --sample FILE:LINE or --step N, up to 2$"):
        explain_row(WhyGroup(run=str(run)))
    with pytest.raises(UsageError, match=r"^--step 7: the run has no such step; set --step N, up to 2$"):
        explain_row(WhyGroup(run=str(run), step=7))


def test_a_token_that_the_row_does_not_have_is_refused_before_steps_run_again(run):
    refused = [text for text in refusals(run, token=99).values() if text.startswith("--token 99: rows.jsonl:")]
    assert len(refused) == 4
    assert all(text.endswith(" has 2 trained tokens") for text in refused)
