"""Common parts of offline datasets: loading rows, template trial, and check for an empty table."""

from rlhf_cli.config.data import (
    DataConfig,
    LabelledDataConfig,
    PreferenceDataConfig,
    StepDataConfig,
    TemplateConfig,
)
from rlhf_cli.data.encoding import Encoder
from rlhf_cli.data.preparing import DataReport
from rlhf_cli.data.reading.sources import Rows, load_rows
from rlhf_cli.data.store import StoredTable
from rlhf_cli.errors import UsageError


def rows_of(
    config: DataConfig | PreferenceDataConfig | LabelledDataConfig | StepDataConfig, dataset: str, split: str, seed: int
) -> Rows:
    """Load a dataset's rows. `dataset_probs` apply only to the training dataset."""
    probs = config.dataset_probs if dataset == config.dataset else None
    return load_rows(
        dataset,
        split=split,
        probs=probs,
        seed=seed,
        max_samples=config.max_samples,
        data_format=config.data_format,
    )


def with_tried_template(encoder: Encoder, template: TemplateConfig, report: DataReport) -> Encoder:
    """Return the encoder after testing the chat template, if used."""
    if template.apply_chat_template:
        report.end_of_turn = encoder.tried_template()
    return encoder


def not_empty(table: StoredTable, report: DataReport) -> StoredTable:
    """Return the table. Raises UsageError if it is empty."""
    if len(table) == 0:
        raise UsageError(f"no {report.items_are[:-1]} remains for training: {report.summary}")
    return table
