"""`rlhf data --rewards`: scores right, wrong and empty responses with the configured rewards, before any training."""

import asyncio
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import PreTrainedTokenizerBase

from rlhf_cli.commands.data import DataCommandConfig
from rlhf_cli.config.data import PromptConfig
from rlhf_cli.config.plugins import called_name
from rlhf_cli.config.row_rewards import verifier_of
from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.data.pictures.marks import TEXT_MARK
from rlhf_cli.data.preview import spread
from rlhf_cli.data.prompts import Prompt, PromptData, load_prompts
from rlhf_cli.models.tokenizers import load_tokenizer
from rlhf_cli.rewards.probes import responses
from rlhf_cli.rewards.probes.judging import (
    Agreement,
    Failure,
    Line,
    Scale,
    Scored,
    agreement_of,
    best_form,
    compares_text,
    constant_parts,
    depends_on_row,
    earning_junk,
    failures_of,
    lines_of,
    overpaid_junk,
    without_spelling_faults,
)
from rlhf_cli.rewards.probes.labels import Answer, answer_of, has_tests, sort_key, surely_differ
from rlhf_cli.rewards.probes.responses import FORMS, Form, Probe
from rlhf_cli.rewards.records import Score
from rlhf_cli.rewards.scorer import Scorer
from rlhf_cli.runs.data_preview import found_model
from rlhf_cli.runs.data_settings import settings_of
from rlhf_cli.runs.episodes import find_environment
from rlhf_cli.runs.judge_model import find_judge, started_judge
from rlhf_cli.runs.pictures import picture_reader
from rlhf_cli.runs.reward_check import check_rewards, check_with, made_up_request
from rlhf_cli.runs.reward_expectations import Expectation, Missed, read_expectations

_LONG_ROWS = 3
"""Rows with long responses, which do not depend on the label."""
_CANDIDATES = 20
"""Rows to choose wrong responses from."""
_SORTED_LABELS = 5_000
"""Most labels to sort, spread over the data, to find similar ones."""
_OPENED = "<think>"
_SOMETHING = "this"
"""Answer for rows without a label."""


@dataclass(frozen=True)
class RewardReport:
    """Result for all rows with the same verifier.

    - `verifier`: the rows' verifier under by_row, otherwise "".
    - `form`: how responses state their answer; None if no label has an answer to write. `is_wanted`: prompts ask
      for it.
    - `labels`: answer or label per row. `where`: file and line per row.
    - `right`, `wrong`: typical reward for a right and a wrong answer in this form.
    - `agreement`: with the labels, on right and wrong answers; None without them.
    - `failures`: responses without a reward.
    - `faults`, `notes`: findings not tied to a line.
    """

    verifier: str
    num_rows: int
    num_prompts: int
    labels: list[str | None]
    where: list[str]
    form: Form | None = None
    is_wanted: bool = False
    right: float | None = None
    wrong: float | None = None
    agreement: Agreement | None = None
    lines: list[Line] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def num_faults(self) -> int:
        """Total number, including failures."""
        return len(self.faults) + len(self.failures) + sum(line.level == "fault" for line in self.lines)


@dataclass(frozen=True)
class RewardTest:
    """Results for all verifiers, the number of expectations, and those that were missed."""

    reports: list[RewardReport]
    num_expected: int
    missed: list[Missed]

    @property
    def num_faults(self) -> int:
        """Number of faults, including missed expectations."""
        return sum(report.num_faults for report in self.reports) + len(self.missed)


def probe_rewards(config: DataCommandConfig) -> RewardTest:
    """Test the rewards on the prompts.

    Raises:
        UsageError: the command would reject the prompts, the rewards or their labels, or the expectations are invalid.
    """
    tokenizer = load_tokenizer(config.model)
    data = _load(config, tokenizer)
    expected = [] if config.test.expect is None else read_expectations(config.test.expect, data)
    judge, is_episode = find_judge(config.reward, config.model), config.episodes.plays_episodes
    with ExitStack() as stack:
        asked = None
        if judge is not None:
            check_rewards(config.reward, data.prompts, is_episode=is_episode, judge=judge)
            logs = Path(stack.enter_context(TemporaryDirectory(prefix="rlhf-judge-")))
            print(f"rlhf data: starting the judge {judge.described}", file=sys.stderr, flush=True)
            asked = stack.enter_context(started_judge(judge, logs))
        scorer = stack.enter_context(Scorer(config.reward, judges=asked, decode=tokenizer.decode))
        check_with(scorer, data.prompts, is_episode=is_episode)
        scoring = _Scoring(scorer, tokenizer, is_episode=is_episode)
        reports = [
            _Test(config.reward, scoring, data, verifier, places, config.test.reward_rows).report()
            for verifier, places in _by_verifier(config.reward, data).items()
        ]
        return RewardTest(reports, len(expected), scoring.missed(expected))


