"""Errors of the offline commands before anything is loaded, and their output about a model."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import Qwen2Config

from rlhf_cli.commands.dpo import DPOConfig
from rlhf_cli.commands.grpo import GRPOConfig
from rlhf_cli.commands.ppo import PPOConfig
from rlhf_cli.commands.reinforce import ReinforceConfig
from rlhf_cli.commands.sft import SFTConfig
from rlhf_cli.data.preparing import DataReport
from rlhf_cli.errors import UsageError
from rlhf_cli.options import build_config
from rlhf_cli.runs.adapter_rates import adapter_rate_facts, adapter_rate_notices
from rlhf_cli.runs.offline.rm import reward_statistics
from rlhf_cli.runs.offline.run import check_items
from rlhf_cli.runs.offline.task import Items, load_items
from rlhf_cli.runs.run_identity import NOT_OF_THE_STEPS, supported_identity
from rlhf_cli.trainers.offline.sft import SequenceItems


def settings(**given: str) -> SFTConfig:
    return build_config(SFTConfig, {"pretrain": "x", "dataset": "x", "output": "x"} | given)


def items(*lengths: int, evaluated: tuple[int, ...] | None = None) -> Items:
    data = SimpleNamespace(lengths=np.array(lengths))
    return Items(data, None if evaluated is None else SimpleNamespace(lengths=np.array(evaluated)))


def test_items_that_no_micro_batch_can_hold_are_refused_wherever_they_are():
    config = settings(train_max_tokens_per_gpu="100", max_len="90")
    check_items(config, items(100, 7, evaluated=(100,)))
    with pytest.raises(UsageError, match=r"training data uses 101 tokens .* raise train_max_tokens_per_gpu 100, or"):
        check_items(config, items(7, 101))
    with pytest.raises(UsageError, match=r"evaluation data uses 120 tokens .* lower max_len 90"):
        check_items(config, items(7, evaluated=(5, 120)))


@pytest.mark.parametrize(
    ("given", "longest"),
    [({}, 90), ({"overlong": "drop", "max_len": "80"}, 64), ({"max_len": "40"}, 40), ({"max_len": "100"}, 90)],
)
def test_rows_longer_than_the_positions_of_the_model_are_refused(given, longest, monkeypatch):
    config = settings(**{"max_len": "90"} | given)
    data: Any = SimpleNamespace(report=DataReport("sequences", lengths={7: 3, 64: 1, 90: 1}))
    architecture = Qwen2Config(max_position_embeddings=64)
    model: Any = SimpleNamespace(tokenizer=None, architecture=architecture, base=config.model, found=None)
    kind: Any = SimpleNamespace(load=lambda *_, **__: data)
    monkeypatch.setattr("rlhf_cli.runs.offline.task.picture_reader", lambda *_: None)
    if longest <= 64:
        assert load_items(config, kind, config.data, model, SequenceItems).data.data is data
        return
    with pytest.raises(UsageError, match=r"x: rows have up to 90 tokens, .* 64 positions .* set --max_len 64"):
        load_items(config, kind, config.data, model, SequenceItems)


@pytest.mark.parametrize(("name", "value"), [("eval_steps", "5"), ("stop_eval_loss", "0.5")])
def test_settings_of_an_evaluation_need_one(name, value):
    config = settings(**{name: value})
    check_items(config, items(7, evaluated=(7,)))
    with pytest.raises(UsageError, match=f"{name} requires --eval_dataset"):
        check_items(config, items(7))


def test_optimizer_settings_that_a_checkpoint_brings_back_are_kept_as_json():
    kept = supported_identity(settings(learning_rate="3e-5", max_norm="2"), "optim", besides=NOT_OF_THE_STEPS)
    assert (kept["learning_rate"], kept["adam_betas"]) == (3e-5, [0.9, 0.95])
    assert json.loads(json.dumps(kept)) == kept
    assert "max_norm" not in kept  # it is read again


def test_a_home_folder_is_found_also_where_something_is_written():
    assert settings(output="~/runs/x").checkpoint.output == str(Path.home() / "runs" / "x")
    assert settings().checkpoint.save_path is None


def test_a_reward_model_that_was_not_evaluated_says_nothing_of_its_rewards():
    assert reward_statistics({"reward": 0.5, "reward_std": 2.0}) == {"reward_mean": 0.5, "reward_std": 2.0}
    assert reward_statistics({}) == {"reward_mean": None, "reward_std": None}


@pytest.mark.parametrize(
    ("config_class", "name", "rate"),
    [
        (SFTConfig, "learning_rate", 5e-6),
        (DPOConfig, "learning_rate", 5e-7),
        (GRPOConfig, "actor_learning_rate", 1e-6),
        (ReinforceConfig, "actor_learning_rate", 1e-6),
        (PPOConfig, "actor_learning_rate", 1e-6),
        (PPOConfig, "critic_learning_rate", 9e-6),
    ],
)
def test_an_adapter_has_ten_times_the_default_rate_and_a_given_one_wins(config_class, name, rate):
    data = {"reward_funcs": "math", "prompt_data": "x"} if "actor" in name or "critic" in name else {"dataset": "x"}

    def rate_of(**given: str) -> float:
        rate: float = build_config(config_class, {"pretrain": "x", "output": "x"} | data | given).setting(name)
        return rate

    assert rate_of() == rate_of(lora_rank="0") == rate
    assert rate_of(lora_rank="8") == pytest.approx(10 * rate)
    assert rate_of(lora_rank="8", **{name: "3e-6"}) == 3e-6


FULL = (
    "is in the range of full fine-tuning, and adapters need about 10 times as much (LoRA Without Regret, Schulman et al"
)
TENFOLD = "10 times the default of full fine-tuning (LoRA Without Regret, Schulman et al. 2025)"


@pytest.mark.parametrize(
    ("config_class", "given", "fact", "notices"),
    [
        (DPOConfig, {}, f"--learning_rate 5e-06: {TENFOLD}", []),
        (DPOConfig, {"learning_rate": "2e-6"}, None, []),
        (
            DPOConfig,
            {"learning_rate": "1e-6"},
            None,
            [f"--learning_rate 1e-06 {FULL}. 2025): try --learning_rate 5e-06"],
        ),
        (PPOConfig, {}, f"--actor_learning_rate 1e-05, --critic_learning_rate 9e-05: {TENFOLD}", []),
        (
            PPOConfig,
            {"critic_learning_rate": "9e-6"},
            f"--actor_learning_rate 1e-05: {TENFOLD}",
            [f"--critic_learning_rate 9e-06 {FULL}. 2025): try --critic_learning_rate 9e-05"],
        ),
    ],
)
def test_a_run_with_an_adapter_reports_its_rate_or_warns_of_one_of_full_tuning(config_class, given, fact, notices):
    names = ["learning_rate"] if config_class is DPOConfig else ["actor_learning_rate", "critic_learning_rate"]
    data = {"dataset": "x"} if config_class is DPOConfig else {"reward_funcs": "math", "prompt_data": "x"}
    config = build_config(config_class, {"pretrain": "x", "output": "x", "lora_rank": "8"} | data | given)
    assert adapter_rate_facts(config, names).get("Adapter") == fact
    assert adapter_rate_notices(config, names) == notices
    assert (adapter_rate_facts(config, []), adapter_rate_notices(config, [])) == ({}, [])
