"""Table of built-in rewards: name, function, inputs and parameters.

The functions are in `rlhf_cli/rewards/` and imported where they run, so that importing this module is cheap.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from rlhf_cli.config.plugins import FORMS, Plugin, is_target, load_target
from rlhf_cli.errors import UsageError, did_you_mean

_Value = int | float


@dataclass(frozen=True, slots=True)
class Parameter:
    """A numeric reward parameter, an integer or float depending on `kind`."""

    default: _Value | None
    """None if it is required."""
    least: _Value | None = None
    kind: type[int] | type[float] = float

    @property
    def expected(self) -> str:
        """Description of allowed values."""
        return ("an integer" if self.kind is int else "a number") + (
            f" >= {self.least}" if self.least is not None else ""
        )

    def read(self, text: str) -> _Value:
        """Parse a value. Raises ValueError if it is not allowed."""
        value = self.kind(text)
        # The first comparison is also false for NaN.
        if not abs(value) < float("inf") or (self.least is not None and value < self.least):
            raise ValueError(text)
        return value


@dataclass(frozen=True, slots=True)
class RewardRow:
    """One reward.

    `function` is `module:name`, or the function itself in a user-defined row; parameters are passed by keyword.
    Signatures by `kind`:

    - verifier: `(response, label) -> Verdict`, in a worker process
    - text: `(response) -> float`, in a worker process; a `<think>` at the end of the prompt is prepended
    - answer: `(response, label) -> float`, in a worker process
    - length: `(request, correct) -> float`; `correct` is the first verifier's verdict, None without a verifier
    - group: `(requests, corrects) -> list of floats` for all responses to a prompt
    - episode: `(request) -> Score`, in the driver
    """

    function: str | Callable[..., object]
    kind: Literal["verifier", "text", "answer", "length", "group", "episode"]
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    needs_verdict: bool = False
    settings: tuple[str, ...] = ()
    """Run settings that are also passed by keyword."""
    by_row: bool = False
    """Whether the verifier depends on the row."""
    structured_labels: tuple[Literal["dict", "list"], ...] = ()
    """Non-text labels that it accepts, as JSON."""

    @property
    def runs_code(self) -> bool:
        """Whether it runs code written by the model."""
        return "code_unsandboxed" in self.settings and not self.by_row

    @property
    def in_worker(self) -> bool:
        """Whether it reads model text, which requires a process that can be killed."""
        return self.kind in ("verifier", "text", "answer")


def _verifier(function: str, *structured: Literal["dict", "list"]) -> RewardRow:
    return RewardRow(f"rlhf_cli.rewards.verifiers.{function}", "verifier", structured_labels=structured)


ENVIRONMENT = "environment"
"""Reward of an episode's environment."""

REWARDS: dict[str, RewardRow] = {
    "gsm8k": _verifier("builtin:gsm8k", "list"),
    "exact": _verifier("builtin:exact"),
    "boxed": _verifier("builtin:boxed", "list"),
    "math": _verifier("mathematics:math", "list"),
    "multiple_choice": RewardRow(
        "rlhf_cli.rewards.verifiers.choices:multiple_choice", "verifier", {"choices": Parameter(10, least=2, kind=int)}
    ),
    "code": RewardRow(
        "rlhf_cli.rewards.verifiers.code:code",
        "verifier",
        {"timeout": Parameter(5.0, least=0.1), "memory_mb": Parameter(512, least=64, kind=int)},
        settings=("code_unsandboxed", "reward_timeout"),
        structured_labels=("dict", "list"),
    ),
    "by_row": RewardRow(
        "rlhf_cli.rewards.verifiers.by_row:by_row",
        "verifier",
        settings=("code_unsandboxed", "reward_timeout"),
        by_row=True,
    ),
    "reasoning_gym": RewardRow(
        "rlhf_cli.rewards.verifiers.reasoning_gym:reasoning_gym",
        "verifier",
        {"tags": Parameter(1, least=0, kind=int), "partial": Parameter(1, least=0, kind=int)},
        structured_labels=("dict",),
    ),
    "format": RewardRow("rlhf_cli.rewards.format_rewards:has_format", "text"),
    "tag_count": RewardRow("rlhf_cli.rewards.format_rewards:tag_count", "text"),
    "reasoning_steps": RewardRow("rlhf_cli.rewards.format_rewards:reasoning_steps", "text"),
    "repetition_penalty": RewardRow(
        "rlhf_cli.rewards.format_rewards:repetition_penalty",
        "text",
        {"n": Parameter(3, least=1, kind=int), "max_penalty": Parameter(-0.1)},
    ),
    "cosine": RewardRow(
        "rlhf_cli.rewards.length_rewards:cosine",
        "length",
        {
            "max_len": Parameter(1000, least=1, kind=int),
            "correct_short": Parameter(1.0),
            "correct_long": Parameter(0.8),
            "wrong_short": Parameter(-0.5),
            "wrong_long": Parameter(-0.1),
        },
        needs_verdict=True,
    ),
    "soft_overlong": RewardRow(
        "rlhf_cli.rewards.length_rewards:soft_overlong",
        "length",
        {
            "max_len": Parameter(None, least=1, kind=int),
            "buffer": Parameter(None, least=1, kind=int),
            "factor": Parameter(1.0, least=0),
        },
    ),
    "length": RewardRow("rlhf_cli.rewards.length_rewards:length", "group", needs_verdict=True),
    ENVIRONMENT: RewardRow("rlhf_cli.rewards.parts:episode_part", "episode"),
}


