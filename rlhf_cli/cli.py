"""The `rlhf` command line: dispatch and error messages.

A command's module is imported only when the command or `rlhf COMMAND --help` runs, never for `rlhf --help`. Commands
are in commands/; options.py derives flags from settings.
"""

import functools
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from rlhf_cli.command_table import COMMANDS, Command
from rlhf_cli.environment import prepare_environment, rest_collector
from rlhf_cli.errors import ProcessDied, RunError, UsageError, listed, missing_package
from rlhf_cli.foreign.table import COMMANDS_ELSEWHERE
from rlhf_cli.foreign.translation import WANDB_KEY
from rlhf_cli.help_page import HelpPageGroup
from rlhf_cli.version import __version__

if TYPE_CHECKING:
    from rlhf_cli.config.base import CommandConfig

_FIRST_RANK_SECONDS = 20
"""Delay before other ranks exit on a usage error. Rank 0 finds the same error and reports it, and the launcher then
kills the rest, so the error is printed once."""


class CommandGroup(HelpPageGroup):
    """Commands from a table, imported lazily."""

    table: dict[str, Command] = COMMANDS

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, entry in self.table.items():
            self.add_command(TyperCommand(name, short_help=entry.summary, rich_help_panel=entry.panel))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args[:1] == ["help"]:
            args = [*args[1:2], "--help", *args[2:]]
        if args and args[0].partition("=")[0] == "--config":
            raise UsageError("--config belongs to a command: rlhf COMMAND --config FILE")
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if (
            args
            and args[0] not in self.table
            and (here := COMMANDS_ELSEWHERE.get(args[0].removeprefix("openrlhf.cli.")))
        ):
            raise UsageError(f"{args[0]} is an OpenRLHF or TRL command; run rlhf {here}")
        if args and ":" in args[0]:
            return args[0], _outside_command(args[0], args[1:]), args[1:]
        name, _, rest = super().resolve_command(ctx, args)
        # `rlhf plan --proof RUN` plans no command, even if the run directory has the name of one.
        if name == "plan" and "--proof" not in rest and (planned := _first_command(rest)):
            rest.remove(planned)
            return f"plan {planned}", _planned_command(planned, rest), rest
        return name, _load_command(name, self.table[name], rest) if name else None, rest


def _first_command(words: Sequence[str]) -> str | None:
    """Return the first command among words, which flags may precede; without one, the first word if it is no flag."""
    found = next(filter(COMMANDS.get, words), None)
    return found or next((word for word in words[:1] if not word.startswith("-")), None)


def _load_command(name: str, entry: Command, arguments: Sequence[str]) -> Any:
    """Import a command's config class and return the Typer command, called with `arguments`."""
    return command_of(name, entry.config_class, entry.run, arguments)


def _planned_command(name: str, arguments: Sequence[str]) -> Any:
    """Return the Typer command that plans the command `name` with the command's own settings.

    Raises:
        UsageError: the command cannot be planned.
    """
    from rlhf_cli.commands.plan import PLANNED, planned_class
    from rlhf_cli.options import typer_command

    if name not in PLANNED:
        raise UsageError(f"rlhf {name} has no plan; the commands with one are {listed(PLANNED)}")

    def run(config: "CommandConfig") -> None:
        # Imported here: it imports torch, which `rlhf plan COMMAND --help` does not need.
        from rlhf_cli.runs.plan import plan_command

        plan_command(config)

    return typer_command(name, planned_class(name), _with_trace(run, checks=False), arguments)


def _outside_command(text: str, arguments: Sequence[str]) -> Any:
    """Return the Typer command for external code, `file.py:NAME` or `module:NAME`.

    Raises:
        UsageError: the code does not exist, or it has no `config` parameter.
    """
    from rlhf_cli.config.plugins import FORMS, absolute, is_target, load_target
    from rlhf_cli.flags import config_class

    if not is_target(text):
        raise UsageError(f"{text} is neither a command nor {FORMS}")
    function = load_target(absolute(text))
    try:
        settings = config_class(function)
    except (TypeError, KeyError, AssertionError, NameError) as error:
        name = text.rpartition(":")[2]
        raise UsageError(f"{text}: {name} must have a parameter `config` annotated with a config class") from error
    return command_of(text, settings, function, arguments, text=function.__doc__)


def command_of(
    name: str, settings: Any, run: Callable[..., None], arguments: Sequence[str] = (), *, text: str | None = None
) -> Any:
    """Return the Typer command that calls `run` with a config of class `settings`.

    Code named in `arguments` may add settings. The help text is `text`, by default the docstring of the class.
    """
    # Imported here: options.py imports pydantic, which `rlhf --help` does not need.
    from rlhf_cli.options import typer_command

    return typer_command(name, settings, _with_trace(run), arguments, text=text)


