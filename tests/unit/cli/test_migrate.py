"""`rlhf migrate` translates programs of other frameworks to commands that train the same way."""

import shlex
import subprocess
import sys
from typing import Any

import pytest

from rlhf_cli import cli
from rlhf_cli.command_table import COMMANDS
from rlhf_cli.commands.plan import planned_class
from rlhf_cli.errors import UsageError
from rlhf_cli.flags import flags_of
from rlhf_cli.foreign.migration import Migration, as_yaml, migrated
from rlhf_cli.foreign.programs import programs_in
from rlhf_cli.options import typer_command

VERL = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=d actor_rollout_ref.model.path=m"
EASY = "python3 -m verl.trainer.main data.train_files=d worker.actor.model.model_path=m"
TRL = "trl grpo --model_name_or_path m --dataset_name d --output_dir o"


def migration(line: str, num_gpus: int | None = None) -> Migration:
    (program,) = programs_in(shlex.split(line), num_gpus=num_gpus)
    return migrated(program)


def settings(line: str) -> dict[str, str]:
    return {name: " ".join(values) for name, values in migration(line).settings.items()}


def accepted(command_line: str) -> dict[str, object]:
    """Parse a translated command with the command's own parser; return its settings by name."""
    program, name, *words = shlex.split(command_line.replace("\\\n", " "))
    assert program == "rlhf"
    seen: list[Any] = []
    typer_command(name, planned_class(name), seen.append).main(words, standalone_mode=False)
    flags = flags_of(COMMANDS[name].config_class).values()
    return {flag.name: getattr(getattr(seen[0], flag.group), flag.attribute) for flag in flags}


# Numbers worked by hand, from the units that each framework documents.
BATCHES = [
    # verl counts prompts: 64 prompts x 5 responses = 320 responses per step; 256 / 64 = 4 steps per iteration.
    (
        f"{VERL} data.train_batch_size=256 actor_rollout_ref.actor.ppo_mini_batch_size=64 "
        "actor_rollout_ref.rollout.n=5",
        {"rollout_batch_size": 256, "n_samples_per_prompt": 5, "train_batch_size": 320},
    ),
    # Its defaults: 1,024 prompts, mini-batches of 256 prompts.
    (
        f"{VERL} actor_rollout_ref.rollout.n=2",
        {"rollout_batch_size": 1024, "n_samples_per_prompt": 2, "train_batch_size": 512},
    ),
    # Its schedule advances once per iteration: 10 iterations x 4 steps x 2 epochs = 80 optimizer steps of warm-up.
    (
        f"{VERL} data.train_batch_size=256 actor_rollout_ref.actor.ppo_mini_batch_size=64 "
        "actor_rollout_ref.actor.ppo_epochs=2 actor_rollout_ref.rollout.n=5 "
        "actor_rollout_ref.actor.optim.lr_warmup_steps=10",
        {"max_epochs": 2, "warmup_steps": 80},
    ),
    # EasyR1 counts prompts too: 128 x 5 = 640.
    (
        f"{EASY} data.rollout_batch_size=512 worker.actor.global_batch_size=128 worker.rollout.n=5",
        {"rollout_batch_size": 512, "n_samples_per_prompt": 5, "train_batch_size": 640},
    ),
    # TRL counts responses per process: 4 x 8 processes x 6 = 192 per step, 192 / 16 = 12 prompts per generation.
    (
        f"accelerate launch --num_processes 8 --module {TRL} --per_device_train_batch_size 4 "
        "--gradient_accumulation_steps 6 --num_generations 16",
        {"train_batch_size": 192, "rollout_batch_size": 12, "n_samples_per_prompt": 16},
    ),
    # One generation for 12 batches is 2 optimizer steps, each used twice: 100 steps are 25 iterations.
    (
        f"accelerate launch --num_processes 8 {TRL} --per_device_train_batch_size 4 --gradient_accumulation_steps 6 "
        "--num_generations 16 --steps_per_generation 12 --num_iterations 2 --max_steps 100 --save_steps 40",
        {"train_batch_size": 192, "rollout_batch_size": 24, "max_iterations": 25, "max_epochs": 2, "save_steps": 10},
    ),
    # Its defaults: 8 responses on one process, 8 per prompt.
    (TRL, {"train_batch_size": 8, "rollout_batch_size": 1, "n_samples_per_prompt": 8}),
    # Offline: 2 rows x (4 x 2) processes x 16 = 256 rows per step.
    (
        "torchrun --nnodes 2 --nproc_per_node 4 trl sft --model_name_or_path m --dataset_name d --output_dir o "
        "--per_device_train_batch_size 2 --gradient_accumulation_steps 16",
        {"train_batch_size": 256},
    ),
    # OpenRLHF counts like this program.
    (
        "python3 -m openrlhf.cli.train_ppo_ray --advantage_estimator group_norm --pretrain m --prompt_data d "
        "--remote_rm_url r.py --save_path p --rollout_batch_size 128 --n_samples_per_prompt 8 --train_batch_size 256",
        {"rollout_batch_size": 128, "n_samples_per_prompt": 8, "train_batch_size": 256},
    ),
]


