"""Teachers of online runs: compatibility with the policy, log-probs, and the resulting advantages."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_tiny_tokenizer
from distill_training import save_teacher
from online_fakes import WITH_REFERENCE, WITHOUT_REFERENCE, Run
from reward_models import save_reward_model
from site_hooks import undocumented
from test_online_batch import floats, generation, prompt, responses_of, scored, settings_of
from test_online_repeats import OneRank
from test_online_reward_model import role_settings
from tiny_training import make_sequences
from transformers import AutoModelForCausalLM

from rlhf_cli.algorithms.advantages import drawn_to_teacher
from rlhf_cli.algorithms.estimators.group import GroupPolicyConfig
from rlhf_cli.algorithms.estimators.reinforce import ReinforcePolicyConfig
from rlhf_cli.backends.roles.groups import TeacherRole
from rlhf_cli.backends.roles.planner import MicroBatchPlanner
from rlhf_cli.backends.roles.ranks import FrozenPolicyRank
from rlhf_cli.config.model import ModelConfig
from rlhf_cli.config.policy import PolicyConfig
from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.config.train import BatchConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.models.finding import find_model
from rlhf_cli.rewards.records import Score
from rlhf_cli.runs.trained_model import ModelPlan, find_frozen_policy
from rlhf_cli.trainers.online.batch import learning_samples
from rlhf_cli.trainers.online.samples import Rollout

ALONE = RewardConfig()


def find(teacher: Path, policy: str) -> ModelPlan:
    source = ModelConfig(pretrain=policy, param_dtype="fp32", gradient_checkpointing=True)
    return find_frozen_policy(
        "teacher_pretrain", str(teacher), source, find_model(source).architecture, make_tiny_tokenizer()
    )


def test_a_teacher_is_loaded_as_the_policy_is_from_its_own_folder(tiny_model_dir, tmp_path):
    found = find(save_teacher(tmp_path), tiny_model_dir)
    assert found.source == ModelConfig(pretrain=str(tmp_path), param_dtype="fp32", gradient_checkpointing=False)
    assert found.found.architecture.hidden_size == 48


def test_a_teacher_of_another_vocabulary_is_refused_and_a_larger_one_is_not(tiny_model_dir, tmp_path):
    larger = make_tiny_tokenizer()
    larger.add_tokens(["<|extra|>"])
    find(save_teacher(tmp_path / "larger", vocab_size=512, tokenizer=larger), tiny_model_dir)
    other = shutil.copytree(save_teacher(tmp_path / "other"), tmp_path / "swapped")
    written = json.loads((other / "tokenizer.json").read_text())
    vocabulary = written["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    (other / "tokenizer.json").write_text(json.dumps(written))
    with pytest.raises(
        UsageError, match=r"^--teacher_pretrain '.*swapped' has a different vocabulary than the policy.*2 of"
    ):
        find(other, tiny_model_dir)


def test_a_teacher_reads_every_token_that_the_policy_may_sample(tiny_model_dir, tmp_path):
    with pytest.raises(UsageError, match="has 280 embeddings and the policy 300: it cannot read every token"):
        find(save_teacher(tmp_path, vocab_size=280), tiny_model_dir)


def test_what_is_no_whole_language_model_is_no_teacher(tiny_model_dir, tmp_path):
    with pytest.raises(UsageError, match="which returns scores: use a language model"):
        find(save_reward_model(tmp_path / "judge"), tiny_model_dir)
    with pytest.raises(UsageError, match=r"^--teacher_pretrain: pretrain '.*nowhere': there is no such folder"):
        find(tmp_path / "nowhere", tiny_model_dir)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.usefixtures("group_of_one")
def test_the_role_gives_transformers_logprobs_of_each_sequence_alone_at_the_sampling_temperature(tmp_path, stage):
    sequences, settings = make_sequences(7), role_settings(save_teacher(tmp_path), stage)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    role = FrozenPolicyRank(settings)
    role.sleep()
    role.wake()
    first, idle, second = role.logprobs([sequences[:4], [], sequences[4:]])
    assert idle.size == 0
    expected = np.concatenate([alone(plain, s.token_ids, s.loss_mask, settings.temperature) for s in sequences])
    assert settings.temperature == 0.7
    assert np.concatenate([first, second]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.usefixtures("group_of_one")
def test_each_sequence_is_scored_by_the_teacher_of_its_source(tmp_path, tiny_llama_dir, stage):
    sequences = [replace(one, teacher=number % 3 % 2) for number, one in enumerate(make_sequences(7))]
    settings = role_settings(save_teacher(tmp_path), stage)
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (tmp_path, tiny_llama_dir)]
    other = settings.model.model_copy(update={"pretrain": tiny_llama_dir})
    offloaded = settings.deepspeed.model_copy(update={"param_offload": stage != 3})
    rank = FrozenPolicyRank(replace(settings, other_models=(other,), deepspeed=offloaded))
    planner = MicroBatchPlanner(1, BatchConfig(train_max_tokens_per_gpu=20), 0.0, lambda: False)
    found = TeacherRole(OneRank(rank), planner, takes_turns=True).logprobs(sequences)  # type: ignore[arg-type]
    for sequence, values in zip(sequences, found, strict=True):
        expected = alone(models[sequence.teacher], sequence.token_ids, sequence.loss_mask, settings.temperature)
        assert np.asarray(values) == pytest.approx(expected, abs=1e-5)


def alone(model: Any, token_ids: np.ndarray, loss_mask: np.ndarray, temperature: float) -> np.ndarray:
    """Return the log-probs of one sequence's trained tokens, with the logits divided by the temperature."""
    ids = torch.from_numpy(token_ids.astype(np.int64))
    with torch.no_grad():
        logprobs_TV = (model(input_ids=ids[None]).logits[0] / temperature).log_softmax(-1)
    targets = torch.from_numpy(np.flatnonzero(loss_mask))
    return logprobs_TV[targets - 1, ids[targets]].numpy()


