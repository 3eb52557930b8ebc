"""Teachers of online runs: compatibility with the policy, log-probs, and the resulting advantages."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bpe_tokenizers import bpe
from conftest import make_tiny_tokenizer
from distill_training import save_teacher
from online_fakes import WITH_REFERENCE, WITHOUT_REFERENCE, Run
from reward_models import save_reward_model
from samples import sample_of
from site_hooks import undocumented
from test_online_batch import floats, generation, prompt, responses_of, scored, settings_of
from test_online_repeats import OneRank
from test_online_reward_model import role_settings
from tiny_training import make_sequences
from transformers import AutoModelForCausalLM

from rlhf_cli.algorithms.advantages import drawn_to_teacher, over_spans
from rlhf_cli.algorithms.estimators.group import GroupPolicyConfig
from rlhf_cli.algorithms.estimators.reinforce import ReinforcePolicyConfig
from rlhf_cli.backends.roles.groups import TeacherRole
from rlhf_cli.backends.roles.planner import MicroBatchPlanner
from rlhf_cli.backends.roles.ranks import FrozenPolicyRank
from rlhf_cli.config.model import ModelConfig
from rlhf_cli.config.policy import PolicyConfig
from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.config.train import BatchConfig
from rlhf_cli.data.packing.packs import TokenSequence
from rlhf_cli.data.prompts import Prompt
from rlhf_cli.data.rollouts import Generation
from rlhf_cli.data.tokenizing.teacher_tokens import TeacherTokens
from rlhf_cli.data.tokenizing.token_texts import TokenTexts
from rlhf_cli.errors import UsageError
from rlhf_cli.models.finding import find_model
from rlhf_cli.rewards.records import Score
from rlhf_cli.runs.trained_model import ModelPlan, find_frozen_policy
from rlhf_cli.trainers.online.batch import learning_samples
from rlhf_cli.trainers.online.forward import fill_in_outputs, spread_over_spans
from rlhf_cli.trainers.online.interfaces import Roles
from rlhf_cli.trainers.online.samples import Rollout, Sample

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


def across(first: list[float], teacher: list[list[float]], rows: list[list[list[int]]]) -> Rollout:
    """Return two responses to one prompt, with three tokens and one, and log-probs for the teacher's tokens."""
    responses = responses_of([prompt(0)] * 2, [generation(1, 2, 3), generation(4)], [scored(1.0), scored(3.0)], [0, 0])
    responses.old_logprobs = [floats(*first), floats(-2.0)]
    responses.frozen_logprobs["teacher"] = [floats(*values) for values in teacher]
    spread_over_spans(responses, [np.array(one) for one in rows], [np.ones(3, bool), np.ones(1, bool)])
    return responses


def test_each_token_in_a_span_has_the_log_ratio_over_the_span_by_hand():
    """Two tokens against one: -.5 - 1 + 1 = -.5; one against two: -2 + .75 = -1.25; one against one: -2 + 2.5 = .5.
    With coefficient .5: .25, .25, .625, -.25; RLOO gives -2 and 2.
    """
    responses = across(
        [-0.5, -1.0, -2.0], [[-1.0, -0.25, -0.5], [-2.5]], [[[0, 0, 2, 1], [2, 1, 1, 2]], [[0, 0, 1, 1]]]
    )
    assert [list(values) for values in map(np.asarray, responses.frozen_logprobs["teacher"])] == [
        [-0.5, -0.5, -0.75],
        [-2.5],
    ]
    found, metrics = advantages(responses, "rloo", PolicyConfig(init_kl_coef=0.0), 0.5)
    assert found == [[-1.75, -1.75, -1.375], [1.75]]
    assert metrics == pytest.approx(
        # Each span counts once: (-.5 - 1.25 + .5) / 4 tokens, and (-1 - .75 - 2.5) / 4 tokens.
        {"teacher_kl": -1.25 / 4, "teacher_logprob": -4.25 / 4, "aligned": 3 / 4, "advantage_abs": 6.625 / 4}
    )


