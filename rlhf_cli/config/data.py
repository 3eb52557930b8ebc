"""Data sources, and how rows become conversations."""

import json
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rlhf_cli.config.base import Excludes, JsonObject, Needs, SettingsGroup
from rlhf_cli.config.plugins import Plugin, is_target

RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize"})
"""Variables of a chat template that rendering sets by itself."""

SEQUENCE_FORMATS = ("auto", "prompt_response", "messages", "sharegpt", "text")
PAIR_FORMATS = ("auto", "explicit_prompt", "shared_prompt")
LABELLED_FORMATS = ("auto", "unpaired", "preference")
STEP_FORMATS = ("auto", "stepwise", "placeholder", "prm800k", "processbench")
PROMPT_FORMATS = ("auto", "prompt", "messages", "sharegpt")
"""Names of the formats of each kind of data; a function of others makes rows that are read as by auto."""

PARAMETERS_OF_FORMAT = ("row",)


def known_format(data_format: str) -> str:
    """Return the name of the format in which rows are read; rows that a function of others made are read by auto."""
    return "auto" if is_target(data_format) else data_format


class TemplateConfig(SettingsGroup):
    """Template"""

    apply_chat_template: bool = True
    """Render rows with the tokenizer's chat template; in chat a model without one continues the text."""
    chat_template_kwargs: Annotated[JsonObject, Needs("apply_chat_template")] = "{}"
    """Variables of the chat template's own, as a JSON object: '{"enable_thinking": false}' of Qwen 3. Entries of a
    column of this name win. Who serves the model has to give the same."""
    input_template: Annotated[str | None, Needs("apply_chat_template", (False,))] = None
    """Text around a prompt without a chat template, `{}` standing for it: 'User: {}\\nAssistant:'."""
    system_prompt: Annotated[str | None, Needs("apply_chat_template")] = None
    """System message put before conversations that have none."""
    prompt_template: Annotated[str | None, Excludes("input_template"), Excludes("chat_template_kwargs")] = None
    """Jinja file that makes a prompt of {{ prompt }} in place of the chat template, or r1_zero (for base models)."""
    format_prompt: Annotated[str | None, Needs("apply_chat_template"), Excludes("prompt_template")] = None
    """Jinja file that makes the text of the last message of {{ content }}, before the chat template, as EasyR1."""

    @model_validator(mode="after")
    def _one_way_of_rendering(self) -> Self:
        if self.input_template is not None and "{}" not in self.input_template:
            raise ValueError(f"input_template {self.input_template!r} has no {{}} for the prompt")
        if taken := sorted(RESERVED & json.loads(self.chat_template_kwargs).keys()):
            raise ValueError(f"chat_template_kwargs: {taken[0]!r} is set by this program")
        return self


DEFAULT_TEMPLATE = TemplateConfig()

OF_PROMPTS = frozenset({"template.prompt_template", "template.format_prompt"})
"""Settings of templates that only commands with prompts support."""


class OfflineDataConfig(SettingsGroup):
    """Which rows are read: shared by all offline commands."""

    dataset: str
    """Training data: file, folder or Hub name[:config], with @split if needed; several separated by commas."""
    dataset_probs: str | None = None
    """Share of each of several data sets in the mixture, separated by commas: 0.3,0.7; all rows of all if not given."""
    dataset_split: str = "train"
    """Split to read if the name gives none."""
    eval_dataset: str | None = None
    """Data to evaluate on."""
    eval_split: str = "train"
    """Split of the evaluation data to read if the name gives none."""
    input_key: str | None = None
    """Column with the prompt or the messages; found by its name if not given."""
    max_len: int = Field(2048, gt=1)
    """Longest sequence in tokens, prompt and response together."""
    overlong: Literal["truncate", "drop", "error"] = "truncate"
    """Treatment of rows longer than max_len; the number of them is always reported."""
    invalid_rows: Literal["error", "drop"] = "error"
    """Treatment of rows that cannot be used; the number of dropped ones is always reported."""
    max_samples: int = Field(100_000_000, gt=0)
    """Rows read at most."""
    data_cache: str = "auto"
    """Folder with tokenised data for next runs; auto is ~/.cache/rlhf-cli/data for larger sets, off is none."""


class DataConfig(OfflineDataConfig):
    """Data"""

    data_format: Annotated[str, Plugin(SEQUENCE_FORMATS, PARAMETERS_OF_FORMAT)] = "auto"
    """How rows are read; auto decides by the columns."""
    output_key: str | None = None
    """Column with the response; found by its name if not given."""
    pretrain_mode: bool = False
    """Train on every token, not only on the assistant's."""

    @model_validator(mode="after")
    def _output_key_is_read(self) -> "DataConfig":
        if self.output_key is not None and known_format(self.data_format) not in ("auto", "prompt_response"):
            raise ValueError(
                f"output_key {self.output_key!r} names the response of data_format prompt_response, and rows are read "
                f"as {self.data_format}: leave one of them out"
            )
        return self


