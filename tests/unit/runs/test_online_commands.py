"""The online commands: their settings, presets, and errors before a run starts."""

from typing import Any

import pytest
import yaml
from online_settings import LEAST, online_settings, resolve
from settings_files import from_yaml

from rlhf_cli import cli
from rlhf_cli.algorithms.estimators.table import ESTIMATORS
from rlhf_cli.backends.training.checkpoint import Checkpoint
from rlhf_cli.command_table import ONLINE_TRAINING, POLICY_GRADIENT
from rlhf_cli.commands.online import OnlineConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.flags import flags_of
from rlhf_cli.options import build_config, to_yaml
from rlhf_cli.runs.online.checks import (
    check_batches,
    check_episodes,
    check_partial_rollout,
    check_selection,
    check_staleness,
    check_step_rewards,
    correction_notices,
    most_episodes,
)
from rlhf_cli.runs.online.evaluation import evaluation_task
from rlhf_cli.runs.online.group_files import check_state
from rlhf_cli.trainers.online.state import LoopState

AHEAD = {"async_train": "true"}
NEEDED = {"gkd": {"teacher_pretrain": "x"}}
"""Additional required settings by command."""
CRITIC = {
    "critic_learning_rate",
    "critic_pretrain",
    "critic_zero_stage",
    "critic_num_nodes",
    "critic_num_gpus_per_node",
    "colocate_critic_reward",
    "value_clip",
    "bootstrap_truncated",
    "critic_update_steps",
    "freezing_actor_steps",
}


def settings(config: OnlineConfig, *names: str) -> tuple[Any, ...]:
    values = yaml.safe_load(to_yaml(config))
    return tuple(values[name] for name in names)


@pytest.mark.parametrize("command", ONLINE_TRAINING)
def test_only_a_command_with_a_critic_has_settings_of_one(command):
    flags = flags_of(cli.COMMANDS[command].config_class).keys()
    assert flags & CRITIC == (CRITIC if command == "ppo" else set())
    assert ("value_clip" in flags) == (command == "ppo")
    assert ("gamma" in flags, "lambd" in flags) == (command in ("ppo", "reinforce++"), command == "ppo")
    assert ("preset" in flags, "advantage_std" in flags) == (command in ("ppo", "grpo"), command == "grpo")


@pytest.mark.parametrize("command", ONLINE_TRAINING)
def test_the_defaults_of_a_command_fit_together(command):
    config = resolve(command, **NEEDED.get(command, {}))
    check_batches(config, ESTIMATORS[config.estimator])


@pytest.mark.parametrize("command", ONLINE_TRAINING)
def test_a_command_names_its_estimator_in_the_table_of_commands(command):
    estimator = ESTIMATORS[resolve(command, **NEEDED.get(command, {})).estimator]
    named = estimator.advantages is not None
    assert (command in POLICY_GRADIENT) == named, "set `estimator` in command_table.py if the command has advantages"


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        (None, ("clip", None, "token_mean", 0.01, "group", None)),
        ("dr_grpo", ("clip", None, "seq_sum_norm", 0.0, "none", None)),
        ("dapo", ("clip", [0.2, 0.28], "token_mean", 0.0, "group", 204)),
        ("gspo", ("gspo", [0.0003, 0.0004], "seq_mean", 0.0, "group", None)),
        ("cispo", ("cispo", None, "token_mean", 0.0, "group", None)),
        ("sapo", ("sapo", None, "seq_mean", 0.0, "group", None)),
        ("dppo", ("dppo_tv", None, "token_mean", 0.0, "group", None)),
        ("gmpo", ("gmpo", None, "seq_mean", 0.0, "group", None)),
        ("luspo", ("gspo", [0.0003, 0.0004], "token_mean", 0.0, "group", None)),
        ("vespo", ("vespo", None, "token_mean", 0.0, "group", None)),
        ("online_dpo", ("clip", None, "seq_sum_norm", 0.1, "group", None)),
    ],
)
def test_presets_show_in_the_resolved_settings(preset, expected, tmp_path):
    given = {} if preset is None else {"preset": preset}
    names = ("policy_loss", "eps_clip_low_high", "loss_agg", "init_kl_coef", "advantage_std", "overlong_buffer_len")
    config = resolve("grpo", **given)
    assert settings(config, *names) == expected
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert from_yaml(type(config), file) == config


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"preset": "dapo", "init_kl_coef": "0.1"}, {"init_kl_coef": 0.1, "eps_clip_low_high": [0.2, 0.28]}),
        ({"preset": "dapo", "use_kl_loss": "true"}, {"init_kl_coef": 0.01, "use_kl_loss": True}),
        ({"preset": "dapo", "use_kl_loss": "no"}, {"init_kl_coef": 0.0, "use_kl_loss": False}),
        ({"preset": "dapo", "eps_clip": "0.1"}, {"eps_clip": 0.1, "eps_clip_low_high": None}),
        ({"preset": "dapo", "max_new_tokens": "20480"}, {"overlong_buffer_len": 4096}),
        ({"preset": "dapo", "stop_properly_penalty_coef": "0.5"}, {"overlong_buffer_len": None}),
        ({"preset": "dapo", "policy_loss": "sapo"}, {"policy_loss": "sapo", "eps_clip_low_high": None}),
        ({"preset": "dapo", "policy_loss": "gspo"}, {"eps_clip_low_high": [0.0003, 0.0004], "loss_agg": "seq_mean"}),
        ({"policy_loss": "gspo", "loss_agg": "token_mean"}, {"loss_agg": "token_mean"}),
        ({"policy_loss": "gspo", "eps_clip": "0.1"}, {"eps_clip_low_high": None}),
        ({}, {"use_kl_loss": True, "kl_estimator": "k3", "n_samples_per_prompt": 8}),
    ],
    ids=str,
)
def test_what_is_given_wins_over_what_it_is_given_with(given, expected):
    assert settings(resolve("grpo", **given), *expected) == tuple(expected.values())


