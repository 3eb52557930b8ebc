"""The whole program: exit statuses, output, shell completion, and import cost of help."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from rlhf_cli import cli
from rlhf_cli.command_table import Command
from rlhf_cli.commands.plan import planned_class
from rlhf_cli.config.base import CommandConfig, SettingsGroup
from rlhf_cli.errors import ProcessDied, RunError, UsageError, first_line
from rlhf_cli.flags import config_class, flags_of
from rlhf_cli.options import typer_command
from rlhf_cli.version import __version__

REPOSITORY = Path(__file__).parents[3]


def rlhf(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the program in a new process and return its output and exit status."""
    command = [sys.executable, "-m", "rlhf_cli", *args]
    env = {**os.environ, "COLUMNS": "80", **environment}
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=REPOSITORY, timeout=60, check=False)


class Output(SettingsGroup):
    output: str = "."
    mood: str = "fine"


class MoodConfig(CommandConfig):
    checkpoint: Output = Output()


def mood(config: MoodConfig) -> None:
    """Exit in the requested way."""
    match config.checkpoint.mood:
        case "usage":
            raise UsageError("row 3 of data.jsonl\nhas no assistant turn")
        case "failure":
            raise RunError("no space left on the disk")
        case "failure with cause":
            try:
                _ = 1 / 0
            except ZeroDivisionError as error:
                raise RunError("engine 1 died: continue with --load_checkpoint") from error
        case "dead":
            raise ProcessDied("engine 1 died")
        case "unread":
            raise BrokenPipeError("pipe")
        case "defect":
            raise KeyError("first line\nsecond line")
        case "interrupt":
            raise KeyboardInterrupt
        case "launcher":
            raise SystemExit(7)


class MoodGroup(cli.CommandGroup):
    """Replaces the commands of the program by `reinforce++` and `mood`."""

    table = {"mood": Command("", "Moods", "End in a mood.", ""), "reinforce++": Command("", "Moods", "Plus.", "")}

    def resolve_command(self, ctx, args):
        name, _, rest = super(cli.CommandGroup, self).resolve_command(ctx, args)
        return name, cli.command_of(name, config_class(mood), mood) if name else None, rest


def ends(args: list[str], capsys) -> tuple[int, str]:
    """Return exit status and standard error of the program with these commands."""
    status = cli.main(args, group=MoodGroup)
    return status, capsys.readouterr().err


def test_a_run_that_ends_well_exits_0_and_says_nothing(capsys):
    assert ends(["mood"], capsys) == (0, "")


def test_wrong_usage_exits_2_in_one_line(capsys):
    said = (2, "rlhf mood: row 3 of data.jsonl; has no assistant turn\n")
    assert ends(["mood", "--mood", "usage"], capsys) == said


def test_a_failed_run_exits_1_in_one_line(capsys, tmp_path):
    said = (1, "rlhf mood: no space left on the disk\n")
    assert ends(["mood", "--mood", "failure", "--output", str(tmp_path)], capsys) == said
    assert not list(tmp_path.iterdir())


def test_a_failure_with_a_cause_leaves_the_trace_in_the_run_directory(capsys, tmp_path):
    status, said = ends(["mood", "--mood", "failure with cause", "--output", str(tmp_path)], capsys)
    log = tmp_path / "error.log"
    assert (status, said) == (1, f"rlhf mood: engine 1 died: continue with --load_checkpoint (trace in {log})\n")
    assert "ZeroDivisionError: division by zero" in log.read_text()


def test_a_defect_exits_1_with_one_line_and_the_path_of_its_trace(capsys, tmp_path):
    status, said = ends(["mood", "--mood", "defect", "--output", str(tmp_path)], capsys)
    log = tmp_path / "error.log"
    assert status == 1
    assert said == f"rlhf mood: unexpected KeyError: 'first line\\nsecond line' (trace in {log})\n"
    assert "Traceback (most recent call last)" in log.read_text()


def test_a_defect_without_a_run_directory_leaves_its_trace_in_a_temporary_file(capsys, tmp_path):
    _, said = ends(["mood", "--mood", "defect", "--output", str(tmp_path / "none")], capsys)
    found = re.search(r"\(trace in (.*)\)", said)
    assert found
    log = Path(found[1])
    assert "KeyError" in log.read_text()
    log.unlink()


def test_an_interrupted_run_exits_130(capsys):
    assert ends(["mood", "--mood", "interrupt"], capsys) == (130, "rlhf mood: interrupted\n")


def test_the_status_of_a_launcher_is_passed_on():
    with pytest.raises(SystemExit) as caught:
        cli.main(["mood", "--mood", "launcher"], group=MoodGroup)
    assert caught.value.code == 7


def test_an_unknown_command_is_answered_with_the_nearest():
    done = rlhf("sfx", "--pretrain", "m")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "rlhf: No such command 'sfx'. Did you mean 'sft'?\n"


