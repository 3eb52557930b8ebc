"""What an advantage estimator receives, returns and declares. Imports no torch, because help pages read the table."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_cli.config.base import SettingsGroup


@dataclass(frozen=True)
class Turns:
    """Turns in a rollout, in token order. A response without an environment is one turn.

    - `cu`: turn boundaries in tokens, int64 `[U+1]`.
    - `cu_responses`: response boundaries in turns, int64 `[B+1]`.
    - `states_U`: int64, equal for turns in a group that follow the same observation.

    Example: two episodes for a prompt, with turns of 2 and 1 tokens and a turn with 3, have `cu` [0, 2, 3, 6] and
    `cu_responses` [0, 2, 3]. Both first turns follow the prompt: `states_U` [0, 1, 0].
    """

    cu: "Tensor"
    cu_responses: "Tensor"
    states_U: "Tensor"


@dataclass(frozen=True)
class Experience:
    """Inputs for advantage estimation: all responses from a rollout, with tokens concatenated.

    - `shaped_N`: token rewards if they contain more than `scores_B`, such as a KL penalty; None if they do not. Use
      `rewards_N` or `rewards_B`.
    - `parts`: (weight, clipped values `[B]`) for each reward, for estimators with `rewards_apart`.
    - `values_N`: critic values; None without a critic.
    - `bootstrap_B`: value of the final state of each truncated response, 0 for a finished one; None treats every
      response as finished.
    - `cu`: response boundaries, int64 `[B+1]`.
    - `groups_B`: prompt index per response, int64. Group sizes may differ when samples fail.
    - `trained_B`: bool, True for responses that are trained on.
    - `greedy_B`: reward for the greedy response to the same prompt; None without greedy responses.
    - `steps_N`: step reward at the last token of each step, NaN elsewhere; None without a process reward model.
    - `step_weight`: multiplier for step advantages.
    - `scale`: score range before the KL penalty is added; None uses the range of `rewards_N`.
    - `scores_B`: shaped score per response, float64; not read if `shaped_N` is given.
    - `turns`: turn boundaries and states; None unless the estimator has `turns`.

    Example: two responses to a prompt, of 2 tokens and 1 token, with rewards 1 and 0, have `rewards_N` [0, 1, 0], `cu`
    [0, 2, 3] and `groups_B` [0, 0]: N = 3, B = 2.
    """

    shaped_N: "Tensor | None"
    parts: "tuple[tuple[float, Tensor], ...]"
    values_N: "Tensor | None"
    bootstrap_B: "Tensor | None"
    cu: "Tensor"
    groups_B: "Tensor"
    trained_B: "Tensor"
    greedy_B: "Tensor | None"
    steps_N: "Tensor | None" = None
    step_weight: float = 1.0
    scale: float | None = None
    scores_B: "Tensor | None" = None
    turns: Turns | None = None

    @cached_property
    def rewards_N(self) -> "Tensor":
        """Shaped token rewards, `[N]`."""
        from rlhf_cli.algorithms.shaping import token_rewards

        if self.shaped_N is not None:
            return self.shaped_N
        assert self.scores_B is not None, "there are no rewards"
        return token_rewards(self.scores_B, None, self.cu, kl_coef=0.0)

    @property
    def rewards_B(self) -> "Tensor":
        """Total reward per response; 0 for one without trained tokens."""
        from rlhf_cli.algorithms.ragged import segment_lengths, segment_sum

        # Arrays over the tokens of all responses cost the driver seconds per iteration.
        if self.shaped_N is not None or self.scores_B is None:
            return segment_sum(self.rewards_N, self.cu)
        return self.scores_B.where(segment_lengths(self.cu) > 0, 0.0)


@dataclass(frozen=True)
class Advantages:
    """What an estimator returns for a rollout.

    - `per_token_N`: one advantage per response token, `[N]`.
    - `returns_N`: targets for the critic, `[N]`; None without one.
    - `metrics`: numbers to log as `advantage/NAME`.
    - `per_response_B`: one advantage for all tokens of a response, `[B]`, instead of `per_token_N`.

    Example: RLOO on two responses to a prompt, of 2 tokens and 1 token, with rewards 1 and 0, gives `per_response_B =
    [1, -1]`, which means `per_token_N = [1, 1, -1]`.
    """

    per_token_N: "Tensor | None" = None
    returns_N: "Tensor | None" = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    per_response_B: "Tensor | None" = None

    def at_tokens(self, cu: "Tensor") -> "Tensor":
        """Return one advantage per response token, `[N]`."""
        from rlhf_cli.algorithms.ragged import segment_ids

        if self.per_token_N is not None:
            return self.per_token_N
        assert self.per_response_B is not None, "there are no advantages"
        return self.per_response_B[segment_ids(cu, int(cu[-1]))]


# (experience, the command's policy settings) -> advantages before whitening
AdvantageFunction = Callable[[Experience, Any], Advantages]


@dataclass(frozen=True)
class Estimator:
    """How advantages are computed, and what the run must provide for it.

    - `name`: recorded in checkpoints. User code needs none: there it is the name of the file and the object.
    - `advantages`: the function; None for losses without advantages, such as a divergence. User code may also return
      `per_token_N`, or a pair with `returns_N`, instead of `Advantages`.
    - `settings`: the settings group that user code brings; its fields become flags of the command, and the function
      gets the group instead of the command's policy settings. Every field needs a default.
    - `critic`: whether a critic is placed, evaluated and trained.
    - `min_group`: minimum number of responses per prompt.
    - `whiten`: whether to whiten advantages over the trained tokens of the rollout.
    - `greedy`: whether to generate and score a greedy response per prompt, which is not trained on.
    - `rewards_apart`: whether the estimator normalizes each reward separately instead of their sum.
    - `steps`: "tokens" adds step rewards to token rewards, "groups" normalizes them within the group; None if step
      rewards are not supported.
    - `turns`: whether the estimator compares turns.
    - `formula`: lines with the formula of an advantage before whitening and its numbers, from (experience, settings,
      response, token), for `rlhf why`; None names only the estimator.
    """

    name: str = ""
    advantages: Callable[[Experience, Any], Any] | None = None
    settings: type["SettingsGroup"] | None = None
    critic: bool = False
    min_group: int = 1
    whiten: bool = False
    greedy: bool = False
    rewards_apart: bool = False
    steps: Literal["tokens", "groups"] | None = None
    turns: bool = False
    formula: Callable[[Experience, Any, int, int], list[str]] | None = None
