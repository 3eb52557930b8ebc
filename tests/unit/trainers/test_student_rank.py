"""A student and its teacher in one rank with the real engine: values, gradients, packs, checkpoints, and runs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_tiny_tokenizer
from distill_training import STEPS, distill_plainly, distill_steps, save_teacher, text_logits
from online_fakes import FakeTracker
from online_settings import online_settings, resolve
from samples import sample_of
from site_hooks import undocumented
from test_online_repeats import PROMPTS, OneEngine, OneRank, Scorer
from tiny_training import CLOSE, LEARNING_RATE, OPTIM, Layout, farthest, make_sequences
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from rlhf_cli.algorithms.estimators.table import ESTIMATORS
from rlhf_cli.algorithms.gradient_share import compared
from rlhf_cli.backends.roles.groups import StudentRole
from rlhf_cli.backends.roles.planner import MicroBatchPlanner
from rlhf_cli.backends.roles.settings import RoleSettings
from rlhf_cli.backends.roles.student_rank import StudentRank
from rlhf_cli.backends.roles.watch import Watch
from rlhf_cli.commands.gkd import GKDConfig
from rlhf_cli.config.train import BatchConfig
from rlhf_cli.data.packing.packs import TokenSequence
from rlhf_cli.data.prompts import Prompt
from rlhf_cli.data.rollouts import Generation
from rlhf_cli.models.distillation import DivergenceSettings
from rlhf_cli.models.tokenizers import load_tokenizer
from rlhf_cli.runs.online.models import find_models
from rlhf_cli.runs.online.student import hosted_teachers, shares_prompts
from rlhf_cli.trainers.offline.distill import DistillObjective
from rlhf_cli.trainers.online.distilling import Mixture, train_student
from rlhf_cli.trainers.online.interfaces import Roles
from rlhf_cli.trainers.online.loop import OnlineHooks
from rlhf_cli.trainers.online.prompt_source import RolloutSource
from rlhf_cli.trainers.online.state import LoopState, first_state

pytestmark = pytest.mark.usefixtures("group_of_one")

SMALL = {"rollout_batch_size": "2", "n_samples_per_prompt": "2", "train_batch_size": "4", "max_new_tokens": "4"}
SIMILAR = {"beta": "0.4", "temperature": "0.9", "lr_scheduler": "constant", "max_norm": "0.5", "l2": "0.1"}


def config_of(student: str, teacher: str, **given: str) -> GKDConfig:
    config = resolve("gkd", pretrain=student, teacher_pretrain=teacher, param_dtype="fp32", **SMALL | SIMILAR | given)
    assert isinstance(config, GKDConfig)
    return config


def make_student(config: GKDConfig, *, learning_rate: float = LEARNING_RATE) -> StudentRank:
    models = find_models(config, ESTIMATORS["gkd"])
    return StudentRank(
        RoleSettings(
            model=config.model,
            deepspeed=config.deepspeed,
            optim=config.optim,
            learning_rate=learning_rate,
            total_steps=10,
            seed=config.batch.seed,
            temperature=config.rollout.temperature,
            max_new_tokens=config.rollout.max_new_tokens,
            policy=config.policy,
            share_prompts=shares_prompts(config, models.teachers),
            sleeps=bool(config.placement.deepspeed_enable_sleep),
            teachers=hosted_teachers(config, models),
        )
    )


def role_of(student: StudentRank, *, max_tokens: int = 1000) -> StudentRole:
    batch = BatchConfig(train_max_tokens_per_gpu=max_tokens)
    planner = MicroBatchPlanner(1, batch, 0.0, student.packer.shares_prompts)
    return StudentRole(OneRank(student), planner, takes_turns=False)  # type: ignore[arg-type]


def responses() -> list[TokenSequence]:
    """Return ten responses to three prompts."""
    rng = np.random.default_rng(2)
    prompts = [Prompt(rng.integers(0, 40, length).tolist(), "", None, "d", length) for length in (3, 5, 2)]
    sampled = [rng.integers(0, 40, int(rng.integers(1, 6))).tolist() for _ in range(10)]
    return [
        sample_of(prompts[i % 3], Generation(ids, [0.0] * len(ids), "stop", 0)).sequence
        for i, ids in enumerate(sampled)
    ]


def helped(sequences: list[TokenSequence]) -> list[TokenSequence]:
    """Return the sequences with longer prompts for the teacher, equal for those with an equal prompt."""
    found = []
    for one in sequences:
        prompt = one.token_ids[: int(one.loss_mask.argmax())].tolist()
        more = [9] * (len(prompt) % 3 + 1)
        token_ids = np.array([*more, *one.token_ids], np.int32)
        reads = TokenSequence(token_ids, np.array([*[False] * len(more), *one.loss_mask]))
        found.append(replace(one, teacher_reads=reads))
    return found


@pytest.mark.parametrize("max_tokens", [1000, 12])
def test_a_teacher_with_a_context_reads_the_same_responses_after_its_own_prompts(
    tiny_model_dir, tiny_llama_dir, max_tokens
):
    sequences = helped(responses())
    given: dict[str, Any] = {"beta": 0.4, "temperature": 0.9}
    expected = distill_plainly(tiny_model_dir, tiny_llama_dir, sequences=sequences, **given)
    assert expected != pytest.approx(distill_plainly(tiny_model_dir, tiny_llama_dir, sequences=responses(), **given))
    role = role_of(make_student(config_of(tiny_model_dir, tiny_llama_dir)), max_tokens=max_tokens)
    role.watch = Watch(((0, 0),))
    found = role.learn(sequences, [np.array(step) for step in STEPS])
    assert [metrics["loss"] for metrics in found] == pytest.approx(expected, rel=2e-6, abs=2e-6)
    assert any(role.projections)


@pytest.mark.parametrize("given", [{}, {"teacher_zero_stage": "3"}, {"deepspeed_enable_sleep": "true"}])
def test_each_response_is_compared_with_the_teacher_of_its_source(tiny_model_dir, tiny_llama_dir, tmp_path, given):
    other = str(save_teacher(tmp_path))
    sequences = [
        replace(one, teacher=number % 3 % 2, teacher_reads=replace(one.teacher_reads, teacher=number % 3 % 2))
        for number, one in enumerate(helped(responses()))
        if one.teacher_reads is not None
    ]
    assert {one.teacher for one in sequences[7:9]} == {0, 1}

    second = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)

    def logits_of(model: torch.nn.Module, sequence: TokenSequence) -> torch.Tensor:
        is_teacher = isinstance(model, LlamaForCausalLM)
        return text_logits(second if is_teacher and sequence.teacher else model, sequence)

    similar: dict[str, Any] = {"beta": 0.4, "temperature": 0.9, "sequences": sequences}
    expected = distill_plainly(tiny_model_dir, tiny_llama_dir, logits_of=logits_of, **similar)
    by_source = json.dumps({"code": other})
    role = role_of(make_student(config_of(tiny_model_dir, tiny_llama_dir, teacher_by_source=by_source, **given)))
    role.watch = Watch(((0, 0),))
    found = role.learn(sequences, [np.array(step) for step in STEPS])
    assert [metrics["loss"] for metrics in found] == pytest.approx(expected, rel=2e-6, abs=2e-6)
    assert role.trace[0]["divergence"].all()


@pytest.mark.parametrize("given", [{}, {"teacher_by_source": "other"}, {"share_prompts": "false", "beta": "0"}])
def test_with_equal_tokenizers_the_text_gives_the_steps_of_the_token_ids(tmp_path, given):
    # Without rows of the head that are no token: only the IDs could compare these.
    size = len(make_tiny_tokenizer())
    paths = [str(save_teacher(tmp_path / str(seed), vocab_size=size, seed=seed)) for seed in (1, 2, 3)]
    if "teacher_by_source" in given:
        given = {"teacher_by_source": json.dumps({"code": paths[2]})}
    plain = config_of(paths[0], paths[1], **given)
    config = config_of(paths[0], paths[1], teacher_tokenizer="own", lmbda="1", **given)
    tokens = find_models(config, ESTIMATORS["gkd"]).teacher_tokens
    tokenizer = load_tokenizer(config.model)
    texts = ["12+3=15", "Hello, world.", "a b c", "12", "one two", "3", "The end", "x = 2", "no", "yes"]
    prompts = [tokenizer.encode("What is it?"), tokenizer.encode("And?")]
    sequences = []
    for number, text in enumerate(texts):
        ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        prompt = Prompt(prompts[number % 2], "", None, "d", number, teacher=number % len(tokens))
        sequences.append(sample_of(prompt, Generation(ids, [0.0] * len(ids), "stop", 0)).sequence)
    read = [tokens[one.teacher].sampled(one, prompts[number % 2]) for number, one in enumerate(sequences)]
    assert all(one.teacher_rows is not None and len(one.teacher_rows) == one.num_trained for one in read)
    steps = [np.array(step) for step in STEPS]
    expected = role_of(make_student(plain), max_tokens=40).learn(sequences, steps)
    found = role_of(make_student(config), max_tokens=40).learn(read, steps)
    assert [one.pop("aligned") for one in found] == pytest.approx([1.0] * 3)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize(
    ("given", "max_tokens"),
    [
        ({}, 1000),
        ({"zero_stage": "0", "share_prompts": "false"}, 12),
        ({"zero_stage": "3", "teacher_zero_stage": "0", "teacher_offload": "true"}, 20),
        ({"zero_stage": "2", "teacher_zero_stage": "3", "deepspeed_enable_sleep": "true"}, 20),
    ],
)
def test_steps_on_responses_are_those_of_one_sequence_at_a_time_in_plain_pytorch(
    tiny_model_dir, tiny_llama_dir, given, max_tokens
):
    sequences = responses()
    expected = distill_plainly(tiny_model_dir, tiny_llama_dir, beta=0.4, temperature=0.9, sequences=sequences)
    student = make_student(config_of(tiny_model_dir, tiny_llama_dir, **given))
    assert student.packer.shares_prompts() == ("share_prompts" not in given)
    found = role_of(student, max_tokens=max_tokens).learn(sequences, [np.array(step) for step in STEPS])
    assert [metrics["loss"] for metrics in found] == pytest.approx(expected, rel=2e-6, abs=2e-6)
    assert not undocumented("gkd", found[0])


def test_steps_on_rows_are_the_steps_of_the_offline_command(tiny_model_dir, tiny_llama_dir):
    objective = DistillObjective(DivergenceSettings(0.4, 0.9))
    offline = distill_steps(tiny_model_dir, tiny_llama_dir, 2, Layout(), objective=objective)
    config = config_of(tiny_model_dir, tiny_llama_dir)
    assert {name: getattr(config.optim, name) for name in ("lr_scheduler", "max_norm", "l2")} == {
        name: getattr(OPTIM, name) for name in ("lr_scheduler", "max_norm", "l2")
    }
    student = make_student(config)
    found = role_of(student).learn(make_sequences(10), [np.array(step) for step in STEPS])
    for metrics, expected in zip(found, offline.metrics, strict=True):
        assert metrics == pytest.approx(expected, rel=1e-5, abs=2e-6)
    weights = dict(student.engine.named_weights(student.hf_model))
    assert farthest(weights, offline.weights) < CLOSE


@pytest.mark.parametrize("given", [{}, {"teacher_top_k": "8", "beta": "0"}])
def test_a_watched_update_has_the_divergence_of_each_token_and_shares_that_sum_to_one(
    tiny_model_dir, tiny_llama_dir, given
):
    sequences = responses()
    student = make_student(config_of(tiny_model_dir, tiny_llama_dir, **given))
    role = role_of(student, max_tokens=12)
    places = [(number, token) for number, one in enumerate(sequences) for token in range(one.num_trained)]
    role.watch = Watch(tuple(places), keeps_gradient=True)
    found = role.learn(sequences, [np.array(step) for step in STEPS])
    for metrics, columns, projections in zip(found, role.trace, role.projections, strict=True):
        assert (columns["divergence"] * columns["gradient"]).sum() == pytest.approx(metrics["loss"], rel=1e-6)
        assert (columns["forward_kl"] * columns["gradient"]).sum() == pytest.approx(metrics["forward_kl"], rel=1e-6)
        assert columns["gradient"] == pytest.approx(1 / len(columns["token"]))
        assert sum(one.share for one in projections.values()) == pytest.approx(1, abs=1e-5)
        assert len(projections) == len(columns["token"])
        assert all(one.step_norm == pytest.approx(metrics["grad_norm"], rel=1e-5) for one in projections.values())
    assert compared(role.gradient(), {}).norm == pytest.approx(found[0]["grad_norm"], rel=1e-5)
    plain = role_of(make_student(config_of(tiny_model_dir, tiny_llama_dir, **given)), max_tokens=12)
    again = plain.learn(sequences, [np.array(step) for step in STEPS])
    assert [one["loss"] for one in again] == [one["loss"] for one in found]  # watching changes nothing


def run(config: GKDConfig, folder: Path, *, resume: Path | None = None, iterations: int = 4) -> dict[str, Any]:
    """Run and return the logged metrics and the weights; a run saves after iteration 2, or resumes from there."""
    student = make_student(config, learning_rate=1e-2)
    engine, tracker = OneEngine(config.model.pretrain, student, folder), FakeTracker()
    state = first_state(config.policy)
    if resume is not None:
        student.load(resume)
        state = LoopState.of(json.loads((resume / "state.json").read_text()))
        engine.receive_weights(state.iteration)
    else:
        (folder / "saved").mkdir(exist_ok=True)

    def save(state: LoopState) -> None:
        if state.iteration == 2 and resume is None:
            student.save(folder / "saved")
            (folder / "saved" / "state.json").write_text(json.dumps(state.plain()))

    roles = Roles(actor=role_of(student), engines=engine, scorer=Scorer([], fails=lambda index: False))
    train_student(
        roles,
        mixture_of(config),
        RolloutSource(
            engine,
            roles.scorer,
            online_settings(config, "gkd"),
            PROMPTS,
            lambda token_ids: "".join(map(chr, token_ids)),
            tracker.message,
        ),
        state=state,
        total_iterations=iterations,
        save_steps=1,
        hooks=OnlineHooks(tracker, save, lambda: False),
    )
    engine.end()
    weights = {name: weight.clone() for name, weight in student.engine_weights()}
    return {"logged": tracker.logged, "rows": tracker.rows, "weights": weights}


def mixture_of(config: GKDConfig) -> Mixture:
    return Mixture(config.distillation.lmbda, make_sequences(10), 4, config.batch.seed)


def same_weights(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(weight.equal(other["weights"][name]) for name, weight in one["weights"].items())


def test_a_run_repeats_differs_with_another_seed_and_goes_on_as_if_never_stopped(
    tiny_model_dir, tiny_llama_dir, tmp_path
):
    def config(seed: int) -> GKDConfig:
        return config_of(tiny_model_dir, tiny_llama_dir, seed=str(seed), lmbda="0.5", num_episodes="2")

    seed = next(seed for seed in range(99) if kinds(mixture_of(config(seed))) == [True, False, False, True])
    first, again = (run(config(seed), tmp_path) for _ in range(2))
    assert [metrics["own_responses"] for _, metrics in first["logged"]] == [1.0, 0.0, 0.0, 1.0]
    assert first["logged"] == again["logged"]
    assert first["rows"] == again["rows"]
    assert same_weights(first, again)
    assert not undocumented("gkd", [name for _, metrics in first["logged"] for name in metrics])
    continued = run(config(seed), tmp_path, resume=tmp_path / "saved")
    assert continued["logged"] == first["logged"][2:]
    assert continued["rows"] == first["rows"][1:]
    assert same_weights(first, continued)
    (tmp_path / "other").mkdir()
    other = run(config(seed + 1), tmp_path / "other")
    assert not same_weights(first, other)


def test_a_run_with_contexts_goes_on_as_if_never_stopped(tiny_model_dir, tiny_llama_dir, tmp_path, monkeypatch):
    config = config_of(tiny_model_dir, tiny_llama_dir, lmbda="1", num_episodes="2")
    plain = run(config, tmp_path)
    prompts = [replace(prompt, teacher_ids=[9, *prompt.prompt_ids]) for prompt in PROMPTS]
    monkeypatch.setattr("test_student_rank.PROMPTS", prompts)
    first = run(config, tmp_path)
    continued = run(config, tmp_path, resume=tmp_path / "saved")
    assert continued["logged"] == first["logged"][2:]
    assert same_weights(first, continued)
    # The same responses in the first iteration, with another divergence.
    assert first["rows"][0] == plain["rows"][0]
    assert first["logged"][0][1]["loss"] != pytest.approx(plain["logged"][0][1]["loss"])


def kinds(mixture: Mixture) -> list[bool]:
    return [mixture.is_own(iteration) for iteration in range(4)]
