"""Checks of paths, columns, sizes and ports before anything heavy is imported.

Importing torch, transformers, datasets and Ray takes seconds, and a mistyped path should fail before that. Runs repeat
these checks, and run all others, after loading models and rows.
"""

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rlhf_cli.backends.doctor.gpus import check_usable_gpus
from rlhf_cli.backends.process.output_lock import check_folder_can_be_made, require_new
from rlhf_cli.backends.training.checkpoint import MANIFEST
from rlhf_cli.backends.training.distributed_env import rank_and_world_size
from rlhf_cli.commands.compare import CompareConfig
from rlhf_cli.commands.data import DataCommandConfig
from rlhf_cli.commands.merge import MergeGroup
from rlhf_cli.commands.online import OnlineConfig
from rlhf_cli.config.base import CommandConfig, SettingsGroup
from rlhf_cli.config.data import (
    DataConfig,
    LabelledDataConfig,
    OfflineDataConfig,
    PreferenceDataConfig,
    PromptConfig,
    StepDataConfig,
)
from rlhf_cli.config.episodes import EpisodeConfig, environment_kind
from rlhf_cli.config.evaluation import HARNESSES, EvaluatedModelConfig, TasksConfig
from rlhf_cli.config.generate import AnswersOutputConfig
from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.config.scratch import ScratchConfigGroup
from rlhf_cli.config.serve import AddressConfig
from rlhf_cli.config.tinker import TINKER_KEY_PREFIX, TinkerModelConfig, TinkerServerConfig
from rlhf_cli.config.train import CheckpointConfig
from rlhf_cli.config.view import ViewGroup
from rlhf_cli.errors import UsageError
from rlhf_cli.models.finding import adapter_folder, resolve_model_path
from rlhf_cli.models.gguf import find_gguf
from rlhf_cli.rewards.judge.template import read_template
from rlhf_cli.rewards.workers.user_module import file_and_name

_COMPUTING = (CheckpointConfig, AnswersOutputConfig, AddressConfig, EvaluatedModelConfig)
"""Settings groups of commands that run models."""
_ANSWER_SECONDS = 3.0
"""Timeout for connecting to a Ray cluster."""


def check_early(config: CommandConfig) -> None:
    """Raise UsageError for errors in the settings."""
    # Only on rank 0: otherwise, the error would be printed by every rank.
    if rank_and_world_size()[0] != 0:
        return
    # A comparison checks each evaluation that it runs.
    if isinstance(config, CompareConfig):
        return
    groups = [group for _, group in config]
    for group in groups:
        # Outputs first: an existing run is the most frequent mistake, and the cheapest to check.
        _check_output(group)
    if any(isinstance(group, _COMPUTING) for group in groups):
        check_usable_gpus()
    if isinstance(config, OnlineConfig):
        from rlhf_cli.runs.online.checks import check_settings
        from rlhf_cli.runs.online.estimator import tried_estimator

        check_settings(config, tried_estimator(config))
    if isinstance(config, OnlineConfig) or any(isinstance(group, AnswersOutputConfig) for group in groups):
        _check_ray_address(os.environ.get("RAY_ADDRESS"))
    for group in groups:
        _check_models(group)
        _check_files(group)
    for settings, dataset, split in _data_sets(config):
        _check_data(settings, dataset, split)


def _check_output(group: object) -> None:
    match group:
        case CheckpointConfig():
            from rlhf_cli.runs.run_directory import check_run_directory, run_directory

            check_run_directory(group)
            paths = run_directory(group)
            check_folder_can_be_made(paths.root, flag="--output")
            check_folder_can_be_made(paths.checkpoints, flag="--ckpt_path")
            check_folder_can_be_made(paths.model, flag="--save_path")
        case AnswersOutputConfig(output=str(output)):
            from rlhf_cli.runs.inference.output_folder import check_folder

            check_folder(Path(output), group)
            check_folder_can_be_made(Path(output), flag="--output")
        case ScratchConfigGroup() | MergeGroup():
            require_new(Path(group.output))
        case AddressConfig():
            from rlhf_cli.runs.server_address import listening, server_key

            server_key(group, prefix=TINKER_KEY_PREFIX if isinstance(group, TinkerServerConfig) else "")
            # Bind and release the port; the run binds it again after loading the model.
            with listening(group.host, group.port):
                pass
            missing = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
            if missing:
                raise UsageError(f"{' and '.join(missing)} is not installed: pip install 'rlhf-cli[serve]'")
        case TinkerModelConfig():
            check_folder_can_be_made(Path(group.output), flag="--output")
        case TasksConfig(tasks=str()):
            _check_tasks(group)
        case ViewGroup():
            from rlhf_cli.tracking.view.runs import checked_folders

            checked_folders(group.runs)


