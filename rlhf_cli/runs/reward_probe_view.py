"""Prints the results of `rlhf data --rewards`: a table with the mean reward per kind, then faults with examples."""

from collections.abc import Iterator
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from rlhf_cli.rewards.judge.judge import judgement_line
from rlhf_cli.rewards.probes.judging import Failure, Line, Scored
from rlhf_cli.rewards.probes.responses import Role
from rlhf_cli.rewards.records import Score
from rlhf_cli.runs.data_view import visible
from rlhf_cli.runs.reward_expectations import Missed
from rlhf_cli.runs.reward_probe import RewardReport, RewardTest

_SECTIONS: dict[str, tuple[Role, ...]] = {
    "Answers in these forms": ("right", "form"),
    "Right answers in other spellings": ("spelling",),
    "Wrong answers": ("wrong",),
    "Many answers": ("spray",),
    "No answer": ("junk",),
    "For information": ("other",),
}
_STYLES = {"": "", "note": "yellow", "fault": "bold red"}
_NAME_WIDTH, _PART_WIDTH = 46, 12
_MAX_CASES = 3
_SHOWN = 100
"""Characters quoted from a response."""


def show_test(test: RewardTest, console: Console) -> None:
    """Print all reports, then missed expectations."""
    for report in test.reports:
        for line in _lines(report):
            console.print(line, soft_wrap=True, highlight=False)
    for line in _expectation_lines(test):
        console.print(line, soft_wrap=True, highlight=False)


def _lines(report: RewardReport) -> Iterator[Text]:
    yield from _heading(report)
    names = list(dict.fromkeys(name for line in report.lines for name in line.parts))
    yield from _table(report.lines, names if len(names) > 1 else [])
    yield Text()
    for text in report.faults:
        yield Text("FAULT: ", "bold red").append(text, "")
    for failure in report.failures:
        yield from _failure(failure, report)
    for level in ("fault", "note"):
        for line in report.lines:
            if line.level == level:
                yield from _finding(line, report)
    for text in report.notes:
        yield Text("note: ", "yellow").append(text, "")
    if not report.num_faults:
        yield Text("no faults found")
    yield Text()


def _heading(report: RewardReport) -> Iterator[Text]:
    of = f" with verifier {report.verifier}" if report.verifier else ""
    yield Text(f"Rewards of {report.num_rows:,} of {report.num_prompts:,} prompts{of}", "bold cyan")
    if report.form is not None:
        asked = ", for which the prompts ask" if report.is_wanted else ""
        yield Text(f"  answers are written as {report.form.name}{asked}")
    if report.right is not None:
        yield Text(f"  typical reward of a right answer {report.right:g}, of a wrong one {report.wrong:g}")
    if report.agreement is not None:
        share, pairs = report.agreement.share, report.agreement.num_pairs
        yield Text(f"  agrees with the labels on {share:.1%} of {pairs:,} pairs of a right and a wrong answer")


def _table(lines: list[Line], names: list[str]) -> Iterator[Text]:
    heads = "".join(name[: _PART_WIDTH - 2].rjust(_PART_WIDTH) for name in names)
    yield Text()
    yield Text(f"{'  response':<{_NAME_WIDTH}}{'number':>8}{'paid':>8}{'reward':>10}{heads}", "bold")
    for title, roles in _SECTIONS.items():
        rows = [line for line in lines if line.role in roles]
        if rows:
            yield Text(f"  {title}", "cyan")
        for line in rows:
            yield _row(line, names)


def _row(line: Line, names: list[str]) -> Text:
    num_scored = line.count - line.num_failed
    paid = "" if line.paid is None or not num_scored else f"{100 * line.paid / num_scored:.0f} %"
    mean = "failed" if line.mean is None else f"{line.mean:.3g}"
    parts = "".join((f"{line.parts[name]:.3g}" if name in line.parts else "").rjust(_PART_WIDTH) for name in names)
    name = f"    {line.name}"
    text = Text(f"{name:<{_NAME_WIDTH}}{line.count:>8}{paid:>8}{mean:>10}{parts}")
    mark = {"": "", "note": "  note", "fault": "  FAULT"}[line.level]
    text.append(f"  {line.num_failed} FAILED" if line.num_failed else "", _STYLES["fault"])
    return text.append(mark, _STYLES[line.level])