class PreferenceDataConfig(OfflineDataConfig):
    """Data"""

    chosen_key: str | None = None
    """Column with the better response, or the conversation with it; found by its name if not given."""
    rejected_key: str | None = None
    """Column with the worse response, or the conversation with it; found by its name if not given."""
    data_format: Annotated[str, Plugin(PAIR_FORMATS, PARAMETERS_OF_FORMAT)] = "auto"
    """Where a pair's prompt is: in its own column, or what both sides begin with; auto decides by the columns."""

    @model_validator(mode="after")
    def _prompt_is_read(self) -> "PreferenceDataConfig":
        if self.input_key is not None and self.data_format == "shared_prompt":
            raise ValueError(
                f"input_key {self.input_key!r} names the prompt of data_format explicit_prompt, and rows are read as "
                "shared_prompt: leave one of them out"
            )
        return self


KEYS_OF_LABELLED = {"unpaired": ("output_key", "label_key"), "preference": ("chosen_key", "rejected_key")}
"""Settings that name columns of only one format of labelled data."""


class LabelledDataConfig(OfflineDataConfig):
    """Data"""

    chosen_key: str | None = None
    """Column with the better response, or the conversation with it; found by its name if not given."""
    rejected_key: str | None = None
    """Column with the worse response, or the conversation with it; found by its name if not given."""
    data_format: Annotated[str, Plugin(LABELLED_FORMATS, PARAMETERS_OF_FORMAT)] = "auto"
    """How rows are read; auto decides by the columns. A pair counts as a desirable and an undesirable response."""
    output_key: str | None = None
    """Column with the response; found by its name if not given."""
    label_key: str | None = None
    """Column that marks desirable responses; found by its name if not given."""

    @model_validator(mode="after")
    def _keys_are_of_one_format(self) -> "LabelledDataConfig":
        given = {form: [key for key in keys if getattr(self, key)] for form, keys in KEYS_OF_LABELLED.items()}
        read = known_format(self.data_format)
        read = "unpaired" if read == "auto" and given["unpaired"] else read
        for form, keys in given.items():
            if keys and read not in ("auto", form):
                because = f"by {given[read][0]}" if given[read] else f"by data_format {read}"
                raise ValueError(
                    f"{keys[0]} {getattr(self, keys[0])!r} names a column of {form} rows, and {because} rows are read "
                    f"as {read}: leave one of them out"
                )
        return self


class StepDataConfig(OfflineDataConfig):
    """Data"""

    step_separator: str = Field(r"\n", min_length=1)
    """Text between the steps of a response; a typed \\n means a line break. A step's score is read where it ends."""
    placeholder_token: str = Field("ки", min_length=1)
    """Text behind each step in rows of the format placeholder; by default Math-Shepherd's. It is not trained on."""
    reward_tokens: tuple[str, str] = ("+", "-")
    """Labels of a right and of a wrong step, beside true, false and numbers from 0 to 1."""
    data_format: Annotated[str, Plugin(STEP_FORMATS, PARAMETERS_OF_FORMAT)] = "auto"
    """How rows are read; auto decides by the columns."""
    output_key: str | None = None
    """Column with the list of steps; found by its name if not given."""
    label_key: str | None = None
    """Column with the labels of the steps; found by its name if not given."""
    train_on_last_step_only: bool = False
    """Train on the last labelled step of each solution alone; evaluations read all of them."""

    @property
    def separator(self) -> str:
        """The separator with its line breaks."""
        return self.step_separator.replace("\\n", "\n")


class PromptConfig(SettingsGroup):
    """Prompts"""

    prompt_data: str
    """Prompts: file, folder or Hub name[:config], with @split if needed; several separated by commas."""
    prompt_data_probs: str | None = None
    """Share of each of several prompt sets in the mixture, separated by commas; all rows of all if not given."""
    prompt_split: str = "train"
    """Split to read if the name gives none."""
    input_key: str | None = None
    """Column with the prompt or the messages; found by its name if not given."""
    max_len: int = Field(2048, gt=1)
    """Longest sequence in tokens, prompt and response together."""
    data_format: Annotated[str, Plugin(PROMPT_FORMATS, PARAMETERS_OF_FORMAT)] = "auto"
    """How prompts are read: text in a column for it, or messages; auto decides by the columns, then row by row."""
    label_key: str | None = None
    """Column with the ground truth; found by its name if not given."""
    pass_rate_range: tuple[float, float] | None = None
    """Use only prompts whose column pass_rate (of `rlhf eval --write_pass_rate`) is in this range, ends included."""
    invalid_rows: Literal["error", "drop"] = "error"
    """Treatment of rows that cannot be used; the number of dropped ones is always reported."""
    overlong_prompts: Literal["drop", "error"] = "drop"
    """Treatment of prompts that leave no room for max_new_tokens; the number is always reported."""
    max_samples: int = Field(100_000_000, gt=0)
    """Rows read at most."""

    @model_validator(mode="after")
    def _range_of_pass_rates_is_not_empty(self) -> "PromptConfig":
        if self.pass_rate_range is not None and not 0 <= self.pass_rate_range[0] <= self.pass_rate_range[1] <= 1:
            low, high = self.pass_rate_range
            raise ValueError(f"pass_rate_range {low:g} {high:g}: two shares from 0 to 1, the smaller one first")
        return self
