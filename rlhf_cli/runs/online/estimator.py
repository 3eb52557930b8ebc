"""The advantage estimator of a run. User code is called on a made-up rollout before anything starts.

No module-level import of torch: early checks call this before anything heavy is loaded.
"""

from dataclasses import replace
from traceback import extract_tb

from rlhf_cli.algorithms.estimators.estimator import AdvantageFunction, Advantages, Estimator, Experience
from rlhf_cli.algorithms.estimators.table import ESTIMATORS
from rlhf_cli.command_table import COMMANDS, POLICY_GRADIENT
from rlhf_cli.commands.online import OnlineConfig
from rlhf_cli.config.plugins import load_target, without_folder
from rlhf_cli.errors import RunError, UsageError, one_line

_TRIED_PROMPTS = 2


def estimator_of(config: OnlineConfig) -> Estimator:
    """Return the command's estimator, or the one of `--advantage_estimator`.

    A plain function inherits the requirements of the command's estimator. Raises UsageError if user code does not fit
    the command.
    """
    row, code = ESTIMATORS[config.estimator], config.policy.advantage_estimator
    if code is None:
        return row
    loaded = load_target(code)
    own = loaded if isinstance(loaded, Estimator) else replace(row, advantages=loaded)
    if fault := _misfit(own, row):
        raise UsageError(f"--advantage_estimator {code}: {fault}")
    return replace(own, name=without_folder(code), advantages=_checked(code, own))


def tried_estimator(config: OnlineConfig) -> Estimator:
    """Return the estimator after a trial. Raises UsageError like `estimator_of`, or if user code fails on a made-up
    rollout.
    """
    estimator = estimator_of(config)
    if config.policy.advantage_estimator is not None:
        _try(estimator, config)
    return estimator


def _misfit(own: Estimator, row: Estimator) -> str | None:
    """Return why the user's estimator does not fit the command with the estimator `row`, or None."""
    if own.advantages is None:
        return "the Estimator has no function: set advantages"
    # A built-in estimator reads the command's policy settings. A new one may have no command yet.
    if own in ESTIMATORS.values() and _algorithm(own) != _algorithm(row):
        algorithms = {_algorithm(ESTIMATORS[COMMANDS[name].estimator]): name for name in POLICY_GRADIENT}
        if command := algorithms.get(_algorithm(own)):
            return f"this is the estimator of another command: use rlhf {command}"
    # The command has already parsed its critic settings, so an estimator cannot add or remove the critic here.
    if own.critic != row.critic:
        has = "trains a critic" if row.critic else "has no critic"
        fix = f"use another command, or set critic={row.critic}"
        return f"this command {has}, but the Estimator has critic={own.critic}: {fix}"
    return None


def _algorithm(estimator: Estimator) -> str:
    """Return the module of the estimator's function: one per algorithm."""
    return getattr(estimator.advantages, "__module__", "")


def _checked(code: str, own: Estimator) -> AdvantageFunction:
    """Wrap the user's function: allow it to return plain tensors, and check their shapes."""
    from torch import Tensor

    function = own.advantages
    assert function is not None

    def check(label: str, values: object, shape: tuple[int, ...], what: str) -> None:
        if not isinstance(values, Tensor) or values.shape != shape:
            found = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise RunError(
                f"--advantage_estimator {code} must return {label} of shape {tuple(shape)}, one per {what}, not {found}"
            )

    def advantages(experience: Experience, settings: object) -> Advantages:
        result = function(experience, settings)
        if not isinstance(result, Advantages):
            result = Advantages(*result) if isinstance(result, tuple) and len(result) == 2 else Advantages(result)
        tokens, responses = (int(experience.cu[-1]),), experience.groups_B.shape
        if result.per_response_B is None:
            check("advantages", result.per_token_N, tokens, "response token")
        else:
            check("per_response_B", result.per_response_B, responses, "response")
        if own.critic:
            check("returns", result.returns_N, tokens, "response token")
        return result if own.critic else replace(result, returns_N=None)

    return advantages


def _try(estimator: Estimator, config: OnlineConfig) -> None:
    """Call the user's function on a made-up rollout. Raises UsageError if it fails."""
    code = str(config.policy.advantage_estimator)
    assert estimator.advantages is not None
    try:
        settings = config.settings_of_code("advantage_estimator") or config.policy
        estimator.advantages(_made_up(config, estimator), settings)
    except RunError as error:
        raise UsageError(str(error)) from error
    except Exception as error:
        # A usage error is shown without a traceback, so name the line.
        place, _, name = code.rpartition(":")
        lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == place]
        where = f" in line {lines[-1]}" if lines else ""
        raise UsageError(
            f"--advantage_estimator {code}: {name} raises {type(error).__name__}{where} on a made-up rollout: "
            f"{one_line(error)}"
        ) from error


def _made_up(config: OnlineConfig, estimator: Estimator) -> Experience:
    """Return an experience with the columns of the run: two prompts, and responses of 1 and 2 tokens in turns."""
    import torch

    from rlhf_cli.algorithms.groups import scale_of
    from rlhf_cli.algorithms.shaping import token_rewards

    size = max(config.rollout.n_samples_per_prompt, estimator.min_group)
    rewards_B = torch.arange(_TRIED_PROMPTS * size, dtype=torch.float64) / size
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), (torch.arange(len(rewards_B)) % 2 + 1).cumsum(0)])
    rewards_N = token_rewards(rewards_B, None, cu, kl_coef=0.0)
    has_steps = config.reward.prm_pretrain is not None
    return Experience(
        shaped_N=None,
        parts=((1.0, rewards_B),) if estimator.rewards_apart else (),
        values_N=rewards_N.float() / 2 if estimator.critic else None,
        bootstrap_B=rewards_B.float() / 2 if config.critic.bootstrap_truncated else None,
        cu=cu,
        groups_B=torch.arange(_TRIED_PROMPTS).repeat_interleave(size),
        trained_B=torch.ones(len(rewards_B), dtype=torch.bool),
        greedy_B=rewards_B / 2 if estimator.greedy else None,
        # NaN marks tokens that do not end a step.
        steps_N=rewards_N.where(rewards_N > 0, float("nan")) if has_steps else None,
        step_weight=config.reward.prm_weight,
        scale=scale_of(rewards_B),
        scores_B=rewards_B,
    )
