"""The environment of one episode: an object of the user's class, which answers actions. Runs in the episode's process.

An error of a tool is an observation, so that the model can learn from it. An error of `reset`, `step` or `get_reward`,
and a broken sandbox, are failures of the environment.
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
_LONGEST_NAME = 100  # characters of a tool's name that the model made up

if TYPE_CHECKING:
    import asyncio


class EnvironmentObject:
    """The object of one episode; `Reset` makes it."""

    def __init__(self, found: EnvironmentClass) -> None:
        self._found = found
        self._object: Any = None
        self._runner: asyncio.Runner | None = None  # imported when a method has to be awaited
        self._reward = 0.0  # of the episode up to now
        self._has_reward = found.gives_reward
        self._is_over = False

    def answer(self, action: Action) -> Reply:
        """Return the reply to an action. No error of the user's code is raised."""
        try:
            return self._answer(action)
        except BadResult as error:
            return Reply(failure=str(error))
        except BaseException as error:  # sys.exit() in an environment is a failure of this environment as well
            return Reply(failure=describe_error(error), trace=own_trace(error))

    def close(self) -> None:
        """Call the object's `close`, if it has one. Its errors are printed: nobody waits for them."""
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
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
            result = result[0]  # Gymnasium's (observation, info)
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
        except SandboxError:
            raise
        except BaseException as error:
            return f"Error: {one_line(error)}"
        return as_text(result, call.name)

    def _step(self, text: str) -> Reply:
        if not self._found.has_step:
            raise BadResult("has no step(text)")
        found = step_result(self._resolve(self._object.step(text)))
        self._reward += found.reward
        reward = found.reward + (self._end() if found.is_done else 0.0)
        return replace(found, reward=reward)

    def _is_done(self) -> bool:
        """Return the attribute `done`; a method of that name is a tool."""
        done = getattr(self._object, "done", False)
        return not callable(done) and bool(done)

    def _ended(self, observations: tuple[str, ...]) -> Reply:
        reward = self._end()
        return Reply(observations, reward=reward, is_done=True, lacks_reward=not self._has_reward)

    def _end(self) -> float:
        """End the episode and return the rest of the reward."""
        if self._is_over:
            return 0.0
        self._is_over = True
        if self._found.owns_reward:
            return self._gain_to(number(self._resolve(self._object.get_reward()), "get_reward"))
        return self._gain()

    def _gain(self) -> float:
        """Return the change of the attribute `reward`; 0 if the reward comes from `get_reward` or `step`."""
        value = getattr(self._object, "reward", None)
        if self._found.owns_reward or self._found.has_step or value is None or callable(value):
            return 0.0
        self._has_reward = True
        return self._gain_to(number(value, "reward"))

    def _gain_to(self, total: float) -> float:
        gain, self._reward = total - self._reward, total
        return gain

    def _resolve(self, result: object) -> object:
        """Return a result, awaited if it has to be. One event loop serves the object, so its connections stay valid."""
        if not inspect.isawaitable(result):
            return result
        import asyncio  # 40 ms that plain methods do not need

        self._runner = self._runner or asyncio.Runner()
        return self._runner.run(_awaited(result))


async def _awaited(result: Awaitable[object]) -> object:
    return await result


def unknown_tool(name: str, tools: Collection[str]) -> str:
    """Return the observation after a call of a tool that does not exist."""
    return f"Error: there is no tool {name[:_LONGEST_NAME]!r}. Tools: {', '.join(tools) or 'none'}"


def as_text(result: object, method: str = "") -> str:
    """Return a result of a method as the text of an observation: "" for None, JSON for an object that JSON can have.

    Raises:
        BadResult: the object has no text but its place in memory, which differs from run to run.
    """
    if result is None:
        return ""
    if not isinstance(result, str):
        try:
            result = json.dumps(result, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            kind, result = type(result).__name__, str(result)
            if _IN_MEMORY.search(result):
                raise BadResult(f"returned {kind} from {method}, which has no text: {result[:80]}") from None
    return str(result).encode(errors="replace").decode()  # a lone surrogate cannot be tokenised


def step_result(result: object) -> Reply:
    """Return the reply of any form that `step` may return. An end of Gymnasium that is none of the task is a limit.

    Raises:
        BadResult: it has no such form.
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
    is_cut = bool(truncated) and not done
    return Reply((as_text(observation, "step"),), reward=gain, is_done=bool(done) or is_cut, is_truncated=is_cut)


def number(value: object, origin: str) -> float:
    """Return a finite number, also one of NumPy or a tensor. Raises BadResult, which names its origin."""
    try:
        found = float(value) if isinstance(value, SupportsFloat) else math.nan
    except (TypeError, ValueError, OverflowError, RuntimeError):  # an array or a tensor of several numbers
        found = math.nan
    if not math.isfinite(found):
        raise BadResult(f"has the {origin} {str(value)[:40]!r}, which is not a finite number")
    return found


def _seed_generators(seed: int) -> None:
    """Seed the global generators, which all episodes would otherwise inherit alike or get from the machine."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed % 2**63)