@pytest.mark.parametrize(("line", "expected"), BATCHES, ids=range(len(BATCHES)))
def test_batches_and_steps_are_those_of_the_other_framework(line, expected):
    found = accepted(migration(line).command_line())
    assert {name: found[name] for name in expected} == expected


DEFAULTS = [
    (
        VERL + " actor_rollout_ref.rollout.n=2",
        {"lr_scheduler": "constant", "lr_warmup_ratio": 0.0, "l2": 0.01, "adam_betas": (0.9, 0.999), "dual_clip": 3.0}
        | {"init_kl_coef": 0.0, "rollout_correction": "off", "actor_learning_rate": 1e-6, "temperature": 1.0},
    ),
    (
        TRL,
        {"lr_scheduler": "linear", "init_kl_coef": 0.0, "actor_learning_rate": 1e-6, "num_episodes": 3}
        | {"max_new_tokens": 512, "loss_agg": "token_mean", "adam_betas": (0.9, 0.999)},
    ),
    (
        "trl rloo --model_name_or_path m --dataset_name d --output_dir o",
        {"init_kl_coef": 0.05, "use_kl_loss": False, "n_samples_per_prompt": 2, "rollout_correction": "off"},
    ),
    (
        EASY + " worker.rollout.n=5",
        {"eps_clip_low_high": (0.2, 0.3), "dual_clip": 3.0, "init_kl_coef": 0.001, "use_kl_loss": False},
    ),
    (
        "python3 -m openrlhf.cli.train_ppo_ray --advantage_estimator group_norm --pretrain m --prompt_data d "
        "--remote_rm_url r.py --save_path p --n_samples_per_prompt 8",
        {"use_kl_loss": False, "kl_estimator": "k1", "apply_chat_template": False, "reward_clip_range": (-10.0, 10.0)}
        | {"rollout_batch_size": 1024, "max_len": 2048, "rollout_correction": "off"},
    ),
    (
        "deepspeed --module openrlhf.cli.train_dpo --pretrain m --dataset d --save_path p",
        {"learning_rate": 1e-5, "max_len": 512, "apply_chat_template": False},
    ),
]


@pytest.mark.parametrize(("line", "expected"), DEFAULTS, ids=range(len(DEFAULTS)))
def test_defaults_of_the_other_framework_hold(line, expected):
    found = accepted(migration(line).command_line())
    assert {name: found[name] for name in expected} == expected


def test_a_default_that_is_the_same_here_is_left_out():
    written = settings(f"{VERL} actor_rollout_ref.rollout.n=2 actor_rollout_ref.rollout.temperature=1.0")
    assert "actor_learning_rate" not in written
    assert written["temperature"] == "1.0"  # given, so it stays


def test_what_has_no_equivalent_is_named_with_its_reason():
    found = migration(f"{VERL} actor_rollout_ref.rollout.n=2 trainer.no_such=1 trainer.nnodes=2 +data.video_key=v")
    notes = "\n".join(found.notes())
    assert "verl, verl.trainer.main_ppo: rlhf grpo" in notes
    assert "not translated: trainer.no_such: no equivalent" in notes
    assert "not translated: data.video_key: videos are not supported" in notes
    assert "not needed: trainer.nnodes 2" in notes


