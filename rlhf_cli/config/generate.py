"""Output and selection of the responses of generate and eval."""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_cli.config.base import Excludes, Needs, SettingsGroup


class AnswersOutputConfig(SettingsGroup):
    """Output"""

    output: str | None = None
    """Folder for samples.jsonl (every response), settings and logs; for eval also eval.json (the metrics), for generate
    selected.jsonl and metrics."""
    load_checkpoint: Annotated[bool, Needs("output")] = False
    """Resume after the existing responses; starts from scratch if there are none."""
    overwrite: Annotated[bool, Needs("output"), Excludes("load_checkpoint")] = False
    """Replace existing content of the folder."""
    print_samples: int = Field(0, ge=0)
    """Print this many responses of each chunk to the terminal, with prompt and reward."""
    write_pass_rate: str | None = None
    """Write the prompt rows with their pass_rate as JSON lines, for --pass_rate_range. Requires a single model."""
    select: Literal["none", "best", "best_worst", "all"] = "none"
    """Rows for selected.jsonl: the best response per prompt, or all (sft), or the best with the worst (dpo)."""
    min_score: Annotated[float | None, Needs("select")] = None
    """Minimum score of selected responses; in a pair, of the chosen one."""


class GenerateOutputConfig(AnswersOutputConfig):
    """Output"""

    output: str
    """Folder for samples.jsonl (all responses), selected.jsonl, settings, metrics and logs."""