def test_the_preset_of_ppo_sets_what_is_not_given():
    names = ("lambd", "lambd_alpha", "critic_lambd", "eps_clip_low_high", "correct_nll_coef", "init_kl_coef")
    assert settings(resolve("ppo", preset="vapo"), *names) == (1.0, 0.05, 1.0, [0.2, 0.28], 0.1, 0.0)
    given = {"lambd": "0.9", "eps_clip": "0.1", "correct_nll_coef": "0", "init_kl_coef": "0.1"}
    assert settings(resolve("ppo", preset="vapo", **given), *names) == (0.9, None, 1.0, None, 0.0, 0.1)


def test_a_group_baseline_takes_the_divergence_into_the_loss():
    names = ("use_kl_loss", "kl_estimator")
    assert settings(resolve("reinforce++"), *names) == (False, "k1")
    assert settings(resolve("reinforce++", baseline="group"), *names) == (True, "k2")
    assert settings(resolve("reinforce++", baseline="group", kl_estimator="k3"), *names) == (True, "k3")
    assert settings(resolve("reinforce++", baseline="group", use_kl_loss=False), *names) == (False, "k1")


@pytest.mark.parametrize(
    ("command", "given", "message"),
    [
        (
            "grpo",
            {"preset": "dpo"},
            "must be dr_grpo, dapo, gspo, cispo, sapo, dppo, gmpo, vespo, luspo or online_dpo",
        ),
        ("grpo", {"kl_estimator": "k1"}, "k1 in the loss has a gradient with zero expectation"),
        ("ppo", {"use_kl_loss": True}, "k1 in the loss has a gradient with zero expectation"),
        ("grpo", {"critic_learning_rate": "1"}, "unknown setting --critic_learning_rate"),
        ("grpo", {"advantage": "passk", "advantage_std": "none"}, "does not support advantage_std none"),
        ("grpo", {"advantage": "maxrl", "advantage_std": "batch"}, "does not support advantage_std batch"),
        ("grpo", {"advantage": "gigpo"}, "set --environment or --agent_command"),
        ("grpo", {"advantage": "gigpo", "advantage_std": "batch"}, "does not support advantage_std batch"),
        ("grpo", {"advantage": "dpo"}, "reads beta and the log-ratios from the KL penalty in the reward: set preset"),
        ("grpo", {"preset": "online_dpo", "init_kl_coef": "0"}, "init_kl_coef above 0"),
        ("grpo", {"preset": "online_dpo", "kl_target": "6"}, "leave out kl_target"),
        ("grpo", {"policy_loss": "dppo_tv", "dppo_delta_low_high": [0.2, 0]}, "both must be above 0"),
        (
            "grpo",
            {"policy_loss": "dppo_tv", "dppo_delta_low_high": [0.2, 1]},
            "must be below 1, the largest difference",
        ),
        ("grpo", {"dppo_delta_low_high": [0.2, 0.2]}, "needs --policy_loss dppo_tv or dppo_kl"),
        ("grpo", {"policy_loss": "vespo", "vespo_k": ["0", "1"]}, "vespo_k and vespo_lambda: all must be above 0"),
        ("ppo", {"lambd_alpha": "0.05", "lambd": "0.9"}, "set only one"),
        ("ppo", {"preset": "dapo"}, "--preset dapo: must be vapo"),
        ("ppo", {"preset": "vapo", "reward_funcs": "format"}, "set one in --reward_funcs, or --correct_nll_coef 0"),
        ("grpo", {"observation_nll_coef": "0.05"}, "observation_nll_coef needs --environment"),
        (
            "grpo",
            {"observation_nll_coef": "1", "environment": "e.py", "policy_loss": "kl_cov"},
            "observation_nll_coef does not support policy_loss clip_cov and kl_cov",
        ),
        ("grpo", {"kl_cov_ratio": "0.1"}, "needs --policy_loss kl_cov"),
        ("grpo", {"policy_loss": "clip_cov", "clip_cov_range": ["5", "1"]}, "requires 0 <= first < second"),
        ("reinforce++", {"unbiased_kl": True}, "unbiased_kl needs --use_kl_loss"),
        ("grpo", {"aggregate": "normalize_then_sum", "advantage": "passk"}, "does not support advantage passk"),
        ("grpo", {"aggregate": "normalize_then_sum", "use_kl_loss": "false"}, "set use_kl_loss"),
        ("rloo", {"aggregate": "normalize_then_sum"}, "unknown setting --aggregate"),
        ("reinforce++", {"baseline": "group", "gamma": "0.9"}, "baseline group uses one reward per response"),
        ("rloo", {"policy_loss": "sapo", "eps_clip": "0.1"}, "eps_clip needs --policy_loss clip or gspo"),
        ("ppo", {"stop": "User:, "}, "--stop User:, : an empty string is in every response"),
        ("ppo", {"stop": [""]}, "an empty string is in every response"),
        (
            "ppo",
            {"max_restarts": "2"},
            "from the last checkpoint, but none is saved: set save_steps",
        ),
        ("grpo", {"preset": "dapo", "kl_target": "6"}, "kl_target adapts init_kl_coef, but"),
        ("ppo", {"adam_betas": ["1.0", "0.9"]}, "adam_betas 1 0.9: both from 0 to below 1"),
        ("ppo", {"seed": str(2**64)}, "--seed 18446744073709551616: must be an integer"),
        ("grpo", {"max_new_tokens": "many", "preset": "dapo"}, "--max_new_tokens many: must be an integer > 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(command, given, message):
    with pytest.raises(UsageError, match=message):
        resolve(command, **given)


@pytest.mark.parametrize(
    ("command", "row", "given", "message"),
    [
        ("grpo", "grpo", {"n_samples_per_prompt": "1"}, "--n_samples_per_prompt 1: grpo compares .* at least 2"),
        ("rloo", "rloo", {"n_samples_per_prompt": "1"}, "requires at least 2"),
        ("reinforce++", "reinforce++_group", {"baseline": "group"}, "requires at least 2"),
        ("grpo", "grpo", {"train_batch_size": "96"}, "does not divide the 1024 responses .* 64 and 128 do"),
        ("grpo", "gdpo", {"stop_properly_penalty_coef": "0.5"}, "changes the summed reward, but gdpo normalizes"),
        ("ppo", "ppo", {"bootstrap_truncated": "true", "max_len": "16192"}, "reads one more token than --max_len"),
        ("ppo", "ppo", {"reward_funcs": "math,length"}, "length compares responses to the same prompt"),
        (
            "ppo",
            "ppo",
            {"reward_funcs": "math,soft_overlong(max_len=9,buffer=3)", "overlong_buffer_len": "3"},
            "penalize length",
        ),
        ("ppo", "ppo", {"overlong_buffer_len": "1025"}, "exceeds the response limit --max_new_tokens 1024"),
    ],
)
def test_sizes_that_do_not_fit_together_are_refused(command, row, given, message):
    with pytest.raises(UsageError, match=message):
        check_batches(resolve(command, **given), ESTIMATORS[row])


@pytest.mark.parametrize("temperature", ["0", "0.7"])
def test_stop_strings_hold_for_training_and_for_its_evaluations(temperature):
    texts = ["</answer>", "\n\nQuestion, "]
    config = resolve("ppo", stop=texts, eval_dataset="x", eval_temperature=temperature)
    assert online_settings(config, "ppo").sampling.stop == tuple(texts)
    task = evaluation_task(config, None, str, total_iterations=1)
    assert (task.sampling.stop, task.sampling.greedy) == (tuple(texts), temperature == "0")


@pytest.mark.parametrize("command", ["reinforce++", "remax"])
def test_groups_of_one_are_fine_where_nothing_is_compared(command):
    check_batches(resolve(command, n_samples_per_prompt="1"), ESTIMATORS[command])


@pytest.mark.parametrize(
    ("command", "given", "message"),
    [
        ("reinforce++", {"n_samples_per_prompt": "1"}, "to the same prompt: raise --n_samples_per_prompt"),
        ("remax", {}, "to the same prompt, but remax also needs the reward of a single greedy response"),
        ("grpo", {"eval_dataset": "x"}, "to the same prompt: raise --eval_n_samples_per_prompt"),
    ],
)
def test_judges_that_compare_responses_need_more_than_one(command, given, message):
    judge = {"judge": "http://a/v1", "judge_method": "pairwise", "n_samples_per_prompt": "2"}
    check_batches(resolve("grpo", **judge), ESTIMATORS["grpo"])
    with pytest.raises(UsageError, match=message):
        check_batches(resolve(command, **(judge | given)), ESTIMATORS[command])


@pytest.mark.parametrize(
    ("command", "given", "message"),
    [
        ("eval", {"pretrain": "x", "prompt_data": "x", "output": "x"}, "set n_samples_per_prompt above 1"),
        (
            "data",
            {"dataset": "x", "pretrain": "x", "for": "grpo", "rewards": "true"},
            "but the test scores them singly",
        ),
    ],
)
def test_commands_that_score_single_responses_refuse_judges_that_compare(command, given, message):
    with pytest.raises(UsageError, match=message):
        build_config(cli.COMMANDS[command].config_class, given | {"judge": "http://a/v1", "judge_method": "listwise"})


def test_dynamic_sampling_needs_a_reward_that_is_there_while_others_are_generated():
    given = {name: value for name, value in LEAST.items() if name != "reward_funcs"}
    given |= {"dynamic_filtering": "true", "n_samples_per_prompt": "2"}
    cls = cli.COMMANDS["grpo"].config_class
    served: Any = build_config(cls, given | {"remote_rm_url": "http://a/get_reward"})
    check_selection(served)
    judged_after: Any = build_config(cls, given | {"reward_pretrain": "rm"})
    with pytest.raises(UsageError, match=r"which reward models do not support: set .* or --judge in addition"):
        check_selection(judged_after)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"n_samples_per_prompt": "1"}, "--prompt_sampling variance compares responses to the same prompt"),
        ({"dynamic_filtering": "true"}, "and --dynamic_filtering both select prompts"),
        ({"async_train": "true"}, "but --async_train samples ahead of it: remove one, or set --max_staleness 0"),
    ],
)
def test_a_curriculum_needs_the_rewards_of_the_iteration_before(given, message):
    least = {"prompt_sampling": "variance", "n_samples_per_prompt": "2"}
    check_selection(resolve("reinforce++", **least | {"prompt_sampling": "source_variance"}))
    check_selection(resolve("reinforce++", **least))
    with pytest.raises(UsageError, match=message):
        check_selection(resolve("reinforce++", **least | given))