def test_a_value_that_the_command_rejects_is_left_out_and_named():
    found = migration(f"{VERL} actor_rollout_ref.rollout.n=2 data.train_batch_size=$SIZE")
    assert "rollout_batch_size" not in found.settings
    assert any("rollout_batch_size $SIZE: must be an integer > 0" in reason for reason in found.refused)


SCRIPT = """
#!/bin/bash
set -x
export HYDRA_FULL_ERROR=1
n=4
size=$((n * 32))
files="['$HOME/a.parquet', '$HOME/b.parquet']"
ALGORITHM=(
    algorithm.adv_estimator=grpo  # group-relative
    algorithm.use_kl_in_reward=False
)
ray job submit --working-dir . -- \\
    python3 -m verl.trainer.main_ppo \\
    "${ALGORITHM[@]}" \\
    data.train_files="$files" \\
    data.train_batch_size=${size} \\
    # data.train_batch_size=7 \\
    data.max_response_length=${LENGTH:-2048} \\
    actor_rollout_ref.rollout.n=$n actor_rollout_ref.actor.ppo_mini_batch_size=16 \\
    actor_rollout_ref.model.path="$MODEL_PATH" $@ 2>&1 | tee run.log
"""


def test_a_script_is_read_with_its_variables_arrays_and_comments(tmp_path, capsys):
    file = tmp_path / "run.sh"
    file.write_text(SCRIPT)
    assert cli.main(["migrate", str(file)]) == 0
    out, err = capsys.readouterr()
    assert '--pretrain "$MODEL_PATH" \\\n' in out
    assert '--prompt_data "$HOME/a.parquet,$HOME/b.parquet"' in out
    assert "--max_len 2560" in out  # 512 by default, and 2,048
    assert "--train_batch_size 64" in out  # 16 x 4
    assert "128 prompts x 4 responses per iteration, 64 responses per optimizer step, 8 steps" in err
    assert accepted(out)["rollout_batch_size"] == 128


def test_a_command_in_a_here_document_is_read(tmp_path):
    file = tmp_path / "train.sh"
    file.write_text(
        "read -r -d '' commands <<EOF\nopenrlhf.cli.train_sft \\\n  --pretrain m \\\n  --dataset d \\\n"
        "  --save_path ./out \\\n  --learning_rate 2e-6\nEOF\n    # --use_wandb KEY\n"
        'if [[ ${1} != "slurm" ]]; then\n    deepspeed --num_gpus 4 --module $commands\nfi\n'
    )
    (program,) = programs_in([str(file)])
    found = accepted(migrated(program).command_line())
    assert (found["learning_rate"], found["num_processes"], found["input_template"]) == (
        2e-6,
        4,
        "User: {}\nAssistant: ",
    )


def test_a_config_of_trl_is_read_with_the_processes_of_accelerate(tmp_path):
    (tmp_path / "config.yaml").write_text(
        "model_name_or_path: m\ndataset_name: d\ndataset_config: main\nreward_funcs:\n- accuracy\n- format\n"
        "per_device_train_batch_size: 2\nnum_generations: 4\nbf16: true\nbeta: 0.04\nsave_strategy: 'no'\n"
    )
    (tmp_path / "zero3.yaml").write_text("num_machines: 1\nnum_processes: 6\n")
    script = tmp_path / "run.sh"
    script.write_text("accelerate launch --config_file zero3.yaml src/grpo.py --config config.yaml --seed 1\n")
    (program,) = programs_in([str(script)])
    found = accepted(migrated(program).command_line())
    expected: dict[str, object] = {
        "prompt_data": "d:main",
        "reward_funcs": ["math", "format"],
        "train_batch_size": 12,
        "seed": 1,
    }
    expected |= {"rollout_batch_size": 3, "init_kl_coef": 0.04, "use_kl_loss": True, "kl_estimator": "k3"}
    assert {name: found[name] for name in expected} == expected
    (program,) = programs_in([str(tmp_path / "config.yaml")], num_gpus=2)
    assert accepted(migrated(program).command_line())["train_batch_size"] == 4


