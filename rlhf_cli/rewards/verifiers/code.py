"""The code reward: the answer's last block of Python against the tests of the label, in the sandbox.

Its value is the share of tests passed. Output is compared line by line and word by word, values by equality; numbers
are not rounded. The expected results of tests stay outside the sandbox.
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

# Seconds of all tests together that loading and one last limit may add.
_SLACK = 1.0


@dataclass(frozen=True, slots=True)
class CodeLimits:
    """Limits for the code of one answer: seconds for each test and for all of them, megabytes of memory."""

    timeout: float
    memory_mb: int
    total_seconds: float


def code(
    response: str, label: str | None, *, timeout: float, memory_mb: int, code_unsandboxed: bool, reward_timeout: float
) -> Verdict:
    """Return `grade` with the settings of a run. A worker has to answer before its own time is over."""
    limits = CodeLimits(timeout, memory_mb, total_seconds=CODE_SHARE * reward_timeout)
    return grade(response, label, limits=limits, sandboxed=not code_unsandboxed)


def grade(response: str, label: str | None, *, limits: CodeLimits, sandboxed: bool) -> Verdict:
    """Return the verdict on an answer, whose value is the share of tests that it passes.

    correct if it passes all, wrong if it does not, invalid without a block of code; failed if the label has no tests or
    the sandbox broke. Tests that are not over within the seconds of all are not passed.
    """
    if label is None:
        return NO_LABEL
    try:
        tests = parse_tests(label)
    except ValueError as error:
        return Verdict("failed", f"the label {error}")
    code = last_code_block(response)
    if code is None:
        return Verdict("invalid", "no block of Python in the response")
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
    """Return the content of the last closed ``` block that is marked as Python, else of the last unmarked block; else
    None.
    """
    found: dict[bool, str] = {}
    fence, tag, lines = "", "", list[str]()
    for line in text.splitlines(keepends=True):
        bare = line.strip()
        ticks = bare[: len(bare) - len(bare.lstrip("`"))]
        if not fence:
            if len(ticks) >= 3 and "`" not in bare[len(ticks) :]:
                fence, tag, lines = ticks, bare[len(ticks) :].strip().partition(" ")[0].lower(), []
        elif bare == ticks and len(ticks) >= len(fence):
            if tag in ("", *_PYTHON):
                found[bool(tag)] = "".join(lines)
            fence = ""
        else:
            lines.append(line)
    return found.get(True, found.get(False))


def same_output(printed: str, expected: str) -> bool:
    """Return whether two texts have the same words in the same lines, apart from white space and empty lines around
    them.
    """
    return _words(printed) == _words(expected)


def same_value(value: object, expected: object) -> bool:
    """Return whether two JSON values are equal; a truth value is no number. Arguments nested too deep are not."""
    try:
        return _same(value, expected)
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
    """The tests of one answer, and what went wrong first."""

    def __init__(self, code: str, limits: CodeLimits, *, sandboxed: bool) -> None:
        self._code, self._limits, self._sandboxed = code, limits, sandboxed
        self._deadline = time.monotonic() + limits.total_seconds
        self.trouble = ""

    def passed(self, tests: Tests) -> Iterator[bool]:
        """Yield whether each test is passed, in order. Raise SandboxError."""
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
        """Return the harness's report on each test; None if it has none. A test that ends it is not tried again."""
        results: list[object] = [None] * count
        first = 0
        while first < count:
            word = secrets.token_hex(16)
            asked = {**request, "code": self._code, "word": word, "first": first, "seconds": self._limits.timeout}
            seconds = self._limits.timeout * (count - first + 1) + _SLACK
            outcome = self._run(_HARNESS, json.dumps(asked), seconds=seconds)
            reported = _results_of(outcome.stdout, word) if outcome else {}
            if -1 not in reported:
                break  # the answer cannot even be loaded, or there is no time left
            known = [number for number in reported if first <= number < count]
            for number in known:
                results[number] = reported[number]
            first = max(known, default=first - 1) + 2
        return results

    def _run(self, program: str, stdin: str, *, seconds: float) -> ProgramOutcome | None:
        """Return the end of a program; None if there is no time left to run it."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            self.trouble = self.trouble or f"{self._limits.total_seconds:g} s were not enough for all of them"
            return None
        limits = replace(Limits(), seconds=min(seconds, left), memory_bytes=self._limits.memory_mb << 20)
        outcome = run_program(program, stdin, limits=limits, sandboxed=self._sandboxed)
        self.trouble = self.trouble or _trouble(outcome)
        return outcome


def _results_of(stdout: str, word: str) -> dict[int, object]:
    """Return the results by the number of the test; the last line may have been cut."""
    results: dict[int, object] = {}
    for line in stdout.split("\n"):
        if line.startswith(word):
            with contextlib.suppress(ValueError, RecursionError, TypeError):
                number, result = json.loads(line[len(word) :])
                results[int(number)] = result
    return results


def _is_value(text: str, expected: object) -> bool:
    """Return whether the JSON of a returned value is the expected one, which some data sets wrap in a list."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    wrapped = isinstance(expected, list) and len(expected) == 1 and same_value(value, expected[0])
    return wrapped or same_value(value, expected)


def _trouble(outcome: ProgramOutcome) -> str:
    if outcome.ended == "finished":
        return ""
    if outcome.ended == "time" or outcome.signal == _SIGALRM:
        return "one took too long"
    if outcome.ended == "raised":
        last = outcome.stderr.strip().rpartition("\n")[2]
        return f"it raised {last[:200]}" if last else f"it ended with exit code {outcome.exit_code}"
    return {"memory": "it took too much memory", "output": "it printed too much"}.get(outcome.ended, "it was killed")
