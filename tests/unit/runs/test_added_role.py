"""A role is a row and a group of settings: one from outside is checked, placed, planned and part of the loss."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
import pytest
import torch
from online_fakes import FakeModel, Run
from online_settings import LEAST, online_settings, resolve
from pydantic import Field
from samples import sample_of
from site_hooks import undocumented

from rlhf_cli.algorithms.aggregation import Metrics, StepTotals
from rlhf_cli.algorithms.estimators.table import ESTIMATORS
from rlhf_cli.algorithms.kl import kl_metric
from rlhf_cli.algorithms.objective import LossWeights
from rlhf_cli.backends.cluster.default_layout import LayoutNeeds, fill_layout
from rlhf_cli.backends.roles.groups import FrozenPolicyRole
from rlhf_cli.backends.roles.ranks import ActorRank
from rlhf_cli.backends.roles.serialization import RankWork
from rlhf_cli.backends.training.deepspeed_engine import ComputeLoss
from rlhf_cli.command_table import COMMANDS, POLICY_GRADIENT
from rlhf_cli.commands.grpo import GRPOConfig
from rlhf_cli.config import base, roles
from rlhf_cli.config.train import ZeroStage
from rlhf_cli.data.prompts import Prompt
from rlhf_cli.data.rollouts import Generation
from rlhf_cli.data.stored_arrays import Column
from rlhf_cli.errors import UsageError
from rlhf_cli.options import build_config
from rlhf_cli.rewards.records import Score
from rlhf_cli.runs.online.identity import settings_identity
from rlhf_cli.runs.online.models import check_shared_sequences, find_models, idle_settings, together
from rlhf_cli.runs.online.start_roles import role_plan
from rlhf_cli.trainers.online.batch import learning_samples
from rlhf_cli.trainers.online.forward import fill_in_outputs
from rlhf_cli.trainers.online.sample_rows import iteration_rows
from rlhf_cli.trainers.online.samples import Rollout
from rlhf_cli.trainers.online.state import first_state
from rlhf_cli.trainers.online.update_plan import StepCounts


class JudgeConfig(base.SettingsGroup):
    """Judge"""

    judge_pretrain: str | None = None
    """Frozen policy from which the trained one must not move away."""
    judge_coef: Annotated[float, base.Needs("judge_pretrain")] = Field(0.5, gt=0)
    """KL coefficient in the loss."""
    judge_num_nodes: int | None = Field(None, gt=0)
    """Nodes for the judge."""
    judge_num_gpus_per_node: int | None = Field(None, gt=0)
    """Judge ranks per node."""
    judge_zero_stage: ZeroStage | None = None
    """ZeRO stage of the judge. Default: zero_stage."""
    judge_sequence_parallel_size: int | None = Field(None, gt=0)
    """Sequence parallel size of the judge. Default: sequence_parallel_size."""


JUDGE = roles.Role(
    "judge",
    group="judge",
    title="judge",
    rank=roles.FROZEN_POLICY,
    driver=f"{roles.DRIVERS}:FrozenPolicyRole",
    pretrain="judge_pretrain",
    kl_coef="judge_coef",
    absent="a judge requires --judge_pretrain",
)


class JudgedConfig(GRPOConfig):
    """Train with a judge."""

    roles = roles.ROLES | {"judge": JUDGE}
    judge: JudgeConfig = JudgeConfig()


def judged(model: str, **given: object) -> JudgedConfig:
    return build_config(JudgedConfig, LEAST | {"pretrain": model, "n_samples_per_prompt": 2} | given)


def test_an_added_role_has_flags_a_model_ranks_and_a_plan(tiny_model_dir):
    config = judged(tiny_model_dir, judge_pretrain=tiny_model_dir, judge_zero_stage=3, judge_num_gpus_per_node=2)
    models = find_models(config, ESTIMATORS["grpo"])
    assert tuple(models.by_role) == ("actor", "ref", "judge")
    assert tuple(models.frozen_policies) == ("judge",)
    assert (config.num_ranks("judge"), config.deepspeed_of("judge").zero_stage, config.shape("ref")) == (2, 3, (1, 1))
    plan = role_plan(config, models, "judge", total_steps=StepCounts(1, 1), end_ids=())
    assert (plan.role, plan.settings.model.pretrain, plan.settings.deepspeed.zero_stage) == (JUDGE, tiny_model_dir, 3)
    assert plan.role.driver.endswith(f":{FrozenPolicyRole.__name__}")


def test_an_added_role_is_placed_on_all_gpus(tiny_model_dir):
    config = judged(tiny_model_dir, judge_pretrain=tiny_model_dir)
    layout, _ = fill_layout(config.layout_settings(("actor", "judge")), node_gpus=[4], needs=LayoutNeeds())
    config = config.with_layout(layout)
    assert (config.judge.judge_num_nodes, config.judge.judge_num_gpus_per_node) == (1, 4)


def test_settings_of_an_added_role_are_checked(tiny_model_dir):
    config = judged(tiny_model_dir, judge_zero_stage=3, zpg=2)  # the role's own stage makes zpg valid
    assert idle_settings(config, ("actor", "ref")) == [
        "--judge_zero_stage is ignored: a judge requires --judge_pretrain"
    ]
    assert idle_settings(config, ("actor", "ref", "judge")) == []
    with pytest.raises(UsageError, match="judge_coef needs --judge_pretrain"):
        judged(tiny_model_dir, judge_coef=0.25)
    with pytest.raises(UsageError, match="--judge_pretrain: pretrain '/none': there is no such folder"):
        find_models(judged(tiny_model_dir, judge_pretrain="/none"), ESTIMATORS["grpo"])
    config = judged(tiny_model_dir, judge_pretrain=tiny_model_dir, judge_sequence_parallel_size=2)
    assert together(config, ("actor", "judge")) == ["2 ranks share each sequence of judge, up to 32,384 tokens"]
    with pytest.raises(UsageError, match="--judge_sequence_parallel_size 2 does not divide the 1 ranks"):
        check_shared_sequences(config, find_models(config, ESTIMATORS["grpo"]))


def test_only_settings_that_affect_results_must_match_on_resume(tiny_model_dir):
    plain, judge = judged(tiny_model_dir), judged(tiny_model_dir, judge_pretrain=tiny_model_dir, judge_zero_stage=3)
    assert settings_identity(judge) == settings_identity(plain) | {"judge_coef": 0.5}


def test_log_probs_of_an_added_role_reach_the_responses():
    run = Run()
    judge = FakeModel("judge", run.journal, level=-0.25)
    kept, other = (
        sample_of(Prompt([1, 2], "", None, "", 0), Generation(ids, [0.0] * len(ids), "stop", 0))
        for ids in ([3, 4], [5])
    )
    responses = Rollout([kept, other])
    fill_in_outputs(replace(run.roles(), frozen_policies={"judge": judge}), run.settings, responses, needs_old=False)
    assert run.journal[0] == "judge.logprobs"
    (found,) = responses.only([False, True]).frozen_logprobs["judge"]
    assert np.asarray(found).tolist() == judge.logprobs(other.sequences)[0].tolist()


def judged_rollout(actor: ActorRank) -> Rollout:
    """Return two responses to a prompt. The engine has the actor's log-probs, so nothing is corrected."""
    place = Prompt([1, 2], "", None, "", 0)
    samples = [
        sample_of(place, Generation(ids, [0.0] * len(ids), "stop", 0), Score(score, "scored"), index=index)
        for index, (ids, score) in enumerate((([3, 4], 1.0), ([5], 0.0)))
    ]
    old = actor.logprobs([[sample.sequence] for sample in samples])
    samples = [
        replace(sample, response=replace(sample.response, logprobs=logprobs.tolist()))
        for sample, logprobs in zip(samples, old, strict=True)
    ]
    distances = {"ref": 0.5, "judge": -0.25}
    frozen: dict[str, Sequence[Column]] = {
        role: [logprobs - distance for logprobs in old] for role, distance in distances.items()
    }
    return Rollout(samples, old_logprobs=old, frozen_logprobs=frozen)