@pytest.mark.parametrize(
    ("command", "row", "given"),
    [
        ("ppo", "ppo", {}),
        ("reinforce++", "reinforce++", {}),
        ("reinforce++", "reinforce++_group", {"baseline": "group"}),
        ("grpo", "grpo", {}),
        ("rloo", "rloo", {}),
    ],
)
def test_rewards_of_steps_go_with_algorithms_that_have_a_place_for_them(command, row, given):
    config = resolve(command, prm_pretrain="prm", prm_weight="0.5", **given)
    check_step_rewards(config, ESTIMATORS[row])
    assert config.reward.prm_weight == 0.5
    assert resolve(command, **given).reward.prm_pretrain is None


@pytest.mark.parametrize(
    ("row", "given", "complaint"),
    [
        ("grpo_passk", {"advantage": "passk"}, "grpo_passk uses one reward per response; step rewards: ppo, "),
        ("gdpo", {"aggregate": "normalize_then_sum"}, "gdpo uses one reward per response"),
        ("grpo", {"advantage_std": "none"}, "divides step rewards by their std, but advantage_std is none"),
    ],
)
def test_comparisons_without_a_place_for_steps_are_refused(row, given, complaint):
    with pytest.raises(UsageError, match=complaint):
        check_step_rewards(resolve("grpo", prm_pretrain="prm", **given), ESTIMATORS[row])


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"prm_pretrain": "m", "teacher_pretrain": "t", "reward_weights": "0"}, "adds step rewards to other rewards"),
    ],
)
def test_settings_of_steps_that_contradict_others_are_refused(given, complaint):
    with pytest.raises(UsageError, match=complaint):
        resolve("grpo", **given)


