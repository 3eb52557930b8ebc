"""Process reward models with the classes wrong and right, as saved by TRL's PRMTrainer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_tiny_tokenizer
from online_settings import resolve
from samples import sample_of
from transformers import AutoModelForTokenClassification, Qwen2Config, Qwen2ForTokenClassification

from rlhf_cli.algorithms.estimators.table import ESTIMATORS
from rlhf_cli.backends.training.frozen_model import FrozenEngine
from rlhf_cli.backends.training.partitioned_loading import partitioned_loading
from rlhf_cli.config.model import ModelConfig
from rlhf_cli.config.train import DeepSpeedConfig
from rlhf_cli.data.packing.packs import TokenSequence, at_targets, pack
from rlhf_cli.data.prompts import Prompt
from rlhf_cli.data.rollouts import Generation
from rlhf_cli.errors import UsageError
from rlhf_cli.models.loading import load_causal_lm, load_reward_model
from rlhf_cli.models.policy import ValueModel
from rlhf_cli.models.reward_model import RewardModelPlan, find_process_reward_model, find_reward_model
from rlhf_cli.runs.online.models import find_models
from rlhf_cli.trainers.online.step_scoring import StepScorer, step_finder

TOKENIZER = make_tiny_tokenizer()
POLICY = ModelConfig(pretrain="policy", param_dtype="fp32")


def save(folder: Path, *, num_labels: int = 2, **entries: Any) -> str:
    """Save a random two-layer model with transformers, whose head has a bias."""
    torch.manual_seed(5)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(vocab_size=300, num_key_value_heads=2, initializer_range=0.2, **shape)
    config.num_labels = num_labels
    config.update(entries)
    model = Qwen2ForTokenClassification(config)
    torch.nn.init.normal_(model.score.bias)
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return save(tmp_path_factory.mktemp("classes"), step_separator="\n")


def softmax_of(folder: str, token_ids: Sequence[int] | np.ndarray) -> torch.Tensor:
    """Return the probability of the second class of each token [T], by transformers."""
    model = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([list(token_ids)])).logits[0].softmax(-1)[:, 1]


class Reader:
    """The model with this project's loading and packing, in this process."""

    def __init__(self, folder: str, stage: int = 0) -> None:
        settings = DeepSpeedConfig(zero_stage=stage)  # type: ignore[arg-type]
        source = POLICY.model_copy(update={"pretrain": folder})
        module = ValueModel(load_reward_model(source, partition=partitioned_loading(settings, param_dtype="fp32")))
        self.engine = FrozenEngine(module, settings, param_dtype="fp32")

    def wake(self) -> None: ...

    def sleep(self) -> None: ...

    def step_scores(self, sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
        (logits,) = self.engine.infer([at_targets(pack(list(sequences)))], lambda model, batch: model(batch))
        bounds = np.cumsum([sequence.num_trained for sequence in sequences])[:-1]
        return np.split(logits.numpy(), bounds)


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("stage", [0, 3])
def test_probabilities_in_a_pack_are_those_of_transformers_softmax(folder, stage):
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 200, size).astype(np.int32) for size in (7, 2, 12)]
    marks = [np.isin(np.arange(row.size), chosen) for row, chosen in zip(rows, ([1, 6], [1], [3, 4, 11]), strict=True)]
    sequences = [TokenSequence(row, mark) for row, mark in zip(rows, marks, strict=True)]
    for row, mark, logits in zip(rows, marks, Reader(folder, stage).step_scores(sequences), strict=True):
        torch.testing.assert_close(torch.from_numpy(logits).sigmoid(), softmax_of(folder, row)[torch.from_numpy(mark)])


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("end", [[], [TOKENIZER.eos_token_id]], ids=["cut", "finished"])
def test_steps_are_read_at_a_separator_behind_each_of_them_as_they_were_trained(folder, end):
    separator = TOKENIZER.encode("\n", add_special_tokens=False)
    first, second, prompt = (TOKENIZER.encode(text, add_special_tokens=False) for text in ("1+1", "is 2", "sum?"))
    response = [*first, *separator, *second, *end]
    trained = [*prompt, *first, *separator, *second, *separator]
    ends = [len(prompt) + len(first) + len(separator) - 1, len(trained) - 1]
    scorer = StepScorer(Reader(folder), step_finder(find_process_reward_model(folder, POLICY, TOKENIZER), TOKENIZER))
    sample = sample_of(Prompt(prompt, "sum?", None, "a", 0), Generation(response, [0.0] * len(response), "stop", 0))
    (found,) = scorer.probabilities([sample])
    assert found == pytest.approx(softmax_of(folder, trained)[ends].tolist(), rel=1e-5)
    (rewards,) = scorer.rewards([sample])
    assert len(rewards) == len(response)
    assert np.flatnonzero(~np.isnan(rewards)).tolist() == [len(first) + len(separator) - 1, len(response) - 1]
    assert rewards[~np.isnan(rewards)] == pytest.approx(found)


def test_a_response_that_ends_with_the_separator_gets_no_second_one(folder):
    finder = step_finder(find_process_reward_model(folder, POLICY, TOKENIZER), TOKENIZER)
    written = TOKENIZER.encode("a\nb\n", add_special_tokens=False)
    read, ends = finder.read([*written, TOKENIZER.eos_token_id])
    assert list(read) == written
    assert ends[-1] == len(written)
    assert finder.read([]) == ([], [])


def test_what_cannot_be_read_is_refused_with_the_reason(folder, tmp_path):
    with pytest.raises(
        UsageError, match=r'does not name the text between steps: add step_separator .*"\\n" is the TRL default'
    ):
        find_process_reward_model(save(tmp_path / "unnamed"), POLICY, TOKENIZER)
    with pytest.raises(UsageError, match="is Qwen2ForTokenClassification with 3 logits per step"):
        find_process_reward_model(save(tmp_path / "three", num_labels=3), POLICY, TOKENIZER)
    with pytest.raises(UsageError, match=r"--reward_pretrain .* is Qwen2ForTokenClassification with 2 logits"):
        find_reward_model(folder, POLICY, TOKENIZER, normalize=False)


def test_a_model_with_classes_is_no_language_model_though_tied_embeddings_would_load_as_one(tmp_path):
    tied = save(tmp_path / "tied", tie_word_embeddings=True)
    with pytest.raises(UsageError, match="is Qwen2ForTokenClassification, which returns scores: use a language model"):
        load_causal_lm(POLICY.model_copy(update={"pretrain": tied}))


def test_a_micro_batch_must_hold_the_separator_behind_the_longest_sequence(folder, tiny_model_dir):
    def found(room: int) -> RewardModelPlan | None:
        lengths = {"max_len": "64", "max_new_tokens": "16", "train_max_tokens_per_gpu": str(room)}
        config = resolve("grpo", pretrain=tiny_model_dir, prm_pretrain=folder, **lengths)
        return find_models(config, ESTIMATORS["grpo"]).reward

    with pytest.raises(UsageError, match="a sequence may have 65 tokens: raise train_max_tokens_per_gpu 64"):
        found(64)
    model = found(65)
    assert model is not None
    assert model.last_separator == tuple(TOKENIZER.encode("\n", add_special_tokens=False))