def _failure(failure: Failure, report: RewardReport) -> Iterator[Text]:
    names = ", ".join(failure.names[:_MAX_CASES]) + (" and more" if len(failure.names) > _MAX_CASES else "")
    reason = f"no reward for {failure.count:,} responses ({names}): {visible(failure.reason)}"
    yield Text("FAULT: ", _STYLES["fault"]).append(reason, "")
    yield _case(failure.first, report)


def _finding(line: Line, report: RewardReport) -> Iterator[Text]:
    title = next(title for title, roles in _SECTIONS.items() if line.role in roles)
    mark = "FAULT" if line.level == "fault" else "note"
    yield Text(f"{mark}: ", _STYLES[line.level]).append(f'{title.lower()}, "{line.name}": {line.says}', "")
    # A note needs no proof.
    for case in line.cases[: _MAX_CASES if line.level == "fault" else 1]:
        yield _case(case, report)


def _case(case: Scored, report: RewardReport) -> Text:
    row = case.probe.row
    return Text(f"    {report.where[row]}: {_quoted_case(report.labels[row], case.probe.response, case.score)}")


def _quoted_case(label: str | None, response: str, score: Score) -> str:
    about = "" if label is None else f"label {_quoted(label)}, "
    return f"{about}response {_quoted(response)}: {_reward(score)}"


def _reward(score: Score) -> str:
    if score.value is None:
        return f"no reward, {visible(_first(score.detail))}"
    reasons = [f"{score.status}: {_first(score.detail)}"] if score.detail else []
    reasons += [f"judge: {judgement_line(judgement)}" for judgement in score.judgements]
    return f"reward {score.value:g}" + (f" ({visible('; '.join(reasons))})" if reasons else "")


def _first(detail: str) -> str:
    """Return the first line; a traceback may follow."""
    return detail.partition("\n")[0]


def _quoted(text: str) -> str:
    """Quote a text in one line, omitting the middle if it is long."""
    shown = visible(text).replace("\n", "\\n").replace("\t", "\\t")
    half = _SHOWN // 2
    return f'"{shown}"' if len(shown) <= _SHOWN else f'"{shown[:half]} ... {shown[-half:]}" ({len(text):,} characters)'


def _expectation_lines(test: RewardTest) -> Iterator[Text]:
    if not test.num_expected:
        return
    met = test.num_expected - len(test.missed)
    yield Text(f"Expectations: {met:,} of {test.num_expected:,} met", "bold cyan")
    for missed in test.missed:
        expected = missed.expected
        case = _quoted_case(expected.prompt.label, expected.response, missed.score)
        yield Text("FAULT: ", "bold red").append(f"{expected.where}: expected {expected.reward:g}; {case}", "")


def as_json(test: RewardTest) -> dict[str, object]:
    """Return all results, with the first cases per finding."""
    return {
        "faults": test.num_faults,
        "reports": [_report_json(report) for report in test.reports],
        "expected": test.num_expected,
        "missed": [_missed_json(missed) for missed in test.missed],
    }


def _report_json(report: RewardReport) -> dict[str, object]:
    return {
        "verifier": report.verifier,
        "rows": report.num_rows,
        "prompts": report.num_prompts,
        "form": None if report.form is None else report.form.name,
        "form_is_wanted": report.is_wanted,
        "right": report.right,
        "wrong": report.wrong,
        "agreement": None if report.agreement is None else asdict(report.agreement),
        "faults": report.faults,
        "notes": report.notes,
        "failures": [
            {"reason": one.reason, "names": one.names, "count": one.count, "first": _case_json(one.first, report)}
            for one in report.failures
        ],
        "responses": [
            asdict(line) | {"cases": [_case_json(one, report) for one in line.cases[:_MAX_CASES]]}
            for line in report.lines
        ],
    }


def _case_json(case: Scored, report: RewardReport) -> dict[str, object]:
    row = case.probe.row
    where = {"where": report.where[row], "label": report.labels[row]}
    return where | {"response": case.probe.response, "reward": case.score.value, "detail": case.score.detail}


def _missed_json(missed: Missed) -> dict[str, object]:
    expected = missed.expected
    return {
        "where": expected.where,
        "response": expected.response,
        "expected": expected.reward,
        "reward": missed.score.value,
        "detail": missed.score.detail,
    }