def resolve_alone(command: str, **given: Any) -> Any:
    """Resolve the settings of a command with a teacher and only the given rewards."""
    least = {name: value for name, value in LEAST.items() if name != "reward_funcs"}
    cls = cli.COMMANDS[command].config_class
    return build_config(cls, least | {"teacher_pretrain": "x"} | given)


@pytest.mark.parametrize("command", ["grpo", "reinforce++", "rloo"])
def test_a_teacher_is_enough_to_learn_from_and_takes_the_references_place(command):
    config = resolve_alone(command, distill_coef="0.5")
    assert (config.teacher.weight, config.policy.init_kl_coef) == (0.5, 0.0)
    assert resolve_alone(command, init_kl_coef="0.1", use_kl_loss="true", kl_estimator="k3").policy.init_kl_coef == 0.1
    beside = resolve(command, teacher_pretrain="x")
    assert (beside.policy.init_kl_coef, resolve(command).policy.init_kl_coef) == (0.0, 0.01)
    assert (beside.distils_alone, config.distils_alone, resolve(command).teacher.weight) == (False, True, None)


def test_a_reward_of_weight_zero_is_measured_alone():
    assert resolve("reinforce++", teacher_pretrain="x", reward_weights="0", eval_dataset="x").distils_alone
    assert not resolve("grpo", teacher_pretrain="x", reward_funcs="exact,math", reward_weights="0,0.5").distils_alone
    assert not resolve_alone("grpo", reward_pretrain="rm").distils_alone
    assert resolve_alone("grpo", reward_pretrain="rm", reward_model_weight="0").distils_alone


