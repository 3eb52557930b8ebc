"""Data sources, and conversion of rows to conversations."""

import json
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rlhf_cli.config.base import Excludes, JsonObject, Needs, SettingsGroup
from rlhf_cli.config.plugins import Plugin, is_target

RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize"})
"""Chat template variables set during rendering."""

SEQUENCE_FORMATS = ("auto", "prompt_response", "messages", "sharegpt", "text")
PAIR_FORMATS = ("auto", "explicit_prompt", "shared_prompt")
LABELLED_FORMATS = ("auto", "unpaired", "preference")
STEP_FORMATS = ("auto", "stepwise", "placeholder", "prm800k", "processbench")
PROMPT_FORMATS = ("auto", "prompt", "messages", "sharegpt")
"""Format names per kind of data. Rows converted by user code are read with auto."""

PARAMETERS_OF_FORMAT = ("row",)


def known_format(data_format: str) -> str:
    """Return the format used to read rows: auto for rows converted by user code."""
    return "auto" if is_target(data_format) else data_format


class TemplateConfig(SettingsGroup):
    """Template"""

    apply_chat_template: bool = True
    """Render rows with the tokenizer's chat template; in chat a model without one continues the text."""
    chat_template_kwargs: Annotated[JsonObject, Needs("apply_chat_template")] = "{}"
    """Chat template variables as a JSON object, such as '{"enable_thinking": false}' for Qwen 3. A column with this
    name overrides entries. Use the same variables when serving the model.
    """
    input_template: Annotated[str | None, Needs("apply_chat_template", (False,))] = None
    """Text around a prompt without a chat template, with `{}` as placeholder: 'User: {}\\nAssistant:'."""
    system_prompt: Annotated[str | None, Needs("apply_chat_template")] = None
    """System message for conversations without one."""
    prompt_template: Annotated[str | None, Excludes("input_template"), Excludes("chat_template_kwargs")] = None
    """Jinja file that renders the prompt from {{ prompt }} instead of the chat template, or r1_zero (for base
    models).
    """
    format_prompt: Annotated[str | None, Needs("apply_chat_template"), Excludes("prompt_template")] = None
    """Jinja file that reformats the last message from {{ content }} before the chat template, as in EasyR1."""

    @model_validator(mode="after")
    def _check_rendering(self) -> Self:
        if self.input_template is not None and "{}" not in self.input_template:
            raise ValueError(f"input_template {self.input_template!r} has no {{}} for the prompt")
        if taken := sorted(RESERVED & json.loads(self.chat_template_kwargs).keys()):
            raise ValueError(f"chat_template_kwargs: {taken[0]!r} is set by this program")
        return self


DEFAULT_TEMPLATE = TemplateConfig()

OF_PROMPTS = frozenset({"template.prompt_template", "template.format_prompt"})
"""Settings of templates that only commands with prompts support."""


class OfflineDataConfig(SettingsGroup):
    """Rows to load, shared by offline commands."""

    dataset: str
    """Training data: file, folder or Hub name[:config], optionally with @split. Separate several with commas."""
    dataset_probs: str | None = None
    """Mixture probabilities of several datasets, separated by commas: 0.3,0.7. Default: use all rows of all
    datasets.
    """
    dataset_split: str = "train"
    """Split to load, if the dataset name contains none."""
    eval_dataset: str | None = None
    """Evaluation data."""
    eval_split: str = "train"
    """Split of the evaluation data, if its name contains none."""
    input_key: str | None = None
    """Column with the prompt or messages. Default: detected by name."""
    max_len: int = Field(2048, gt=1)
    """Maximum sequence length in tokens, including prompt and response."""
    overlong: Literal["truncate", "drop", "error"] = "truncate"
    """How to handle rows longer than max_len. Their number is always reported."""
    invalid_rows: Literal["error", "drop"] = "error"
    """How to handle invalid rows. The number of dropped rows is always reported."""
    max_samples: int | None = Field(None, gt=0)
    """Maximum number of rows to load; all by default."""
    data_cache: str = "auto"
    """Cache folder for tokenized data. auto uses ~/.cache/rlhf-cli/data for large datasets; off disables caching."""


class DataConfig(OfflineDataConfig):
    """Data"""

    data_format: Annotated[str, Plugin(SEQUENCE_FORMATS, PARAMETERS_OF_FORMAT)] = "auto"
    """Row format. auto detects it from the columns."""
    output_key: str | None = None
    """Column with the response. Default: detected by name."""
    pretrain_mode: bool = False
    """Train on all tokens instead of only the assistant's."""

    @model_validator(mode="after")
    def _check_output_key(self) -> "DataConfig":
        if self.output_key is not None and known_format(self.data_format) not in ("auto", "prompt_response"):
            raise ValueError(
                f"output_key {self.output_key!r} names the response of data_format prompt_response, and rows are read "
                f"as {self.data_format}: leave one of them out"
            )
        return self