def test_the_expected_gradient_is_the_gradient_of_the_reverse_kl_divergence():
    generator = torch.Generator().manual_seed(0)
    logits_V, teacher_V = (torch.randn(7, generator=generator, dtype=torch.float64) for _ in range(2))
    logits_V.requires_grad_()
    logprobs_V, teacher_V = logits_V.log_softmax(-1), teacher_V.log_softmax(-1)
    (exact_V,) = torch.autograd.grad((logprobs_V.exp() * (logprobs_V - teacher_V)).sum(), logits_V, retain_graph=True)
    own_V = logprobs_V.detach()
    advantages_V = drawn_to_teacher(torch.zeros(7), own_V - teacher_V, coef=1.0)
    # As REINFORCE with these advantages, over all tokens that may be sampled.
    (expected_V,) = torch.autograd.grad(-(own_V.exp() * advantages_V * logprobs_V).sum(), logits_V)
    torch.testing.assert_close(expected_V, exact_V)


def judged(scores: list[float], teacher: list[list[float]]) -> Rollout:
    """Return responses of two and one tokens to one prompt; the trainer's log-probs differ from the sampler's (-.1,
    -.2).
    """
    responses = responses_of(
        [prompt(0)] * 2, [generation(1, 2), generation(3)], [scored(score) for score in scores], [0, 0]
    )
    responses.old_logprobs = [floats(-0.5, -1.0), floats(-2.0)]
    responses.frozen_logprobs["teacher"] = [floats(*values) for values in teacher]
    return responses


def advantages(responses: Rollout, algorithm: str, policy: PolicyConfig, coef: float | None) -> tuple[list[Any], Any]:
    settings = settings_of(algorithm, policy, distill_coef=coef)
    samples, metrics = learning_samples(responses, None, settings, kl_coef=0.0)
    return [sample.columns["advantages"].tolist() for sample in samples], metrics


def test_advantages_beside_a_reward_by_hand():
    """Log-ratios .5, -.75, .5 with coefficient .5: -.25, .375, -.25; rewards 1 and 3 have RLOO advantages -2 and 2."""
    responses = judged([1.0, 3.0], [[-1.0, -0.25], [-2.5]])
    found, metrics = advantages(responses, "rloo", PolicyConfig(init_kl_coef=0.0), 0.5)
    assert found == [[-2.25, -1.625], [1.75]]
    assert metrics == pytest.approx(
        {"teacher_kl": 0.25 / 3, "teacher_logprob": -1.25, "advantage_abs": (2.25 + 1.625 + 1.75) / 3}
    )