def test_a_mistake_prints_one_line_and_no_usage():
    done = rlhf("sft", "--pretrian", "m", "--zero_stage", "4", "--adam_betas", "1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "--adam_betas" in done.stderr


def test_every_mistake_of_real_settings_is_in_the_line():
    done = rlhf("sft", "--pretrian", "m", "--zero_stage", "4")
    assert done.returncode == 2
    assert done.stderr == (
        "rlhf sft: unknown flag --pretrian (did you mean --pretrain?); missing --pretrain, --dataset, --output; "
        "--zero_stage 4: must be 0, 1, 2 or 3\n"
    )


def test_cross_field_errors_are_plain_sentences():
    done = rlhf("ppo", "--pretrain", "m", "--prompt_data", "d", "--output", "o")
    assert (done.returncode, done.stderr[:29]) == (2, "rlhf ppo: no reward: set --re")


def test_version():
    assert rlhf("--version").stdout == f"rlhf-cli {__version__}\n"


def test_no_command_shows_the_help():
    assert rlhf().stdout == rlhf("--help").stdout == rlhf("-h").stdout == rlhf("help").stdout


def test_the_deepspeed_launcher_may_put_local_rank_first():
    assert "missing --dataset" in rlhf("--local_rank=0", "sft", "--pretrain", "m", "--output", "o").stderr


class HelpPage(NamedTuple):
    """Output and exit status of a call in a fresh process, and the heavy packages imported by then."""

    status: int
    text: str
    errors: str
    heavy: list[str]


HELP_PAGES = """
import contextlib, io, json, sys
from rlhf_cli.cli import main
for words in json.loads(sys.argv[1]):
    output, errors = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        status = main(words)
    heavy = [name for name in sys.argv[2].split() if name in sys.modules]
    texts = [stream.seek(0) or stream.read() for stream in (output, errors)]
    print(json.dumps([words, [status, *texts, heavy]]))
"""
HELP_CALLS = [
    ["--version"],
    ["help"],
    *([name, "--help"] for name in cli.COMMANDS),
    *([name, "--help", "all"] for name in cli.COMMANDS),
    ["help", "sft", "lora"],
    ["sft", "--help", "learning_rate"],
]


@pytest.fixture(scope="module")
def help_pages() -> dict[str, HelpPage]:
    """Return all help pages, by their arguments, from one process; imports accumulate over the calls."""
    packages = "torch transformers datasets ray deepspeed vllm peft pandas numpy rich"
    words = [sys.executable, "-c", HELP_PAGES, json.dumps(HELP_CALLS), packages]
    environment = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=120, check=True)
    return {" ".join(call): HelpPage(*page) for call, page in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_help_fits_80_columns_and_shows_every_flag(name, help_pages):
    page = help_pages[f"{name} --help all"]
    assert (page.status, page.errors) == (0, "")
    assert max(map(len, page.text.splitlines())) <= 80
    shown = set(re.findall(r"^│ --(\w+)", page.text, re.MULTILINE))
    flags = flags_of(cli.COMMANDS[name].config_class)
    assert shown == flags.keys() | {"config", "help"}
    assert {flag.panel for flag in flags.values()} <= set(re.findall(r"[╭├]─ (.+?) ─", page.text))


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_help_fits_a_screen_and_has_the_flags_of_its_example(name, help_pages):
    page, example = help_pages[f"{name} --help"], cli.COMMANDS[name].config_class.example
    assert (page.status, page.errors) == (0, "")
    lines = page.text.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 40
    if example and "Main flags" in page.text:
        call = page.text[page.text.index(f"\nrlhf {name} ") : page.text.index("╭")].replace("\\\n", " ")
        call = " ".join(call.split())
        assert call == f"rlhf {name} {example}"
        shown = set(re.findall(r"^│ (--\w+)", page.text, re.MULTILINE))
        own = {f"--{flag}" for flag in flags_of(cli.COMMANDS[name].config_class)}
        assert shown - {"--load_checkpoint"} == set(re.findall(r"--\w+", example)) & own
    else:
        assert page.text == help_pages[f"{name} --help all"].text


@pytest.mark.parametrize("name", [name for name in cli.COMMANDS if cli.COMMANDS[name].config_class.example])
def test_examples_in_help_pages_are_valid(name):
    words, settings = shlex.split(cli.COMMANDS[name].config_class.example), cli.COMMANDS[name].config_class
    if name == "plan":
        settings, words = planned_class(words[0]), words[1:]
    read: list[CommandConfig] = []
    typer_command(name, settings, read.append, words).main(words, standalone_mode=False)
    assert len(read) == 1


def test_help_of_a_topic_and_of_a_flag(help_pages):
    topic, flag = help_pages["help sft lora"].text, help_pages["sft --help learning_rate"].text
    assert "─ Adapter (LoRA) ─" in topic
    assert "--lora_rank" in topic
    assert "--max_len" not in topic
    assert re.findall(r"^│ --(\w+)", flag, re.MULTILINE) == ["learning_rate"]
    assert "peak learning rate" in flag.lower()


def test_a_topic_that_no_command_has_is_named_with_those_that_there_are():
    done = rlhf("chat", "--help", "lora")
    assert done.returncode == 2
    assert done.stderr.endswith("neither a topic nor part of a flag; the topics are model, template, sampling\n")


def test_settings_files_belong_to_a_command():
    done = rlhf("--config", "sft.yaml")
    assert (done.returncode, done.stderr) == (2, "rlhf: --config belongs to a command: rlhf COMMAND --config FILE\n")


def test_help_of_the_program_fits_a_screen(help_pages):
    assert len(help_pages["help"].text.splitlines()) <= 40


def test_help_of_the_program_groups_the_commands():
    shown = rlhf("--help").stdout
    assert max(map(len, shown.splitlines())) <= 80
    assert (
        shown.index("─ Train offline") < shown.index("│ sft ") < shown.index("─ Train online") < shown.index("│ ppo ")
    )
    assert "local_rank" not in shown


def test_help_is_readable_where_the_terminal_knows_only_ascii():
    done = rlhf("--help", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "+- Train offline ---" in done.stdout


@pytest.mark.parametrize("words", map(" ".join, HELP_CALLS))
def test_help_imports_nothing_heavy(words, help_pages):
    assert help_pages[words].status == 0
    assert help_pages[words].heavy == []


def test_help_of_the_program_imports_no_command():
    code = (
        "import sys; from rlhf_cli.cli import main; main(['--help']); "
        "print(*[name for name in sys.modules if name.startswith('rlhf_cli.commands') or name == 'pydantic'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == ""


def completions(*words: str) -> list[str]:
    """Return the completions that bash offers for the last word."""
    environment = {
        "_RLHF_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(["rlhf", *words]),
        "COMP_CWORD": str(len(words)),
    }
    done = rlhf(**environment)
    assert done.stderr == ""
    return done.stdout.split()


def test_a_reader_that_stops_early_is_no_failure():
    command = f'"{sys.executable}" -m rlhf_cli ppo --help | head -n 1'
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=REPOSITORY, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("Usage: rlhf ppo [--FLAG VALUE]...\n", "")


def test_a_command_without_an_output_folder_ends_silently_if_its_reader_stops(capsys, tmp_path):
    assert ends(["mood", "--mood", "unread", "--output", str(tmp_path / "none")], capsys) == (1, "")
    status, said = ends(["mood", "--mood", "unread", "--output", str(tmp_path)], capsys)
    assert (status, said[:43]) == (1, "rlhf mood: unexpected BrokenPipeError: pipe")


def test_a_command_that_cannot_resume_does_not_mention_it(capsys):
    assert ends(["mood", "--mood", "dead"], capsys) == (1, "rlhf mood: engine 1 died\n")


def test_completion_offers_commands_flags_and_choices():
    assert completions("s") == [name for name in cli.COMMANDS if name.startswith("s")]
    assert completions("sft", "--learn") == ["--learning_rate"]
    assert completions("sft", "--no_use_te") == ["--no_use_tensorboard"]
    assert completions("sft", "--zero_stage", "2", "--lr_scheduler", "cos") == ["cosine_with_min_lr", "cosine"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_with_help_texts_works_in_other_shells(shell):
    environment = {
        "_RLHF_COMPLETE": f"complete_{shell}",
        "_TYPER_COMPLETE_ARGS": "rlhf ppo --",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    done = rlhf(**environment)
    assert done.stderr == ""
    assert "--reward_funcs" in done.stdout
    assert "Built-in rewards to add" in done.stdout


def test_completion_knows_a_command_with_plus_signs(monkeypatch, capsys):
    monkeypatch.setenv("_RLHF_COMPLETE", "complete_bash")
    for words, offered in (["rlhf", "rein"], "reinforce++\n"), (["rlhf", "reinforce++", "--moo"], "--mood\n"):
        monkeypatch.setenv("COMP_WORDS", " ".join(words))
        monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
        with pytest.raises(SystemExit):
            cli.main([], group=MoodGroup)
        assert capsys.readouterr().out == offered


def test_bash_loads_the_completion_script():
    """The script of --show-completion is printed, sourced, and called as bash does on Tab."""
    script = f"""
        rlhf() {{ "{sys.executable}" -m rlhf_cli "$@"; }}
        eval "$("{sys.executable}" -m rlhf_cli --show-completion)"
        complete -p rlhf
        """
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, cwd=REPOSITORY, timeout=60, check=False
    )
    assert done.stdout.strip() == "complete -o default -F _rlhf_completion rlhf", done.stderr


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("\nno such layer\nat 1\nat 2"), "no such layer"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_one_line_is_said_of_an_error_of_a_library(error, said):
    assert first_line(error) == said
