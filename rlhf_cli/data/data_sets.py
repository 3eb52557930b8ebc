"""What the data sets of all offline commands have in common: their rows, the trial of the template, the empty table."""

from rlhf_cli.config.data import (
    DataConfig,
    LabelledDataConfig,
    OfflineDataConfig,
    PreferenceDataConfig,
    StepDataConfig,
)
from rlhf_cli.data.encoding import Encoder
from rlhf_cli.data.preparing import DataReport
from rlhf_cli.data.reading.sources import Rows, load_rows
from rlhf_cli.data.store import StoredTable
from rlhf_cli.errors import UsageError


def rows_of(
    config: DataConfig | PreferenceDataConfig | LabelledDataConfig | StepDataConfig, dataset: str, split: str, seed: int
) -> Rows:
    """Return the rows of a data set; `dataset_probs` apply if it is the settings' own."""
    probs = config.dataset_probs if dataset == config.dataset else None
    return load_rows(
        dataset,
        split=split,
        probs=probs,
        seed=seed,
        max_samples=config.max_samples,
        data_format=config.data_format,
    )


def with_tried_template(encoder: Encoder, config: OfflineDataConfig, report: DataReport) -> Encoder:
    """Return the encoder after a trial of the chat template, if one is used."""
    if config.apply_chat_template:
        report.end_of_turn = encoder.tried_template()
    return encoder


def not_empty(table: StoredTable, report: DataReport) -> StoredTable:
    """Return the table. Raise UsageError if it has no item."""
    if len(table) == 0:
        raise UsageError(f"no {report.items_are[:-1]} is left to train on: {report.summary}")
    return table