REWARD_PLUGIN = Plugin(tuple(REWARDS), ("response", "label"), records=("RewardRow",), is_called=True)


class RewardCall(NamedTuple):
    """A reward with its parameter values.

    `name` is used in metrics; `target` refers to user code, "" for built-in rewards.
    """

    name: str
    parameters: dict[str, _Value]
    target: str = ""

    @property
    def row(self) -> RewardRow:
        """Row in the reward table, or user-defined row."""
        return row_of(self.target or self.name)


def row_of(name: str) -> RewardRow:
    """Return the row of a built-in reward, or of user code at `file.py:NAME` or `module:NAME`.

    Raises:
        UsageError: the code is not loadable or usable.
    """
    # First, because it is called for each response.
    if name in REWARDS:
        return REWARDS[name]
    found = load_target(name)
    if fault := REWARD_PLUGIN.fault_of(found):
        raise UsageError(f"{name.rpartition(':')[2]} {fault}")
    return found if isinstance(found, RewardRow) else RewardRow(found, "answer")


# These names are common in configurations of other tools, so the error names the reward to use.
_NAMES_ELSEWHERE = {"accuracy": "math", "accuracy_reward": "math"}
"""Reward names in other tools: math-verify comparison in Open R1 and TRL."""

_CALL = re.compile(r"(?P<name>\w+|[^()]+:\w+)\s*(?:\((?P<given>[^()]*)\))?")


def read_call(text: str) -> RewardCall:
    """Parse a reward such as `cosine(max_len=2048)`, with default parameters. Raises ValueError with the reason."""
    match = _CALL.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not NAME or NAME(PARAMETER=NUMBER, ...); in a YAML file it needs quotes")
    place, _, name = match["name"].rpartition(":")
    row = _row(match["name"])
    given = _given(name, row, match["given"] or "")
    if missing := [key for key, parameter in row.parameters.items() if parameter.default is None and key not in given]:
        example = ", ".join(f"{key}=..." for key in missing)
        raise ValueError(f"{name} needs a value for {' and '.join(missing)}: {name}({example})")
    defaults = {key: parameter.default for key, parameter in row.parameters.items() if parameter.default is not None}
    return RewardCall(name, defaults | given, match["name"] if place else "")


def _row(name: str) -> RewardRow:
    """Return the row of a name or user code. Raises ValueError if it is unknown."""
    if is_target(name):
        try:
            return row_of(name)
        except UsageError as error:
            raise ValueError(str(error)) from error
    if name not in REWARDS:
        near = f" (it is {_NAMES_ELSEWHERE[name]} here)" if name in _NAMES_ELSEWHERE else did_you_mean(name, REWARDS)
        raise ValueError(f"there is no reward {name!r}{near}: {', '.join(REWARDS)}, or {FORMS}")
    return REWARDS[name]


def read_calls(texts: Iterable[str]) -> list[RewardCall]:
    """Parse rewards to be added. Raises ValueError for duplicates, or if a reward requires a missing verifier."""
    calls = [read_call(text) for text in texts]
    names = [call.name for call in calls]
    # Equal names would have the same metric.
    if len(set(names)) < len(names):
        raise ValueError(f"a reward is listed twice: {' '.join(names)}; use a weight instead")
    blind = [call.name for call in calls if call.row.needs_verdict]
    if blind and not any(call.row.kind == "verifier" for call in calls):
        verifiers = ", ".join(name for name, row in REWARDS.items() if row.kind == "verifier")
        raise ValueError(f"{blind[0]} depends on whether an answer is right: name a verifier too ({verifiers})")
    return calls


def _given(name: str, row: RewardRow, text: str) -> dict[str, _Value]:
    given: dict[str, _Value] = {}
    # Empty parts allow a trailing comma.
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, _, written = (piece.strip() for piece in part.partition("="))
        parameter = row.parameters.get(key)
        if parameter is None:
            raise ValueError(f"{name} has no parameter {key!r}{did_you_mean(key, row.parameters)}: {_all_of(row)}")
        if key in given:
            raise ValueError(f"{name} is given {key} twice")
        try:
            given[key] = parameter.read(written)
        except ValueError:
            raise ValueError(f"{key} of {name} must be {parameter.expected}, not {written!r}") from None
    return given


def _all_of(row: RewardRow) -> str:
    return f"it takes {', '.join(row.parameters)}" if row.parameters else "it takes none"