def recorded_losses(actor: ActorRank, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the list to which the actor's losses will be added, one per micro-batch."""
    losses: list[float] = []
    make = actor._loss

    def recorded(totals: StepTotals, weights: LossWeights) -> ComputeLoss:
        def compute(*args: Any) -> tuple[torch.Tensor, Metrics]:
            loss, metrics = make(totals, weights)(*args)
            losses.append(loss.item())
            return loss, metrics

        return compute

    monkeypatch.setattr(actor, "_loss", recorded)
    return losses


@pytest.fixture
def judged_update(
    tiny_model_dir, group_of_one, monkeypatch
) -> Callable[..., tuple[dict[str, float], list[dict[str, Any]]]]:
    """Returns the metrics of one optimizer step and the rows of its samples, with settings of the judge."""

    def update(role: roles.Role = JUDGE, **columns: float) -> tuple[dict[str, float], list[dict[str, Any]]]:
        monkeypatch.setattr(JudgedConfig, "roles", roles.ROLES | {"judge": role})
        config = judged(tiny_model_dir, judge_pretrain=tiny_model_dir, param_dtype="fp32", init_kl_coef=0.01)
        settings = online_settings(config, "grpo")
        models = find_models(config, ESTIMATORS["grpo"])
        actor = ActorRank(role_plan(config, models, "actor", total_steps=StepCounts(1, 1), end_ids=()).settings)
        rollout = judged_rollout(actor)
        samples, metrics = learning_samples(rollout, None, settings, kl_coef=0.01)
        for sample in samples:
            sample.columns.update({name: np.full(sample.num_trained, value) for name, value in columns.items()})
        work = RankWork([[samples]], [StepTotals(num_tokens=3, num_sequences=2)])
        losses = recorded_losses(actor, monkeypatch)
        (of_step,) = actor.update(work, True, first_state(settings.policy).weights(settings))
        return metrics | of_step | {"loss": sum(losses)}, iteration_rows(rollout.samples, rollout, settings)

    return update


def test_a_kl_term_of_an_added_role_is_in_the_loss(judged_update):
    """Per token, k3 of a log-ratio l is exp(-l) - 1 + l. At ratio 1, the policy loss is minus the mean advantage."""
    metrics, rows = judged_update()
    of_ref, of_judge = (math.exp(-ratio) - 1 + ratio for ratio in (0.5, -0.25))
    # Advantages of scores 1 and 0 in a group of two: +-1 / sqrt(2), for two tokens and one.
    policy_loss = -(2 - 1) / math.sqrt(2) / 3
    assert metrics["policy_loss"] == pytest.approx(policy_loss, rel=1e-4)
    assert metrics["loss"] == pytest.approx(policy_loss + 0.01 * of_ref + 0.5 * of_judge, rel=1e-4)
    # Sums over a response's tokens, two and one.
    assert (metrics["kl"], metrics["judge_kl"]) == pytest.approx((1.5 * of_ref, 1.5 * of_judge), rel=1e-4)
    assert [row["judge_kl"] for row in rows] == pytest.approx([2 * of_judge, of_judge], rel=1e-4)
    assert [row["judge_logprob"] - row["old_logprob"] for row in rows] == pytest.approx([0.5, 0.25], abs=1e-5)


def test_a_frozen_policy_without_a_kl_term_is_measured(judged_update):
    metrics, rows = judged_update(replace(JUDGE, kl_coef=""))
    old = [row["old_logprob"] for row in rows]
    assert (metrics["judge_kl"], metrics["judge_logprob"]) == pytest.approx((-0.25, sum(old) / 3 + 0.25), rel=1e-4)
    assert [row["judge_kl"] for row in rows] == pytest.approx([-0.25, -0.25], abs=1e-5)
    assert "judge_logprob" not in rows[0]


def test_a_column_that_no_loss_reads_is_an_error(judged_update):
    with pytest.raises(AssertionError, match=r"no loss reads the columns \['stray'\]"):
        judged_update(stray=1.0)


def test_only_a_present_role_with_a_coefficient_has_a_kl_term(tiny_model_dir):
    ref, judge = roles.KLTerm(0.01, "k3"), roles.KLTerm(0.5, "k3")
    assert judged(tiny_model_dir).kl_terms == {"ref": ref}
    assert judged(tiny_model_dir, judge_pretrain=tiny_model_dir).kl_terms == {"ref": ref, "judge": judge}
    assert judged(tiny_model_dir, init_kl_coef=0.0).kl_terms == {}
    assert resolve("ppo", kl_estimator="k2").kl_terms == {"ref": roles.KLTerm(0.01, "k2")}


@pytest.mark.parametrize(
    "role", [role for role in roles.ROLES.values() if role.rank == roles.FROZEN_POLICY], ids=lambda role: role.name
)
def test_metrics_of_a_frozen_policy_are_documented(role):
    names = [kl_metric(role.name)] if role.kl_coef else [kl_metric(role.name), f"{role.name}_logprob"]
    (command, *_) = (name for name in POLICY_GRADIENT if role.group in COMMANDS[name].config_class.model_fields)
    assert not undocumented(command, names), "describe the metrics in docs/metrics.yaml"


@pytest.mark.parametrize("role", [*roles.ROLES.values(), JUDGE], ids=lambda role: role.name)
def test_a_role_has_the_settings_of_its_ranks(role):
    classes = [JudgedConfig, *(COMMANDS[name].config_class for name in POLICY_GRADIENT)]
    config = next(config for config in classes if role.group in config.model_fields)
    flags = {name for group in config.model_fields for name in config.group_class(group).model_fields}
    own = set(config.group_class(role.group).model_fields)
    assert {f"{role.name}_num_nodes", f"{role.name}_num_gpus_per_node"} <= own
    assert set(role.rank_settings) <= flags or role.name == "actor"
