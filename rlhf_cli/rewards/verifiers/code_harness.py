"""The program that runs an answer's functions or the assertions on them inside the sandbox, one test after another.

Executed there as its own main program, so it imports nothing of this package. It reads JSON from standard input: the
answer's code, `tests` and which of them to begin with. For every test that ends it prints a line, the given word and
JSON `[number, result]` behind it: the value of a function as JSON text, `true` for an assertion that holds, else null.
The expected values of tests are not known here, so an answer cannot look it up; assertions have to be.
"""

import contextlib
import json
import os
import signal
import sys

Result = str | bool | None


class _Report:
    """Lines to the one who asked, apart from whatever the answer prints."""

    def __init__(self, word: str) -> None:
        self._word, self._channel = word, os.dup(1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    def __call__(self, number: int, result: Result) -> None:
        line = f"{self._word}{json.dumps([number, result])}\n".encode()
        while line:
            line = line[os.write(self._channel, line) :]


def main() -> None:
    """Load the answer, then run its tests. The number -1 stands for the loading."""
    request = json.load(sys.stdin)
    if os.access("/dev/stdin", os.W_OK) and os.path.isfile("/dev/stdin"):
        os.truncate("/dev/stdin", 0)  # the answer must not read its tests
    report = _Report(request["word"])
    names = {"__name__": "answer", "__builtins__": __builtins__}
    _limit(request["seconds"])
    with contextlib.suppress(SystemExit):  # many a program ends so; its definitions are there
        exec(compile(request["code"], "answer.py", "exec"), names)
    if "function" in request:
        _call(request, names, report)
    else:
        _assert(request, names, report)
    os._exit(0)  # whatever the answer has set up for the end


def _call(request: dict, names: dict, report: _Report) -> None:
    name = request["function"]
    owner = None if name in names else names["Solution"]
    report(-1, callable(names[name] if owner is None else getattr(owner, name)))
    for number, arguments in enumerate(request["tests"]):
        if number >= request["first"]:
            _limit(request["seconds"])
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
    """Let the kernel end this process if the next test takes longer."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)


if __name__ == "__main__":
    main()
