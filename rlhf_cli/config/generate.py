"""Output and selection of the responses of generate and eval."""

from typing import Annotated, Literal

from rlhf_cli.config.base import Excludes, Needs, SettingsGroup


class AnswersOutputConfig(SettingsGroup):
    """Output"""

    output: str | None = None
    """Folder for samples.jsonl (every response), settings and logs, with eval.json (the figures) of eval, or
    selected.jsonl and metrics of generate."""
    load_checkpoint: Annotated[bool, Needs("output")] = False
    """Continue behind the responses that are there; starts fresh if there is nothing to continue."""
    overwrite: Annotated[bool, Needs("output"), Excludes("load_checkpoint")] = False
    """Replace the folder's contents from an earlier time."""
    write_pass_rate: str | None = None
    """JSON lines with the rows of the prompts and their pass_rate, for --pass_rate_range; of a single model."""
    select: Literal["none", "best", "best_worst", "all"] = "none"
    """Rows of selected.jsonl: the best response to a prompt or all of them (sft), or the best with the worst (dpo)."""
    min_score: Annotated[float | None, Needs("select")] = None
    """Responses below this score are not selected; in a pair it is the chosen one that has to reach it."""


class GenerateOutputConfig(AnswersOutputConfig):
    """Output"""

    output: str
    """Folder for samples.jsonl (every response), selected.jsonl, settings, metrics and logs."""
