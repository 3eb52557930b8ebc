"""Questions to judges about responses, and scores from their verdicts. Pure functions; the calls are in wire.py."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.rewards.judge.template import FIELDS, POINTWISE, WITH_LABEL, columns_in, filled, read_template, rules
from rlhf_cli.rewards.judge.verdicts import last_object, number_in, text_in
from rlhf_cli.rewards.judge.wire import Question
from rlhf_cli.rewards.records import BadResult, Score, ScoreRequest
from rlhf_cli.rewards.workers.pool import ItemOutcome

JUDGE_PART = "judge"
"""Component name of judges."""

_NO_LABEL = "(none)"


@dataclass(frozen=True)
class Case:
    """Questions about one or more responses, and the function from their outcomes to a score per response."""

    questions: list[Question]
    conclude: Callable[[Sequence[ItemOutcome]], list[Score]]


class Judge:
    """What to ask about responses.

    Raises UsageError on construction if the template cannot be used.
    """

    def __init__(self, config: RewardConfig) -> None:
        path = config.judge_template
        self._ends = config.judge_score_range
        self._template = None if path is None else read_template(path, FIELDS, needed="response")

    def case(self, request: ScoreRequest) -> Case:
        """Return the questions about a response."""
        template = self._template or (POINTWISE if request.label is None else WITH_LABEL)
        try:
            texts = _texts_of(request, template)
        except BadResult as error:
            failed = Score(None, "failed", f"{JUDGE_PART}: {error}", failure="unjudged")
            return Case([], lambda _: [failed])
        text, code = filled(template, texts)
        low, high = self._ends
        form = (
            "Give your reasons first. End with one JSON object and nothing after it: "
            f'{{"reason": "your reasons in one or two sentences", "score": S}}, where S is a number from {low:g} '
            f"(worst) to {high:g} (best)."
        )
        return Case([Question(f"{text.rstrip()}\n\n{rules(code, form)}", self._read)], _concluded)

    def _read(self, answer: str) -> dict[str, object]:
        verdict, (low, high) = last_object(answer), self._ends
        score = number_in(verdict, "score", self._ends)
        return {"score": (score - low) / (high - low), "reason": text_in(verdict, "reason")}


def _concluded(outcomes: Sequence[ItemOutcome]) -> list[Score]:
    (outcome,) = outcomes
    if outcome.failure is not None:
        return [failed_part(outcome)]
    return [Score(outcome.value["score"], "scored", judgements=[outcome.value])]


def failed_part(outcome: ItemOutcome) -> Score:
    """Return the score for a failed call."""
    assert outcome.failure is not None
    return Score(None, "failed", f"{JUDGE_PART} {outcome.failure.reason}", failure=outcome.failure.kind)


def _texts_of(request: ScoreRequest, template: str) -> dict[str, str]:
    """Return the texts for a template's fields. Raises BadResult if the row lacks a column."""
    row = json.loads(request.row) if request.row else {}
    texts = {
        "prompt": _conversation(row["prompt"]) if "prompt" in row else request.prompt,
        "response": _conversation(list(request.messages)) if request.messages else request.response,
        "label": _NO_LABEL if request.label is None else request.label,
    }
    for name in columns_in(template):
        column = name.partition(".")[2]
        value = row.get("columns", {}).get(column)
        if value is None:
            raise BadResult(f"the row has no {column!r}, which --judge_template shows")
        texts[name] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return texts


def _conversation(messages: str | Sequence[Mapping[str, object]]) -> str:
    """Return a prompt as text; messages with their roles, unless there is only one."""
    if isinstance(messages, str):
        return messages
    contents = [message["content"] for message in messages]
    texts = [content if isinstance(content, str) else json.dumps(content, ensure_ascii=False) for content in contents]
    if len(texts) == 1:
        return texts[0]
    return "\n\n".join(f"{message['role']}: {text}" for message, text in zip(messages, texts, strict=True))
