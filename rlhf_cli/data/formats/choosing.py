"""Selects the format per data source, when rows are loaded and in early checks of the first rows.

Imports nothing heavy, so that a wrong column is reported before model libraries are loaded.
"""

from collections.abc import Sequence

from rlhf_cli.config.data import (
    DataConfig,
    LabelledDataConfig,
    PreferenceDataConfig,
    PromptConfig,
    StepDataConfig,
    known_format,
)
from rlhf_cli.data.formats.preference import (
    LabelledFormat,
    PairColumns,
    PairFormat,
    choose_labelled_format,
    choose_pair_format,
)
from rlhf_cli.data.formats.steps import StepColumns, StepFormat, choose_step_format
from rlhf_cli.data.formats.table import Format, PromptFormat, Verifiers, choose_format, choose_prompt_format
from rlhf_cli.data.reading.columns import Columns
from rlhf_cli.data.reading.sources import Source


def sequence_formats(config: DataConfig, sources: Sequence[Source]) -> dict[str, Format]:
    """Return the example format by source name. Raises UsageError like `choose_format`."""
    wanted, data_format = Columns(config.input_key, config.output_key), known_format(config.data_format)
    return {source.name: choose_format(source, wanted, data_format=data_format) for source in sources}


def pair_formats(config: PreferenceDataConfig, sources: Sequence[Source]) -> dict[str, PairFormat]:
    """Return the pair format by source name. Raises UsageError like `choose_pair_format`."""
    wanted = PairColumns(config.input_key, config.chosen_key, config.rejected_key)
    data_format = known_format(config.data_format)
    return {source.name: choose_pair_format(source, wanted, data_format=data_format) for source in sources}


def labelled_formats(config: LabelledDataConfig, sources: Sequence[Source]) -> dict[str, LabelledFormat]:
    """Return the labeled response format by source name. Raises UsageError like `choose_labelled_format`."""
    wanted = PairColumns(config.input_key, config.chosen_key, config.rejected_key, config.output_key, config.label_key)
    data_format = known_format(config.data_format)
    return {source.name: choose_labelled_format(source, wanted, data_format=data_format) for source in sources}


def step_formats(config: StepDataConfig, sources: Sequence[Source]) -> dict[str, StepFormat]:
    """Return the solution format by source name. Raises UsageError like `choose_step_format`."""
    wanted = StepColumns(
        config.input_key, config.output_key, config.label_key, config.placeholder_token, config.reward_tokens
    )
    data_format = known_format(config.data_format)
    return {source.name: choose_step_format(source, wanted, data_format=data_format) for source in sources}


def prompt_formats(
    config: PromptConfig, sources: Sequence[Source], *, verifiers: Verifiers = lambda row: ()
) -> dict[str, PromptFormat]:
    """Return the prompt format by source name. Raises UsageError like `choose_prompt_format`."""
    wanted, data_format = Columns(config.input_key, label_key=config.label_key), known_format(config.data_format)
    return {
        source.name: choose_prompt_format(source, wanted, data_format=data_format, verifiers=verifiers)
        for source in sources
    }