def test_tokens_whose_text_the_teacher_does_not_read_have_no_log_ratio():
    """In the first response, the second token starts at a common byte, but the texts differ before the next one."""
    responses = across([-0.5, -1.0, -2.0], [[-1.5, -9.0], [-2.0]], [[[0, 0, 1, 1], [1, 1, 0, 0]], [[0, 0, 1, 1]]])
    assert responses.teacher_spans is not None
    assert [spans.tolist() for spans in responses.teacher_spans] == [[0, -1, -1], [0]]
    found, _ = advantages(responses, "rloo", PolicyConfig(init_kl_coef=0.0), 1.0)
    assert found == [[-3.0, -2.0, -2.0], [2.0]]
    nothing = across([-0.5, -1.0, -2.0], [[], [-2.0]], [[[0, 0, 0, 0]], [[0, 0, 1, 1]]])
    assert advantages(nothing, "rloo", PolicyConfig(init_kl_coef=0.0), 1.0)[0] == [[-2.0] * 3, [2.0]]


def test_tokens_without_text_count_by_themselves_by_hand():
    """The second token has no text: -1 + 20 = 19. The span of the others: -.5 - 2 + 1 = -1.5."""
    responses = responses_of([prompt(0)] * 2, [generation(1, 2, 3), generation(4)], [scored(1.0), scored(3.0)], [0, 0])
    responses.old_logprobs = [floats(-0.5, -1.0, -2.0), floats(-2.0)]
    responses.frozen_logprobs["teacher"] = [floats(-1.0), floats(-2.0)]
    rows = [np.array([[0, 0, 3, 1]]), np.array([[0, 0, 1, 1]])]
    spread_over_spans(responses, rows, [np.array([True, False, True]), np.array([True])])
    found, _ = advantages(responses, "rloo", PolicyConfig(init_kl_coef=0.0), 1.0)
    assert found == [[-0.5, -21.0, -0.5], [2.0]]


def test_the_expected_gradient_with_spans_is_the_gradient_of_the_reverse_kl_divergence_between_texts():
    """Each text has two policy tokens and one teacher token."""
    generator = torch.Generator().manual_seed(0)
    first_A, second_AB = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((3,), (3, 4)))
    teacher_AB = torch.randn(12, generator=generator, dtype=torch.float64).log_softmax(-1).view(3, 4)
    first_A.requires_grad_()
    second_AB.requires_grad_()
    of_first_A, of_second_AB = first_A.log_softmax(-1), second_AB.log_softmax(-1)
    texts_AB = of_first_A[:, None] + of_second_AB
    exact = torch.autograd.grad(
        (texts_AB.exp() * (texts_AB - teacher_AB)).sum(), [first_A, second_AB], retain_graph=True
    )
    # REINFORCE over all texts: both tokens have the text's log-ratio as advantage.
    pairs = torch.stack([of_first_A[:, None].expand(3, 4), of_second_AB], -1).reshape(-1)
    halves = torch.stack([teacher_AB / 2] * 2, -1).reshape(-1)
    ratios = over_spans((pairs - halves).detach(), torch.arange(12).repeat_interleave(2))
    loss = (texts_AB.detach().exp().reshape(-1).repeat_interleave(2) * ratios * pairs).sum()
    for found, expected in zip(torch.autograd.grad(loss, [first_A, second_AB]), exact, strict=True):
        torch.testing.assert_close(found, expected)


def test_a_long_read_does_not_change_how_later_batches_are_packed():
    packed = []

    class Rank:
        def logprobs(self, micro_batches, number):
            packed.append([len(members) for members in micro_batches])
            return [np.zeros(sum(one.num_trained for one in members), np.float32) for members in micro_batches]

    def read(*lengths):
        teacher.logprobs([TokenSequence(np.arange(n, dtype=np.int32), np.arange(n) > 0) for n in lengths])

    planner = MicroBatchPlanner(1, BatchConfig(train_max_tokens_per_gpu=20), 0.0, lambda: False)
    teacher = TeacherRole(OneRank(Rank()), planner, takes_turns=False)  # type: ignore[arg-type]
    for lengths in ((12, 12), (30, 5), (12, 12)):
        read(*lengths)
    assert packed[0] == packed[2] == [1, 1]
    assert sum(packed[1]) == 2