@pytest.mark.parametrize(
    ("algorithm", "policy"),
    [
        ("reinforce++", ReinforcePolicyConfig(init_kl_coef=0.0)),
        ("reinforce++_group", ReinforcePolicyConfig(init_kl_coef=0.0)),
        ("grpo", GroupPolicyConfig(init_kl_coef=0.0)),
        ("grpo_passk", GroupPolicyConfig(init_kl_coef=0.0)),
        ("rloo", PolicyConfig(init_kl_coef=0.0)),
    ],
)
def test_without_a_reward_an_advantage_is_the_teachers_part_alone(algorithm, policy):
    found, _ = advantages(judged([0.0, 0.0], [[-1.0, -0.25], [-2.5]]), algorithm, policy, 2.0)
    assert found == [[-1.0, 1.5], [-1.0]]


def test_the_teachers_part_is_added_after_advantages_are_whitened():
    policy, teacher = ReinforcePolicyConfig(init_kl_coef=0.0), [[-1.0, -0.25], [-2.5]]
    whitened, _ = advantages(judged([1.0, 3.0], teacher), "reinforce++", policy, None)
    found, _ = advantages(judged([1.0, 3.0], teacher), "reinforce++", policy, 4.0)
    assert np.std(np.concatenate(whitened), ddof=1) == pytest.approx(1.0)
    parts = np.concatenate(found) - np.concatenate(whitened)
    assert parts == pytest.approx([-2.0, 3.0, -2.0])


def test_a_teacher_computes_once_in_an_iteration_between_reference_and_actor():
    run = Run(policy=WITH_REFERENCE, distill_coef=1.0)
    run(total_iterations=2)
    first, second = (number for number, call in enumerate(run.journal) if call == "teacher.logprobs")
    for number in (first, second):
        assert run.journal[number - 1 : number + 2] == ["ref.logprobs", "teacher.logprobs", "actor.logprobs"]


def test_the_policys_own_logprobs_are_computed_although_a_single_step_needs_no_anchor():
    run = Run(policy=WITHOUT_REFERENCE, distill_coef=1.0)
    run(total_iterations=1)
    assert run.journal.count("actor.logprobs") == 1
    assert run.actor.on_policy == [True]


def run_alone() -> Run:
    """Return a one-iteration run without a reward, for which the real scorer returns 0."""
    run = Run(policy=ReinforcePolicyConfig(init_kl_coef=0.0), algorithm="reinforce++", reward=ALONE, distill_coef=0.5)
    run.scorer.judge = lambda request: Score(0.0, "scored")  # type: ignore[method-assign]
    run(total_iterations=1)
    return run


def test_exactly_the_sampled_tokens_get_the_teachers_part():
    run = run_alone()
    samples, _ = run.actor.updates[0]
    answers = [run.engines._answer(request) for request in run.engines.requests[0]]
    assert len(samples) == len(answers)
    for sample, answer in zip(samples, answers, strict=True):
        # The actor is at -1 and the teacher at -.75, so the teacher prefers every token by .25 nats.
        assert sample.columns["advantages"].tolist() == [0.125] * len(answer.token_ids)


def test_an_iteration_without_a_reward_logs_the_teacher_and_no_scores():
    run = run_alone()
    ((_, metrics),) = run.tracker.logged
    assert (metrics["teacher_kl"], metrics["teacher_logprob"]) == (-0.25, -0.75)
    ((_, rows),) = run.tracker.rows
    assert [(row["reward"], row["verdict"], row["teacher_kl"]) for row in rows] == [(None, None, -0.25)] * 6
    assert metrics["response_length"] > 0
    assert not [name for name in metrics if "reward" in name or name == "accuracy"]
    assert undocumented("reinforce++", metrics) == ["loss"]  # from the fake actor


def test_responses_whose_reward_failed_are_not_distilled():
    run = Run(distill_coef=1.0, batch=BatchConfig(train_batch_size=6), fails=lambda index: index == 2)
    run(total_iterations=1)
    samples, _ = run.actor.updates[0]
    assert len(samples) == 5
    rows = run.tracker.rows[0][1]
    assert [row.get("teacher_kl") for row in rows] == [-0.25, -0.25, None, -0.25, -0.25, -0.25]
    assert run.tracker.logged[0][1]["reward_failed"] == pytest.approx(1 / 6)