@pytest.mark.parametrize(
    ("command", "given", "message"),
    [
        ("ppo", {}, "the critic predicts rewards, but only the teacher is used: rlhf reinforce"),
        ("remax", {}, "the baseline is the reward of the greedy response, but only the teacher"),
        ("grpo", {"aggregate": "normalize_then_sum"}, "normalize_then_sum normalizes rewards, but only the teacher"),
        ("grpo", {"dynamic_filtering": "true"}, "dynamic_filtering selects prompts by reward, but only the teacher"),
        ("reinforce++", {"init_kl_coef": "0.1"}, "init_kl_coef is a penalty on the reward, but only the teacher"),
        (
            "grpo",
            {"preset": "dapo"},
            "overlong_buffer_len applies to scores: set a reward in addition to the teacher",
        ),
        ("rloo", {"eval_dataset": "x"}, "eval_dataset applies to scores: set a reward"),
        ("rloo", {"distill_coef": "0"}, "distill_coef 0: must be a number > 0"),
    ],
)
def test_settings_that_need_a_reward_are_refused_beside_a_teacher_alone(command, given, message):
    with pytest.raises(UsageError, match=message):
        resolve_alone(command, **given)


@pytest.mark.parametrize("command", POLICY_GRADIENT)
def test_a_run_without_reward_and_teacher_is_refused(command):
    with pytest.raises(UsageError, match=r"no reward: set --reward_funcs .* or --teacher_pretrain MODEL"):
        resolve_alone(command, teacher_pretrain=None)