def test_an_adapter_of_trl_is_trained_only_with_use_peft():
    line = "trl sft --model_name_or_path m --dataset_name d --output_dir o --lora_r 8"
    assert "lora_rank" not in settings(line)
    assert any("lora_r 8 has no effect" in note for note in migration(line).notes())
    found = accepted(migration(f"{line} --use_peft").command_line())
    assert (found["lora_rank"], found["lora_alpha"], found["lora_dropout"]) == (8, 32, 0.05)


def test_a_cosine_with_a_minimum_keeps_its_minimum():
    optim = "actor_rollout_ref.actor.optim"
    found = settings(f"{VERL} actor_rollout_ref.rollout.n=2 {optim}.warmup_style=cosine {optim}.min_lr_ratio=0.2")
    assert (found["lr_scheduler"], found["min_lr_ratio"]) == ("cosine_with_min_lr", "0.2")
    options = "--lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{\"min_lr_rate\": 0.3}'"
    found = settings(f"{TRL} {options}")
    assert (found["lr_scheduler"], found["min_lr_ratio"]) == ("cosine_with_min_lr", "0.3")


KL = [
    ("actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.002", ("0.002", "true", "k3")),
    ("actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_type=kl", ("0.001", "true", "k2")),
    ("algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.01", ("0.01", "false", "k1")),
    ("algorithm.kl_ctrl.kl_coef=0.01", ("0", None, None)),  # no effect in verl without use_kl_in_reward
]


@pytest.mark.parametrize(("words", "expected"), KL)
def test_the_kl_penalty_of_verl_is_in_the_loss_in_the_reward_or_off(words, expected):
    found = settings(f"{VERL} actor_rollout_ref.rollout.n=2 {words}")
    assert tuple(found.get(name) for name in ("init_kl_coef", "use_kl_loss", "kl_estimator")) == expected


def test_a_kl_coefficient_without_effect_is_named():
    notes = migration(f"{VERL} actor_rollout_ref.rollout.n=2 algorithm.kl_ctrl.kl_coef=0.01").notes()
    assert any("algorithm.kl_ctrl.kl_coef has no effect without algorithm.use_kl_in_reward" in note for note in notes)
    notes = migration(f"{VERL} actor_rollout_ref.rollout.n=2 algorithm.use_kl_in_reward=True").notes()
    assert not any("no effect" in note for note in notes)


