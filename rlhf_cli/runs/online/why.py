"""`rlhf why`: how a sampled token entered the loss, with numbers from a repeated iteration."""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from rlhf_cli.algorithms.aggregation import CORRECT, PROMPT_TOKENS
from rlhf_cli.algorithms.formulas import (
    advantage_formula,
    correction_formula,
    loss_formula,
    mean_formula,
    number,
    ratio_formula,
    whitening_formula,
)
from rlhf_cli.algorithms.token_trace import SAMPLE, TOKEN
from rlhf_cli.command_table import ONLINE_TRAINING
from rlhf_cli.commands.gkd import GKDConfig
from rlhf_cli.config.replay import WhyGroup
from rlhf_cli.errors import UsageError
from rlhf_cli.rewards.judge.judge import judgement_line
from rlhf_cli.rewards.model_scores import weights_of_all_parts
from rlhf_cli.runs.data_view import visible
from rlhf_cli.runs.online.explained import (
    Explained,
    located,
    response_lines,
    sampled_lines,
    share_lines,
    tokens_with_share,
)
from rlhf_cli.runs.online.replay import Replayed, replay
from rlhf_cli.runs.online.why_student import student_table, student_token
from rlhf_cli.runs.run_directory import recorded_config
from rlhf_cli.tracking.sinks import SAMPLES_FILE, read_lines

_SHOWN_DIFFERENCES = 8


def explain_response(settings: WhyGroup) -> tuple[list[str], Callable[[], dict[str, object]]]:
    """Return how a response or one of its tokens changed the model: lines, and a function that returns JSON values."""
    root = Path(settings.run).expanduser()
    own = recorded_config(root, ONLINE_TRAINING)
    if settings.step is not None:
        raise UsageError(
            f"--step is for rows of offline commands; a response of rlhf {own.command} is trained in its iteration "
            f"only: set --sample to an id in {root / SAMPLES_FILE}"
        )
    if settings.sample is None:
        raise UsageError(f"set --sample to an id in {root / SAMPLES_FILE}")
    row = _row(root, settings.sample)
    # Before the iteration runs again, which takes minutes. Branches have tokens of their own.
    if "branches" not in row and "length" in row:
        _check_token(settings.token, int(str(row["length"])))
    again = replay(own, int(str(row["step"])), tokens=partial(tokens_with_share, row, settings, own))
    return lines(again, row, settings.token), partial(explanation, again, row)


def _row(root: Path, sample: str) -> Mapping[str, object]:
    path = root / SAMPLES_FILE
    rows = [row for row in read_lines(path) if row.get("id") == sample]
    if not rows and next(read_lines(path), None) is None:
        raise UsageError(f"{root} has no sampled responses, so there is none to explain")
    if not rows:
        raise UsageError(f"--sample: {path} has no response {sample!r}: copy an `id` from that file or the report")
    return rows[-1]


def explanation(again: Replayed, row: Mapping[str, object]) -> dict[str, object]:
    """Return the explanation of a response for other programs.

    Returns:
        - `lines`: text for the response; `equality`: its comparison with the run.
        - `tokens`: `text`, `lines`, and `values` in the last optimizer step (algorithms/token_trace.py) of each token;
          empty if the response was not trained on. Values that are not finite are None.
    """
    explained = _explained(again, row)
    tokens = [] if explained is None else [_token_of(explained, row, place) for place in range(len(explained.texts))]
    return {"lines": lines(again, row, None, explained), "equality": _equality(again, row), "tokens": tokens}


def _token_of(explained: Explained, row: Mapping[str, object], place: int) -> dict[str, object]:
    values = list(explained.steps.values())[-1][place] if explained.steps else {}
    text = lines(explained.again, row, place, explained)
    return {"text": explained.texts[place], "lines": text, "values": _finite(values)}


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _explained(again: Replayed, row: Mapping[str, object]) -> Explained | None:
    """Return the response; None if it was not trained on."""
    found = None if again.batch is None else located(again.batch, row, again.run.config)
    return None if found is None else Explained(again, *found)


def lines(
    again: Replayed, row: Mapping[str, object], token: int | None, explained: Explained | None = None
) -> list[str]:
    """Return the explanation of a response, or of one token."""
    if again.batch is None:
        return [f"iteration {again.iteration} was skipped: no response could be trained on"]
    explained = explained or _explained(again, row)
    head = [f"{row['id']}, iteration {again.iteration} of rlhf {again.run.config.command}", *response_lines(row)]
    if explained is None:
        return [*head, "", "not trained on: its reward failed, or its group was filtered", "", *_equality(again, row)]
    _check_token(token, len(explained.texts))
    return [*head, "", *_body(explained, token), "", *_equality(again, row)]


