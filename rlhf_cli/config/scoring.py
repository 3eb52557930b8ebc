"""Rewards: built-in functions, reward files, reward models and reward servers, and score shaping.

The table of built-in rewards is in rewards.py.
"""

import json
import math
import re
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, field_validator, model_validator

from rlhf_cli.config.base import Excludes, JsonObject, Needs, Range, SettingsGroup
from rlhf_cli.config.rewards import ENVIRONMENT, REWARD_PLUGIN, RewardCall, read_calls
from rlhf_cli.config.rollout import SamplingConfig
from rlhf_cli.config.row_rewards import fault_of_sources

REMOTE_RM_KEY = "RLHF_RM_API_KEY"
"""Environment variable with the API key of reward servers."""

JUDGE_KEY = "RLHF_JUDGE_API_KEY"
"""Environment variable with the API key of judges."""

_FIXED_BY_JUDGE = ("messages", "model", "n", "stream")
"""Keys of a request to a judge that judge_args must not change."""
_OF_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop")
_OF_MODEL = (*_OF_SAMPLING, "max_tokens", "chat_template_kwargs", "response_format")
"""Keys that judge_args may have for a judge model."""
_HOST_AND_PORT = re.compile(r"[\w.-]+:\d+(/|$)")
_STARTED = Needs("judge", ("MODEL",), when="starts_judge")
_ENDPOINTS = Needs("judge", ("http://HOST/v1",), when="asks_endpoints")

JUDGE_MAX_LEN = 8192
"""Default for judge_max_len, if the model has as many positions."""

CODE_SHARE = 0.7
"""Fraction of reward_timeout available for a response's tests, so that the worker can still report results."""


STEP_AGGREGATIONS = ("min", "prod", "last", "mean")
"""Aggregations from step probabilities to a response value."""


