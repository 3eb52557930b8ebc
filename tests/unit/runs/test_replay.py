"""`rlhf replay` and `rlhf why`: what they read, refuse and compare, without starting a run."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from rlhf_cli.backends.roles.watch import joined_trace, with_place
from rlhf_cli.commands.grpo import GRPOConfig
from rlhf_cli.commands.replay import ReplayConfig
from rlhf_cli.commands.why import WhyConfig
from rlhf_cli.config.replay import ReplayGroup, WhyGroup
from rlhf_cli.data.packing.packs import TokenSequence
from rlhf_cli.errors import UsageError
from rlhf_cli.options import build_config, to_yaml
from rlhf_cli.runs.online import replay as replays
from rlhf_cli.runs.online.replay import Replayed, run_replay
from rlhf_cli.runs.run_directory import recorded_config
from rlhf_cli.runs.why import explain

EMPTY = Replayed(Path("run"), cast("Any", None), 1, {}, {}, [], None, None, [], {})


@pytest.fixture
def run(tmp_path):
    """Return a run directory of one iteration, without checkpoints."""
    root = tmp_path / "run"
    root.mkdir()
    values = {"pretrain": "model", "prompt_data": "data.jsonl", "reward_funcs": "exact", "output": "elsewhere"}
    (root / "config.yaml").write_text(to_yaml(build_config(GRPOConfig, values)))
    (root / "run.json").write_text(json.dumps({"command": "grpo"}))
    lines = [json.dumps({"step": step, "policy_loss": 0.5}) for step in (1, 2, 3)]
    (root / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (root / "samples.jsonl").write_text(json.dumps({"step": 1, "id": "data.jsonl:0/4.0@0", "length": 3}) + "\n")
    return root


def replayed(run, iteration=1, *changes, sample_again=False):
    group = ReplayGroup(run=str(run), iteration=iteration, set=[*changes], sample_again=sample_again)
    run_replay(ReplayConfig(replay=group))


def test_settings_of_a_run_are_read_with_changes(run):
    config = recorded_config(run, ["grpo"], {"eps_clip": "0.3"})
    assert (config.policy.eps_clip, config.checkpoint.output) == (0.3, str(run))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("eps_clip", r"--set eps_clip: write NAME=VALUE"),
        ("max_new_tokens=4", r"--set max_new_tokens: it affects models, prompts or sampling"),
        ("seed=3", r"--set seed: it affects"),
        ("pretrain=other", r"--set pretrain: it affects"),
        ("eps_klip=0.3", r"unknown setting eps_klip|eps_klip.*did you mean eps_clip"),
        ("eps_clip=wide", r"eps_clip"),
    ],
)
def test_changes_that_cannot_be_replayed_are_refused(run, change, message):
    with pytest.raises(UsageError, match=message):
        replayed(run, 1, change)


@pytest.mark.parametrize("change", ["pretrain=other", "rollout_batch_size=4", "prompt_data=other.jsonl"])
def test_new_samples_are_of_the_same_prompts_and_model(run, change):
    with pytest.raises(UsageError, match=r"it affects models or prompts"):
        replayed(run, 1, change, sample_again=True)


@pytest.mark.parametrize(
    ("given", "again"), [({}, 43), ({"rollout_seed": "43"}, 44), ({"rollout_seed": str(2**32 - 1)}, 0)]
)
def test_new_samples_have_another_seed_than_those_of_the_run(run, given, again, monkeypatch):
    (run / "config.yaml").write_text(to_yaml(recorded_config(run, ["grpo"], given)))
    seen = []

    def record(config, iteration, *, changed=None, keeps_update=False):
        seen.append(changed or config)
        return replace(EMPTY, iteration=iteration)

    monkeypatch.setattr(replays, "replay", record)
    monkeypatch.setattr(replays, "comparison", lambda *replayed, **options: [])
    replayed(run, sample_again=True)
    assert seen[1].rollout.rollout_seed == again


def test_responses_sampled_iterations_before_are_not_sampled_again(run):
    config = (run / "config.yaml").read_text().replace("async_train: false", "async_train: true")
    (run / "config.yaml").write_text(config)
    with pytest.raises(UsageError, match=r"sampled these responses iterations before"):
        replayed(run, sample_again=True)


def test_an_iteration_that_the_run_does_not_have_is_refused(run):
    metrics = run / "metrics.jsonl"
    metrics.write_text(json.dumps({"step": 0, "eval/reward": 0.5}) + "\n" + metrics.read_text())
    with pytest.raises(UsageError, match="has no iteration 9: it has 1 to 3"):
        replayed(run, 9)


def test_changes_need_a_checkpoint_directly_before(run):
    for step in (1, 3):  # after 3, the run has ended
        folder = run / "checkpoints" / f"step_{step:06d}"
        folder.mkdir(parents=True)
        for name in ("manifest.json", "state.json"):
            (folder / name).write_text("{}")
    with pytest.raises(UsageError, match=r"must follow a checkpoint or the start of .*: set 1 or 2$"):
        replayed(run, 3, "eps_clip=0.3")


def test_a_usage_error_leaves_no_temporary_folder(run, tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    with pytest.raises(UsageError, match="there is no such folder here"):
        replayed(run)
    assert list(temporary.iterdir()) == []


def test_packages_of_the_trackers_of_a_run_are_not_required(run, monkeypatch):
    (run / "config.yaml").write_text(to_yaml(recorded_config(run, ["grpo"], {"use_mlflow": "true"})))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="there is no such folder here"):  # its model
        replayed(run)


def test_a_folder_that_is_no_run_and_a_command_without_iterations_are_refused(run, tmp_path):
    with pytest.raises(UsageError, match=r"not a run directory, it has no readable run\.json"):
        replayed(tmp_path)
    (run / "run.json").write_text(json.dumps({"command": "sft"}))
    with pytest.raises(UsageError, match=r"is a run of rlhf sft, not of ppo, .* or gkd"):
        replayed(run)


def test_a_response_that_the_run_does_not_have_is_refused(run):
    config = WhyConfig(why=WhyGroup(run=str(run), sample="data.jsonl:0/4.1@0"))
    with pytest.raises(UsageError, match=r"has no response 'data.jsonl:0/4.1@0': copy an `id`"):
        explain(config)
    (run / "samples.jsonl").write_text("")  # gkd on responses of the dataset
    with pytest.raises(UsageError, match="has no sampled responses, so there is none to explain"):
        explain(config)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"token": 3}, "^--token 3: the response has tokens 0 to 2$"),
        ({"step": 1, "sample": None}, "^--step is for rows of offline .* of rlhf grpo .*: set --sample"),
    ],
)
def test_a_token_or_step_that_a_response_does_not_have_is_refused_before_a_run(run, given, message):
    config = WhyConfig(why=WhyGroup(**{"run": str(run), "sample": "data.jsonl:0/4.0@0", **given}))
    with pytest.raises(UsageError, match=message):
        explain(config)


def test_traces_of_ranks_are_joined_by_sequence_and_token():
    """Rank 0 and 1 share a sequence; rank 2 has another, in two micro-batches with an idle one."""

    def part(sample: float, tokens: list[float], logprobs: list[float]) -> dict[str, torch.Tensor]:
        columns = ([sample] * len(tokens), tokens, logprobs)
        return dict(zip(("sample", "token", "logprob"), map(torch.tensor, columns), strict=True))

    both = [[part(1, [0, 1], [-0.3, -0.4])]]
    other = [[part(0, [1], [-0.2]), part(0, [], []), part(0, [0], [-0.1])]]
    (step,) = joined_trace([both, both, other])
    assert step["sample"].tolist() == [0, 0, 1, 1]
    assert step["logprob"].tolist() == pytest.approx([-0.1, -0.2, -0.3, -0.4])


def test_places_identify_the_tokens_of_a_sequence():
    sequence = TokenSequence(
        np.array([1, 2, 3], np.int32), np.array([False, True, True]), columns={"advantages": np.ones(2)}
    )
    placed = with_place(sequence, 7)
    assert {name: values.tolist() for name, values in placed.columns.items()} == {
        "advantages": [1, 1],
        "sample": [7, 7],
        "token": [0, 1],
    }


@pytest.mark.parametrize(
    ("recorded", "metrics", "differing"),
    [
        ({"loss": 1.0, "time/step": 2.0, "eval/reward": 0.5}, {"loss": 1.0, "time/step": 3.0}, set()),
        ({"loss": math.nan}, {"loss": math.nan}, set()),
        ({"loss": 1.0}, {"loss": 1.0 + 1e-15}, {"loss"}),
        ({"loss": 1.0, "kl": 0.1}, {"loss": 1.0}, {"kl"}),
        ({"loss": 1.0}, {"loss": 1.0, "kl": 0.1}, {"kl"}),
    ],
)
def test_a_missing_metric_is_a_difference_and_an_evaluation_or_measurement_is_not_compared(
    recorded, metrics, differing
):
    replayed = replace(EMPTY, recorded=recorded, metrics=metrics)
    assert replayed.differences.keys() == differing
    assert not {name for name in replayed.compared if "/" in name}