def _load(config: DataCommandConfig, tokenizer: PreTrainedTokenizerBase) -> PromptData:
    settings = settings_of(config.show.for_, config.data, config.template)
    # Only commands that sample have rewards.
    assert isinstance(settings, PromptConfig)
    found = found_model(config)
    plan = find_environment(config.episodes, settings, config.template, found, tokenizer)
    return load_prompts(
        settings,
        tokenizer,
        max_new_tokens=config.data.max_new_tokens,
        seed=config.show.seed,
        template=config.template,
        reward=config.reward,
        reader=picture_reader(config.pictures, config.model, found, tokenizer),
        environment=None if plan is None else plan.description,
    )


def _by_verifier(reward: RewardConfig, data: PromptData) -> dict[str, list[int]]:
    """Group prompt indices by verifier under by_row; otherwise all under ""."""
    if not reward.is_by_row:
        return {"": list(range(len(data.prompts)))}
    places: dict[str, list[int]] = {}
    for place, prompt in enumerate(data.prompts):
        # `check_with` has found a verifier for each source.
        places.setdefault(str(verifier_of(str(prompt.data_source), reward.own_sources)), []).append(place)
    return places


class _Scoring:
    """Scores made-up responses, each in a separate group, so that a failure affects only one."""

    def __init__(self, scorer: Scorer, tokenizer: PreTrainedTokenizerBase, *, is_episode: bool) -> None:
        self._scorer, self._tokenizer, self._is_episode = scorer, tokenizer, is_episode

    def scores(self, pairs: Sequence[tuple[Prompt, str]]) -> list[Score]:
        """Return a score per (prompt, response) pair, in order."""
        requests = []
        for number, (prompt, response) in enumerate(pairs):
            # Some chat templates open the tag in the prompt, so the response must not.
            written = response.removeprefix(_OPENED) if prompt.text.rstrip().endswith(_OPENED) else response
            ids = self._tokenizer.encode(written, add_special_tokens=False)
            requests.append(made_up_request(prompt, written, ids, group=str(number), is_episode=self._is_episode))
        with self._scorer.session() as session:
            session.add(requests)
            by_number = asyncio.run(session.finish())
        return [by_number[number] for number in range(len(requests))]

    def missed(self, expected: Sequence[Expectation]) -> list[Missed]:
        """Return the expectations whose reward differs."""
        found = self.scores([(one.prompt, one.response) for one in expected]) if expected else []
        return [Missed(one, score) for one, score in zip(expected, found, strict=True) if not one.is_met(score)]