def _make_app(group: type[CommandGroup] = CommandGroup) -> typer.Typer:
    """Build the Typer application for a command group."""
    app = typer.Typer(
        cls=group,
        invoke_without_command=True,
        context_settings={"help_option_names": ["--help", "-h"]},
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_root)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rlhf-cli {__version__}")
        raise typer.Exit


def _root(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
    local_rank: Annotated[int | None, typer.Option("--local_rank", hidden=True)] = None,
) -> None:
    """Post-train language models. `rlhf COMMAND --help` shows a command's settings."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def main(args: Sequence[str] | None = None, *, group: type[CommandGroup] = CommandGroup) -> int:
    """Run the command line. Returns 0 on success, 1 on failure, 2 on a usage error, 130 if interrupted."""
    rest_collector()
    words = list(sys.argv[1:] if args is None else args)
    is_outside = ":" in "".join(words[:1])
    called = words[0] if is_outside else next((word for word in words if word in group.table), None)
    try:
        outcome = typer.main.get_command(_make_app(group)).main(words, prog_name="rlhf", standalone_mode=False)
        if outcome == 130:
            _tell(called, "interrupted")
        return outcome if isinstance(outcome, int) else 0
    except UsageError as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(_FIRST_RANK_SECONDS)
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


def _nothing() -> None:
    """No-op, instead of the report that a run begins."""


def _with_trace(run: Callable[..., None], *, checks: bool = True) -> Callable[..., None]:
    """Wrap a command: unexpected exceptions write a traceback to the run directory and become one sentence.

    With `checks`, files and paths of the settings are checked first, and events of the run are reported.
    """

    @functools.wraps(run)
    def guarded(config: "CommandConfig") -> None:
        from rlhf_cli.runs.events import with_events
        from rlhf_cli.runs.memory_fixes import with_memory_fixes

        prepare_environment()
        try:
            with with_events(config) if checks else nullcontext(_nothing) as begin, with_memory_fixes(config):
                if checks:
                    from rlhf_cli.runs.early_checks import check_early

                    check_early(config)
                begin()
                run(config)
        except UsageError:
            raise
        except RunError as error:
            text = error.message if isinstance(error, ProcessDied) and not _can_resume(config) else str(error)
            # Without a cause, it is raised by this package on purpose: the sentence is complete without a traceback.
            trace = f" (trace in {_write_trace(error, _run_directory(config))})" if error.__cause__ else ""
            raise RunError(f"{text}{trace}") from error
        except ModuleNotFoundError as error:
            raise RunError(missing_package(error)) from None
        except Exception as error:
            directory = _run_directory(config)
            # The program that reads the output has ended, such as `head`.
            if isinstance(error, BrokenPipeError) and directory is None:
                raise typer.Exit(1) from None
            raise RunError(_unexpected(error, directory)) from error

    return guarded


def _can_resume(config: "CommandConfig") -> bool:
    return any(hasattr(group, "load_checkpoint") for _, group in config)


def _run_directory(config: "CommandConfig") -> Path | None:
    """Return the run directory, or None if the command has none or it does not exist yet."""
    output = next((value.output for _, value in config if hasattr(value, "output")), None)
    return Path(output) if output and Path(output).is_dir() else None


def _unexpected(error: Exception, directory: Path | None) -> str:
    reason = next(iter(str(error).strip().splitlines()), "")
    return f"unexpected {type(error).__name__}: {reason[:300]} (trace in {_write_trace(error, directory)})"


def _write_trace(error: Exception, directory: Path | None) -> Path:
    """Append the traceback to this rank's log in the run directory, or to a temporary file. Returns the path."""
    text = f"{time.strftime('%F %T')} rlhf {' '.join(sys.argv[1:])}\n{''.join(traceback.format_exception(error))}\n"
    # The command line may contain the key after --use_wandb, as in OpenRLHF.
    if key := os.environ.get(WANDB_KEY):
        text = text.replace(key, "(hidden)")
    rank = os.environ.get("RANK", "0")
    if directory is not None:
        path = directory / ("error.log" if rank == "0" else f"error_rank{rank}.log")
        try:
            with path.open("a", encoding="utf-8") as log:
                log.write(text)
            return path
        # A full disk may be the original error.
        except OSError:
            pass
    with tempfile.NamedTemporaryFile("w", prefix="rlhf-", suffix=".log", delete=False, encoding="utf-8") as temporary:
        temporary.write(text)
    return Path(temporary.name)