def _check_token(token: int | None, count: int) -> None:
    if token is not None and token >= count:
        raise UsageError(f"--token {token}: the response has tokens 0 to {count - 1}")


def _body(explained: Explained, token: int | None) -> Iterator[str]:
    if isinstance(explained.again.run.config, GKDConfig):
        yield from student_table(explained) if token is None else student_token(explained, token)
        return
    yield from (*_rewards(explained), "", *_advantage(explained, token), "")
    yield from _table(explained) if token is None else _token(explained, token)


def _rewards(explained: Explained) -> Iterator[str]:
    """Yield the reward by part, and what shaping made of it."""
    reward, score = explained.again.run.config.reward, explained.sample.score
    weights = weights_of_all_parts(reward)
    yield "Reward"
    for name, value in score.parts.items():
        yield f"  {name}: {number(value)} x weight {number(weights.get(name, 1.0))}"
    yield from (f"    judge: {visible(judgement_line(judgement))}" for judgement in score.judgements)
    reason = f": {score.detail}" if score.detail else ""
    yield f"  score {number(float(score.value or 0.0))}, {score.status}{reason}"
    shaped = float(explained.experience.rewards_B[explained.number])
    if shaped != score.value:
        yield f"  {number(shaped)} after clipping, length penalties, and KL penalties per token"


def _advantage(explained: Explained, token: int | None) -> Iterator[str]:
    """Yield the formula of the advantage at a token, by default the last."""
    run, experience = explained.again.run, explained.experience
    settings, estimator = run.settings, run.estimator
    first, end = experience.cu[explained.number : explained.number + 2].tolist()
    at = end - first - 1 if token is None else token
    yield "Advantage" if token is not None else f"Advantage of the last token, {at}"
    own = settings.estimator_settings or settings.policy
    formula = advantage_formula(estimator, experience, own, sample=explained.number, token=at)
    yield from (f"  {line}" for line in formula)
    assert estimator.advantages is not None
    if estimator.whiten:
        raw_N = estimator.advantages(experience, own).at_tokens(experience.cu)
        yield f"  {whitening_formula(raw_N, experience, place=first + at)}"
    if settings.distill_coef is not None:
        yield f"  less {number(settings.distill_coef)} x {_teacher_ratio(explained, at)}"
    assert explained.rollout.advantages is not None
    yield f"  advantage in the loss {number(float(explained.rollout.advantages[explained.number][at]))}"


def _teacher_ratio(explained: Explained, token: int) -> str:
    """Return the log-ratio to the teacher that enters the advantage of a token, with its numbers."""
    rollout, number_of = explained.rollout, explained.number
    assert rollout.old_logprobs is not None
    old, teachers = rollout.old_logprobs[number_of], rollout.frozen_logprobs["teacher"][number_of]
    places, what = np.array([token]), "the teacher"
    if rollout.teacher_spans is not None:
        spans = rollout.teacher_spans[number_of]
        # Tokens that are not compared have a log-ratio of 0.
        places = np.flatnonzero(spans == spans[token]) if spans[token] >= 0 else places
        text = "".join(explained.texts[place] for place in places)
        what = f"the teacher, over the text {text!r} of tokens {', '.join(map(str, places.tolist()))}"
    sums = (float(np.asarray(column, dtype=np.float64)[places].sum()) for column in (old, teachers))
    return "({} - {}), the log-probs of the policy and of {}".format(*map(number, sums), what)


def _table(explained: Explained) -> Iterator[str]:
    """Yield one line per token and optimizer step."""
    if not explained.steps:
        yield "not in an optimizer step: truncated and excluded by mask_truncated"
    for step, tokens in explained.steps.items():
        total = float(np.abs(explained.again.trace[step - 1]["gradient"]).sum())
        yield f"Optimizer step {step} of {len(explained.again.trace)}"
        yield "  token                      engine       old       now     ratio  advantage      loss   share  "
        for place, (text, values) in enumerate(zip(explained.texts, tokens, strict=True)):
            share = abs(values["gradient"]) / total if total else 0.0
            shown = (values["rollout"], values["anchor"], values["logprob"], values["ratio"])
            yield (
                f"  {place:4d} {text!r:16.16}"
                + "".join(f"{value:10.4f}" for value in shown)
                + f"{values['advantage']:11.4f}{values['loss']:10.4f}{share:8.2%}  {_marks(values)}"
            )