@pytest.mark.parametrize("command", POLICY_GRADIENT)
def test_sampling_ahead_is_bounded_by_the_staleness_that_is_asked_for(command):
    found = (resolve(command, **given).asynchronous for given in ({}, AHEAD, AHEAD | {"max_staleness": 3}))
    assert [one.staleness for one in found] == [0, 1, 3]
    assert resolve(command, **AHEAD, max_staleness=0).asynchronous.staleness == 0
    with pytest.raises(UsageError, match="max_staleness"):
        resolve(command, **AHEAD, max_staleness=-1)


@pytest.mark.parametrize("command", POLICY_GRADIENT)
def test_pushes_in_the_middle_of_responses_need_sampling_ahead_and_vllm(command):
    partial = {"partial_rollout": "true"}
    config = resolve(command, **AHEAD, **partial)
    assert config.asynchronous.partial_rollout
    assert not resolve(command, **AHEAD).asynchronous.partial_rollout
    check_partial_rollout(config, backend="vllm")
    check_partial_rollout(resolve(command, **AHEAD), backend="transformers")
    with pytest.raises(UsageError, match=r"requires vLLM.*; transformers updates them between batches"):
        check_partial_rollout(config, backend="transformers")
    with pytest.raises(UsageError, match="requires --max_staleness of at least 1"):
        resolve(command, **AHEAD, **partial, max_staleness=0)


@pytest.mark.parametrize("flag", ["colocate_all_models", "vllm_enable_sleep"])
def test_engines_that_give_their_gpus_to_training_do_not_sample_ahead(flag):
    with pytest.raises(UsageError, match=f"engines require dedicated GPUs: drop --{flag}"):
        check_staleness(resolve("grpo", **AHEAD, **{flag: "true"}))
    check_staleness(resolve("grpo", **AHEAD, max_staleness=0, **{flag: "true"}))
    check_staleness(resolve("grpo", **AHEAD, colocate_actor_ref="true"))


def test_a_run_without_a_correction_of_older_policies_is_reported():
    assert not correction_notices(resolve("grpo", rollout_correction="off"))
    assert not correction_notices(resolve("grpo", **AHEAD))
    (line,) = correction_notices(resolve("grpo", **AHEAD, rollout_correction="off"))
    assert line.startswith("--rollout_correction off: with --async_train")


def test_a_run_without_a_correction_of_quantized_engines_is_reported():
    quantized = {"vllm_args": '{"quantization": "fp8", "kv_cache_dtype": "fp8", "max_num_seqs": 9}'}
    assert not correction_notices(resolve("grpo", **quantized))
    (line,) = correction_notices(resolve("grpo", **quantized, rollout_correction="off"))
    assert line.startswith("--rollout_correction off: with quantization and kv_cache_dtype, the engines sample")


def test_a_checkpoint_of_an_earlier_version_is_refused_by_its_form(tmp_path):
    check_state(Checkpoint(tmp_path, 2, {"loop": LoopState(2, 0.0, 0.0).plain()}))
    with pytest.raises(UsageError, match="was written by an earlier version of rlhf"):
        check_state(Checkpoint(tmp_path, 2, {"loop": {"iteration": 2, "lengths": {}}}))


def test_a_batch_of_episodes_counts_samples_and_the_extra_prompts_of_dynamic_sampling():
    batch = {"rollout_batch_size": 6, "n_samples_per_prompt": 4, "train_batch_size": 24}
    assert most_episodes(resolve("grpo", **batch), num_prompts=100) == 24
    assert most_episodes(resolve("grpo", **batch), num_prompts=5) == 20
    assert most_episodes(resolve("grpo", **batch, dynamic_filtering=True), num_prompts=100) == 36


@pytest.mark.parametrize(
    ("command", "given", "complaint"),
    [
        ("ppo", {"prm_pretrain": "x"}, "--prm_pretrain does not support episodes"),
        ("grpo", {"overlong_buffer_len": 8}, "--overlong_buffer_len applies to a single response"),
        (
            "grpo",
            {"reward_funcs": "environment,soft_overlong(max_len=60,buffer=8)"},
            "--reward_funcs soft_overlong applies",
        ),
    ],
)
def test_settings_about_one_response_are_refused_beside_an_environment(command, given, complaint):
    config = resolve(command, **{"environment": "calculator.py", "reward_funcs": "environment", **given})
    with pytest.raises(UsageError, match=complaint):
        check_episodes(config)
    check_episodes(resolve(command, **{"reward_funcs": "exact", **given, **LEAST}))