def _check_tasks(group: TasksConfig) -> None:
    if find_spec(HARNESSES[group.harness]) is None:
        raise UsageError(f"--tasks {group.tasks}: {group.harness} is not installed: pip install 'rlhf-cli[evals]'")
    # Inspect's other names, such as inspect_evals/gsm8k, are those of tasks in packages. FILE.py@NAME is one of a file.
    for path in (Path(name.partition("@")[0]).expanduser() for name in group.names if group.harness == "inspect"):
        if path.suffix == ".py" and not path.is_file():
            raise UsageError(f"--tasks {group.tasks}: {path} does not exist")


def _check_models(group: Any) -> None:
    """Raise UsageError if a model folder is missing or empty. Adapters, checkpoints, GGUF files are checked later."""
    if isinstance(group, MergeGroup) and not Path(group.model).expanduser().is_dir():
        raise UsageError(f"--model {group.model}: there is no such folder")
    for name in type(group).model_fields:
        if not name.endswith("pretrain") or getattr(group, name) is None:
            continue
        for place in getattr(group, "names", [getattr(group, name)]):
            try:
                path = Path(place).expanduser()
                # Leave adapters, GGUF files and checkpoints to the run, because checking them needs heavy imports.
                if adapter_folder(place) is None and find_gguf(path) is None and not _is_in_checkpoint(path):
                    resolve_model_path(place)
            except UsageError as error:
                raise error if name == "pretrain" else UsageError(f"--{name}: {error}") from error
    if isinstance(group, RewardConfig) and group.starts_judge:
        try:
            resolve_model_path(group.judge[0])
        except UsageError as error:
            raise UsageError(f"--judge: {error}") from error


def _is_in_checkpoint(path: Path) -> bool:
    return any((folder / MANIFEST).is_file() for folder in (path, path.parent))


def _check_files(group: object) -> None:
    """Raise UsageError for missing Python files and judge templates."""
    if isinstance(group, RewardConfig) and group.reward_func is not None:
        _require_python("reward_func", group.reward_func)
    if isinstance(group, RewardConfig) and group.judge_template is not None:
        read_template(group.judge_template, group.judge_method)
    environment = group.environment if isinstance(group, EpisodeConfig) else None
    if environment is not None and environment_kind(environment) == "file":
        _require_python("environment", environment)


def _require_python(setting: str, source: str) -> None:
    path, _ = file_and_name(source)
    if path.is_dir():
        raise UsageError(f"--{setting} {source} is a folder: set the path of a file in it, such as {path / 'FILE.py'}")
    if not path.is_file():
        raise UsageError(f"--{setting} {source}: there is no such file")
    try:
        # Compile only: importing the file would run user code twice.
        compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = f"line {error.lineno}: {error.msg}" if isinstance(error, SyntaxError) else str(error)
        raise UsageError(f"--{setting} {source} is not valid Python: {line}") from error


def _data_sets(config: CommandConfig) -> Iterator[tuple[SettingsGroup, str, str]]:
    """Yield settings, name and split of each dataset that the command reads."""
    if isinstance(config, DataCommandConfig):
        from rlhf_cli.runs.data_settings import settings_of

        groups: list[Any] = [settings_of(config.show.for_, config.data, config.template)]
    else:
        groups = [group for _, group in config]
    for group in groups:
        # Benchmark tasks have prompts of their own.
        if isinstance(group, PromptConfig) and group.prompt_data:
            yield group, group.prompt_data, group.prompt_split
            evaluation = config.evaluation if isinstance(config, OnlineConfig) else None
            if evaluation is not None and evaluation.eval_dataset is not None:
                yield group, evaluation.eval_dataset, evaluation.eval_split
        elif isinstance(group, OfflineDataConfig):
            yield group, group.dataset, group.dataset_split
            if group.eval_dataset is not None:
                yield group, group.eval_dataset, group.eval_split
        elif isinstance(group, ScratchConfigGroup):
            yield group, group.dataset, group.dataset_split


def _check_data(settings: Any, dataset: str, split: str) -> None:
    """Raise UsageError if the dataset is missing, or a configured column is missing in the first rows."""
    # Imported late, because it imports numpy and pyarrow.
    from rlhf_cli.data.formats import choosing
    from rlhf_cli.data.reading.sources import first_rows

    formats: Mapping[type, Callable[..., object]] = {
        DataConfig: choosing.sequence_formats,
        PreferenceDataConfig: choosing.pair_formats,
        LabelledDataConfig: choosing.labelled_formats,
        StepDataConfig: choosing.step_formats,
        PromptConfig: choosing.prompt_formats,
    }
    sources = first_rows(dataset, split=split, data_format=getattr(settings, "data_format", "auto"))
    for kind, choose in formats.items():
        if isinstance(settings, kind):
            choose(settings, sources)


def _check_ray_address(address: str | None) -> None:
    """Raise UsageError if nothing listens at a cluster address HOST:PORT."""
    parts = urlsplit(f"//{address}") if address and "://" not in address else None
    if parts is None or parts.hostname is None or parts.port is None:
        return
    try:
        # A connection is enough: Ray's own client waits much longer for an unreachable address.
        socket.create_connection((parts.hostname, parts.port), timeout=_ANSWER_SECONDS).close()
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"RAY_ADDRESS={address}: no Ray cluster responds ({reason})") from error
