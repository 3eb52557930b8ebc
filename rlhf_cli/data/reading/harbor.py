"""Task folders of Harbor (0.26): `harbor:FOLDER` reads their instructions as rows.

A task is a folder with task.toml, instruction.md, tests/test.sh, and environment/Dockerfile unless task.toml names an
image. `agents/harbor.py` runs it. Parts of the format that change the result, and that it does not run, are errors.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_cli.config.queries import HARBOR_PREFIX
from rlhf_cli.data.reading.files import Table
from rlhf_cli.errors import UsageError, first_line

_CONFIG = "task.toml"
_TEMPLATE = re.compile(r"\$\{([A-Za-z_]\w*)(?::-(.*))?\}", re.DOTALL)
_UNSUPPORTED = {
    "steps": "has several steps",
    "environment.mcp_servers": "starts MCP servers",
    "environment.healthcheck": "waits for a health check",
    "environment.gpus": "requires GPUs",
    "environment.tpu": "requires TPUs",
    "verifier.environment": "runs its tests in a second container",
    "verifier.collect": "collects files of other services",
}
"""Settings that are errors unless they are empty, with what the task does then."""


_TYPES: Mapping[str, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys(("agent.user", "verifier.user"), ((str, int), "a user's name or number")),
    **dict.fromkeys(("environment.env", "verifier.env"), ((dict,), "a table")),
    **dict.fromkeys(
        ("environment.docker_image", "environment.workdir", "environment.network_mode"), ((str,), "a text")
    ),
    **dict.fromkeys(("environment.cpus", "environment.memory_mb"), ((int, float), "a number")),
    "environment.allow_internet": ((bool,), "true or false"),
}
"""Types of the settings that are used, with their names in messages."""


@dataclass(frozen=True)
class HarborTask:
    """A task.

    - `image`: name of a finished image, None to build `environment`.
    - `options`, `variables`: of `docker run`. `user`: who runs the model's commands, "" for the image's user.
    - `verifier_user`, `verifier_variables`: of the tests.
    """

    folder: Path
    instruction: str
    image: str | None
    options: tuple[str, ...]
    variables: Mapping[str, str]
    user: str
    verifier_user: str
    verifier_variables: Mapping[str, str]

    @property
    def environment(self) -> Path:
        """Folder with the Dockerfile."""
        return self.folder / "environment"

    @property
    def tests(self) -> Path:
        """Folder with test.sh."""
        return self.folder / "tests"


def read_tasks(name: str) -> Table:
    """Read the task in a folder, or all tasks in its subfolders, in the order of their names.

    Raises:
        UsageError: there is no task, or one has parts that are not supported.
    """
    root = Path(name.removeprefix(HARBOR_PREFIX)).expanduser()
    folders = [root] if (root / _CONFIG).is_file() else sorted(path.parent for path in root.glob(f"*/{_CONFIG}"))
    if not folders:
        raise UsageError(f"{name}: neither the folder nor a folder in it has a {_CONFIG}")
    rows = [_row(read_task(folder)) for folder in folders]
    return Table(name, len(rows), lambda index: dict(rows[index]), lambda index: folders[index].name)


def _row(task: HarborTask) -> dict[str, object]:
    return {
        "question": task.instruction,
        "task": str(task.folder.resolve()),
        "data_source": f"harbor/{task.folder.name}",
    }


def read_task(folder: Path) -> HarborTask:
    """Read a task. Raises UsageError with the file if it is incomplete or not supported."""
    path = folder / _CONFIG
    try:
        config = tomllib.loads(_text(path))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: {first_line(error)}") from error
    instruction = _text(folder / "instruction.md").strip()
    if not instruction:
        raise UsageError(f"{folder / 'instruction.md'}: is empty, and a task needs an instruction")
    _check_types(path, config)
    environment, verifier = config.get("environment", {}), config.get("verifier", {})
    _refuse(path, config, environment, verifier)
    image = environment.get("docker_image")
    for needed in ("tests/test.sh", *(() if image else ("environment/Dockerfile",))):
        if not (folder / needed).is_file():
            raise UsageError(f"{folder / needed}: there is no such file, which a task needs")
    return HarborTask(
        folder,
        instruction,
        image,
        _run_options(environment),
        _variables(path, environment),
        str(config.get("agent", {}).get("user", "")),
        str(verifier.get("user", "")),
        _variables(path, verifier),
    )


def _text(path: Path) -> str:
    """Read a file of a task. Raises UsageError with its name."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or first_line(error)}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: is not UTF-8 text") from error


def _check_types(path: Path, config: Mapping[str, Any]) -> None:
    for name in ("agent", "environment", "verifier"):
        if not isinstance(config.get(name, {}), dict):
            raise UsageError(f"{path}: {name} must be a table, as in [{name}]")
    for setting, (kinds, noun) in _TYPES.items():
        group, _, name = setting.partition(".")
        value = config.get(group, {}).get(name)
        if value is not None and not isinstance(value, kinds):
            raise UsageError(f"{path}: {setting} must be {noun}, not {value!r}")


def _refuse(path: Path, config: Mapping[str, Any], environment: Mapping[str, Any], verifier: Mapping[str, Any]) -> None:
    """Raise UsageError for parts of a task that are not supported."""
    groups = {"": config, "environment": environment, "verifier": verifier}
    for setting, action in _UNSUPPORTED.items():
        group, _, name = setting.rpartition(".")
        if groups[group].get(name):
            raise UsageError(f"{path}: {setting} is not supported: the task {action}")
    if str(environment.get("os", "linux")).lower() != "linux":
        raise UsageError(f"{path}: environment.os must be linux")
    if verifier.get("environment_mode", "shared") != "shared":
        raise UsageError(f"{path}: verifier.environment_mode must be shared: one container per episode")
    phases = [group.get("network_mode") for group in (config.get("agent", {}), verifier)]
    if environment.get("network_mode", "public") not in ("public", "no-network") or any(phases):
        raise UsageError(f"{path}: the network is public or no-network for the whole task (environment.network_mode)")
    if any((path.parent / "environment" / f"docker-compose.{end}").exists() for end in ("yaml", "yml")):
        raise UsageError(f"{path}: environment/docker-compose.yaml is not supported: one container per episode")


def _run_options(environment: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the options of `docker run` for the limits, network and working directory of a task."""
    no_network = environment.get("network_mode") == "no-network" or environment.get("allow_internet") is False
    limits = {"--cpus": environment.get("cpus"), "--workdir": environment.get("workdir")}
    if (memory := environment.get("memory_mb")) is not None:
        limits["--memory"] = f"{memory}m"
    if no_network:
        limits["--network"] = "none"
    return tuple(word for name, value in limits.items() if value is not None for word in (name, str(value)))


def _variables(path: Path, group: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables of a group. `${NAME}` and `${NAME:-DEFAULT}` read this process's variables."""
    variables: dict[str, str] = {}
    for name, value in group.get("env", {}).items():
        found = _TEMPLATE.fullmatch(str(value))
        text = str(value) if found is None else os.environ.get(found[1], found[2])
        if text is None:
            assert found is not None
            raise UsageError(f"{path}: env.{name} needs the environment variable {found[1]}, which is not set")
        variables[name] = text
    return variables
