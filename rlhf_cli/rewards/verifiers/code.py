"""The `code` verifier: runs the last Python code block in the sandbox against the tests in the label.

The reward is the fraction of tests passed. Output is compared by lines and words, values by equality, and numbers are
not rounded. Expected output and return values never enter the sandbox.
"""

import contextlib
import json
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rlhf_cli.config.scoring import CODE_SHARE
from rlhf_cli.rewards.sandbox.run import Limits, ProgramOutcome, SandboxError, run_program
from rlhf_cli.rewards.verifiers import code_harness
from rlhf_cli.rewards.verifiers.builtin import NO_LABEL, Verdict
from rlhf_cli.rewards.verifiers.code_tests import AssertTests, FunctionTests, StdinTests, Tests, parse_tests

_PYTHON = ("python", "python3", "py")
_HARNESS = Path(code_harness.__file__).read_text()
_SIGALRM = 14

# Extra seconds per run for interpreter startup and the last test's timeout.
_SLACK = 1.0


@dataclass(frozen=True, slots=True)
class CodeLimits:
    """Limits for one response: seconds per test, memory in megabytes, and seconds for all tests."""

    timeout: float
    memory_mb: int
    total_seconds: float


def code(
    response: str, label: str | None, *, timeout: float, memory_mb: int, code_unsandboxed: bool, reward_timeout: float
) -> Verdict:
    """Run `grade` with the run's settings."""
    # Only a share of the reward timeout: the worker must return a partial result before the pool kills it.
    limits = CodeLimits(timeout, memory_mb, total_seconds=CODE_SHARE * reward_timeout)
    return grade(response, label, limits=limits, sandboxed=not code_unsandboxed)


def grade(response: str, label: str | None, *, limits: CodeLimits, sandboxed: bool) -> Verdict:
    """Grade a response. The reward is the fraction of tests passed.

    - correct: all tests pass.
    - wrong: at least one test fails. Tests that do not finish within `total_seconds` fail.
    - invalid: there is no code block.
    - failed: the label has no tests, or the sandbox broke.
    """
    if label is None:
        return NO_LABEL
    try:
        tests = parse_tests(label)
    except ValueError as error:
        return Verdict("failed", f"the label {error}")
    code = last_code_block(response)
    if code is None:
        return Verdict("invalid", "no Python code block in the response")
    grading = _Grading(code, limits, sandboxed=sandboxed)
    try:
        passed = list(grading.passed(tests))
    except SandboxError as error:
        return Verdict("failed", str(error))
    detail = f"{sum(passed)} of {len(passed)} tests passed"
    if grading.trouble:
        detail += f"; {grading.trouble}"
    return Verdict("correct" if all(passed) else "wrong", detail, value=sum(passed) / len(passed))


def last_code_block(text: str) -> str | None:
    """Return the last closed ``` block tagged as Python, or else the last untagged block, or None."""
    blocks: dict[bool, str] = {}
    fence, tag, lines = "", "", list[str]()
    for line in text.splitlines(keepends=True):
        bare = line.strip()
        ticks = bare[: len(bare) - len(bare.lstrip("`"))]
        if not fence:
            if len(ticks) >= 3 and "`" not in bare[len(ticks) :]:
                fence, tag, lines = ticks, bare[len(ticks) :].strip().partition(" ")[0].lower(), []
        elif bare == ticks and len(ticks) >= len(fence):
            if tag in ("", *_PYTHON):
                blocks[bool(tag)] = "".join(lines)
            fence = ""
        else:
            lines.append(line)
    return blocks.get(True, blocks.get(False))


def same_output(printed: str, expected: str) -> bool:
    """Return whether two outputs match line by line, ignoring whitespace and leading and trailing empty lines."""
    return _words(printed) == _words(expected)


def same_value(value: object, expected: object) -> bool:
    """Return whether two JSON values are equal. Booleans never equal numbers."""
    try:
        return _same(value, expected)
    # The value is from model code and may be nested arbitrarily deep.
    except RecursionError:
        return False