class PreferenceDataConfig(OfflineDataConfig):
    """Data"""

    chosen_key: str | None = None
    """Column with the chosen response or conversation. Default: detected by name."""
    rejected_key: str | None = None
    """Column with the rejected response or conversation. Default: detected by name."""
    data_format: Annotated[str, Plugin(PAIR_FORMATS, PARAMETERS_OF_FORMAT)] = "auto"
    """Position of a pair's prompt: a separate column, or the common start of both sides. auto detects it from the
    columns.
    """

    @model_validator(mode="after")
    def _check_input_key(self) -> "PreferenceDataConfig":
        if self.input_key is not None and self.data_format == "shared_prompt":
            raise ValueError(
                f"input_key {self.input_key!r} names the prompt of data_format explicit_prompt, and rows are read as "
                "shared_prompt: leave one of them out"
            )
        return self


KEYS_OF_LABELLED = {"unpaired": ("output_key", "label_key"), "preference": ("chosen_key", "rejected_key")}
"""Column settings of only one labeled data format."""


class LabelledDataConfig(OfflineDataConfig):
    """Data"""

    chosen_key: str | None = None
    """Column with the chosen response or conversation. Default: detected by name."""
    rejected_key: str | None = None
    """Column with the rejected response or conversation. Default: detected by name."""
    data_format: Annotated[str, Plugin(LABELLED_FORMATS, PARAMETERS_OF_FORMAT)] = "auto"
    """Row format. auto detects it from the columns. A pair counts as one desirable and one undesirable response."""
    output_key: str | None = None
    """Column with the response. Default: detected by name."""
    label_key: str | None = None
    """Column with the label (desirable or not). Default: detected by name."""

    @model_validator(mode="after")
    def _check_keys(self) -> "LabelledDataConfig":
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
    """Separator between the steps of a response; \\n is a line break. A step's score is read at its end."""
    placeholder_token: str = Field("ки", min_length=1)
    """Text after each step in rows with format placeholder. The default is Math-Shepherd's. It is not trained."""
    reward_tokens: tuple[str, str] = ("+", "-")
    """Labels for a correct and a wrong step, in addition to true, false, and numbers from 0 to 1."""
    data_format: Annotated[str, Plugin(STEP_FORMATS, PARAMETERS_OF_FORMAT)] = "auto"
    """Row format. auto detects it from the columns."""
    output_key: str | None = None
    """Column with the list of steps. Default: detected by name."""
    label_key: str | None = None
    """Column with the step labels. Default: detected by name."""
    train_on_last_step_only: bool = False
    """Train only on the last labeled step of each solution. Evaluations use all steps."""

    @property
    def separator(self) -> str:
        """The separator with escaped newlines resolved."""
        return self.step_separator.replace("\\n", "\n")


class PromptConfig(SettingsGroup):
    """Prompts"""

    prompt_data: str
    """Prompts: file, folder or Hub name[:config], optionally with @split. Separate several with commas."""
    prompt_data_probs: str | None = None
    """Mixture probabilities of several prompt datasets, separated by commas. Default: use all rows of all datasets."""
    prompt_split: str = "train"
    """Split to load, if the dataset name contains none."""
    input_key: str | None = None
    """Column with the prompt or messages. Default: detected by name."""
    max_len: int = Field(2048, gt=1)
    """Maximum sequence length in tokens, including prompt and response."""
    data_format: Annotated[str, Plugin(PROMPT_FORMATS, PARAMETERS_OF_FORMAT)] = "auto"
    """Prompt format: text or messages. auto detects it from the columns, then per row."""
    label_key: str | None = None
    """Column with the ground truth. Default: detected by name."""
    teacher_context_key: str | None = None
    """Column with text that only the teacher (--teacher_pretrain) reads, before the text of the last message: a
    demonstration, feedback or a hint. With the policy's own model as teacher, this is self-distillation.
    """
    pass_rate_range: tuple[float, float] | None = None
    """Use only prompts with a pass_rate (column from `rlhf eval --write_pass_rate`) in this range, inclusive."""
    invalid_rows: Literal["error", "drop"] = "error"
    """How to handle invalid rows. The number of dropped rows is always reported."""
    overlong_prompts: Literal["drop", "error"] = "drop"
    """How to handle prompts without room for max_new_tokens. Their number is always reported."""
    max_samples: int | None = Field(None, gt=0)
    """Maximum number of rows to load; all by default."""

    @model_validator(mode="after")
    def _check_pass_rate_range(self) -> "PromptConfig":
        if self.pass_rate_range is not None and not 0 <= self.pass_rate_range[0] <= self.pass_rate_range[1] <= 1:
            low, high = self.pass_rate_range
            raise ValueError(f"pass_rate_range {low:g} {high:g}: must be two ascending fractions from 0 to 1")
        return self
