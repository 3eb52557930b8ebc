"""Questions to judges about responses, and scores from their verdicts. Pure functions; the calls are in wire.py."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations

from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.rewards.judge.rubrics import Item, items_of, reward_of, shown
from rlhf_cli.rewards.judge.template import columns_in, default_template, filled, read_template, rules
from rlhf_cli.rewards.judge.verdicts import (
    Form,
    Judgement,
    listwise_form,
    pairwise_form,
    pointwise_form,
    rubric_form,
)
from rlhf_cli.rewards.judge.wire import Question
from rlhf_cli.rewards.records import BadResult, Score, ScoreRequest
from rlhf_cli.rewards.workers.pool import ItemOutcome

JUDGE_PART = "judge"
"""Component name of judges."""
FLIPS = f"{JUDGE_PART}/position_flips"
"""Metric: share of a response's pairs in which the verdict depends on the order."""

_NO_LABEL = "(none)"
_ALONE = f"{JUDGE_PART}: compares the responses to a prompt, but there is only one"


@dataclass(frozen=True)
class Case:
    """Questions about one or more responses, and the function from their outcomes to a score per response."""

    questions: list[Question]
    conclude: Callable[[Sequence[ItemOutcome]], list[Score]]


class Judge:
    """What to ask about responses.

    - `by_group`: all responses to a prompt are compared in one case; otherwise each is a case.

    Raises UsageError on construction if the template cannot be used.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._method, self._ends = config.judge_method, config.judge_score_range
        self._rubric_key = config.judge_rubric_key
        self.by_group = config.compares_responses
        path = config.judge_template
        self._template = None if path is None else read_template(path, config.judge_method)

    def case(self, requests: Sequence[ScoreRequest]) -> Case:
        """Return the questions about a response, or about all responses to a prompt."""
        ask = {
            "pointwise": self._pointwise,
            "rubric": self._by_rubric,
            "pairwise": self._pairwise,
            "listwise": self._listwise,
        }[self._method]
        try:
            return ask(requests)
        except BadResult as error:
            return _without_questions([_failed(f"{JUDGE_PART}: {error}")] * len(requests))

    def trial(self, requests: Sequence[ScoreRequest]) -> Case:
        """Return a case about some of these responses to a prompt."""
        return self.case(requests if self.by_group else requests[:1])

    def fault_of(self, row: str | None) -> str:
        """Return what is wrong with the rubric of a row, or ""."""
        if self._method != "rubric":
            return ""
        try:
            self._items(_columns(row))
        except BadResult as error:
            return str(error)
        return ""

    def _pointwise(self, requests: Sequence[ScoreRequest]) -> Case:
        (request,) = requests
        question = self._question(request, {"response": _response(request)}, pointwise_form(self._ends))
        return Case([question], _scored)

    def _by_rubric(self, requests: Sequence[ScoreRequest]) -> Case:
        (request,) = requests
        items = self._items(_columns(request.row))
        texts = {"response": _response(request), "rubric": shown(items)}
        return Case([self._question(request, texts, rubric_form(len(items)))], partial(_weighed, items))

    def _pairwise(self, requests: Sequence[ScoreRequest]) -> Case:
        if len(requests) < 2:
            return _without_questions([_failed(_ALONE)])
        texts = [_response(request) for request in requests]
        # Equal responses are tied; a judge would only add noise.
        pairs = [pair for pair in combinations(range(len(texts)), 2) if texts[pair[0]] != texts[pair[1]]]
        questions = [
            self._question(requests[0], {"response_1": texts[first], "response_2": texts[second]}, pairwise_form())
            for pair in pairs
            for first, second in (pair, pair[::-1])
        ]
        return Case(questions, partial(_compared, len(texts), pairs))

    def _listwise(self, requests: Sequence[ScoreRequest]) -> Case:
        count = len(requests)
        if count < 2:
            return _without_questions([_failed(_ALONE)])
        texts = [_response(request) for request in requests]
        form = listwise_form(count)
        questions = [self._question(requests[0], {"responses": order}, form) for order in (texts, texts[::-1])]
        return Case(questions, partial(_ordered, count))

    def _question(self, request: ScoreRequest, judged: Mapping[str, str | Sequence[str]], form: Form) -> Question:
        """Return a question. Raises BadResult if the row lacks a column in the template."""
        template = self._template or default_template(self._method, has_label=request.label is not None)
        row = json.loads(request.row) if request.row else {}
        texts: dict[str, str | Sequence[str]] = {
            "prompt": _conversation(row["prompt"]) if "prompt" in row else request.prompt,
            "label": _NO_LABEL if request.label is None else request.label,
            **judged,
        }
        for name in columns_in(template):
            value = row.get("columns", {}).get(name.partition(".")[2])
            if value is None:
                raise BadResult(f"the row has no {name.partition('.')[2]!r}, which --judge_template shows")
            texts[name] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        text, code = filled(template, texts)
        return Question(f"{text.rstrip()}\n\n{rules(code, form.words)}", form.read, request.pictures, form.schema)

    def _items(self, columns: Mapping[str, object]) -> list[Item]:
        if columns.get(self._rubric_key) is None:
            raise BadResult(f"the row has no {self._rubric_key!r} (--judge_rubric_key)")
        try:
            return items_of(columns[self._rubric_key])
        except BadResult as error:
            raise BadResult(f"column {self._rubric_key!r} {error}") from None


def _without_questions(scores: list[Score]) -> Case:
    return Case([], lambda _: scores)


def _failed(detail: str) -> Score:
    return Score(None, "failed", detail, failure="unjudged")


def _failed_call(outcome: ItemOutcome, judgements: Sequence[Judgement] = ()) -> Score:
    """Return a failed score. `judgements`: those of other calls; by default, only that this call failed."""
    assert outcome.failure is not None
    detail, kind = f"{JUDGE_PART} {outcome.failure.reason}", outcome.failure.kind
    return Score(None, "failed", detail, failure=kind, judgements=list(judgements) or [_failed_judgement(outcome)])


def _failed_judgement(outcome: ItemOutcome) -> Judgement:
    assert outcome.failure is not None
    return {"failed": outcome.failure.reason}


def _scored(outcomes: Sequence[ItemOutcome]) -> list[Score]:
    (outcome,) = outcomes
    if outcome.failure is not None:
        return [_failed_call(outcome)]
    return [Score(outcome.value["score"], "scored", judgements=[outcome.value])]


def _weighed(items: Sequence[Item], outcomes: Sequence[ItemOutcome]) -> list[Score]:
    (outcome,) = outcomes
    if outcome.failure is not None:
        return [_failed_call(outcome)]
    judgements = [
        {"criterion": item.criterion, "weight": item.weight, **found}
        for item, found in zip(items, outcome.value, strict=True)
    ]
    return [Score(reward_of(items, [found["met"] for found in outcome.value]), "scored", judgements=judgements)]


def _compared(count: int, pairs: Sequence[tuple[int, int]], outcomes: Sequence[ItemOutcome]) -> list[Score]:
    """Return each response's share of wins over the others, where a tie is half a win.

    Each pair is judged in both orders, so a preference for a position cancels. A pair with a failed call does not
    count, so that a response which the judge cannot read fails by itself.
    """
    won: list[list[float]] = [[] for _ in range(count)]
    judgements: list[list[Judgement]] = [[] for _ in range(count)]
    flips: list[list[bool]] = [[] for _ in range(count)]
    failed: dict[int, ItemOutcome] = {}
    for first, second in set(combinations(range(count), 2)).difference(pairs):
        won[first].append(0.5)
        won[second].append(0.5)
    for number, (first, second) in enumerate(pairs):
        both = outcomes[2 * number : 2 * number + 2]
        if any(outcome.failure is not None for outcome in both):
            for outcome, position in zip(both, _POSITIONS, strict=True):
                if outcome.failure is not None:
                    failed[first] = failed[second] = outcome
                    fault = _failed_judgement(outcome)
                    judgements[first].append({"against": second, "shown": position, **fault})
                    judgements[second].append({"against": first, "shown": _other(position), **fault})
            continue
        # In the second order, the second response came first.
        shares = [both[0].value["won"], 1 - both[1].value["won"]]
        for place in (first, second):
            flips[place].append(shares[0] != shares[1])
        won[first].append(sum(shares) / 2)
        won[second].append(1 - sum(shares) / 2)
        for share, outcome, position in zip(shares, both, _POSITIONS, strict=True):
            reason = outcome.value["reason"]
            judgements[first].append({"against": second, "shown": position, "won": share, "reason": reason})
            judgements[second].append({"against": first, "shown": _other(position), "won": 1 - share, "reason": reason})
    return [
        Score(
            sum(won[place]) / len(won[place]),
            "scored",
            metrics={FLIPS: sum(flips[place]) / len(flips[place])} if flips[place] else {},
            judgements=judgements[place],
        )
        if won[place]
        else _failed_call(failed[place], judgements[place])
        for place in range(count)
    ]


def _ordered(count: int, outcomes: Sequence[ItemOutcome]) -> list[Score]:
    """Return 1 for the best response, 0 for the worst, evenly spaced; the mean over both orders of the responses."""
    failed = next((outcome for outcome in outcomes if outcome.failure is not None), None)
    if failed is not None:
        return [_failed_call(failed)] * count
    ranks: list[list[int]] = [[] for _ in range(count)]
    for is_reversed, outcome in enumerate(outcomes):
        for rank, position in enumerate(outcome.value["order"]):
            ranks[count - 1 - position if is_reversed else position].append(rank)
    reasons = [outcome.value["reason"] for outcome in outcomes]
    return [
        Score(
            1 - sum(own) / (len(own) * (count - 1)),
            "scored",
            judgements=[
                {"rank": rank + 1, "of": count, "reason": reason} for rank, reason in zip(own, reasons, strict=True)
            ],
        )
        for own in ranks
    ]


def _columns(row: str | None) -> dict[str, object]:
    return dict(json.loads(row).get("columns", {})) if row else {}


def _response(request: ScoreRequest) -> str:
    return _conversation(request.messages) if request.messages else request.response


def _conversation(messages: str | Sequence[Mapping[str, object]]) -> str:
    """Return a prompt or episode as text; messages with their roles, unless there is only one."""
    if isinstance(messages, str):
        return messages
    contents = [message["content"] for message in messages]
    texts = [content if isinstance(content, str) else json.dumps(content, ensure_ascii=False) for content in contents]
    if len(texts) == 1:
        return texts[0]
    return "\n\n".join(f"{message['role']}: {text}" for message, text in zip(messages, texts, strict=True))


def judgement_line(judgement: Judgement) -> str:
    """Return a judgement in one line: what was decided, and why."""
    reason = f": {judgement['reason']}" if judgement.get("reason") else ""
    match judgement:
        case {"failed": fault, "against": other, "shown": position}:
            return f"shown {position}, not compared with sample {other}: {fault}"
        case {"failed": fault}:
            return f"no verdict: {fault}"
        case {"met": met, "criterion": criterion, "weight": weight}:
            return f"{'met' if met else 'not met'}, weight {weight:g}: {criterion}{reason}"
        case {"against": other, "won": float(won), "shown": position}:
            return f"shown {position}, {_WON[won]} sample {other}{reason}"
        case {"rank": rank, "of": count}:
            return f"rank {rank} of {count}{reason}"
        case _:
            return f"score {judgement['score']:.6g}{reason}"


def _other(position: str) -> str:
    return _POSITIONS[position == _POSITIONS[0]]


_POSITIONS = ("first", "second")
_WON = {1.0: "better than", 0.0: "worse than", 0.5: "equal to"}
