"""Test parsing for coding tasks, in the label formats that datasets use.

A label is one of:

- JSON `{"inputs": [...], "outputs": [...]}`: a program that reads the input and prints the output.
- The same with `"fn_name"`: a function with these arguments and return values.
- A JSON list of Python snippets with assertions.
- Python code: each top-level assertion is a test.
- Skywork-OR1: snippets under `"assert_case"`, or a function `check` under `"test_code"` with its argument under
  `"entry_point"`.
"""

import ast
import json
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class StdinTests:
    """Program input and expected output for each test."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FunctionTests:
    """Function (or method of a class `Solution`), with arguments and expected return value for each test."""

    name: str
    arguments: tuple[list[object], ...]
    values: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class AssertTests:
    """Python snippets in execution order. `tests` holds the indices of tests; other snippets are setup code."""

    pieces: tuple[str, ...]
    tests: tuple[int, ...]
    prefix: str = ""
    """Code that runs before the response's code, such as imports."""


Tests = StdinTests | FunctionTests | AssertTests


def parse_tests(label: str) -> Tests:
    """Parse tests from a label. Raises ValueError, whose message completes the sentence "the label ..."."""
    try:
        content = json.loads(label)
    except (ValueError, RecursionError):
        return _of_text(label)
    if isinstance(content, dict):
        return _of_pairs(content)
    if isinstance(content, list) and all(isinstance(piece, str) for piece in content):
        return _of_pieces(content)
    if isinstance(content, str):
        return _of_text(content)
    raise ValueError('is neither {"inputs": [...], "outputs": [...]} nor a list of assertions nor Python')


def _of_pairs(content: dict[str, Any]) -> Tests:
    if isinstance(content.get("assert_case"), list):
        return _of_pieces(list(map(str, content["assert_case"])))
    if "test_code" in content and "entry_point" in content:
        tests = _of_text(f"{content['test_code']}\ncheck({content['entry_point']})")
        return replace(tests, prefix=str(content.get("import_prefix") or ""))
    inputs, outputs, name = (content.get(key) for key in ("inputs", "outputs", "fn_name"))
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise ValueError(f"has no lists 'inputs' and 'outputs'; keys: {', '.join(map(repr, content)) or 'none'}")
    if len(inputs) != len(outputs):
        raise ValueError(f"has {len(inputs)} inputs and {len(outputs)} outputs")
    if not inputs:
        raise ValueError("has no tests: 'inputs' is empty")
    if name:
        return _of_function(str(name), inputs, outputs)
    return StdinTests(tuple(map(_text, inputs)), tuple(map(_text, outputs)))


def _text(value: object) -> str:
    """Return program input or output as text; datasets store text or a list of lines."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise ValueError(f"has a test that is not text: {json.dumps(value)[:60]}")
    return value


def _of_function(name: str, inputs: list[Any], outputs: list[object]) -> FunctionTests:
    """Build function tests. Arguments are a list, or text with one JSON value per line and a JSON return value."""
    if not name.isidentifier():
        raise ValueError(f"has fn_name {name!r}, which is not a valid function name")
    arguments, values = [], []
    for given, value in zip(inputs, outputs, strict=True):
        is_text = isinstance(given, str)
        if not is_text and not isinstance(given, list):
            raise ValueError(f"has arguments for {name} that are not a list: {json.dumps(given)[:60]}")
        try:
            arguments.append([json.loads(line) for line in given.splitlines() if line.strip()] if is_text else given)
            values.append(json.loads(value) if is_text and isinstance(value, str) else value)
        except (ValueError, RecursionError):
            raise ValueError(f"has arguments or a value for {name} that are not JSON: {str(given)[:60]!r}") from None
    return FunctionTests(name, tuple(arguments), tuple(values))


def _of_pieces(pieces: list[str]) -> AssertTests:
    if not pieces:
        raise ValueError("has no tests: it is an empty list")
    for piece in pieces:
        _parsed(piece)
    return AssertTests(tuple(pieces), tuple(range(len(pieces))))


def _of_text(text: str) -> AssertTests:
    """Split code into top-level assertions. Without any, the last statement is the test (`check(candidate)`)."""
    statements = _parsed(text).body
    if not statements:
        raise ValueError("has no tests: it is empty")
    tests = [number for number, statement in enumerate(statements) if isinstance(statement, ast.Assert)]
    if not tests and not any(isinstance(node, ast.Assert) for statement in statements for node in ast.walk(statement)):
        raise ValueError(f"has no assertions: {text[:60]!r}")
    # Unparsed statement by statement, so that a failing one does not stop the rest.
    return AssertTests(tuple(map(ast.unparse, statements)), tuple(tests or [len(statements) - 1]))


def _parsed(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ValueError(f"is neither JSON nor valid Python ({reason}): {text[:60]!r}") from None
