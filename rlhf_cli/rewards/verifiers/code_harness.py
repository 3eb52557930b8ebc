"""Test harness that runs inside the sandbox: calls functions from the response, or executes assertions on them.

It runs as the main program, so it imports nothing from this package.

- Input: JSON on stdin with the response's code, `tests`, and the first test to run.
- Output: one line per finished test, the given word followed by JSON `[number, result]`. The result is a function's
  return value as JSON text, `true` for an assertion that holds, or null.

Expected return values are not passed in, so a response cannot read them. Assertions contain theirs.
"""

import contextlib
import json
import os
import signal
import sys

Result = str | bool | None


class _Report:
    """Writes results to the original stdout. The response's own output is discarded."""

    def __init__(self, word: str) -> None:
        self._word, self._channel = word, os.dup(1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    def __call__(self, number: int, result: Result) -> None:
        # os.write may write only a part.
        line = f"{self._word}{json.dumps([number, result])}\n".encode()
        while line:
            line = line[os.write(self._channel, line) :]


def main() -> None:
    """Load the response's code, then run the tests. The number -1 reports a successful load."""
    request = json.load(sys.stdin)
    # The code must not read the tests from stdin.
    if os.access("/dev/stdin", os.W_OK) and os.path.isfile("/dev/stdin"):
        os.truncate("/dev/stdin", 0)
    report = _Report(request["word"])
    names = {"__name__": "answer", "__builtins__": __builtins__}
    _limit(request["seconds"])
    # Scripts often end with sys.exit(), after they have defined everything.
    with contextlib.suppress(SystemExit):
        exec(compile(request["code"], "answer.py", "exec"), names)
    if "function" in request:
        _call(request, names, report)
    else:
        _assert(request, names, report)
    # Skips exit handlers and non-daemon threads from the response's code.
    os._exit(0)


def _call(request: dict, names: dict, report: _Report) -> None:
    name = request["function"]
    owner = None if name in names else names["Solution"]
    report(-1, callable(names[name] if owner is None else getattr(owner, name)))
    for number, arguments in enumerate(request["tests"]):
        if number >= request["first"]:
            _limit(request["seconds"])
            # A new `Solution` per test, so that no state is carried over.
            try:
                function = names[name] if owner is None else getattr(owner(), name)
                report(number, json.dumps(function(*arguments)))
            except BaseException:
                report(number, None)


def _assert(request: dict, names: dict, report: _Report) -> None:
    report(-1, True)
    numbers = {place: number for number, place in enumerate(request["places"])}
    for place, piece in enumerate(request["tests"]):
        number = numbers.get(place)
        # Only tests are skipped. Statements between them prepare the ones that follow.
        if number is not None and number < request["first"]:
            continue
        _limit(request["seconds"])
        try:
            exec(compile(piece, "test.py", "exec"), names)
            passed = True
        except BaseException:
            passed = False
        if number is not None:
            report(number, passed or None)


def _limit(seconds: float) -> None:
    """Let the kernel kill this process if the next test takes longer."""
    # The default action kills. A Python handler would not run while C code holds the GIL, and the code may have
    # installed one.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)


if __name__ == "__main__":
    main()
