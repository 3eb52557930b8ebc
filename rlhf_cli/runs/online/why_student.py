"""`rlhf why` for `rlhf gkd`: the divergence of a token, with the numbers filled in."""

import math
from collections.abc import Iterator, Mapping

import numpy as np

from rlhf_cli.algorithms.formulas import number
from rlhf_cli.commands.gkd import GKDConfig
from rlhf_cli.config.distillation import DistillationConfig
from rlhf_cli.data.tokenizing.decoding import text_of
from rlhf_cli.models.distillation import DIVERGENCE, TERMS
from rlhf_cli.runs.online.explained import Explained, sampled_lines, share_lines


def student_table(explained: Explained) -> Iterator[str]:
    """Yield one line per token and optimizer step."""
    for step, tokens in explained.steps.items():
        loss = _loss(explained, step)
        yield f"Optimizer step {step} of {len(explained.again.trace)}, loss {number(loss)}"
        yield "  token                     student   teacher  divergence  forward_kl  reverse_kl   share of the loss"
        for place, (text, values) in enumerate(zip(explained.texts, tokens, strict=True)):
            shown = "".join(f"{values[name]:12.4f}" for name in (DIVERGENCE, "forward_kl", "reverse_kl"))
            part = values["gradient"] * values[DIVERGENCE]
            yield (
                f"  {place:4d} {text!r:16.16}{values['logprob']:10.4f}{values['teacher']:10.4f}{shown}"
                f"{part / loss if loss else 0.0:20.3%}"
            )


def student_token(explained: Explained, token: int) -> Iterator[str]:
    """Yield everything about one token."""
    config = explained.again.run.config
    assert isinstance(config, GKDConfig)
    yield from sampled_lines(explained, token)
    for step, tokens in explained.steps.items():
        values, loss = tokens[token], _loss(explained, step)
        part = values["gradient"] * values[DIVERGENCE]
        yield ""
        yield f"Optimizer step {step} of {len(explained.again.trace)}, loss {number(loss)}"
        yield (
            f"  log-prob of the student {number(values['logprob'])}, of the teacher {number(values['teacher'])} "
            f"(temperature {number(config.rollout.temperature)})"
        )
        yield from (f"  {line}" for line in divergence_lines(config.distillation, values, _texts(explained, values)))
        yield (
            f"  forward KL(t | s) {number(values['forward_kl'])}, reverse KL(s | t) {number(values['reverse_kl'])}, "
            f"entropy of the teacher {number(values['teacher_entropy'])}"
        )
        yield (
            f"  weight in the mean: 1 / {len(explained.again.trace[step - 1][DIVERGENCE])} tokens of the step; part of "
            f"the loss {number(part)}, {part / loss if loss else 0.0:.3%}"
        )
        yield from (f"  {line}" for line in share_lines(explained, step, token))


def _loss(explained: Explained, step: int) -> float:
    """Return the loss of an optimizer step: the mean divergence over its tokens."""
    columns = explained.again.trace[step - 1]
    return float((columns[DIVERGENCE].astype(np.float64) * columns["gradient"]).sum())


def _texts(explained: Explained, values: Mapping[str, float]) -> list[str]:
    """Return the text of the token of each term."""
    tokens = [int(values[f"term_{place}_token"]) for place in range(TERMS) if f"term_{place}" in values]
    tokenizer = explained.again.run.tokenizer
    return [
        "remaining tokens" if token < 0 else repr(text_of(tokenizer, [token], skip_special_tokens=False))
        for token in tokens
    ]


def divergence_lines(settings: DistillationConfig, values: Mapping[str, float], texts: list[str]) -> Iterator[str]:
    """Yield the formula of a token's divergence, its largest terms with numbers, and the sum."""
    beta, total = settings.beta, values[DIVERGENCE]
    top = settings.teacher_top_k
    events = "all tokens" if top is None else f"the {top} top tokens of the teacher, and all remaining ones as one"
    yield f"D = {_FORMULAS.get(beta, _MIXED)}"
    yield f"beta {number(beta)}, t teacher, s student, over {events}; largest terms:"
    rest = total
    for place, text in enumerate(texts):
        term = values[f"term_{place}"]
        student, teacher = (math.exp(values[f"term_{place}_{name}"]) for name in ("student", "teacher"))
        rest -= term
        yield f"  {text}: {_filled(beta, student, teacher)} = {number(term)}"
    yield f"  all remaining terms {number(rest)}"
    yield f"D = {number(total)}"
    yield "GKD, arXiv 2306.13649, eq. 1"


_FORMULAS = {0.0: "KL(t | s) = sum t log(t / s)", 1.0: "KL(s | t) = sum s log(s / t)"}
_MIXED = "sum beta t log(t / m) + (1 - beta) s log(s / m), m = beta t + (1 - beta) s"


def _filled(beta: float, student: float, teacher: float) -> str:
    """Return a term of the divergence with the probabilities of an event."""
    s, t = number(student), number(teacher)
    if beta == 0.0:
        return f"{t} log({t} / {s})"
    if beta == 1.0:
        return f"{s} log({s} / {t})"
    m = number(beta * teacher + (1.0 - beta) * student)
    return f"{number(beta)} x {t} log({t} / {m}) + {number(1.0 - beta)} x {s} log({s} / {m})"
