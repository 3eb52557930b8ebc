"""An episode's environment: an instance of the user's class, in the episode process.

An exception in a tool becomes an observation, so that the model can learn from it. An exception in `reset`, `step` or
`get_reward`, and a broken sandbox, fail the environment.
"""

import inspect
import json
import math
import random
import re
import sys
from collections.abc import Awaitable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, SupportsFloat

from rlhf_cli.agents.environment_class import EnvironmentClass
from rlhf_cli.agents.records import Action, Calls, Finish, Reply, Reset, Text
from rlhf_cli.data.formats.conversations import ToolCall
from rlhf_cli.errors import one_line
from rlhf_cli.rewards.records import BadResult
from rlhf_cli.rewards.sandbox.run import SandboxError
from rlhf_cli.rewards.workers.worker import describe_error, own_trace

ENDED = "Error: the episode has ended."
_IN_MEMORY = re.compile(r" at 0x[0-9a-fA-F]+")
# The model makes up these names: bound them in observations.
_LONGEST_NAME = 100

if TYPE_CHECKING:
    import asyncio


class EnvironmentObject:
    """The environment for one episode. `Reset` creates the user's object."""

    def __init__(self, found: EnvironmentClass) -> None:
        self._found = found
        self._object: Any = None
        # Created for the first async method.
        self._runner: asyncio.Runner | None = None
        # Cumulative reward so far.
        self._reward = 0.0
        self._has_reward = found.gives_reward
        self._is_over = False

    def answer(self, action: Action) -> Reply:
        """Answer an action. Exceptions in user code become failures."""
        try:
            return self._answer(action)
        except BadResult as error:
            return Reply(failure=str(error))
        # BaseException: sys.exit() in user code must fail the environment, not end the process silently.
        except BaseException as error:
            return Reply(failure=describe_error(error), trace=own_trace(error))

    def close(self) -> None:
        """Call the object's `close` method, if any. Exceptions are only printed: the episode is over."""
        if self._object is None or not self._found.has_close:
            return
        try:
            self._resolve(self._object.close())
        except BaseException as error:
            print(f"{self._found.type.__name__}.close {describe_error(error)}", file=sys.stderr)

    def _answer(self, action: Action) -> Reply:
        match action:
            case Reset():
                return self._reset(action)
            case Calls(calls):
                return self._make_calls(calls)
            case Text(text):
                return self._step(text)
            case Finish():
                return self._ended(())

    def _reset(self, action: Reset) -> Reply:
        problem = self._found.columns.missing(action.row)
        if problem is not None:
            raise BadResult(problem)
        _seed_generators(action.seed)
        self._object = self._found.type()
        result = self._resolve(self._object.reset(**self._found.columns.arguments(action.row, action.seed)))
        # Gymnasium's reset returns (observation, info).
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
            result = result[0]
        return Reply(() if result is None else (as_text(result, "reset"),), reward=self._gain())

    def _make_calls(self, calls: Sequence[ToolCall]) -> Reply:
        observations = tuple(self._call(call) for call in calls)
        return self._ended(observations) if self._is_done() else Reply(observations, reward=self._gain())

    def _call(self, call: ToolCall) -> str:
        if self._is_done():
            return ENDED
        if call.name not in self._found.tools:
            return unknown_tool(call.name, self._found.tools)
        method = getattr(self._object, call.name)
        signature = inspect.signature(method)
        try:
            signature.bind(**call.arguments)
        except TypeError as error:
            return f"Error: {call.name}: {one_line(error)}. Arguments: {', '.join(signature.parameters) or 'none'}"
        try:
            result = self._resolve(method(**call.arguments))
        # The sandbox is broken, not the model's code: fail the episode instead of blaming the model.
        except SandboxError:
            raise
        except BaseException as error:
            return f"Error: {one_line(error)}"
        return as_text(result, call.name)

    def _step(self, text: str) -> Reply:
        if not self._found.has_step:
            raise BadResult("has no step(text)")
        found = _step_result(self._resolve(self._object.step(text)))
        self._reward += found.reward
        reward = found.reward + (self._end() if found.is_done else 0.0)
        return replace(found, reward=reward)

    def _is_done(self) -> bool:
        """Return the attribute `done`. A method named `done` is a tool."""
        done = getattr(self._object, "done", False)
        return not callable(done) and bool(done)

    def _ended(self, observations: tuple[str, ...]) -> Reply:
        reward = self._end()
        return Reply(observations, reward=reward, is_done=True, lacks_reward=not self._has_reward)

    def _end(self) -> float:
        """End the episode once and return the remaining reward."""
        if self._is_over:
            return 0.0
        self._is_over = True
        if self._found.owns_reward:
            return self._gain_to(number(self._resolve(self._object.get_reward()), "get_reward"))
        return self._gain()

    def _gain(self) -> float:
        """Return the change in the attribute `reward`, or 0 if `get_reward` or `step` computes the reward."""
        value = getattr(self._object, "reward", None)
        if self._found.owns_reward or self._found.has_step or value is None or callable(value):
            return 0.0
        self._has_reward = True
        return self._gain_to(number(value, "reward"))

    def _gain_to(self, total: float) -> float:
        gain, self._reward = total - self._reward, total
        return gain

    def _resolve(self, result: object) -> object:
        """Await a result if necessary."""
        if not inspect.isawaitable(result):
            return result
        # Imported late: asyncio takes 40 ms per episode process, which synchronous environments do not need.
        import asyncio

        # One event loop for the whole episode: connections that the user opens in it stay valid.
        self._runner = self._runner or asyncio.Runner()
        return self._runner.run(_awaited(result))


