"""Flags of other tools are accepted, translated or rejected, on command lines as their users write them."""

import os
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import foreign_commands
import pytest
from foreign_commands import COMMAND_LINES

from rlhf_cli import cli
from rlhf_cli.errors import UsageError
from rlhf_cli.flags import RESERVED, flags_of
from rlhf_cli.foreign.call import Call
from rlhf_cli.foreign.table import FLAT_NAMES, FUNCTIONS, NO_EQUIVALENT, OF_COMMAND, TABLE
from rlhf_cli.foreign.translation import WANDB_KEY, translate, translate_settings
from rlhf_cli.options import typer_command


def parsed(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    """Parse a command line without running it; return the config and the printed notes."""
    name, *words = shlex.split(line)
    seen: list[Any] = []

    def run(config):
        seen.append(config)

    typer_command(name, cli.COMMANDS[name].config_class, run).main(words, standalone_mode=False)
    return seen[0], capsys.readouterr().err


@pytest.mark.parametrize(("line", "outcome"), COMMAND_LINES.items(), ids=range(len(COMMAND_LINES)))
def test_a_command_line_of_another_tool_parses_with_notes_or_names_the_replacement(line, outcome, capsys, monkeypatch):
    monkeypatch.delenv(WANDB_KEY, raising=False)
    if outcome.startswith("refused: "):
        with pytest.raises(UsageError) as raised:
            parsed(line, capsys)
        for words in outcome.removeprefix("refused: ").split(" | "):
            assert words in str(raised.value)
        return
    _, notes = parsed(line, capsys)
    for words in outcome.removeprefix("parses").strip(": ").split(" | "):
        assert words in notes


def test_there_are_enough_command_lines():
    assert len(COMMAND_LINES) >= 35


def test_a_key_on_the_command_line_goes_into_the_environment_and_nowhere_else(capsys, monkeypatch):
    monkeypatch.setenv(WANDB_KEY, "")
    monkeypatch.delenv(WANDB_KEY)
    config, notes = parsed("sft --pretrain m --dataset d --output o --use_wandb s3cret", capsys)
    assert os.environ[WANDB_KEY] == "s3cret"
    assert config.tracking.use_wandb
    assert "s3cret" not in notes + repr(config)


def test_a_key_is_in_no_trace_and_may_stand_in_a_file(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv(WANDB_KEY, "other")
    file = tmp_path / "settings.yaml"
    file.write_text("use_wandb: s3cret\n")
    config, notes = parsed(f"sft --pretrain m --dataset d --output o --config {file}", capsys)
    assert config.tracking.use_wandb
    assert (os.environ[WANDB_KEY], "s3cret" in notes + repr(config)) == ("s3cret", False)
    monkeypatch.setattr("sys.argv", ["rlhf", "sft", "--use_wandb", "s3cret"])
    trace = cli._write_trace(ValueError("no key s3cret"), tmp_path).read_text()
    assert "rlhf sft --use_wandb (hidden)" in trace
    assert "s3cret" not in trace


def test_the_longest_prompt_and_response_are_added_up():
    known = {"max_len": 1, "max_new_tokens": 1}
    done = translate(["--prompt_max_len", "512", "--generate_max_len", "100"], command="ppo", known=known)
    assert done.words == ["--max_len", "612", "--max_new_tokens", "100"]
    assert done.rewritten[0] == "--prompt_max_len 512 is translated to --max_len 612"


def test_a_model_without_an_output_has_the_files_of_its_run_beside_it(capsys):
    config, _ = parsed("sft --pretrain m --dataset d --save_path out/model/", capsys)
    assert config.checkpoint.save_path == "out/model/"
    assert config.checkpoint.output == "out/model_run"


def test_settings_of_a_file_are_translated_as_flags_are():
    known = {"max_new_tokens": 1, "param_dtype": 1, "target_modules": 1}
    values = {
        "bf16": True,
        "packing_samples": True,
        "flash_attn": False,
        "generate_max_len": 64,
        "target_modules": ["a"],
    }
    own, done = translate_settings(values, command="ppo", known=known)
    assert own == {"param_dtype": "bf16", "max_new_tokens": "64", "target_modules": ["a"]}
    assert done.notes[0] == "ignored, not needed: --packing_samples"
    nested = {"actor_rollout_ref": {"rollout": {"n": 5}, "actor": {"ppo_mini_batch_size": 8, "no_such": 1}}}
    own, done = translate_settings(nested, command="grpo", known={"n_samples_per_prompt": 1, "train_batch_size": 1})
    assert own == {"n_samples_per_prompt": "5", "train_batch_size": "40"}
    assert done.problems == [f"--actor_rollout_ref.actor.no_such: {NO_EQUIVALENT}"]


def test_a_file_may_have_the_forms_that_a_command_line_may_have(capsys, tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text(
        "pretrain: m\nprompt_data: d\nremote_rm_url: ./score.py\nuse_tensorboard: ./tb\nsave_path: out/model/\n"
        "input_template: 'User: {}'\n"
    )
    config, notes = parsed(f"ppo --config {file}", capsys)
    assert config.reward.reward_func == "./score.py"
    assert config.tracking.use_tensorboard
    assert config.checkpoint.output == "out/model_run"
    assert "--no_apply_chat_template" in notes
    assert not config.template.apply_chat_template
    config, notes = parsed(f"ppo --config {file} --output mine --no_apply_chat_template", capsys)
    assert (config.checkpoint.output, config.template.apply_chat_template) == ("mine", False)
    assert "out/model_run" not in notes + repr(config)
    assert "replaces the chat template" not in notes


def test_foreign_words_of_several_files_are_replaced_before_later_files_win(capsys, tmp_path):
    common = "pretrain: m\ndataset: d\nring_attn_size: 2\nsave_path: out/model\n"
    (tmp_path / "base.yaml").write_text(common)
    (tmp_path / "own.yaml").write_text("sequence_parallel_size: 4\noutput: mine\n")
    (tmp_path / "foreign.yaml").write_text("extends: own.yaml\nring_attn_size: 8\ntrain_split: x\nuse_ms: true\n")
    config, notes = parsed(f"sft --config {tmp_path}/base.yaml,{tmp_path}/own.yaml", capsys)
    assert (config.deepspeed.sequence_parallel_size, config.checkpoint.output) == (4, "mine")
    assert "out/model_run" not in notes
    with pytest.raises(UsageError, match=rf"--use_ms: .* \(in {tmp_path}/foreign.yaml\)$"):
        parsed(f"sft --config {tmp_path}/base.yaml,{tmp_path}/foreign.yaml", capsys)
    (tmp_path / "foreign.yaml").write_text("extends: own.yaml\nring_attn_size: 8\n")
    config, _ = parsed(f"sft --config {tmp_path}/base.yaml,{tmp_path}/foreign.yaml", capsys)
    assert config.deepspeed.sequence_parallel_size == 8


def test_a_foreign_word_in_a_file_may_need_a_setting_of_another(capsys, tmp_path):
    (tmp_path / "base.yaml").write_text("pretrain: m\nprompt_data: d\noutput: o\nreward_funcs: math\n")
    (tmp_path / "long.yaml").write_text("extends: base.yaml\nmax_new_tokens: 500\n")
    (tmp_path / "prompt.yaml").write_text("prompt_max_len: 100\n")
    config, _ = parsed(f"ppo --config {tmp_path}/long.yaml,{tmp_path}/prompt.yaml", capsys)
    assert config.prompts.max_len == 600


def test_names_with_sections_in_a_file_are_translated(capsys, tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("pretrain: m\nprompt_data: d\noutput: o\nactor.adam.lr: 3e-6\nreward_funcs: math\n")
    config, notes = parsed(f"ppo --config {file}", capsys)
    assert "actor_learning_rate=3e-06" in repr(config)
    assert "--actor.adam.lr is --actor_learning_rate" in notes
    file.write_text(file.read_text() + "actor_learning_rate: 1e-6\n")
    with pytest.raises(UsageError, match=r"actor\.adam\.lr: actor_learning_rate is set too"):
        parsed(f"ppo --config {file}", capsys)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--bf16 true", "--param_dtype bf16"),
        ("--bf16=True", "--param_dtype bf16"),
        ("--bf16 false", ""),
        ("--bf16 --seed 3", "--param_dtype bf16 --seed 3"),
        ("--warmup_steps 0.1", "--lr_warmup_ratio 0.1"),
        ("--warmup_steps 150 --seed 3", "--warmup_steps 150 --seed 3"),
        ("--use_wandb true", "--use_wandb"),
        ("--use_wandb=False", "--no_use_wandb"),
        ("--use-wandb true --seed 3", "--use_wandb --seed 3"),
    ],
)
def test_values_may_have_the_form_of_trl(words, expected):
    known = {"param_dtype": 1, "seed": 1, "use_wandb": 0, "warmup_steps": 1, "lr_warmup_ratio": 1}
    assert " ".join(translate(words.split(), command="sft", known=known).words) == expected


TRL_ROWS = re.findall(
    r"^\| (.+?) \| (.+?) \|$",
    Path("docs/coming-from.md").read_text().partition("## TRL")[2].partition("\n## ")[0],
    re.M,
)
REFUSED = {
    "gradient_accumulation_steps",
    "lora_modules_to_save",
    "load_in_8bit",
    "repetition_penalty",
    "seq_kd",
    "beta",
}
"""Words whose table entry explains why there is no equivalent, or whose meaning depends on the trainer."""


@pytest.mark.parametrize(("there", "here"), TRL_ROWS[2:], ids=lambda cell: cell[:30])
def test_every_word_of_trl_in_the_docs_is_one_of_ours_or_becomes_what_the_docs_say(there, here):
    for word, value in re.findall(r"`-{0,2}([a-z][a-z0-9_]+)(?: ([^`]*))?`", there):
        if word in ("trl", "transformers", "accuracy", "accuracy_reward") or word.startswith("adamw_"):
            continue
        sampled = translated_for(word, value, "grpo", "gkd", "chat")
        settled = [found for found in (sampled, translated_for(word, value, "sft", "distill", "prm")) if found]
        assert settled, f"{word}: no command knows it"
        for done in settled:
            if word in REFUSED or not done.rewritten or here == "taken as written":
                continue
            assert not done.problems, done.problems
            assert any(new in here for new in re.findall(r"--(?:no_)?(\w+)", " ".join(done.words))), (word, done.words)


def translated_for(word: str, value: str, *commands: str) -> Any:
    """Return the translation by the first command that knows the word; it is empty for a flag of this program."""
    for command in commands:
        known = {flag.name: flag.takes for flag in flags_of(cli.COMMANDS[command].config_class).values()}
        if word in known and not value:
            return translate([], command=command, known=known)
        if word in TABLE or word in OF_COMMAND.get(command, {}) or word in known:
            words = [f"--{word}", *(value or "1").split()[:1]]
            done = translate(words, command=command, known=known)
            if not any("which rlhf" in problem for problem in done.problems):
                return done
    return None


def test_the_key_may_stand_behind_an_equals_sign(monkeypatch):
    monkeypatch.setenv(WANDB_KEY, "other")
    assert translate(["--use_wandb=s3cret"], command="sft", known={"use_wandb": 0}).words == ["--use_wandb"]
    assert os.environ[WANDB_KEY] == "s3cret"


def test_a_setting_without_a_value_in_a_file_is_not_given():
    known = {"output": 1, "save_path": 1, "input_template": 1, "apply_chat_template": 0, "use_tensorboard": 0}
    values = {"save_path": None, "input_template": None, "use_tensorboard": "true"}
    assert translate_settings(values, command="sft", known=known)[0] == values


def test_a_flag_of_the_command_itself_is_never_taken_for_a_foreign_one():
    ppo = {flag.name: flag.takes for flag in flags_of(cli.COMMANDS["ppo"].config_class).values()}
    words = ["--gamma", "0.9", "--lambd", "0.95", "--critic_learning_rate", "1e-6", "--freezing_actor_steps", "3"]
    done = translate(words, command="ppo", known=ppo)
    assert (done.words, done.notes, done.problems) == (words, [], [])


@pytest.mark.parametrize(
    ("name", "here"), [("train_sft", "rlhf sft"), ("serve_rm", "rlhf serve-rm"), ("interactive_chat", "rlhf chat")]
)
def test_a_command_of_another_tool_is_named_as_it_is_called_here(name, here, capsys):
    assert cli.main([name, "--pretrain", "x"]) == 2
    assert here in capsys.readouterr().err


FOREIGN = Path(cli.__file__).parent / "foreign"
FLAGS = (FOREIGN / "flags.toml").read_text()
IN_SECTIONS = (FOREIGN / "sections.toml").read_text()


def test_every_refusal_and_note_names_a_setting_that_exists():
    names = {flag for entry in cli.COMMANDS.values() for flag in flags_of(entry.config_class)}
    text = IN_SECTIONS + "".join(path.read_text() for path in FOREIGN.glob("*.py"))
    offered = set(re.findall(r"(?:use|is|are|to|with|as|--)\s?--([a-z_0-9]+)", text)) - {"name"}
    offered |= set(re.findall(r"--(?:no_)?([a-z_0-9]+)", FLAGS)) - {"flag"}
    assert offered <= names | {"remote_rm_url", "reward_func"}


def test_the_file_of_flags_names_each_flag_once_and_uses_every_function():
    read = tomllib.loads(FLAGS)
    sections = [read["all"], read["sequence_parallel"], read["tensor_parallel"], *read["command"].values()]
    for section in sections:
        names = [name for entries in section.values() for key in entries for name in key.split()]
        assert len(names) == len(set(names))
    names = [name for kind in ("values", "lists") for key in tomllib.loads(IN_SECTIONS)[kind] for name in key.split()]
    assert len(names) == len(set(names))
    used = re.findall(r'function = "(\w+)"', FLAGS.partition("[command_names]")[2] + IN_SECTIONS)
    assert set(used) == FUNCTIONS.keys()
    assert read["command"].keys() <= cli.COMMANDS.keys()
    assert OF_COMMAND["merge"]["lora_path"].meaning(["x"], Call("merge", {})) == {"model": ["x"]}


OPENRLHF_FLAGS = (Path(foreign_commands.__file__).parent / "openrlhf_flags.txt").read_text().splitlines()[1:]
OWN_COMMANDS = {"ppo_ray": "ppo", "batch_inference": "generate", "serve_rm": "serve-rm", "lora_combiner": "merge"}


def unnamed(flags: list[str], command: str) -> list[str]:
    """Return the flags that are neither settings of the command nor in a table."""
    known = set(flags_of(cli.COMMANDS[command].config_class))
    named = known | RESERVED | TABLE.keys() | OF_COMMAND.get(command, {}).keys()
    return [flag for flag in flags if FLAT_NAMES.get(flag, flag) not in named]


@pytest.mark.parametrize("line", OPENRLHF_FLAGS, ids=[line.partition(":")[0] for line in OPENRLHF_FLAGS])
def test_every_flag_of_openrlhf_is_a_setting_or_named(line):
    name, _, flags = line.partition(": ")
    command = OWN_COMMANDS.get(name, name)
    assert unnamed(flags.split(), command) == []


def test_a_flag_that_nothing_names_is_found():
    assert unnamed(["pretrain", "no_such_flag", "actor.no_such"], "ppo") == ["no_such_flag", "actor.no_such"]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("sft", "--pretrain m --dataset d --learning_rate 1e-5 --train_batch_size 8 --max_epochs 3"),
        ("grpo", "--pretrain m --prompt_data d --actor_learning_rate 1e-5 --train_batch_size 8 --num_episodes 3"),
    ],
)
def test_short_names_are_those_of_the_command(command, expected):
    words = ["--model", "m", "--data", "d", "--lr", "1e-5", "--batch_size", "8", "--epochs", "3"]
    known = {flag.name: flag.takes for flag in flags_of(cli.COMMANDS[command].config_class).values()}
    done = translate(words, command=command, known=known)
    assert (" ".join(done.words), done.problems) == (expected, [])
    assert len(done.notes) == 5


def test_data_is_a_section_in_a_file_of_verl_and_a_name_otherwise():
    nested = {"data": {"train_files": ["a.parquet", "b.parquet"]}}
    own, _ = translate_settings(nested, command="sft", known={"dataset": 1})
    assert own == {"dataset": "a.parquet,b.parquet"}
    own, _ = translate_settings({"data": "a.jsonl"}, command="sft", known={"dataset": 1})
    assert own == {"dataset": "a.jsonl"}
