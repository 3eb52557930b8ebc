"""Labels of programming tasks: the tests in them, in the formats that data sets have.

A label is text: JSON of `{"inputs": [...], "outputs": [...]}`, for a program that reads an input and prints the output;
the same with `"fn_name"`, for a function of arguments that returns a value; a JSON list of pieces of Python that
assert something; or Python itself, of which every statement that asserts is a test. Labels of Skywork-OR1 are such
pieces under `"assert_case"`, or a function `check` under `"test_code"` with its argument under `"entry_point"`.
"""

import ast
import json
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class StdinTests:
    """A program's input and expected output, test by test."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FunctionTests:
    """A function (or a method of a class `Solution`), its arguments and the value it has to return, test by test."""

    name: str
    arguments: tuple[list[object], ...]
    values: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class AssertTests:
    """Pieces of Python in the order they run; those at the places `tests` are tests, others prepare them."""

    pieces: tuple[str, ...]
    tests: tuple[int, ...]
    prefix: str = ""
    """Python that runs before the answer: imports that it may take for granted."""


Tests = StdinTests | FunctionTests | AssertTests


def parse_tests(label: str) -> Tests:
    """Return the tests of a label. Raise ValueError, whose message ends the sentence "the label ..."."""
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
        raise ValueError(f"has no lists 'inputs' and 'outputs'; it has {', '.join(map(repr, content)) or 'nothing'}")
    if len(inputs) != len(outputs):
        raise ValueError(f"has {len(inputs)} inputs and {len(outputs)} outputs")
    if not inputs:
        raise ValueError("has no tests: 'inputs' is empty")
    if name:
        return _of_function(str(name), inputs, outputs)
    return StdinTests(tuple(map(_text, inputs)), tuple(map(_text, outputs)))


def _text(value: object) -> str:
    """Return a program's input or output: text, or a list of its lines."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise ValueError(f"has a test that is no text: {json.dumps(value)[:60]}")
    return value


def _of_function(name: str, inputs: list[Any], outputs: list[object]) -> FunctionTests:
    """Return the tests of a function: arguments are a list, or text with one JSON value a line; then the value is JSON
    too.
    """
    if not name.isidentifier():
        raise ValueError(f"has fn_name {name!r}, which is no name of a function")
    arguments, values = [], []
    for given, value in zip(inputs, outputs, strict=True):
        is_text = isinstance(given, str)
        if not is_text and not isinstance(given, list):
            raise ValueError(f"has arguments of {name} that are no list: {json.dumps(given)[:60]}")
        try:
            arguments.append([json.loads(line) for line in given.splitlines() if line.strip()] if is_text else given)
            values.append(json.loads(value) if is_text and isinstance(value, str) else value)
        except (ValueError, RecursionError):
            raise ValueError(f"has arguments or a value of {name} that are no JSON: {str(given)[:60]!r}") from None
    return FunctionTests(name, tuple(arguments), tuple(values))


def _of_pieces(pieces: list[str]) -> AssertTests:
    if not pieces:
        raise ValueError("has no tests: it is an empty list")
    for piece in pieces:
        _parsed(piece)
    return AssertTests(tuple(pieces), tuple(range(len(pieces))))


def _of_text(text: str) -> AssertTests:
    """Return the top-level assertions; without any, the last statement is one (`check(candidate)`)."""
    statements = _parsed(text).body
    if not statements:
        raise ValueError("has no tests: it is empty")
    tests = [number for number, statement in enumerate(statements) if isinstance(statement, ast.Assert)]
    if not tests and not any(isinstance(node, ast.Assert) for statement in statements for node in ast.walk(statement)):
        raise ValueError(f"asserts nothing: {text[:60]!r}")
    return AssertTests(tuple(map(ast.unparse, statements)), tuple(tests or [len(statements) - 1]))


def _parsed(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ValueError(f"is neither JSON nor valid Python ({reason}): {text[:60]!r}") from None
