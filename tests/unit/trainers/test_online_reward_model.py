"""Reward models of online runs: compatibility with the policy, and scores of single sequences."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_tiny_tokenizer
from reward_models import save_reward_model
from safetensors.torch import load_file
from tiny_training import OPTIM, make_sequences
from transformers import AutoModelForSequenceClassification

from rlhf_cli.algorithms.shaping import clip_scores, normalised_scores
from rlhf_cli.backends.roles.ranks import CriticRank, RewardRank
from rlhf_cli.backends.roles.settings import RoleSettings
from rlhf_cli.config.model import ModelConfig
from rlhf_cli.config.policy import PolicyConfig
from rlhf_cli.config.train import DeepSpeedConfig
from rlhf_cli.data.packing.packs import TokenSequence
from rlhf_cli.errors import UsageError
from rlhf_cli.models.loading import load_reward_model
from rlhf_cli.models.reward_model import ScoreStatistics, find_reward_model
from rlhf_cli.models.tokenizers import load_tokenizer

POLICY = ModelConfig(pretrain="policy", param_dtype="fp32", gradient_checkpointing=True)


@pytest.fixture(scope="module")
def reward_dir(tmp_path_factory) -> Path:
    return save_reward_model(tmp_path_factory.mktemp("reward"), reward_mean=0.5, reward_std=2.0)


def find(folder: Path, *, normalize: bool = False, tokenizer: Any = None):
    return find_reward_model(str(folder), POLICY, tokenizer or make_tiny_tokenizer(), normalize=normalize)


def test_a_reward_model_is_loaded_as_the_policy_is_from_its_own_folder(reward_dir):
    found = find(reward_dir)
    assert found.source == POLICY.model_copy(update={"pretrain": str(reward_dir), "gradient_checkpointing": False})
    assert found.statistics is None


def test_statistics_are_read_from_the_configuration_where_scores_are_normalised(reward_dir):
    assert find(reward_dir, normalize=True).statistics == ScoreStatistics(0.5, 2.0)


def test_statistics_that_are_missing_or_useless_are_refused(tmp_path):
    folder = save_reward_model(tmp_path)
    with pytest.raises(UsageError, match="has no reward_mean and reward_std; `rlhf rm` writes them if you pass"):
        find(folder, normalize=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"reward_mean": 1.0, "reward_std": 0.0}))
    with pytest.raises(UsageError, match=r"reward_mean 1\.0, reward_std 0\.0"):
        find(folder, normalize=True)


def test_models_without_a_score_or_with_several_are_refused(tiny_model_dir, tmp_path):
    with pytest.raises(UsageError, match="is Qwen2ForCausalLM, not a sequence-classification model with one label"):
        find(Path(tiny_model_dir))
    with pytest.raises(UsageError, match="has 3 labels, but a reward model has one"):
        find(save_reward_model(tmp_path, num_labels=3))
    with pytest.raises(UsageError, match=r"--reward_pretrain: pretrain '.*nowhere': there is no such folder"):
        find(tmp_path / "nowhere")


def test_a_vocabulary_with_other_ids_is_refused_and_a_larger_one_is_not(reward_dir, tmp_path):
    larger = make_tiny_tokenizer()
    larger.add_tokens(["<|extra|>"])
    assert find(save_reward_model(tmp_path, tokenizer=larger)).source.pretrain == str(tmp_path)
    with pytest.raises(UsageError) as caught:
        find(reward_dir, tokenizer=larger)
    assert str(caught.value).endswith("1 of 261 tokens differ, first '<|extra|>': 260 here, not there")


def test_the_tokenizer_of_a_saved_policy_is_that_of_its_reward_model(tiny_model_dir, reward_dir):
    assert find(reward_dir, tokenizer=load_tokenizer(ModelConfig(pretrain=tiny_model_dir)))


def test_a_folder_without_a_score_head_gets_no_random_one(tiny_model_dir):
    with pytest.raises(UsageError, match=r"1 missing or with another shape, first score\.weight"):
        load_reward_model(ModelConfig(pretrain=tiny_model_dir, param_dtype="fp32"))


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("stage", [2, 3])
def test_a_critic_that_starts_from_a_reward_model_keeps_its_head(reward_dir, stage):
    critic = CriticRank(role_settings(reward_dir, stage))
    weights = dict(critic.engine.named_weights(critic.hf_model))
    assert weights["score.weight"].equal(load_file(reward_dir / "model.safetensors")["score.weight"])


def test_scores_are_normalised_before_they_are_clipped():
    scores_B = torch.tensor([9.0, 1.0, -40.0])
    normal_B = normalised_scores(scores_B, mean=1.0, std=4.0)
    assert normal_B.tolist() == [2.0, 0.0, -10.25]
    assert clip_scores(normal_B, (-10.0, 1.5)).tolist() == [1.5, 0.0, -10.0]


def role_settings(folder: Path, stage: int) -> RoleSettings:
    return RoleSettings(
        model=ModelConfig(pretrain=str(folder), param_dtype="fp32"),
        deepspeed=DeepSpeedConfig(zero_stage=stage),  # type: ignore[arg-type]
        optim=OPTIM,
        learning_rate=1e-3,
        total_steps=1,
        seed=0,
        temperature=0.7,
        max_new_tokens=8,
        policy=PolicyConfig(),
    )


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.usefixtures("group_of_one")
def test_the_role_gives_the_score_of_transformers_for_each_sequence_alone(reward_dir, stage):
    sequences = [TokenSequence(s.token_ids, np.arange(len(s)) == len(s) - 1) for s in make_sequences(7)]
    plain = AutoModelForSequenceClassification.from_pretrained(reward_dir, dtype=torch.float32)
    with torch.no_grad():
        ids = [torch.from_numpy(sequence.token_ids.astype(np.int64))[None] for sequence in sequences]
        expected = [plain(input_ids=row).logits.item() for row in ids]
    role = RewardRank(role_settings(reward_dir, stage))
    role.sleep()
    role.wake()
    first, idle, second = role.scores([sequences[:4], [], sequences[4:]])
    assert idle.size == 0
    assert np.concatenate([first, second]) == pytest.approx(expected, abs=1e-5)
    assert np.std(expected) > 0.1