ALSO = "algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=5"
OWN_REWARD = "reward.custom_reward_function"
SFT = "torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer model.path=m data.train_files=d"
OPENRLHF = "python3 -m openrlhf.cli.train_ppo_ray --pretrain m --prompt_data d --reward_pretrain r --save_path p"
TRANSLATED = [
    # A file of verl 0.8 has the reward in its own section.
    (
        f"{VERL} {OWN_REWARD}.path=r.py {OWN_REWARD}.name=f +{OWN_REWARD}.reward_kwargs.a=0.5 "
        f"+{OWN_REWARD}.reward_kwargs.mode=fast",
        {"reward_func": "r.py:f", "reward_func_args": '{"a": 0.5, "mode": "fast"}', "reward_funcs": None},
    ),
    (f"{VERL} reward.reward_model.enable=True reward.reward_model.model_path=r", {"reward_pretrain": "r"}),
    (
        f"{VERL} +reward.reward_kwargs.overlong_buffer_cfg.enable=True "
        "+reward.reward_kwargs.overlong_buffer_cfg.len=64",
        {"overlong_buffer_len": "64"},
    ),
    (
        f"{VERL} '+data.apply_chat_template_kwargs={{enable_thinking:False}}'",
        {"chat_template_kwargs": '{"enable_thinking": false}'},
    ),
    (f"{VERL} data.val_files=v data.val_max_samples=20 trainer.test_freq=5", {"eval_max_samples": "20"}),
    # An unknown loss does not hide the other settings of the objective.
    (
        f"{VERL} actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov actor_rollout_ref.actor.clip_ratio_high=0.28 "
        f"actor_rollout_ref.actor.loss_agg_mode=token-mean {ALSO}",
        {"eps_clip_low_high": "0.2 0.28", "loss_agg": "token_mean", "policy_loss": None, "rollout_correction_cap": "5"},
    ),
    (
        f'{EASY} data.val_files=v \'worker.rollout.val_override_config={{"temperature":0.5,"n":4}}\'',
        {"eval_temperature": "0.5", "eval_n_samples_per_prompt": "4"},
    ),
    (
        f"{SFT} optim.lr_scheduler_type=cosine optim.min_lr_ratio=0.1 optim.lr_warmup_steps=10 "
        "optim.lr_warmup_steps_ratio=0.5 engine=fsdp engine.ulysses_sequence_parallel_size=2 data.messages_key=m",
        {"num_processes": "8", "lr_scheduler": "cosine_with_min_lr", "min_lr_ratio": "0.1", "warmup_steps": "10"}
        | {"lr_warmup_ratio": None, "sequence_parallel_size": "2", "input_key": "m", "learning_rate": "0.001"},
    ),
    # OpenRLHF evaluates with 4 responses at temperature 0.6; the temperature of training stays.
    (
        f"{OPENRLHF} --eval_dataset v --eval_n_samples_per_prompt 2 --temperature 0.7",
        {"eval_n_samples_per_prompt": "2", "eval_temperature": "0.6", "temperature": "0.7"},
    ),
    # GKD has one response per prompt: 2 x 1 process x 4 prompts.
    (
        "trl gkd --model_name_or_path m --teacher_model_name_or_path t --dataset_name d --output_dir o "
        "--per_device_train_batch_size 2 --gradient_accumulation_steps 4",
        {"rollout_batch_size": "8", "train_batch_size": "8"},
    ),
    (
        "trl dpo --model_name_or_path m --dataset_name d --output_dir o --ref_model_name_or_path r --rpo_alpha 0.5 "
        "--max_length 1024 --max_prompt_length 512",
        {"ref_pretrain": "r", "nll_loss_coef": "0.5", "max_len": "1024"},
    ),
    (f"{TRL} --reward_funcs accuracy_reward my.module.f think_format_reward", {"reward_funcs": "math,format"}),
    # 64 responses per step, 16 per prompt, in the names of earlier versions.
    (
        "uv run rl --model.name m --orchestrator.batch_size 64 --orchestrator.rollouts_per_example 16 "
        "--max_async_level 2 --orchestrator.sampling.top_p 0.9 --orchestrator.buffer.online_difficulty_filtering true",
        {"rollout_batch_size": "4", "train_batch_size": "64", "max_staleness": "2", "top_p": "0.9"}
        | {"dynamic_filtering": "true"},
    ),
]


@pytest.mark.parametrize(("line", "expected"), TRANSLATED, ids=range(len(TRANSLATED)))
def test_settings_with_an_equivalent_are_translated(line, expected):
    found = settings(f"{line} actor_rollout_ref.rollout.n=2" if line.startswith(VERL) else line)
    assert {name: found.get(name) for name in expected} == expected


NAMED = [
    (f"{TRL} --model_revision abc", "model_revision: download the revision"),
    (f"{TRL} --shuffle_dataset false", "shuffle_dataset: rows are always shuffled"),
    (f"{TRL} --max_tool_calling_iterations 3", "max_turns needs --environment"),
    (f"{TRL} --num_generations_eval 2", "num_generations_eval: use --eval_n_samples_per_prompt"),
    (f"{TRL} --reward_funcs accuracy my.module.f", "my.module.f: pass Python code as --reward_func"),
    ("trl sft --model_name_or_path m --dataset_name d --eos_token x", "eos_token: the end token is that of"),
    ("trl sft --model_name_or_path m --dataset_name d --completion_only_loss false", "use --pretrain_mode"),
    ("trl sft --model_name_or_path m --dataset_name d --dataset_text_field t", "rename the column"),
    ("trl dpo --model_name_or_path m --dataset_name d --loss_type sigmoid sft", "sft is --nll_loss_coef"),
    (f"{VERL} data.shuffle=False", "data.shuffle: rows are always shuffled"),
    (f"{VERL} reward_model.reward_kwargs.scale=2", "scale: arguments of a reward manager"),
    (f"{VERL} trainer.resume_from_path=p", "use --load_checkpoint"),
    (f"{VERL.replace('=grpo', '=gae')} critic.ppo_epochs=4", "critic.ppo_epochs: actor and critic pass"),
    (f"{VERL.replace('=grpo', '=gae')} critic.grad_clip=0.5", "critic.grad_clip: actor and critic share --max_norm"),
    (f"{VERL.replace('=grpo', '=gae')} critic.model.lora_rank=8", "critic.model.lora_rank: actor and critic share"),
    ("uv run rl --model.name m --orchestrator.batch_size 8 --orchestrator.sampling.min_tokens 4", "min_tokens: use"),
]


