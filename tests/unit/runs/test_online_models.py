"""The models of an online command: which are loaded, and which are incompatible."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from adapted_models import foreign_adapter
from conftest import make_tiny_tokenizer
from online_settings import resolve
from reward_models import save_reward_model

from rlhf_cli.algorithms.estimators.table import ESTIMATORS
from rlhf_cli.backends.training.checkpoint import Checkpoint
from rlhf_cli.backends.training.checkpoint_layout import StateLayout, write_layout
from rlhf_cli.config.roles import ROLES
from rlhf_cli.errors import UsageError
from rlhf_cli.runs.online.models import (
    OnlineModels,
    check_4_bits,
    check_replayed,
    check_shared_sequences,
    check_split_layers,
    check_stages,
    find_models,
    idle_settings,
    layout_notices,
    together,
    truncation_notice,
)
from rlhf_cli.runs.online.student import hosted_teachers, rows_config
from rlhf_cli.runs.trained_model import reference_notice


def find(command: str, pretrain: str, **given: Any) -> OnlineModels:
    return find_models(resolve(command, pretrain=pretrain, **given), ESTIMATORS[command])


def test_4_bits_are_refused_by_the_stage_of_the_role_and_where_no_gpu_can_be(tiny_model_dir, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    adapter = {"lora_rank": "4", "load_in_4bit": "true"}
    for stages, message in (
        ({"zero_stage": "3"}, "load_in_4bit does not go with --zero_stage 3"),
        ({"critic_zero_stage": "3"}, "load_in_4bit (does not go with --critic_zero_stage 3|needs an NVIDIA GPU)"),
        ({}, "load_in_4bit (needs an NVIDIA GPU|: bitsandbytes is not installed)"),
    ):
        config = resolve("ppo", pretrain=tiny_model_dir, **adapter, **stages)
        with pytest.raises(UsageError, match=message):
            check_4_bits(config, find_models(config, ESTIMATORS["ppo"]))
    without = resolve("ppo", pretrain=tiny_model_dir, lora_rank="4")
    check_4_bits(without, find_models(without, ESTIMATORS["ppo"]))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "vLLM returns routed experts only on a GPU: set --rollout_backend transformers"),
        ({"rollout_backend": "engine.py:Engine"}, "engine.py:Engine does not return routed experts"),
        ({"compile_model": "true"}, "compile_model would compile the routers"),
        ({"enable_prefix_caching": "false"}, "only with prefix caching: drop --no_enable_prefix_caching"),
    ],
)
def test_replay_is_refused_where_engines_return_no_experts(given, message, tiny_moe_dir, monkeypatch):
    config = resolve("grpo", pretrain=tiny_moe_dir, rollout_routing_replay="true", **given)
    architecture = find_models(config, ESTIMATORS["grpo"]).policy.architecture
    backend = config.engine.rollout_backend.replace("auto", "vllm")
    monkeypatch.setattr("rlhf_cli.runs.online.models.may_have_gpus", lambda: bool(given))
    with pytest.raises(UsageError, match=f"--rollout_routing_replay: .*{message}"):
        check_replayed(config, architecture, backend=backend)


def test_a_critic_starts_from_the_policy_where_nothing_else_is_said(tiny_model_dir):
    found = find("ppo", tiny_model_dir)
    assert found.critic == found.policy
    assert find("grpo", tiny_model_dir).critic is None


def test_a_critic_from_another_base_is_loaded_as_the_policy_is(tiny_model_dir, tmp_path):
    other = save_reward_model(tmp_path, hidden_size=64)
    found = find("ppo", tiny_model_dir, critic_pretrain=str(other), gradient_checkpointing="true")
    assert found.critic is not None
    assert found.critic.source == found.policy.source.model_copy(update={"pretrain": str(other)})
    assert found.critic.architecture.hidden_size == 64
    assert found.policy.architecture.hidden_size != 64


def test_each_has_an_adapter_on_its_own_base(tiny_model_dir, tmp_path):
    other = save_reward_model(tmp_path)
    found = find("ppo", tiny_model_dir, critic_pretrain=str(other), lora_rank=4)
    assert found.critic is not None
    plans = (found.policy.plan, found.critic.plan)
    assert [plan and plan.base for plan in plans] == [str(Path(path).resolve()) for path in (tiny_model_dir, other)]
    assert found.rates_of_adapters == ("actor_learning_rate", "critic_learning_rate")
    assert find("ppo", tiny_model_dir).rates_of_adapters == ()


def test_a_run_from_an_adapter_reports_that_its_reference_is_the_bare_base(tiny_model_dir, tmp_path):
    foreign_adapter(tiny_model_dir, tmp_path / "adapter", r=2, target_modules=["q_proj"])
    (line,) = reference_notice(find("grpo", str(tmp_path / "adapter")).policy)
    assert line.startswith(f"the reference is {Path(tiny_model_dir).resolve()} without the initial adapter")
    assert f"rlhf merge --model {tmp_path / 'adapter'} " in line
    assert reference_notice(find("grpo", tiny_model_dir, lora_rank=2).policy) == []


def test_a_critic_that_does_not_fit_is_refused(tiny_model_dir, tmp_path):
    with pytest.raises(UsageError, match="has 3 labels, but a reward model has one"):
        find("ppo", tiny_model_dir, critic_pretrain=str(save_reward_model(tmp_path / "labels", num_labels=3)))
    with pytest.raises(UsageError, match=r"^--critic_pretrain: pretrain '.*nowhere': there is no such folder"):
        find("ppo", tiny_model_dir, critic_pretrain=str(tmp_path / "nowhere"))
    policy = shutil.copytree(tiny_model_dir, tmp_path / "policy")
    larger = make_tiny_tokenizer()
    larger.add_tokens(["<|extra|>"])
    larger.save_pretrained(policy)
    with pytest.raises(UsageError, match=r"^--critic_pretrain '.*' has a different vocabulary than the policy"):
        find("ppo", str(policy), critic_pretrain=str(save_reward_model(tmp_path / "critic")))


def test_a_teacher_is_a_role_of_its_own(tiny_model_dir, tmp_path):
    teacher = shutil.copytree(tiny_model_dir, tmp_path / "teacher")
    config = resolve("grpo", pretrain=tiny_model_dir, teacher_pretrain=str(teacher))
    found = find_models(config, ESTIMATORS["grpo"])
    assert found.teacher is not None
    assert found.teacher.source.pretrain == str(teacher)
    assert tuple(found.by_role) == ("actor", "teacher")
    with pytest.raises(UsageError, match=r"--overwrite would remove '.*teacher', from which this run starts"):
        find("grpo", tiny_model_dir, teacher_pretrain=str(teacher), output=str(teacher), overwrite="true")


def test_a_teacher_of_distributions_lives_in_the_ranks_of_its_student(tiny_model_dir, tmp_path):
    teacher = shutil.copytree(tiny_model_dir, tmp_path / "teacher")
    stage = {"teacher_zero_stage": "3", "param_offload": "true"}
    config = resolve("gkd", pretrain=tiny_model_dir, teacher_pretrain=str(teacher), compile_model="true", **stage)
    found = find_models(config, ESTIMATORS["gkd"])
    assert found.teacher is not None
    assert tuple(found.by_role) == ("actor",)
    assert idle_settings(config, ("actor",)) == []
    hosted = hosted_teachers(config, found)
    assert [(one.pretrain, one.compile_model) for one in hosted.models] == [(str(teacher), False)]
    assert (hosted.deepspeed.zero_stage, hosted.deepspeed.param_offload) == (3, True)
    with pytest.raises(UsageError, match=r"--overwrite would remove '.*teacher', from which this run starts"):
        find("gkd", tiny_model_dir, teacher_pretrain=str(teacher), output=str(teacher), overwrite="true")


def test_ranks_that_share_sequences_share_the_hosted_teachers_too(tiny_model_dir):
    shared = {"sequence_parallel_size": "2", "actor_num_gpus_per_node": "2", "sequence_parallel_mode": "ulysses"}
    config = resolve("gkd", pretrain=tiny_model_dir, teacher_pretrain=tiny_model_dir, **shared)
    check_shared_sequences(config, find_models(config, ESTIMATORS["gkd"]))
    config = resolve("gkd", pretrain=tiny_model_dir, teacher_pretrain=tiny_model_dir, zero_stage="3", zpg="2")
    with pytest.raises(UsageError, match="--zpg 2 does not divide 1 rank of the actor"):
        check_stages(config, ("actor",))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ("p", "train", None, "auto", None)),
        (
            {"prompt_split": "test", "data_format": "prompt", "max_samples": "9"},
            ("p", "test", None, "prompt_response", 9),
        ),
        (
            {"dataset": "a,b", "dataset_probs": "0.5,0.5", "data_format": "prompt"},
            ("a,b", "train", "0.5,0.5", "auto", None),
        ),
    ],
)
def test_fixed_responses_come_from_rows_of_their_own_or_from_the_rows_of_prompts(given, expected):
    rendering = {"max_len": "99", "input_key": "q", "output_key": "a"}
    config = rows_config(resolve("gkd", teacher_pretrain="t", prompt_data="p", **rendering, **given))
    names = ("dataset", "dataset_split", "dataset_probs", "data_format", "max_samples")
    assert tuple(getattr(config, name) for name in names) == expected
    assert (config.max_len, config.input_key, config.output_key) == (99, "q", "a")


def test_a_role_has_its_own_stage_or_that_of_all():
    config = resolve("ppo", zero_stage=2, critic_zero_stage=3, ref_zero_stage=0, zpg=2)
    assert [config.deepspeed_of(role).zero_stage for role in ("actor", "critic", "ref", "reward")] == [2, 3, 0, 2]
    with pytest.raises(UsageError, match="zpg needs --zero_stage 3"):
        resolve("ppo", zero_stage=2, ref_zero_stage=0, zpg=2)


@pytest.mark.parametrize(
    ("roles", "given", "said"),
    [
        (
            ("actor",),
            {"ref_num_gpus_per_node": 2},
            "--ref_num_gpus_per_node is ignored: a reference",
        ),
        (("actor",), {"ref_zero_stage": 3}, "--ref_zero_stage is ignored: a reference requires"),
        (("actor", "critic"), {"colocate_actor_ref": "true"}, "--colocate_actor_ref is ignored: a reference"),
        (("actor", "ref"), {"reward_num_nodes": 2}, "--reward_num_nodes is ignored: a reward model requires"),
        (
            ("actor", "ref"),
            {"normalize_reward": "true"},
            "--normalize_reward is ignored: a reward model",
        ),
        (
            ("actor", "ref", "reward"),
            {"teacher_zero_stage": 3},
            "--teacher_zero_stage is ignored: a teacher",
        ),
        (("actor", "ref"), {"colocate_critic_reward": "true"}, "--colocate_critic_reward is ignored: a reward model"),
    ],
)
def test_it_is_said_where_a_role_is_not_there_that_something_is_said_of(roles, given, said):
    config = resolve("ppo", **given)
    (sentence,) = idle_settings(config, roles)
    assert sentence.startswith(said)
    assert idle_settings(config, ("actor", "ref", "reward", "teacher")) == []


@pytest.mark.parametrize(("name", "value"), [("top_p", 0.9), ("top_k", 20), ("min_p", 0.05)])
def test_a_line_reports_that_training_does_not_know_truncated_sampling(name, value):
    assert truncation_notice(resolve("grpo", n_samples_per_prompt=2).rollout) == []
    (line,) = truncation_notice(resolve("grpo", n_samples_per_prompt=2, **{name: value}).rollout)
    assert line.startswith(f"--{name} {value} truncates only sampling: ratios, KL and gradients use the full")


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        ({"zero_stage": 3}, "--zero_stage"),
        ({"critic_zero_stage": 3}, "--critic_zero_stage"),
        ({"ref_zero_stage": 3}, "--ref_zero_stage"),
        ({"zero_stage": 2, "reward_zero_stage": 3}, "--reward_zero_stage"),
    ],
)
def test_models_are_compiled_where_no_role_that_is_there_is_partitioned(given, flag):
    config = resolve("ppo", compile_model="true", **given)
    with pytest.raises(UsageError, match=f"^compile_model does not go with {flag} 3"):
        check_stages(config, ("actor", "critic", "ref", "reward"))
    if "zero_stage" not in given or given["zero_stage"] == 2:
        check_stages(config, ("actor",))


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"actor_num_gpus_per_node": 3}, "2 does not divide the 3 ranks of the model"),
        ({"actor_num_gpus_per_node": 2}, "2 does not divide the 1 ranks of the model"),  # of the critic
        ({"actor_num_gpus_per_node": 2, "critic_num_gpus_per_node": 2, "enable_ema": "true"}, "enable_ema averages"),
    ],
    ids=str,
)
def test_every_trained_role_can_split_its_layers(tiny_model_dir, given, fault):
    models = find("ppo", tiny_model_dir)
    with pytest.raises(UsageError, match=fault):
        check_split_layers(resolve("ppo", tensor_parallel_size=2, **given), models)


def test_a_teacher_in_the_ranks_of_a_student_that_is_split_is_whole(tiny_model_dir):
    split = {"tensor_parallel_size": "2", "actor_num_gpus_per_node": "2", "zero_stage": "3"}

    def check(teacher_zero_stage: str) -> None:
        models = {"pretrain": tiny_model_dir, "teacher_pretrain": tiny_model_dir}
        config = resolve("gkd", **models, **split, teacher_zero_stage=teacher_zero_stage)
        check_split_layers(config, find_models(config, ESTIMATORS["gkd"]))

    check("2")
    with pytest.raises(UsageError, match="when layers are split; set --teacher_zero_stage 2"):
        check("3")


def test_frozen_roles_split_nothing():
    config = resolve("ppo", tensor_parallel_size=2)
    sizes = {role.name: 2 if role.is_trained else 1 for role in ROLES.values()}
    assert {role: config.deepspeed_of(role).tensor_parallel_size for role in ROLES} == sizes
    assert together(config, ("actor", "critic", "ref")) == ["2 ranks split the layers of actor + critic (experimental)"]


def test_each_trained_role_goes_on_from_its_own_ranks_and_stage(tiny_model_dir, tmp_path):
    uncut = {"actor": [], "critic": ["row_var"]}
    for role, num_ranks in (("actor", 2), ("critic", 1)):
        (tmp_path / role).mkdir()
        write_layout(StateLayout(2, num_ranks, "AdamW", uncut[role], []), tmp_path / role, rank=0)
    resume, models = Checkpoint(tmp_path, 1, {}), find("ppo", tiny_model_dir)

    def notices(**given: Any) -> list[str]:
        return [line.split(" from ")[0] for line in layout_notices(resume, resolve("ppo", **given), models)]

    assert notices(zero_stage=2, actor_num_gpus_per_node=2) == []
    actor = "The actor resumes with 4 ranks at ZeRO stage 3"
    assert notices(zero_stage=3, critic_zero_stage=2, actor_num_nodes=2, actor_num_gpus_per_node=2) == [actor]
    with pytest.raises(UsageError, match="critic cannot be resumed with 2 ranks at ZeRO stage 2: the optimizer AdamW"):
        notices(zero_stage=2, critic_num_gpus_per_node=2)