def _same(value: object, expected: object) -> bool:
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(_same, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(_same(value[key], expected[key]) for key in value)
    return isinstance(value, bool) == isinstance(expected, bool) and bool(value == expected)


def _words(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().split("\n")]


class _Grading:
    """Runs the tests for one response. `trouble` holds the first problem."""

    def __init__(self, code: str, limits: CodeLimits, *, sandboxed: bool) -> None:
        self._code, self._limits, self._sandboxed = code, limits, sandboxed
        self._deadline = time.monotonic() + limits.total_seconds
        self.trouble = ""

    def passed(self, tests: Tests) -> Iterator[bool]:
        """Yield the result for each test, in order. Raises SandboxError."""
        if isinstance(tests, StdinTests):
            for given, expected in zip(tests.inputs, tests.outputs, strict=True):
                yield self._prints(given, expected)
        elif isinstance(tests, FunctionTests):
            request: dict[str, object] = {"function": tests.name, "tests": tests.arguments}
            for result, value in zip(self._results(request, len(tests.values)), tests.values, strict=True):
                yield isinstance(result, str) and _is_value(result, value)
        else:
            assert isinstance(tests, AssertTests)
            self._code = f"{tests.prefix}\n{self._code}" if tests.prefix else self._code
            request = {"tests": tests.pieces, "places": tests.tests}
            for result in self._results(request, len(tests.tests)):
                yield result is True

    def _prints(self, given: str, expected: str) -> bool:
        outcome = self._run(self._code, given, seconds=self._limits.timeout)
        return outcome is not None and outcome.ended == "finished" and same_output(outcome.stdout, expected)

    def _results(self, request: dict[str, object], count: int) -> list[object]:
        """Return the harness's result for each test, or None if it reported none.

        If a test kills the harness, a new run continues after that test.
        """
        results: list[object] = [None] * count
        first = 0
        while first < count:
            # Unpredictable, so that model code cannot print a line that looks like a passed test.
            word = secrets.token_hex(16)
            run = {**request, "code": self._code, "word": word, "first": first, "seconds": self._limits.timeout}
            seconds = self._limits.timeout * (count - first + 1) + _SLACK
            outcome = self._run(_HARNESS, json.dumps(run), seconds=seconds)
            reported = _results_of(outcome.stdout, word) if outcome else {}
            # The code does not load, or no time is left.
            if -1 not in reported:
                break
            known = [number for number in reported if first <= number < count]
            for number in known:
                results[number] = reported[number]
            # The first unreported test killed the harness: skip it.
            first = max(known, default=first - 1) + 2
        return results

    def _run(self, program: str, stdin: str, *, seconds: float) -> ProgramOutcome | None:
        """Run a program, or return None if no time is left."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            self.trouble = self.trouble or f"all tests together exceeded {self._limits.total_seconds:g} s"
            return None
        limits = replace(Limits(), seconds=min(seconds, left), memory_bytes=self._limits.memory_mb << 20)
        outcome = run_program(program, stdin, limits=limits, sandboxed=self._sandboxed)
        self.trouble = self.trouble or _trouble(outcome)
        return outcome


def _results_of(stdout: str, word: str) -> dict[int, object]:
    """Parse results by test number."""
    results: dict[int, object] = {}
    for line in stdout.split("\n"):
        if line.startswith(word):
            # The last line may be incomplete.
            with contextlib.suppress(ValueError, RecursionError, TypeError):
                number, result = json.loads(line[len(word) :])
                results[int(number)] = result
    return results


def _is_value(text: str, expected: object) -> bool:
    """Return whether a returned JSON value equals the expected one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    # Some datasets wrap the expected value in a list.
    wrapped = isinstance(expected, list) and len(expected) == 1 and same_value(value, expected[0])
    return wrapped or same_value(value, expected)


def _trouble(outcome: ProgramOutcome) -> str:
    if outcome.ended == "finished":
        return ""
    if outcome.ended == "time" or outcome.signal == _SIGALRM:
        return "a test timed out"
    if outcome.ended == "raised":
        last = outcome.stderr.strip().rpartition("\n")[2]
        return f"it raised {last[:200]}" if last else f"it exited with code {outcome.exit_code}"
    limits = {"memory": "it exceeded the memory limit", "output": "it exceeded the output limit"}
    return limits.get(outcome.ended, "it was killed")