async def _awaited(result: Awaitable[object]) -> object:
    return await result


def unknown_tool(name: str, tools: Collection[str]) -> str:
    """Build the observation for a call to an unknown tool."""
    return f"Error: there is no tool {name[:_LONGEST_NAME]!r}. Tools: {', '.join(tools) or 'none'}"


def as_text(result: object, method: str = "") -> str:
    """Convert a method's return value to observation text: "" for None, JSON if possible, else `str`.

    Raises:
        BadResult: the text contains a memory address, which differs between runs.
    """
    if result is None:
        return ""
    if not isinstance(result, str):
        try:
            result = json.dumps(result, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            kind, result = type(result).__name__, str(result)
            if _IN_MEMORY.search(result):
                raise BadResult(f"returned {kind} from {method}, which has no stable text: {result[:80]}") from None
    # Tokenizers cannot encode lone surrogates.
    return str(result).encode(errors="replace").decode()


def _step_result(result: object) -> Reply:
    """Parse any return value that `step` may have. Gymnasium's `truncated` marks the episode as truncated.

    Raises:
        BadResult: the value has an unknown form.
    """
    match result:
        case {"observation": observation, **others}:
            is_over = others.get("done") or others.get("terminated")
            return _stepped(observation, others.get("reward"), is_over, others.get("truncated"))
        case (observation, reward, done) | (observation, reward, done, dict()):
            return _stepped(observation, reward, done)
        case (observation, reward, terminated, truncated, _):
            return _stepped(observation, reward, terminated, truncated)
    raise BadResult(f"returned {type(result).__name__} from step, not (observation, reward, done)")


def _stepped(observation: object, reward: object, done: object, truncated: object = False) -> Reply:
    gain = 0.0 if reward is None else number(reward, "reward of step")
    is_truncated = bool(truncated) and not done
    is_done = bool(done) or is_truncated
    return Reply((as_text(observation, "step"),), reward=gain, is_done=is_done, is_truncated=is_truncated)


def number(value: object, origin: str) -> float:
    """Convert to a finite float; accepts NumPy scalars and tensors. Raises BadResult, which names the origin."""
    try:
        found = float(value) if isinstance(value, SupportsFloat) else math.nan
    # Arrays and tensors with more than one element raise, with different exceptions per library.
    except (TypeError, ValueError, OverflowError, RuntimeError):
        found = math.nan
    if not math.isfinite(found):
        raise BadResult(f"has the {origin} {str(value)[:40]!r}, which is not a finite number")
    return found


def _seed_generators(seed: int) -> None:
    """Seed the global random generators."""
    # Forked processes inherit the generator state, so all episodes would draw the same numbers.
    random.seed(seed)
    # Only libraries that the environment has imported. Seed ranges differ.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed % 2**63)