@pytest.mark.parametrize(("line", "text"), NAMED, ids=range(len(NAMED)))
def test_settings_that_change_training_are_never_called_not_needed(line, text):
    found = migration(f"{line} actor_rollout_ref.rollout.n=2" if line.startswith("python3") else line)
    assert any(text in reason for reason in found.refused), found.notes()


def test_a_script_keeps_escapes_and_passes_no_empty_argument(tmp_path):
    file = tmp_path / "a.sh"
    file.write_text(
        f'{VERL} actor_rollout_ref.rollout.n=2 --config-name=ppo_trainer \\\n  "$@"\n'
        "deepspeed --module openrlhf.cli.train_sft --pretrain m --dataset d --save_path p \\\n"
        "  --input_template $'User: {}\\nIt\\'s: '\n"
    )
    first, second = map(migrated, programs_in([str(file)]))
    assert not any("missing" in note for note in first.notes())
    assert second.settings["input_template"] == ["User: {}\nIt's: "]


def test_a_config_of_dpo_with_a_limit_for_responses_is_not_one_of_grpo(tmp_path):
    file = tmp_path / "dpo_config.yaml"
    file.write_text("model_name_or_path: m\ndataset_name: d\nmax_completion_length: 64\nbeta: 0.05\n")
    (program,) = programs_in([str(file)])
    assert program.command == "dpo"
    (tmp_path / "a.toml").write_text("[orchestrator]\nbatch_size = 8\n")
    with pytest.raises(UsageError, match="pass one at a time"):
        programs_in([str(file), str(tmp_path / "a.toml")])


def test_separate_files_of_prime_rl_are_parts(tmp_path):
    (tmp_path / "t.toml").write_text('max_steps = 9\n[model]\nname = "m"\n[optim]\nlr = 3e-6\n')
    (tmp_path / "o.toml").write_text("batch_size = 32\nrollouts_per_example = 8\n[sampling]\nmax_tokens = 64\n")
    (tmp_path / "i.toml").write_text('[model]\nname = "m"\n')
    script = tmp_path / "run.sh"
    script.write_text(
        "uv run rl --trainer @ t.toml --orchestrator @ o.toml --inference @ i.toml --inference-gpu-ids 0\n"
    )
    (program,) = programs_in([str(script)])
    found = migrated(program)
    assert found.refused == []
    assert found.settings["rollout_batch_size"] == ["4"]
    assert found.settings["max_new_tokens"] == ["64"]


LOSSES = [
    ("clip_ratio_low=0.2 clip_ratio_high=0.28 clip_ratio_c=10", {"eps_clip_low_high": "0.2 0.28", "dual_clip": "10"}),
    ("policy_loss.loss_mode=gspo clip_ratio_low=3e-4 clip_ratio_high=4e-4", {"policy_loss": "gspo"}),
    ("policy_loss.loss_mode=gspo loss_agg_mode=token-mean", {"loss_agg": "seq_mean"}),
    ("policy_loss.loss_mode=cispo clip_ratio_high=0.3", {"policy_loss": "cispo", "cispo_eps_high": "1.3"}),
    ("policy_loss.loss_mode=gpg", {"policy_loss": "reinforce"}),
    ("loss_agg_mode=seq-mean-token-sum-norm", {"loss_agg": "seq_sum_norm"}),
]


