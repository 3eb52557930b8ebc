"""Model card: README.md in a model folder, in the format of the Hugging Face Hub."""

import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from rlhf_cli.config.base import CommandConfig
from rlhf_cli.runs.recorded_runs import RecordedRun
from rlhf_cli.tracking.figures import number, title
from rlhf_cli.version import __version__

_CARD = "README.md"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_HOW_IT_RAN = ("checkpoint", "tracking", "launch", "placement", "engine")
"""Groups without effect on the model."""
_OMITTED = (
    *("pretrain", "dataset", "prompt_data", "eval_dataset"),
    *("agent_command", "environment", "reward_func_args", "remote_rm_url", "judge", "judge_args"),
)
"""Settings with models and data, which have separate lines, and settings that may contain passwords."""


def write_model_card(folder: Path, config: CommandConfig, run: RecordedRun) -> None:
    """Write the card of a model that a run has trained: base model, data, settings that differ from defaults, metrics.

    Cards are published with models, so local paths are shortened to their last part. Addresses, commands and arguments
    of user code are left out.
    """
    name = config.command
    base, data = str(config.setting("pretrain")), _data_of(config)
    found = {
        "library_name": "peft" if (folder / "adapter_config.json").exists() else "transformers",
        "pipeline_tag": "text-classification" if name in ("rm", "prm") else "text-generation",
        "tags": ["rlhf-cli", name],
        **({"base_model": base} if _is_hub_name(base) else {}),
        **({"datasets": hub} if (hub := [one for one in data if _is_hub_name(one)]) else {}),
    }
    settings = yaml.safe_dump(dict(_changed(config)), sort_keys=False, allow_unicode=True, width=100)
    metrics = "\n".join(f"| {title(metric)} | {number(value)} |" for metric, value in run.metrics.items())
    text = f"""---
{yaml.safe_dump(found, sort_keys=False)}---

# {folder.resolve().parent.name}

Trained with `rlhf {name}` (rlhf-cli {__version__}): {run.unit} {run.step} of {run.total_steps}.

- Base model: {_public(base)}
- Data: {", ".join(str(_public(one)) for one in data)}

## Settings

Settings that differ from the general defaults, including those of the command:

```yaml
{settings}```

## Metrics

Of the last {run.unit} and the last evaluation:

| metric | value |
|---|---|
{metrics}
"""
    (folder / _CARD).write_text(text, encoding="utf-8")


def _data_of(config: CommandConfig) -> list[str]:
    """Return the names of the training data, without configuration and split."""
    names = config.setting("prompt_data") or config.setting("dataset") or ""
    return [name.partition("@")[0].partition(":")[0].strip() for name in names.split(",") if name]


def _changed(config: CommandConfig) -> Iterator[tuple[str, object]]:
    for group, settings in config:
        if group not in _HOW_IT_RAN:
            names = [name for name in config.supported(group) if name not in _OMITTED and settings.changed(name)]
            values = settings.model_dump(mode="json", include=set(names))
            yield from ((name, _public(values[name])) for name in names if "://" not in str(values[name]))


def _is_hub_name(name: str) -> bool:
    return bool(_HUB_NAME.fullmatch(name)) and not Path(name).exists()


def _public(value: object) -> object:
    """Shorten a local path to its last part."""
    if isinstance(value, list):
        return [_public(item) for item in value]
    is_path = isinstance(value, str) and "/" in value and not _is_hub_name(value) and "\n" not in value
    return Path(str(value)).name if is_path else value
