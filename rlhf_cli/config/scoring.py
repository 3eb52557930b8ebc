"""Rewards: built-in ones, reward files, reward models and reward servers, and how their scores are shaped.

The table of built-in rewards is in rewards.py.
"""

import json
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from rlhf_cli.config.base import Excludes, JsonObject, Needs, Range, SettingsGroup
from rlhf_cli.config.rewards import ENVIRONMENT, REWARD_PLUGIN, RewardCall, read_calls
from rlhf_cli.config.row_rewards import fault_of_sources

REMOTE_RM_KEY = "RLHF_RM_API_KEY"
"""Environment variable in which reward servers and their clients look for the key."""

CODE_SHARE = 0.7
"""Share of reward_timeout that all tests of a response may take, so that its worker can still report their results."""


STEP_AGGREGATIONS = ("min", "prod", "last", "mean")
"""Names of the ways from the probabilities of steps to a value of the response."""


class RewardConfig(SettingsGroup):
    """Reward"""

    # A score is made of reward functions and a reward file, in worker processes, ...
    reward_funcs: Annotated[list[str], REWARD_PLUGIN] = []
    """Rewards, added up. Parameters stand in parentheses: cosine(max_len=2048). Code of yours gets a response and its
    label; by_row is the verifier that each row names."""
    reward_weights: list[float] = []
    """Weight of each of reward_funcs; 1 by default."""
    reward_func: str | None = None
    """Python file with reward_func(queries, prompts, labels) -> list of floats, or FILE.py:NAME, plain or async, or a
    class; TRL's, verl's and EasyR1's signatures work too. Called about one prompt at a time, by several processes."""
    reward_func_args: Annotated[JsonObject, Needs("reward_func")] = "{}"
    """Parameters of the reward file's function, as a JSON object or a YAML mapping."""
    reward_func_weight: Annotated[float, Needs("reward_func")] = 1.0
    """Weight of reward_func's value."""
    reward_timeout: float = Field(30.0, gt=0)
    """Seconds a call of a reward may take before it is killed and counts as failed."""
    reward_retries: int = Field(1, ge=0)
    """Further attempts for a reward that failed; one that took too long gets none."""
    reward_num_workers: int | None = Field(None, gt=0)
    """Processes that run reward_funcs, and as many that run reward_func, each of which loads the file; by default one
    for each CPU, but four at most."""
    reward_max_failures: float = Field(0.1, ge=0, le=1)
    """Maximum share of an iteration's rewards that may fail before the run stops; in serve-rm of a request's, which
    then gets status 500."""
    code_unsandboxed: Annotated[bool, Needs("reward_funcs", ("code",), when="may_run_code")] = False
    """DANGEROUS: the reward code runs the model's programs as this user, without the sandbox (docs/sandbox.md)."""
    reward_key: Annotated[str | None, Needs("reward_funcs", ("by_row",), when="is_by_row")] = None
    """Column that names each row's source or verifier for by_row; by default data_source."""
    reward_by_source: Annotated[JsonObject, Needs("reward_funcs", ("by_row",), when="is_by_row")] = "{}"
    """Verifiers of sources for by_row, before the built-in ones of verl's data: {"my_*": "math", "mbpp": "code"}."""
    # ... of a reward model, reward servers and a process reward model.
    reward_pretrain: str | None = None
    """Reward model, added to other rewards: a folder, a run of `rlhf rm` or a Hugging Face name. Its token ids are the
    policy's; in serve-rm it reads text with its own tokenizer, and each text as if the response had ended."""
    reward_model_weight: Annotated[float, Needs("reward_pretrain")] = 1.0
    """Weight of the reward model's score."""
    normalize_reward: bool = False
    """Take the reward model's score less its mean and by its spread, which `rlhf rm` writes into its configuration."""
    remote_rm_url: list[str] = []
    """Reward servers, added to other rewards and asked in turns: http://HOST:PORT/get_reward of `rlhf serve-rm`.
    They get texts, and pictures if they report to take some, but no tokens: a reward model there reads a response that
    was cut as if it had ended."""
    remote_rm_weight: Annotated[float, Needs("remote_rm_url")] = 1.0
    """Weight of the reward servers' score."""
    remote_rm_timeout: Annotated[float, Needs("remote_rm_url")] = Field(20.0, gt=0)
    """Seconds in which a reward server has to answer; later it is named, left out until it answers a probe, and another
    one asked."""
    remote_rm_batch_size: Annotated[int, Needs("remote_rm_url")] = Field(16, gt=0)
    """Responses in one request to a reward server at most; which come together depends on when they are finished."""
    remote_rm_api_key_env: Annotated[str, Needs("remote_rm_url")] = REMOTE_RM_KEY
    """Environment variable with the key of the reward servers; the key itself is never written anywhere."""
    prm_pretrain: Annotated[str | None, Excludes("reward_pretrain")] = None
    """Process reward model, which scores the steps of responses: a folder or a run of `rlhf prm`; same token ids. In
    eval it chooses among samples; in training it adds rewards of steps to the reward of a response."""
    prm_weight: Annotated[float, Needs("prm_pretrain")] = Field(1.0, gt=0)
    """Weight of the steps' rewards beside the reward of the whole response."""
    prm_aggregation: Annotated[list[str], Needs("prm_pretrain")] = ["min", "prod", "last"]
    """How the probabilities of its steps make a value of a response, some of min, prod, last, mean: prm_min@k and so on
    count how often the sample with the highest value of k is right."""
    # Scores are shaped before advantages are computed.
    reward_clip_range: Range = None
    """Clip scores to this range before shaping, such as -10 10 for a reward model with outliers; by default none."""
    overlong_buffer_len: int | None = Field(None, gt=0)
    """Last tokens before max_new_tokens over which the score falls in a line, by overlong_penalty_factor at the end."""
    overlong_penalty_factor: Annotated[float, Needs("overlong_buffer_len")] = Field(1.0, gt=0)
    """Score that a response of max_new_tokens loses under overlong_buffer_len."""
    stop_properly_penalty_coef: Annotated[float | None, Excludes("overlong_buffer_len")] = Field(None, le=1)
    """Score of a response that was cut: this share of its score, or this score if it is negative."""

    @property
    def rewards(self) -> list[RewardCall]:
        """The built-in rewards with their parameters."""
        return read_calls(self.reward_funcs)

    @property
    def is_by_row(self) -> bool:
        """Whether rows name their verifiers."""
        return any(call.row.by_row for call in self.rewards)

    @property
    def may_run_code(self) -> bool:
        """Whether programs in responses may be run: by the reward code, or by a verifier that a row names."""
        return self.is_by_row or any(call.row.runs_code for call in self.rewards)

    @property
    def own_sources(self) -> dict[str, str]:
        """The verifier of each source that the settings name."""
        return dict(json.loads(self.reward_by_source))

    @property
    def has_verifier(self) -> bool:
        """Whether responses are found right or wrong, and not only scored."""
        return any(call.row.kind == "verifier" for call in self.rewards)

    @property
    def asks_environment(self) -> bool:
        """Whether the reward of an episode's environment is one of the rewards."""
        return any(call.name == ENVIRONMENT for call in self.rewards)

    @property
    def is_given(self) -> bool:
        """Whether there is any reward of whole responses."""
        ways = (self.reward_funcs, self.reward_func, self.reward_pretrain, self.remote_rm_url)
        return any(way not in (None, []) for way in ways)

    @property
    def has_weight(self) -> bool:
        """Whether a reward counts: one of weight 0 is only measured."""
        others = (
            (self.reward_func, self.reward_func_weight),
            (self.reward_pretrain, self.reward_model_weight),
            (self.remote_rm_url, self.remote_rm_weight),
        )
        weights = (self.reward_weights or [1.0]) if self.reward_funcs else []
        return any(weights) or any(weight for way, weight in others if way not in (None, []))

    def require_model_to_normalize(self) -> None:
        """Raise ValueError if normalize_reward has no reward model.

        Online commands only print a notice: OpenRLHF's scripts with a reward file have --normalize_reward too.
        """
        if self.normalize_reward and self.reward_pretrain is None:
            raise ValueError("normalize_reward needs --reward_pretrain")

    @field_validator("reward_funcs")
    @classmethod
    def _rewards_exist(cls, texts: list[str]) -> list[str]:
        read_calls(texts)
        return texts

    @field_validator("remote_rm_url")
    @classmethod
    def _urls_are_whole(cls, urls: list[str]) -> list[str]:
        for url in urls:
            if problem := _url_problem(url):
                raise ValueError(f"{url!r} {problem}; it has to be like http://10.0.0.5:5000/get_reward")
        if len(set(urls)) < len(urls):
            raise ValueError("names a server twice")
        return urls

    @model_validator(mode="after")
    def _weights_fit(self) -> Self:
        if self.reward_weights and len(self.reward_weights) != len(self.reward_funcs):
            raise ValueError(
                f"reward_weights has {len(self.reward_weights)} values for {len(self.reward_funcs)} reward_funcs"
            )
        return self

    @model_validator(mode="after")
    def _code_fits(self) -> Self:
        code = next((call for call in self.rewards if call.row.runs_code), None)
        if code is not None and code.parameters["timeout"] > CODE_SHARE * self.reward_timeout:
            raise ValueError(
                f"code(timeout={code.parameters['timeout']:g}) is too long for reward_timeout {self.reward_timeout:g}: "
                f"all tests of a response get {CODE_SHARE:.0%} of that; raise the one or lower the other"
            )
        return self

    @model_validator(mode="after")
    def _rows_name_verifiers(self) -> Self:
        if fault := fault_of_sources(self.own_sources):
            raise ValueError(f"reward_by_source: {fault}")
        return self

    @model_validator(mode="after")
    def _aggregations_are_known(self) -> Self:
        named = set(self.prm_aggregation)
        if not named or len(named) < len(self.prm_aggregation) or named - set(STEP_AGGREGATIONS):
            names = ", ".join(STEP_AGGREGATIONS)
            raise ValueError(f"prm_aggregation {','.join(self.prm_aggregation)} has to name some of {names}, each once")
        return self


STEP_REWARDS = frozenset({"reward.prm_pretrain", "reward.prm_weight", "reward.prm_aggregation"})
SHAPING = frozenset(
    {
        "reward.reward_clip_range",
        "reward.overlong_buffer_len",
        "reward.overlong_penalty_factor",
        "reward.stop_properly_penalty_coef",
    }
)
"""Settings that some commands do not support."""


def _url_problem(url: str) -> str:
    """Return the fault of a reward server's address, "" if there is none."""
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