@pytest.mark.parametrize(("words", "expected"), LOSSES)
def test_losses_of_verl_keep_their_clip_range_and_aggregation(words, expected):
    actor = " ".join(f"actor_rollout_ref.actor.{word}" for word in words.split())
    found = settings(f"{VERL} actor_rollout_ref.rollout.n=2 {actor}")
    assert {name: found.get(name) for name in expected} == expected


def test_files_of_prime_rl_are_read(tmp_path):
    (tmp_path / "rl.toml").write_text(
        'max_steps = 20\nseq_len = 2048\n[model]\nname = "m"\n[orchestrator]\nbatch_size = 128\ngroup_size = 16\n'
        '[[orchestrator.train.source]]\nname = "reverse-text"\n[orchestrator.train.sampling]\n'
        "max_completion_tokens = 128\n[trainer.optim]\nlr = 3e-6\n[ckpt]\n"
    )
    (program,) = programs_in([str(tmp_path / "rl.toml")])
    found = migrated(program)
    values = accepted(found.command_line())
    # 128 responses per step, 16 per prompt: 8 prompts per iteration.
    expected: dict[str, object] = {
        "rollout_batch_size": 8,
        "train_batch_size": 128,
        "max_iterations": 20,
        "actor_learning_rate": 3e-6,
    }
    expected |= {"policy_loss": "dppo_tv", "advantage_std": "none", "max_len": 2048, "init_kl_coef": 0.0}
    assert {name: values[name] for name in expected} == expected
    assert any(reason.startswith("orchestrator.train.source") for reason in found.refused)


def test_a_teacher_of_prime_rl_needs_no_server_and_no_reward():
    line = (
        "uv run rl --model.name m --orchestrator.batch_size 32 --orchestrator.group_size 4 --orchestrator.algo.type opd"
    )
    found = migration(f"{line} --orchestrator.algo.teacher.name t --orchestrator.algo.teacher.base_url http://h:1/v1")
    assert found.refused == []
    assert found.settings["teacher_pretrain"] == ["t"]
    assert not any("no reward" in note for note in found.notes())


def test_the_same_settings_are_written_as_yaml_for_config(tmp_path, capsys):
    line = f"{VERL} actor_rollout_ref.rollout.n=2 trainer.default_local_dir=o"
    command = accepted(migration(line).command_line())
    file = tmp_path / "settings.yaml"
    assert cli.main(["migrate", "--output", str(file), "--", *shlex.split(line)]) == 0
    assert file.read_text().startswith("# verl, verl.trainer.main_ppo: rlhf grpo\n")
    assert accepted(f"rlhf grpo --config {file}") == command
    assert as_yaml(migration(line)).startswith("# verl")
    assert f"rlhf grpo --config {file}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (["no_such.sh"], "no_such.sh: no such file or directory"),
        (["python3", "train.py", "--lr", "1"], "contains no training command of OpenRLHF"),
        (VERL.replace("=grpo", "=no_such").split(), "no command has verl's advantage estimator 'no_such'"),
    ],
)
def test_what_is_not_recognized_is_one_sentence(source, message, capsys):
    assert cli.main(["migrate", "--", *source]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "stage: sft\n", "contains no settings of OpenRLHF"),
        ("a.yaml", "a: [", "line 1"),
        ("a.toml", "a = ", "not TOML"),
        ("a.toml", "[project]\nname = 'x'\n", "contains no settings of prime-rl"),
        ("a.sh", "echo 'no", "a quote is not closed"),
        ("a.sh", "echo no\n", "contains no training command"),
    ],
)
def test_a_file_that_is_not_recognized_is_one_sentence_with_its_name(name, text, message, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=message) as raised:
        programs_in([str(tmp_path / name)])
    assert name in str(raised.value)


def test_torch_is_not_imported():
    code = (
        "import sys; from rlhf_cli import cli; "
        f"status = cli.main(['migrate', '--', *{VERL.split()!r}, 'actor_rollout_ref.rollout.n=2']); "
        "sys.exit(status or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