class RewardConfig(SettingsGroup):
    """Reward"""

    # A score combines reward functions and a reward file, which run in worker processes, ...
    reward_funcs: Annotated[list[str], REWARD_PLUGIN] = []
    """Built-in rewards to add, optionally with parameters: cosine(max_len=2048). Your own code receives a response and
    its label. by_row selects a verifier per row.
    """
    reward_weights: list[float] = []
    """Weights of reward_funcs. Default: 1."""
    reward_func: str | None = None
    """Python file with reward_func(queries, prompts, labels) -> list of floats, or FILE.py:NAME. May be a function,
    async function or class; the signatures of TRL, verl and EasyR1 are supported. Called once per prompt, in several
    processes.
    """
    reward_func_args: Annotated[JsonObject, Needs("reward_func")] = "{}"
    """Arguments for the reward file's function, as a JSON object or YAML mapping."""
    reward_func_weight: Annotated[float, Needs("reward_func")] = 1.0
    """Weight of the reward file's value."""
    reward_timeout: float = Field(30.0, gt=0)
    """Timeout in seconds per reward call. A call that exceeds it is killed and counts as failed."""
    reward_retries: int = Field(1, ge=0)
    """Retries after a failed reward. Timeouts are not retried."""
    reward_num_workers: int | None = Field(None, gt=0)
    """Number of processes for reward_funcs, and also for reward_func, each of which loads the file. Default: one per
    CPU, at most four.
    """
    reward_max_failures: float = Field(0.1, ge=0, le=1)
    """Maximum share of an iteration's rewards that may fail before the run stops. In serve-rm, of a request's rewards,
    which then returns status 500.
    """
    code_unsandboxed: Annotated[bool, Needs("reward_funcs", ("code",), when="may_run_code")] = False
    """DANGEROUS: run the model's programs as this user without the sandbox (docs/sandbox.md), for the code reward."""
    reward_key: Annotated[str | None, Needs("reward_funcs", ("by_row",), when="is_by_row")] = None
    """Column with each row's source or verifier, for by_row. Default: data_source."""
    reward_by_source: Annotated[JsonObject, Needs("reward_funcs", ("by_row",), when="is_by_row")] = "{}"
    """Verifiers by source for by_row, in addition to the built-in ones for verl data: {"my_*": "math", "mbpp":
    "code"}.
    """
    # ... a reward model, reward servers and a process reward model.
    reward_pretrain: str | None = None
    """Reward model, added to other rewards: a folder, a run of `rlhf rm`, or a Hugging Face name. It must use the
    policy's token IDs. In serve-rm it tokenizes text itself, and treats each response as finished.
    """
    reward_model_weight: Annotated[float, Needs("reward_pretrain")] = 1.0
    """Weight of the reward model's score."""
    normalize_reward: bool = False
    """Standardize reward-model scores with the mean and std stored by `rlhf rm`."""
    remote_rm_url: list[str] = []
    """Reward servers, added to other rewards and used in turn: http://HOST:PORT/get_reward of `rlhf serve-rm`. They
    receive text, and images if supported, but no tokens: a remote reward model treats truncated responses as finished.
    """
    remote_rm_weight: Annotated[float, Needs("remote_rm_url")] = 1.0
    """Weight of the reward servers' score."""
    remote_rm_timeout: Annotated[float, Needs("remote_rm_url")] = Field(20.0, gt=0)
    """Timeout per request in seconds. A server that misses it is reported and skipped until it passes a health check;
    the request goes to another server.
    """
    remote_rm_batch_size: Annotated[int, Needs("remote_rm_url")] = Field(16, gt=0)
    """Maximum responses per request to a reward server. Their grouping depends on when they finish."""
    remote_rm_api_key_env: Annotated[str, Needs("remote_rm_url")] = REMOTE_RM_KEY
    """Environment variable with the reward servers' API key. The key itself is never written."""
    judge: list[str] = []
    """Judge, added to other rewards: a chat model, which the command starts in separate engines (a folder or a Hugging
    Face name), or OpenAI-compatible chat endpoints such as http://HOST:PORT/v1, used in turn. Scores are scaled to 0 to
    1. An answer without a valid verdict is a failed reward.
    """
    judge_max_len: Annotated[int | None, _STARTED] = Field(None, gt=0)
    """Maximum tokens per question with answer. Default: 8192, or the model's positions if fewer."""
    judge_num_engines: Annotated[int | None, _STARTED] = Field(None, gt=0)
    """Number of judge engines, on separate GPUs. Default: the judge uses the rollout engines' GPUs while they sleep, if
    models and engines take turns; otherwise 1.
    """
    judge_tensor_parallel_size: Annotated[int, _STARTED] = Field(1, gt=0)
    """Tensor parallel size per judge engine."""
    judge_model: Annotated[str | None, _ENDPOINTS] = None
    """Model name in requests to judges. Default: the only model that the endpoint lists."""
    judge_weight: Annotated[float, Needs("judge")] = 1.0
    """Weight of the judges' score."""
    judge_method: Annotated[Literal["pointwise", "rubric", "pairwise", "listwise"], Needs("judge")] = "pointwise"
    """What judges decide: a score (pointwise), which criteria of the row's rubric are met (rubric), which of two
    responses to a prompt is better (pairwise), or the order of all of them (listwise).
    """
    judge_rubric_key: Annotated[str, Needs("judge_method", ("rubric",))] = "rubric"
    """Column with the rubric: a list of {"criterion": TEXT, "weight": NUMBER}, or of texts."""
    judge_template: Annotated[str | None, Needs("judge")] = None
    """Text file with the question to the judge, in which {prompt}, {label}, {row.COLUMN} and, depending on the method,
    {response}, {rubric}, {response_1}, {response_2} or {responses} are replaced. Delimiters and the format of the
    verdict are added. Default: a question for overall quality, with the label if any.
    """
    judge_score_range: Annotated[tuple[float, float], Needs("judge")] = (0.0, 10.0)
    """Lowest and highest score that a pointwise judge may give. Any other score is a failed reward."""
    judge_args: Annotated[JsonObject, Needs("judge")] = "{}"
    """Fields added to requests to judges, as a JSON object or YAML mapping, such as {"max_tokens": 2048}. null removes
    a default: "temperature": 0 and, for a judge model, the "response_format" that permits only valid verdicts. Stored
    in config.yaml: put no secrets here.
    """
    judge_timeout: Annotated[float, _ENDPOINTS] = Field(120.0, gt=0)
    """Timeout per request to a judge in seconds. A judge that misses it is reported and skipped until it passes a
    health check; the request goes to another judge.
    """
    judge_concurrency: Annotated[int, _ENDPOINTS] = Field(16, gt=0)
    """Maximum concurrent requests per judge."""
    judge_cache: Annotated[str | None, Needs("judge")] = None
    """File with verdicts by content, which runs may share: an equal question to a model of the same name is not asked
    again. On a local disk; created if missing.
    """
    judge_api_key_env: Annotated[str, _ENDPOINTS] = JUDGE_KEY
    """Environment variable with the judges' API key. The key itself is never written."""
    prm_pretrain: Annotated[str | None, Excludes("reward_pretrain")] = None
    """Process reward model, which scores steps of responses: a folder or a run of `rlhf prm`. It must use the same
    token IDs. In eval it selects among samples; in training it adds step rewards.
    """
    prm_weight: Annotated[float, Needs("prm_pretrain")] = Field(1.0, gt=0)
    """Weight of step rewards relative to the response reward."""
    prm_aggregation: Annotated[list[str], Needs("prm_pretrain")] = ["min", "prod", "last"]
    """Aggregations from step probabilities to a response value: min, prod, last, mean. prm_min@k etc. measure how often
    the highest-valued of k samples is correct.
    """
    # Score shaping, applied before advantages are computed.
    reward_clip_range: Range = None
    """Clip scores to this range before shaping, such as -10 10 for a reward model with outliers. Disabled by
    default.
    """
    overlong_buffer_len: int | None = Field(None, gt=0)
    """Number of tokens before max_new_tokens over which the score decreases linearly, by overlong_penalty_factor at the
    end.
    """
    overlong_penalty_factor: Annotated[float, Needs("overlong_buffer_len")] = Field(1.0, gt=0)
    """Penalty for a response of max_new_tokens with overlong_buffer_len."""
    stop_properly_penalty_coef: Annotated[float | None, Excludes("overlong_buffer_len")] = Field(None, le=1)
    """Score of truncated responses: this fraction of their score, or this value if it is negative."""

    @property
    def rewards(self) -> list[RewardCall]:
        """Built-in rewards with parameters."""
        return read_calls(self.reward_funcs)

    @property
    def is_by_row(self) -> bool:
        """Whether rows select their verifiers."""
        return any(call.row.by_row for call in self.rewards)

    @property
    def may_run_code(self) -> bool:
        """Whether the code reward, or a verifier selected by a row, may run programs from responses."""
        return self.is_by_row or any(call.row.runs_code for call in self.rewards)

    @property
    def starts_judge(self) -> bool:
        """Whether the judge is a model that the command starts."""
        return bool(self.judge) and "://" not in self.judge[0]

    @property
    def asks_endpoints(self) -> bool:
        """Whether judges are endpoints."""
        return bool(self.judge) and not self.starts_judge

    @property
    def judge_arguments(self) -> dict[str, object]:
        """Fields added to requests to judges."""
        return dict(json.loads(self.judge_args))

    @property
    def judge_sampling(self) -> SamplingConfig:
        """Sampling settings for a judge model, without the token limit."""
        given = {"temperature": 0, **self.judge_arguments}
        return SamplingConfig.model_validate(
            {name: given[name] for name in _OF_SAMPLING if given.get(name) is not None}
        )

    @property
    def compares_responses(self) -> bool:
        """Whether judges compare the responses to a prompt."""
        return bool(self.judge) and self.judge_method in ("pairwise", "listwise")

    @property
    def reads_rows(self) -> bool:
        """Whether a reward reads more of a row than prompt and label."""
        return self.reward_func is not None or bool(self.judge)

    @property
    def own_sources(self) -> dict[str, str]:
        """Verifier per source from the settings."""
        return dict(json.loads(self.reward_by_source))

    @property
    def has_verifier(self) -> bool:
        """Whether responses are verified as correct or wrong, not only scored."""
        return any(call.row.kind == "verifier" for call in self.rewards)

    @property
    def asks_environment(self) -> bool:
        """Whether the environment's reward is used."""
        return any(call.name == ENVIRONMENT for call in self.rewards)

    @property
    def is_given(self) -> bool:
        """Whether any response reward is set."""
        ways = (self.reward_funcs, self.reward_func, self.reward_pretrain, self.remote_rm_url, self.judge)
        return any(way not in (None, []) for way in ways)

    @property
    def has_weight(self) -> bool:
        """Whether any reward has a non-zero weight. Rewards with weight 0 are only logged."""
        others = (
            (self.reward_func, self.reward_func_weight),
            (self.reward_pretrain, self.reward_model_weight),
            (self.remote_rm_url, self.remote_rm_weight),
            (self.judge, self.judge_weight),
        )
        weights = (self.reward_weights or [1.0]) if self.reward_funcs else []
        return any(weights) or any(weight for way, weight in others if way not in (None, []))

    def require_model_to_normalize(self) -> None:
        """Raise ValueError if normalize_reward is set without a reward model.

        Online commands only print a notice: OpenRLHF scripts with a reward file also set --normalize_reward.
        """
        if self.normalize_reward and self.reward_pretrain is None:
            raise ValueError("normalize_reward requires --reward_pretrain")

    @field_validator("reward_funcs")
    @classmethod
    def _check_rewards(cls, texts: list[str]) -> list[str]:
        read_calls(texts)
        return texts

    @field_validator("remote_rm_url")
    @classmethod
    def _check_urls(cls, urls: list[str]) -> list[str]:
        for url in urls:
            # Check the form here: a wrong URL would fail only after generation.
            if problem := _url_problem(url):
                raise ValueError(f"{url!r} {problem}; use a URL such as http://10.0.0.5:5000/get_reward")
        if len(set(urls)) < len(urls):
            raise ValueError("lists a server twice")
        return urls

    @field_validator("judge")
    @classmethod
    def _check_judges(cls, urls: list[str]) -> list[str]:
        models = [url for url in urls if "://" not in url]
        if models and len(urls) > 1:
            raise ValueError(
                f"{models[0]!r} is a model, which is the only judge of a command: drop {len(urls) - 1} of the "
                f"{len(urls)} judges, or serve the models and set their URLs"
            )
        if models and _HOST_AND_PORT.match(models[0]):
            raise ValueError(f"{models[0]!r} is no URL: set http://{models[0]}")
        for url in [] if models else urls:
            if problem := _url_problem(url):
                raise ValueError(f"{url!r} {problem}; use a URL such as http://10.0.0.5:8000/v1")
        bases = [url.rstrip("/").removesuffix("/chat/completions") for url in urls]
        if len(set(bases)) < len(bases):
            raise ValueError("lists a judge twice")
        return bases

    @field_validator("judge_score_range")
    @classmethod
    def _check_score_range(cls, ends: tuple[float, float]) -> tuple[float, float]:
        if not ends[0] < ends[1] or not math.isfinite(ends[1] - ends[0]):
            raise ValueError(f"{ends[0]:g} {ends[1]:g} is no range: the first must be below the second, both finite")
        return ends

    @field_validator("judge_args")
    @classmethod
    def _check_judge_args(cls, text: str) -> str:
        if fixed := next((name for name in _FIXED_BY_JUDGE if name in json.loads(text)), None):
            raise ValueError(
                f"{fixed!r} is set by the program: drop it" + (" and set judge_model" * (fixed == "model"))
            )
        return text

    @model_validator(mode="after")
    def _check_judge_model(self) -> Self:
        if not self.starts_judge:
            return self
        given = self.judge_arguments
        if unknown := next((name for name in given if name not in _OF_MODEL), None):
            raise ValueError(f"judge_args: {unknown!r} is unknown for a judge model: use {', '.join(_OF_MODEL)}")
        if given.get("response_format") is not None:
            raise ValueError("judge_args: 'response_format' of a judge model is set by the program; null removes it")
        limit, kwargs = given.get("max_tokens", 1), given.get("chat_template_kwargs", {})
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise ValueError(f"judge_args: 'max_tokens' is {json.dumps(limit)}, not a number of tokens")
        if not isinstance(kwargs, dict):
            raise ValueError("judge_args: 'chat_template_kwargs' is not an object")
        try:
            _ = self.judge_sampling
        except ValidationError as error:
            first = error.errors()[0]
            where = "".join(f"{name!r}: " for name in first["loc"][:1])
            raise ValueError(f"judge_args: {where}{first['msg'].removeprefix('Value error, ')}") from error
        return self

    @model_validator(mode="after")
    def _check_judge_method(self) -> Self:
        if self.judge_method != "pointwise" and self.changed("judge_score_range"):
            raise ValueError(
                f"judge_score_range has no effect with judge_method {self.judge_method}, which has no scores"
            )
        return self

    @model_validator(mode="after")
    def _check_reward_weights(self) -> Self:
        if self.reward_weights and len(self.reward_weights) != len(self.reward_funcs):
            raise ValueError(
                f"reward_weights has {len(self.reward_weights)} values for {len(self.reward_funcs)} reward_funcs"
            )
        return self

    @model_validator(mode="after")
    def _check_code_timeout(self) -> Self:
        code = next((call for call in self.rewards if call.row.runs_code), None)
        # The worker's own limit must not end a response before its tests can.
        if code is not None and code.parameters["timeout"] > CODE_SHARE * self.reward_timeout:
            raise ValueError(
                f"code(timeout={code.parameters['timeout']:g}) is too long for reward_timeout {self.reward_timeout:g}: "
                f"all tests of a response get {CODE_SHARE:.0%} of that; raise reward_timeout or lower the code timeout"
            )
        return self

    @model_validator(mode="after")
    def _check_by_row(self) -> Self:
        if fault := fault_of_sources(self.own_sources):
            raise ValueError(f"reward_by_source: {fault}")
        return self

    @model_validator(mode="after")
    def _check_aggregations(self) -> Self:
        named = set(self.prm_aggregation)
        # Duplicates would give equal metrics.
        if not named or len(named) < len(self.prm_aggregation) or named - set(STEP_AGGREGATIONS):
            names = ", ".join(STEP_AGGREGATIONS)
            raise ValueError(f"prm_aggregation {','.join(self.prm_aggregation)} must list some of {names}, each once")
        return self


JUDGES = frozenset(f"reward.{name}" for name in RewardConfig.model_fields if name.startswith("judge"))
STEP_REWARDS = frozenset({"reward.prm_pretrain", "reward.prm_weight", "reward.prm_aggregation"})
SHAPING = frozenset(
    {
        "reward.reward_clip_range",
        "reward.overlong_buffer_len",
        "reward.overlong_penalty_factor",
        "reward.stop_properly_penalty_coef",
    }
)
"""Settings unsupported by some commands."""


def _url_problem(url: str) -> str:
    """Return the error in a reward server URL, or ""."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        return f"is no URL ({error})"
    if parts.scheme not in ("http", "https"):
        return "does not begin with http:// or https://"
    if not host or url != url.strip() or " " in url:
        return "names no host"
    if parts.username is not None or parts.password is not None:
        return "has a name or password in it, which would be written to config.yaml"
    return "has a query or fragment" if parts.query or parts.fragment else ""
