"""The `reasoning_gym` reward, computed by the scoring function of the dataset in the package.

Some scoring functions evaluate model output as Python or with SymPy. Here, evaluation is restricted to numbers, symbols
and common functions.
"""

import ast
import json
import sys
from collections.abc import Callable
from functools import cache, lru_cache

from rlhf_cli.config.procedural import REWARD
from rlhf_cli.data.reading.problems import dataset_of
from rlhf_cli.rewards.verifiers.builtin import NO_LABEL, Verdict, short

_OPEN, _CLOSE, _THOUGHT = "<answer>", "</answer>", "</think>"
_RIGHT = 1 - 1e-9
"""Minimum score of a correct response, allowing for rounding. Lower scores are partial credit."""
_CACHED = 64
"""Problems cached per worker, so that a group generates its problem once."""
_MAX_EXPONENT = 100

_ARITHMETIC = (
    ast.Expression,
    ast.Constant,
    ast.List,
    ast.Tuple,
    ast.Set,
    ast.Dict,
    ast.BinOp,
    ast.UnaryOp,
    ast.operator,
    ast.unaryop,
    ast.expr_context,
)
_FUNCTIONS = {
    *("sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh"),
    *("atanh", "exp", "log", "ln", "sqrt", "Abs", "erf", "Ei", "Si", "Ci", "gamma", "Integral"),
}
"""Allowed SymPy functions. Solutions in the package contain `Integral` if SymPy finds no closed form."""


def reasoning_gym(response: str, label: str | None, *, tags: int, partial: int) -> Verdict:
    """Score the content of the last `<answer>` tags, or the response after the reasoning if `tags` is 0.

    The package gives partial credit: 0.75 for -214 instead of 214. If `partial` is 0, partial credit counts as 0.
    """
    if label is None:
        return NO_LABEL
    # First the label, without generating its problem: the startup check passes empty responses for all labels.
    try:
        problem = json.loads(label)
        text, index, expected = problem[REWARD], problem["row"], problem["expected"]
    except (ValueError, KeyError, TypeError):
        return Verdict("failed", f"label {short(label)!r} is no problem of a reasoning_gym dataset")
    answer = _tagged(response) if tags else response.rpartition(_THOUGHT)[2].strip()
    if not answer:
        return Verdict("invalid", f"no {_OPEN}...{_CLOSE} in the response" if tags else "empty response")
    entry = _entry(text, index)
    if entry["answer"] != expected:
        return Verdict("failed", f"the installed reasoning_gym has another answer for problem {index} of {text}")
    try:
        score = float(_scorer(text)(answer, entry))
    except ImportError:
        raise
    # Most functions return 0 for unparsable text; a few raise.
    except Exception as error:
        return Verdict("invalid", f"{short(answer)!r} cannot be parsed ({type(error).__name__})")
    is_right = score > _RIGHT
    return Verdict("correct" if is_right else "wrong", short(answer), answer, value=score if partial else None)


def _tagged(response: str) -> str | None:
    """Return the content of the last tags, as the package's `extract_answer` reads it."""
    head, closing, _ = response.rpartition(_CLOSE)
    _, opening, content = head.rpartition(_OPEN)
    return content.strip() if closing and opening else None


@lru_cache(maxsize=_CACHED)
def _entry(text: str, index: int) -> dict[str, object]:
    return dataset_of(text)[index]


@cache
def _scorer(text: str) -> Callable[[str, dict[str, object]], float]:
    """Return the dataset's `score_answer`, restricted so that it cannot run code in responses."""
    import sympy
    from sympy.parsing.sympy_parser import parse_expr

    dataset = dataset_of(text)
    parse = _checked(parse_expr, (*_ARITHMETIC, ast.Name, ast.Call), is_algebra=True)
    # Replace names in this process, which only scores.
    sympy.parse_expr = parse
    module = sys.modules[type(dataset).__module__]
    module.eval = _checked(eval, _ARITHMETIC)  # type: ignore[attr-defined]
    if getattr(module, "parse_expr", None) is parse_expr:
        module.parse_expr = parse  # type: ignore[attr-defined]
    return dataset.score_answer


def _checked(
    evaluate: Callable[..., object], allowed: tuple[type[ast.AST], ...], *, is_algebra: bool = False
) -> Callable[..., object]:
    """Restrict `evaluate` to expressions with the `allowed` nodes. The result raises ValueError for other text."""

    def checked(text: str, *args: object, **kwargs: object) -> object:
        for node in ast.walk(ast.parse(str(text).strip(), mode="eval")):
            if not isinstance(node, allowed) or _is_unsafe(node, is_algebra=is_algebra):
                raise ValueError(f"{short(str(text))!r} is no plain expression")
        return evaluate(text, *args, **kwargs)

    return checked


def _is_unsafe(node: ast.AST, *, is_algebra: bool) -> bool:
    match node:
        case ast.Call(func=function):
            return not isinstance(function, ast.Name) or function.id not in _FUNCTIONS
        case ast.Name(id=name):
            return name.startswith("_")
        # SymPy evaluates text again.
        case ast.Constant(value=str() | bytes()):
            return is_algebra
        case ast.BinOp(op=ast.Pow(), right=exponent):
            return any(map(_grows, ast.walk(exponent)))
        case _:
            return False


def _grows(node: ast.AST) -> bool:
    """Return whether part of an exponent may produce a huge number."""
    is_large = isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value > _MAX_EXPONENT
    return is_large or isinstance(node, ast.Pow)
