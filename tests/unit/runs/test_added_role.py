"""A role is a row and a group of settings: one from outside the tables is found, checked, placed and planned."""

from dataclasses import replace
from typing import Annotated

import pytest
from online_fakes import FakeModel, Run
from online_settings import LEAST
from pydantic import Field
from samples import sample_of

from rlhf_cli.algorithms.estimators.table import ESTIMATORS
from rlhf_cli.backends.cluster.default_layout import LayoutNeeds, fill_layout
from rlhf_cli.backends.roles.groups import FrozenPolicyRole
from rlhf_cli.commands.grpo import GRPOConfig
from rlhf_cli.config import base, roles
from rlhf_cli.config.train import ZeroStage
from rlhf_cli.data.prompts import Prompt
from rlhf_cli.data.rollouts import Generation
from rlhf_cli.errors import UsageError
from rlhf_cli.options import build_config
from rlhf_cli.runs.online.identity import settings_identity
from rlhf_cli.runs.online.models import check_shared_sequences, find_models, idle_settings, together
from rlhf_cli.runs.online.start_roles import role_plan
from rlhf_cli.trainers.online.forward import fill_in_outputs
from rlhf_cli.trainers.online.samples import Rollout
from rlhf_cli.trainers.online.update_plan import StepCounts


class JudgeConfig(base.SettingsGroup):
    """Judge"""

    judge_pretrain: str | None = None
    """Frozen policy whose log-probs are used."""
    judge_coef: Annotated[float, base.Needs("judge_pretrain")] = Field(0.5, gt=0)
    """Weight of its log-probs."""
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
    assert run.journal[:3] == ["judge.wake", "judge.logprobs", "judge.sleep"]
    (found,) = responses.only([False, True]).frozen_logprobs["judge"]
    assert found.tolist() == judge.logprobs(other.sequences)[0].tolist()


@pytest.mark.parametrize("role", [*roles.ROLES.values(), JUDGE], ids=lambda role: role.name)
def test_a_role_has_the_settings_of_its_ranks(role):
    flags = {name for group in JudgedConfig.model_fields for name in JudgedConfig.group_class(group).model_fields}
    own = set(JudgedConfig.group_class(role.group).model_fields)
    assert {f"{role.name}_num_nodes", f"{role.name}_num_gpus_per_node"} <= own
    assert set(role.rank_settings) <= flags or role.name == "actor"
