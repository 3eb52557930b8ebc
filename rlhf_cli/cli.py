"""The `rlhf` program: its commands, and the messages for the person at the terminal when a command fails.

A command's module is imported when that command is called or asked for its help, never for `rlhf --help`. The commands
are in commands/; options.py makes flags of settings.
"""

import functools
import importlib
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from rlhf_cli.command_table import COMMANDS, Command
from rlhf_cli.environment import prepare_environment, rest_collector
from rlhf_cli.errors import RunError, UsageError, full_memory, memory_sentence, missing_package
from rlhf_cli.foreign.commands import COMMANDS as COMMANDS_ELSEWHERE
from rlhf_cli.foreign.translation import WANDB_KEY
from rlhf_cli.help_page import HelpPageGroup
from rlhf_cli.version import __version__

if TYPE_CHECKING:
    from rlhf_cli.config.base import CommandConfig

FIRST_RANK_SECONDS = 20
"""Time for the first rank of a machine to find the same fault: it reports the fault, and its end ends the others."""


class CommandGroup(HelpPageGroup):
    """The commands of a table, each imported when it is called."""

    table: dict[str, Command] = COMMANDS

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, entry in self.table.items():
            self.add_command(TyperCommand(name, short_help=entry.summary, rich_help_panel=entry.panel))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if (
            args
            and args[0] not in self.table
            and (here := COMMANDS_ELSEWHERE.get(args[0].removeprefix("openrlhf.cli.")))
        ):
            raise UsageError(f"{args[0]} is called here: rlhf {here}")
        if args and ":" in args[0]:
            return args[0], outside_command(args[0], args[1:]), args[1:]
        name, _, rest = super().resolve_command(ctx, args)
        return name, load_command(name, self.table[name], rest) if name else None, rest


def command_function(entry: Command) -> Callable[..., None]:
    """Return the function of a command: it takes the config, and its docstring is the help text."""
    return getattr(importlib.import_module(f"rlhf_cli.commands.{entry.module}"), entry.function)


def load_command(name: str, entry: Command, words: Sequence[str]) -> Any:
    """Return the Typer command of a table entry, called with `words`; import its module."""
    return command_of(name, command_function(entry), words)


def outside_command(text: str, words: Sequence[str]) -> Any:
    """Return the Typer command of code outside this program, `file.py:NAME` or `module:NAME`.

    Raises:
        UsageError: there is no such code, or it takes no config.
    """
    from rlhf_cli.config.plugins import FORMS, absolute, is_target, load_target
    from rlhf_cli.flags import config_class

    if not is_target(text):
        raise UsageError(f"{text} is no command, and no code as {FORMS}")
    function = load_target(absolute(text))
    try:
        config_class(function)
    except (TypeError, KeyError, AssertionError, NameError) as error:
        name = text.rpartition(":")[2]
        raise UsageError(f"{text}: {name} has to take `config`, annotated with a class of settings groups") from error
    return command_of(text, function, words)


def command_of(name: str, function: Callable[..., None], words: Sequence[str] = ()) -> Any:
    """Return the Typer command of a function that takes a config; code that `words` name may bring settings."""
    from rlhf_cli.options import typer_command  # brings pydantic, which `rlhf --help` does without

    return typer_command(name, _with_trace(function), words)


def make_app(group: type[CommandGroup] = CommandGroup) -> typer.Typer:
    """Return the program with the commands of a group."""
    app = typer.Typer(
        cls=group,
        invoke_without_command=True,
        context_settings={"help_option_names": ["--help", "-h"]},
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(root)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rlhf-cli {__version__}")
        raise typer.Exit


def root(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
    local_rank: Annotated[int | None, typer.Option("--local_rank", hidden=True)] = None,
) -> None:
    """Post-train language models: supervised fine-tuning and reinforcement learning, from a laptop to a cluster.

    Settings are flags, or lines of a YAML file given with --config; `rlhf COMMAND --help` lists them.
    """
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def main(args: Sequence[str] | None = None, *, group: type[CommandGroup] = CommandGroup) -> int:
    """Run the program; the exit status: 0 done, 1 failure, 2 wrong usage, 130 interrupted."""
    rest_collector()
    words = list(sys.argv[1:] if args is None else args)
    is_outside = ":" in "".join(words[:1])
    called = words[0] if is_outside else next((word for word in words if word in group.table), None)
    try:
        outcome = typer.main.get_command(make_app(group)).main(words, prog_name="rlhf", standalone_mode=False)
        if outcome == 130:
            _tell(called, "interrupted")
        return outcome if isinstance(outcome, int) else 0
    except UsageError as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(FIRST_RANK_SECONDS)
        _tell(called, str(error))
        return 2
    except RunError as error:
        _tell(called, str(error))
        return 1
    except (typer.TyperException, typer.Abort) as error:
        _tell(called, str(error) or "aborted")
        return getattr(error, "exit_code", 1)
    except ModuleNotFoundError as error:
        _tell(called, missing_package(error))
        return 1
    except Exception as error:
        _tell(called, _unexpected(error, None))
        return 1


def _tell(command: str | None, message: str) -> None:
    sentence = "; ".join(line.strip() for line in message.splitlines() if line.strip())
    sys.stderr.write(f"rlhf{f' {command}' if command else ''}: {sentence}\n")


def _with_trace(run: Callable[..., None]) -> Callable[..., None]:
    """Return `run` with a change: an exception that is not a plain sentence leaves its trace in the run directory."""

    @functools.wraps(run)
    def guarded(config: "CommandConfig") -> None:
        from rlhf_cli.runs.early_checks import check_early

        prepare_environment()
        try:
            check_early(config)
            run(config)
        except UsageError:
            raise
        except RunError as error:
            if error.__cause__ is None:
                raise
            raise RunError(f"{error} (trace in {_write_trace(error, _run_directory(config))})") from error
        except ModuleNotFoundError as error:
            raise RunError(missing_package(error)) from None
        except Exception as error:
            kind = full_memory(error)
            if kind is not None:
                trace = _write_trace(error, _run_directory(config))
                raise RunError(f"{memory_sentence(kind, '')} (trace in {trace})") from error
            raise RunError(_unexpected(error, _run_directory(config))) from error

    return guarded


def _run_directory(config: "CommandConfig") -> Path | None:
    """Return the run directory of a config, if it has one and the directory exists."""
    output = next((value.output for _, value in config if hasattr(value, "output")), None)
    return Path(output) if output and Path(output).is_dir() else None


def _unexpected(error: Exception, directory: Path | None) -> str:
    reason = next(iter(str(error).strip().splitlines()), "")
    return f"unexpected {type(error).__name__}: {reason[:300]} (trace in {_write_trace(error, directory)})"


def _write_trace(error: Exception, directory: Path | None) -> Path:
    """Append the full trace to this rank's file, in the run directory or else a temporary one; return the file."""
    text = f"{time.strftime('%F %T')} rlhf {' '.join(sys.argv[1:])}\n{''.join(traceback.format_exception(error))}\n"
    if key := os.environ.get(WANDB_KEY):  # it may have been given after --use_wandb
        text = text.replace(key, "(hidden)")
    rank = os.environ.get("RANK", "0")
    if directory is not None:
        path = directory / ("error.log" if rank == "0" else f"error_rank{rank}.log")
        try:
            with path.open("a", encoding="utf-8") as log:
                log.write(text)
            return path
        except OSError:  # the disk may be what failed
            pass
    with tempfile.NamedTemporaryFile("w", prefix="rlhf-", suffix=".log", delete=False, encoding="utf-8") as temporary:
        temporary.write(text)
    return Path(temporary.name)