def _marks(values: Mapping[str, float]) -> str:
    names = {
        "clip_low": "clipped below",
        "clip_high": "clipped above",
        "clip_dual": "dual clip",
        "corrected": "corrected",
    }
    return ", ".join(words for name, words in names.items() if values[name])


def _token(explained: Explained, token: int) -> Iterator[str]:
    """Yield everything about one token."""
    run, again = explained.again.run, explained.again
    config, policy = run.config, run.config.policy
    yield from sampled_lines(explained, token)
    if explained.rollout.old_logprobs is not None:
        old = float(explained.rollout.old_logprobs[explained.number][token])
        yield f"  log-prob of the policy before the update {number(old)}"
    for role, logprobs in explained.rollout.frozen_logprobs.items():
        yield f"  log-prob of {role} {number(float(logprobs[explained.number][token]))}"
    for step, tokens in explained.steps.items():
        values, columns = tokens[token], again.trace[step - 1]
        yield ""
        yield f"Optimizer step {step} of {len(again.trace)}"
        yield f"  log-prob now {number(values['logprob'])}, entropy {number(values['entropy'])}"
        yield f"  {ratio_formula(policy, values)}"
        yield from (f"  {line}" for line in loss_formula(policy, values))
        yield f"  {correction_formula(policy, values)}"
        for role, term in again.run.settings.kl_losses.items():
            coef, kl = values[f"{role}_coef"], values[f"{role}_kl"]
            kind = f"r x {term.estimator}" if policy.unbiased_kl else term.estimator
            yield f"  KL penalty for {role}: {number(coef)} x {number(kl)} ({kind})"
        if values.get(CORRECT):
            weight = f"{number(policy.correct_nll_coef)} / {int(columns[CORRECT].sum())} tokens of correct responses"
            yield f"  correct response: plus {weight} x -log-prob (VAPO)"
        mean = mean_formula(
            policy,
            num_tokens=len(columns[TOKEN]),
            num_sequences=len(np.unique(columns[SAMPLE])),
            length=int((columns[SAMPLE] == values[SAMPLE]).sum()),
            max_new_tokens=config.rollout.max_new_tokens,
            prompts=_prompts(columns, values),
        )
        yield f"  weight in the mean ({policy.loss_agg}): {mean}"
        total = float(np.abs(columns["gradient"]).sum())
        share = abs(values["gradient"]) / total if total else 0.0
        yield (
            f"  gradient of the loss with respect to the log-prob {number(values['gradient'])}, {share:.3%} of the sum "
            "of their magnitudes in the step"
        )
        yield from (f"  {line}" for line in share_lines(explained, step, token))


def _prompts(columns: Mapping[str, np.ndarray], values: Mapping[str, float]) -> tuple[float, float]:
    """Return the number of prompts in the step, and the tokens of a token's prompt; zeros without these columns."""
    if PROMPT_TOKENS not in columns:
        return 0.0, 0.0
    return float((1 / columns[PROMPT_TOKENS]).sum()), values[PROMPT_TOKENS]


def _equality(again: Replayed, row: Mapping[str, object]) -> list[str]:
    """Say whether the replay equals the run."""
    rows = {one["id"]: one for one in again.rows}
    own = rows.get(row["id"], {})
    names = [name for name in row if name in own and name != "images"]
    differing = [name for name in names if row[name] != own[name]]
    differences = again.differences
    if not differing and not differences and own:
        return [
            f"Equal to the run: all {len(again.compared)} metrics of iteration "
            f"{again.iteration}, and the {len(names)} values of this response."
        ]
    if not own:
        return ["The replay did not sample this response: this machine or its versions differ from the run's."]
    pairs = [f"{name} {number(old)} in the run, {number(new)} here" for name, (old, new) in differences.items()]
    pairs = [*(f"{name} of the response" for name in differing), *pairs]
    more = f" and {len(pairs) - _SHOWN_DIFFERENCES} more" if len(pairs) > _SHOWN_DIFFERENCES else ""
    return [f"Different from the run: {'; '.join(pairs[:_SHOWN_DIFFERENCES])}{more}."]
