"""Bounds the digits in a formula's value without evaluating it.

`10^{10^{10}}` and `1000000!` are short to write but take hours to compute: a worker that tries is killed after
`--reward_timeout`.
"""

import math

import sympy

_MAX_DIGITS = 10**6
"""Largest number that is computed, in digits: about one second on one core."""
_LOG10_2 = 0.30103
# Functions with values far longer than the arguments.
_GROWING = (sympy.factorial, sympy.binomial, sympy.gamma, sympy.FallingFactorial, sympy.RisingFactorial)
# A float64 overflows at 1.8e308.
_MAX_FLOAT_DIGITS = 300
_MAX_BINOMIAL = 10**4


def is_too_large(form: object) -> bool:
    """Return whether evaluating a parsed formula could produce more than `_MAX_DIGITS` digits."""
    if isinstance(form, sympy.MatrixBase):
        return any(map(is_too_large, form.flat()))
    return isinstance(form, sympy.Basic) and _digits(form) > _MAX_DIGITS


def _digits(form: sympy.Basic) -> float:
    """Return an upper bound for the digits in numerator plus denominator; infinity if it exceeds the limit."""
    if isinstance(form, sympy.Rational):
        return (int(form.p).bit_length() + int(form.q).bit_length()) * _LOG10_2
    if isinstance(form, sympy.Float):
        return abs(math.log10(abs(form))) + form._prec * _LOG10_2 if form else 1
    parts = [_digits(part) for part in form.args]
    if not all(part <= _MAX_DIGITS for part in parts):
        return math.inf
    if isinstance(form, sympy.Pow):
        return max(parts[0], 1) * max(1, _size(form.exp, parts[1]))
    if isinstance(form, _GROWING):
        size = max(_size(part, digits) for part, digits in zip(form.args, parts, strict=True))
        # sympy computes large binomials from all primes below the argument.
        if isinstance(form, sympy.binomial) and size > _MAX_BINOMIAL:
            return math.inf
        return size * math.log10(size + 1) if size <= _MAX_DIGITS else math.inf
    return max(1, sum(parts))


def _size(form: sympy.Basic, digits: float) -> float:
    """Return the magnitude of a value: 1 for a formula with symbols, infinity if it is too large for a float."""
    if form.free_symbols:
        return 1
    if digits > _MAX_FLOAT_DIGITS:
        return math.inf
    try:
        return abs(complex(form.evalf(15)))
    except (TypeError, ValueError, AttributeError, OverflowError):
        return math.inf