class _Test:
    """Tests all rows with the same verifier."""

    def __init__(
        self, reward: RewardConfig, scoring: _Scoring, data: PromptData, verifier: str, places: list[int], count: int
    ) -> None:
        self._reward, self._scoring, self._data, self._verifier = reward, scoring, data, verifier
        self._places = places
        self._rows = [data.prompts[places[place]] for place in spread(len(places), count)]
        runs_code = called_name(verifier) == "code" or any(call.row.runs_code for call in reward.rewards)
        self._verifiers = [call.name for call in reward.rewards if call.row.kind == "verifier"]
        self._labels = [row.label for row in self._rows if row.label is not None]
        self._has_tests = [row.label is not None and (runs_code or has_tests(row.label)) for row in self._rows]
        self._right = {
            place: answer
            for place, row in enumerate(self._rows)
            if not self._has_tests[place] and (answer := answer_of(row.label)) is not None
        }
        self._others = {row: other for row in self._right if (other := self._other_row(row)) is not None}

    def report(self) -> RewardReport:
        """Score all probes and judge them."""
        report = RewardReport(
            self._verifier,
            len(self._rows),
            len(self._places),
            [self._right[place].text if place in self._right else row.label for place, row in enumerate(self._rows)],
            [self._data.where(row) for row in self._rows],
        )
        return self._with_labels(report) if self._right else self._without_labels(report)

    def _other_row(self, row: int) -> int | None:
        """Return a row whose answer is wrong for this one, preferably for certain; None if all are equal."""
        mine, rows = self._right[row], list(self._right)
        place = rows.index(row)
        others = [*rows[place + 1 :], *rows[:place]]
        sure = (other for other in others if surely_differ(mine, self._right[other]))
        differing = (other for other in others if self._right[other].text != mine.text)
        return next(sure, next(differing, None))

    def _scored(self, probes: Sequence[Probe]) -> list[Scored]:
        found = self._scoring.scores([(self._rows[probe.row], probe.response) for probe in probes])
        return [Scored(probe, score) for probe, score in zip(probes, found, strict=True)]

    def _without_labels(self, report: RewardReport) -> RewardReport:
        """Test with responses that are not right, because no label has an answer that can be written."""
        has_tests = any(self._has_tests)
        probes = [probe for row in range(len(self._rows)) for probe in self._junk(row, self._wanted() or FORMS[0])]
        if has_tests:
            probes = [*self._programs(), *probes]
        else:
            probes = [Probe(0, "form", form.name, form.with_answer(_SOMETHING)) for form in FORMS] + probes
        scored = self._scored(probes)
        why = "the labels are tests" if has_tests else "the labels have no answer" if self._labels else "no labels"
        return replace(
            report,
            lines=lines_of(scored, self._passes if has_tests else None),
            failures=failures_of(scored),
            notes=[f"{why}: right answers are not tested; list some with --expect", *self._part_notes(scored, set())],
            faults=self._constant(scored),
        )

    def _programs(self) -> list[Probe]:
        rows = list(enumerate(self._rows))[:_LONG_ROWS]
        return [probe for row, prompt in rows for probe in responses.programs(row, prompt.label or "")]

    def _passes(self, one: Scored) -> bool:
        """Return whether the verifier pays for a program."""
        return any(one.score.parts.get(name, 0.0) > 0 for name in self._verifiers)

    def _constant(self, scored: Sequence[Scored]) -> list[str]:
        """Return a fault if the reward is constant, except for code, which no made-up program solves."""
        value = constant_parts(scored).get("")
        if value is None or any(self._has_tests):
            return []
        return [f"all {len(scored)} responses get the reward {value:g}: nothing can be learned from it"]

    def _with_labels(self, report: RewardReport) -> RewardReport:
        wanted = self._wanted()
        trials = self._trials()
        scales = {form: _scale(scored) for form, scored in trials.items()}
        form = best_form(scales, wanted)
        dependent = depends_on_row(self._same_text(trials))
        report = replace(report, form=form, is_wanted=form == wanted)
        if "" not in dependent:
            return self._independent(report, trials, form, dependent)
        scale = scales[form]
        probes = [probe for row in range(len(self._rows)) for probe in self._probes(row, form)]
        scored = [*_of_forms(trials, form), *self._scored(probes)]
        lines = lines_of(scored, lambda one: one.value >= scale.threshold(one.probe.row))
        notes = [*_form_notes(scales, form, wanted), *self._part_notes(scored, dependent)]
        if compares_text(lines):
            lines = without_spelling_faults(lines)
            notes = ["the reward compares text: right answers in a different spelling are not paid", *notes]
        right, wrong = scale.typical
        faults = [*self._constant(scored), *self._blind_verifiers(dependent), *_refusals(scales, form, wanted)]
        found = replace(report, lines=lines, failures=failures_of(scored), faults=faults, notes=notes)
        return replace(found, right=right, wrong=wrong, agreement=agreement_of(scored))

    def _independent(
        self, report: RewardReport, trials: Mapping[Form, list[Scored]], form: Form, dependent: set[str]
    ) -> RewardReport:
        """Report a reward that is equal for right and wrong answers, such as a format reward."""
        junk = [probe for row in range(len(self._rows)) for probe in self._junk(row, form)]
        forms = [one for one in _of_forms(trials, form) if one.probe.role != "wrong"]
        scored = [*forms, *self._scored(junk)]
        lines, overpaid = lines_of(scored, None), overpaid_junk(scored)
        note = "the reward does not depend on the label: right and wrong answers, and many answers, are not tested"
        return replace(
            report,
            lines=lines,
            failures=failures_of(scored),
            faults=[*self._constant(scored), *self._blind_verifiers(dependent), *overpaid],
            notes=[note, *([] if overpaid else earning_junk(lines)), *self._part_notes(scored, dependent)],
        )

    def _blind_verifiers(self, dependent: set[str]) -> Iterator[str]:
        for name in self._verifiers:
            if name not in dependent:
                yield f"{name} does not pay for right answers in any form that was tried"

    def _wanted(self) -> Form | None:
        """Return the form that most prompts ask for."""
        ((form, _),) = Counter(responses.wanted_form(row.text) for row in self._rows).most_common(1)
        return form

    def _trials(self) -> dict[Form, list[Scored]]:
        """Score the right answer and a wrong one for each row, in all forms."""
        probes = [probe for form in FORMS for probe in self._stated(form)]
        scored = iter(self._scored(probes))
        return {form: [next(scored) for _ in self._stated(form)] for form in FORMS}

    def _stated(self, form: Form) -> list[Probe]:
        rights = [Probe(row, "right", form.name, form.with_answer(one.text)) for row, one in self._right.items()]
        return rights + [self._wrong(row, form) for row in self._right]

    def _wrong(self, row: int, form: Form) -> Probe:
        answer = self._right[row]
        if row not in self._others:
            return next(responses.wrong(row, answer, form))
        other = self._right[self._others[row]]
        name = "answer of a different row"
        return Probe(row, "wrong", name, form.with_answer(other.text), surely_differ(answer, other))

    def _same_text(self, trials: Mapping[Form, list[Scored]]) -> Iterator[tuple[Score, Score]]:
        """Yield score pairs for the same response text in two rows; it is right in only one.

        If all rows have the same answer, compare a right and a wrong response to the same row.
        """
        rights = self._others or {row: row for row in self._right}
        for scored in trials.values():
            right = {one.probe.row: one.score for one in scored if one.probe.role == "right"}
            wrong = {one.probe.row: one.score for one in scored if one.probe.role == "wrong"}
            yield from ((wrong[row], right[other]) for row, other in rights.items())

    def _probes(self, row: int, form: Form) -> Iterator[Probe]:
        if (answer := self._right.get(row)) is not None:
            label = self._rows[row].label or ""
            if label != answer.text:
                yield Probe(row, "form", "the label itself", label)
            yield from responses.spelled(row, answer, form)
            yield from responses.wrong(row, answer, form)
            yield from self._similar(row, answer, form)
            yield from responses.sprays(row, answer, form, list(self._right.values())[:_CANDIDATES])
        yield from self._junk(row, form)

    def _junk(self, row: int, form: Form) -> Iterator[Probe]:
        message = self._data.conversation_of(self._rows[row]).messages[-1]
        yield from responses.junk(row, form, TEXT_MARK.join(message.pieces))
        # Only a judge can follow instructions; a verifier may find an answer in the words.
        if self._reward.judge:
            yield from responses.injections(row, form)
        if row < _LONG_ROWS:
            yield from responses.long_junk(row, form)

    @cached_property
    def _sorted(self) -> list[Answer]:
        """Distinct label values, with similar ones next to each other."""
        labels = {self._data.prompts[self._places[place]].label for place in spread(len(self._places), _SORTED_LABELS)}
        distinct = {answer.text: answer for label in labels if (answer := answer_of(label)) is not None}
        return sorted(distinct.values(), key=sort_key)

    def _similar(self, row: int, answer: Answer, form: Form) -> Iterator[Probe]:
        """Yield the label that comes next in sorted order, which may be the same answer in other words."""
        place = bisect_right(self._sorted, sort_key(answer), key=sort_key)
        if place < len(self._sorted):
            other = self._sorted[place]
            is_sure = surely_differ(answer, other)
            yield Probe(row, "wrong", "most similar label in the data", form.with_answer(other.text), is_sure)

    def _part_notes(self, scored: Sequence[Scored], dependent: set[str]) -> Iterator[str]:
        """Describe each component if the reward is a sum."""
        constant = constant_parts(scored)
        names = list(dict.fromkeys(name for one in scored for name in one.score.parts))
        groups = {call.name for call in self._reward.rewards if call.row.kind == "group"}
        for name in names if len(names) > 1 else []:
            if name in groups:
                yield f"{name} compares the responses to a prompt; here each is scored by itself, which gives 0"
            elif name in constant:
                yield f"{name} gives {constant[name]:g} for all responses"
            elif self._right and name not in dependent:
                yield f"{name} does not depend on the label: right and wrong answers get the same value"