def roles_of(*folders: Path, max_tokens: int) -> Roles:
    """Return an actor and a teacher that only compute log-probs."""
    planner = MicroBatchPlanner(1, BatchConfig(train_max_tokens_per_gpu=max_tokens), 0.0, lambda: False)
    actor, teacher = (
        TeacherRole(OneRank(FrozenPolicyRank(role_settings(folder, 0))), planner, takes_turns=False)  # type: ignore[arg-type]
        for folder in folders
    )
    others: dict[str, Any] = {"engines": None, "scorer": None}
    return Roles(actor=actor, frozen_policies={"teacher": teacher}, **others)


def texts_of(tokenizer: Any) -> TokenTexts:
    return TokenTexts(tokenizer, [tokenizer.eos_token_id], num_rows=len(tokenizer), what="the model")


def read_samples(roles: Roles, samples: list[Sample], *tokens: TeacherTokens) -> tuple[Rollout, list[Any]]:
    settings = replace(settings_of("rloo", PolicyConfig(init_kl_coef=0.0), distill_coef=0.5), teacher_tokens=tokens)
    rollout = Rollout(samples)
    fill_in_outputs(roles, settings, rollout, needs_old=True)
    found, _ = learning_samples(rollout, None, settings, kl_coef=0.0)
    return rollout, [sample.columns["advantages"] for sample in found]


@pytest.mark.usefixtures("group_of_one")
def test_with_equal_tokenizers_advantages_equal_the_default(tmp_path):
    tokenizer = make_tiny_tokenizer()
    folders = [save_teacher(tmp_path / str(seed), vocab_size=len(tokenizer), seed=seed) for seed in (1, 2)]
    asked = tokenizer.encode("What is it?")
    samples = []
    for number, text in enumerate(["12+3=15", "Hello, world.", "a b c", "The end"]):
        ids = tokenizer.encode(text, add_special_tokens=False)
        ids += [tokenizer.eos_token_id] * (number > 0)  # the first is truncated
        response = Generation(ids, [0.0] * len(ids), "stop" if number else "length", 0)
        samples.append(
            sample_of(Prompt(asked, "", None, "d", 0, teacher_ids=asked), response, scored(number), index=number)
        )
    tokens = TeacherTokens(texts_of(tokenizer), texts_of(tokenizer))
    roles = roles_of(*folders, max_tokens=1000)
    _, expected = read_samples(roles, samples)
    rollout, found = read_samples(roles, samples, tokens)
    assert rollout.num_spans == sum(sample.response.num_sampled for sample in samples)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6, rtol=0)


@pytest.mark.usefixtures("group_of_one")
def test_a_teacher_reads_responses_in_more_tokens_than_a_micro_batch_or_none(tmp_path):
    own, other = make_tiny_tokenizer(), bpe("straw", end="</s>")
    folders = (
        save_teacher(tmp_path / "own", vocab_size=len(own) + 1, tokenizer=own, seed=1),
        save_teacher(tmp_path / "other", vocab_size=len(other), tokenizer=other, seed=2),
    )
    texts = [own.encode("12+3=15 strawberry", add_special_tokens=False), [len(own)]]  # a row that is no token
    asked = Prompt(own.encode("Fruit?"), "", None, "d", 0, teacher_ids=other.encode("Fruit?"))
    samples = [
        sample_of(asked, Generation(ids, [0.0] * len(ids), "stop", 0), scored(number), index=number)
        for number, ids in enumerate(texts)
    ]
    roles = roles_of(*folders, max_tokens=len(asked.prompt_ids) + len(texts[0]))
    rollout, found = read_samples(roles, samples, TeacherTokens(texts_of(own), texts_of(other)))
    assert rollout.old_logprobs is not None
    assert rollout.num_spans > 1
    # Such a row is 20 nats for the teacher, so that the policy gains nothing with it.
    assert np.asarray(rollout.frozen_logprobs["teacher"][1]).tolist() == [-20.0]
    assert found[1] == pytest.approx(1 - 0.5 * (np.asarray(rollout.old_logprobs[1]) + 20), rel=1e-5)


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