def _scale(scored: Sequence[Scored]) -> Scale:
    values: dict[str, dict[int, float]] = {"right": {}, "wrong": {}}
    for one in scored:
        if one.score.value is not None:
            values[one.probe.role][one.probe.row] = one.score.value
    return Scale(values["right"], values["wrong"])


def _of_forms(trials: Mapping[Form, list[Scored]], form: Form) -> Iterator[Scored]:
    """Yield all scores in the chosen form, then right responses in all remaining forms."""
    yield from trials[form]
    for other, scored in trials.items():
        if other != form:
            yield from (
                replace(one, probe=replace(one.probe, role="form")) for one in scored if one.probe.role == "right"
            )


def _refusals(scales: Mapping[Form, Scale], form: Form, wanted: Form | None) -> list[str]:
    if not scales[form].tells:
        return ["right answers earn no more than wrong ones in any form that was tried"]
    if wanted is not None and not scales[wanted].tells:
        return [f"the prompts ask for {wanted.name}, for which the reward does not pay; it pays for {form.name}"]
    return []


def _form_notes(scales: Mapping[Form, Scale], form: Form, wanted: Form | None) -> Iterator[str]:
    if wanted is None and form.signs and not any(scales[one].tells for one in FORMS if not one.signs):
        yield (
            f"the reward pays for {form.name} only, for which the prompts do not ask: set --system_prompt or "
            "--format_prompt"
        )
