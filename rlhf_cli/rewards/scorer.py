"""Scores responses with built-in rewards, the user's reward file, reward servers and judges.

The score is a weighted sum. A failed reward never counts as 0: the sample is marked as failed, and the run stops if
too many samples fail. algorithms/shaping.py clips and shapes scores.
"""

import asyncio
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from types import TracebackType
from typing import Self

from rlhf_cli.config.rewards import RewardCall, read_call
from rlhf_cli.config.row_rewards import DATA_SOURCE, verifier_of
from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.rewards.file_feed import Decode, batch_of
from rlhf_cli.rewards.judge.cache import CompletionCache
from rlhf_cli.rewards.judge.engines import JudgeEngines
from rlhf_cli.rewards.judge.feed import JudgeFeed
from rlhf_cli.rewards.judge.judge import JUDGE_PART, Judge
from rlhf_cli.rewards.judge.wire import judge_wire, models_of_judges
from rlhf_cli.rewards.parts import FILE_PART, REMOTE_PART, stop_if_too_many_failed, worker_part
from rlhf_cli.rewards.records import Score, ScoreRequest
from rlhf_cli.rewards.remote.api_key import api_key
from rlhf_cli.rewards.remote.client import RemoteRewards, check_servers
from rlhf_cli.rewards.sandbox.run import require_sandbox
from rlhf_cli.rewards.session import ScoringSession
from rlhf_cli.rewards.workers.pool import ItemOutcome, WorkerPool
from rlhf_cli.rewards.workers.user_module import file_and_name

logger = logging.getLogger(__name__)

# Maximum responses sent to a worker at once: enough to hide the transfer, few enough to balance the load.
_CHUNK = 64

# Maximum reward file calls sent to a worker at once. An async function handles them concurrently.
_FILE_CHUNK = 16

# Exceptions that indicate a bug in the reward function. With NoneType in the message, the response may be the cause:
# a regular expression that does not match the made-up text returns None.
_FAULTS_OF_CODE = tuple(
    f"raised {name}" for name in ("TypeError", "NameError", "AttributeError", "ImportError", "ModuleNotFoundError")
)

_TRL = "TRL calls it"
_TRL_HINT = "; completions are strings if the row's prompt is a string, and message lists if it is a message list"

# Sources listed in an error message.
_MAX_LISTED = 5

# Worker processes if --reward_num_workers is unset, or fewer on a small machine.
_DEFAULT_MAX_WORKERS = 4


def weights_of_parts(config: RewardConfig) -> dict[str, float]:
    """Return reward weights by component name, without the reward model's."""
    names = [call.name for call in config.rewards]
    weights = dict.fromkeys(names, 1.0) | dict(zip(names, config.reward_weights, strict=False))
    others = {
        FILE_PART: config.reward_func_weight,
        REMOTE_PART: config.remote_rm_weight,
        JUDGE_PART: config.judge_weight,
    }
    return weights | others


class Scorer:
    """Computes all rewards in a run; a context manager that owns the worker processes and leaves none behind.

    - `judges`: engines of a judge model, which are closed with the scorer. Without them, such a judge is not asked.
    - `tell`: called from a background thread with a sentence when a reward server or judge fails or recovers.
    - `decode`: decodes tokens with special tokens kept, for reward files that use `raw_responses`.
    - `needs_environment`: fail episodes without an environment reward, instead of counting 0.

    Raises UsageError on construction if:

    - the reward file is missing, cannot be imported or has no `reward_func`,
    - a reward runs code and the sandbox does not work on this machine,
    - a reward server or judge does not respond.
    """

    def __init__(
        self,
        config: RewardConfig,
        *,
        judges: JudgeEngines | None = None,
        tell: Callable[[str], None] | None = None,
        decode: Decode | None = None,
        needs_environment: bool = False,
    ) -> None:
        self._config, self._needs_environment = config, needs_environment
        self._decode = decode
        self._weights = weights_of_parts(config)
        if any(call.row.runs_code for call in config.rewards):
            _prepare_code(config)
        # If a later step raises, the stack closes what is already running; `pop_all` keeps it open otherwise.
        with ExitStack() as stack:
            self._workers = stack.enter_context(_worker_pool(config)) if _calls(config) else None
            self._file = _file_pool(stack, config.reward_func, config) if config.reward_func else None
            self._servers = None
            if config.remote_rm_url:
                self._servers = stack.enter_context(_reward_servers(config, tell))
            self._judge = Judge(config) if config.judge else None
            self._judges: JudgeEngines | RemoteRewards | None = None
            if judges is not None:
                self._judges = stack.enter_context(judges)
            elif config.judge and not config.starts_judge:
                self._judges = _judges(stack, config, tell)
            self._processes = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop all worker processes and the clients of reward servers and judges."""
        self._processes.close()

    @property
    def form(self) -> str:
        """The reward function's signature if it is another framework's; "" otherwise."""
        return "" if self._file is None else str(self._file.about["form"])

    @property
    def reads_images(self) -> bool:
        """Whether the reward function has an `images` parameter."""
        return self._file is not None and "images" in self._file.about["needs"]

    def check_labels(self, labels: Sequence[str | None], sources: Sequence[str | None] | None = None) -> None:
        """Check labels and sources before models are loaded.

        Raises UsageError if the fraction of unusable labels exceeds `reward_max_failures`, or if a source has no
        verifier under by_row.
        """
        sources = sources or [None] * len(labels)
        verifiers = _row_verifiers(self._config, sources)
        # by_row may select the code verifier, which the settings do not show.
        if any(read_call(text).row.runs_code for text in set(verifiers)):
            _prepare_code(self._config)
        for place, call in enumerate(_calls(self._config)):
            if call.row.kind != "verifier":
                continue
            assert self._workers is not None
            # Verifiers check the label before the response, so an empty response shows whether the label is usable.
            items = [[place, "", label] for label in labels]
            if call.row.by_row:
                items = [[*item, named] for item, named in zip(items, verifiers, strict=True)]
            outcomes = self._workers.map(items)
            bad = [part.detail for part in (worker_part(call, outcome) for outcome in outcomes) if part.value is None]
            if len(bad) > self._config.reward_max_failures * len(labels):
                raise UsageError(
                    f"--reward_funcs {call.name}: {len(bad)} of {len(labels)} prompts have no usable label; "
                    f"the first: {bad[0]}"
                )

    def try_file(self, requests: Sequence[ScoreRequest]) -> str:
        """Call the reward function with made-up responses. Returns a warning, or "" on success.

        Raises UsageError for bugs that would affect any response, such as an invalid result type or a missing argument.
        Exceptions that the made-up text may have caused are only warnings.
        """
        if self._file is None:
            return ""
        groups: dict[str, list[ScoreRequest]] = {}
        for request in requests:
            groups.setdefault(request.group, []).append(request)
        needs = self._file.about["needs"]
        outcomes = self._file.map([batch_of(group, self._decode, needs=needs) for group in groups.values()])
        trial = f"--reward_func {self._config.reward_func}: a test call with a made-up response"
        hint = _TRL_HINT if _TRL in self.form else ""
        return next(filter(None, (_trial_fault(outcome, trial, hint=hint) for outcome in outcomes)), "")

    def check_rubrics(self, rows: Sequence[str | None]) -> None:
        """Raise UsageError if the fraction of rows without a valid rubric exceeds `reward_max_failures`."""
        if self._judge is None:
            return
        bad = [fault for row in rows if (fault := self._judge.fault_of(row))]
        if len(bad) > self._config.reward_max_failures * len(rows):
            raise UsageError(
                f"--judge_method rubric: {len(bad)} of {len(rows)} prompts have no usable rubric; the first: {bad[0]}"
            )

    def try_judge(self, requests: Sequence[ScoreRequest]) -> str:
        """Ask a judge about made-up responses to a prompt. Returns a warning, or "" on success or without a judge.

        Raises UsageError if the call fails. An invalid verdict, which the made-up text may have caused, is a warning.
        """
        if self._judge is None or self._judges is None:
            return ""
        case = self._judge.trial(requests)
        score, *_ = case.conclude([future.result() for future in self._judges.submit(case.questions)])
        if score.value is None and score.failure != "bad_result":
            images = "; the prompt has images, so use a judge that reads images" if requests[0].pictures else ""
            raise UsageError(f"--judge: {score.detail}{images}")
        return f"{score.detail}; such a reward counts as failed" if score.value is None else ""

    def session(self) -> ScoringSession:
        """Open a scoring session for incrementally added responses. Only one may be open at a time."""
        return ScoringSession(
            self._config,
            weights=self._weights,
            workers=self._workers,
            file=self._file,
            servers=self._servers,
            judges=self._judge_feed if self._judges is not None else None,
            decode=self._decode,
            needs_environment=self._needs_environment,
        )

    def _judge_feed(self) -> JudgeFeed:
        assert self._judge is not None
        assert self._judges is not None
        waits = isinstance(self._judges, JudgeEngines) and self._judges.waits
        return JudgeFeed(self._judge, self._judges, waits=waits)

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Score responses and return the scores in order. Failures are retried `reward_retries` times.

        Raises RunError if the fraction of failed scores exceeds `reward_max_failures`.
        """
        with self.session() as session:
            session.add(requests)
            by_number = asyncio.run(session.finish(is_all=True))
        scores = [by_number[number] for number in range(len(requests))]
        stop_if_too_many_failed(scores, self._config.reward_max_failures)
        return scores


def _calls(config: RewardConfig) -> list[RewardCall]:
    """Return the rewards computed in workers. Worker items refer to them by index."""
    return [call for call in config.rewards if call.row.in_worker]


def _settings(config: RewardConfig, call: RewardCall) -> dict[str, object]:
    return {name: getattr(config, name) for name in call.row.settings}


def _prepare_code(config: RewardConfig) -> None:
    """Check that code can run here, and warn if it runs without a sandbox."""
    if config.code_unsandboxed:
        logger.warning(
            "WARNING: --code_unsandboxed: model-generated code runs as this user, WITHOUT A SANDBOX. "
            "It can read, change and delete your files and use the network."
        )
    require_sandbox(sandboxed=not config.code_unsandboxed)


def _num_workers(config: RewardConfig) -> int:
    return config.reward_num_workers or min(_DEFAULT_MAX_WORKERS, os.cpu_count() or 1)


def _worker_pool(config: RewardConfig) -> WorkerPool:
    return WorkerPool(
        "rlhf_cli.rewards.workers.functions:load",
        [[call.name, call.parameters | _settings(config, call), call.target] for call in _calls(config)],
        limit=config.reward_timeout,
        num_workers=_num_workers(config),
        chunk_size=_CHUNK,
        retries=config.reward_retries,
    )


def _file_pool(stack: ExitStack, reward_func: str, config: RewardConfig) -> WorkerPool:
    """Start the reward file's worker pool, with one worker loaded."""
    path, name = file_and_name(reward_func)
    if not path.is_file():
        raise UsageError(f"--reward_func {reward_func}: file not found")
    # No `retries`: FileFeed retries calls, since a retry must keep the values that were valid.
    pool = stack.enter_context(
        WorkerPool(
            "rlhf_cli.rewards.workers.user_file:load",
            {"path": str(path), "name": name, "args": json.loads(config.reward_func_args)},
            limit=config.reward_timeout,
            num_workers=_num_workers(config),
            chunk_size=_FILE_CHUNK,
        )
    )
    # Load once now, so that an import error stops the command before models are loaded.
    failure = pool.start()
    if failure is not None:
        logger.warning("%s %s\n%s", path, failure.reason, failure.trace)
        raise UsageError(f"--reward_func {reward_func} {failure.reason}")
    return pool


def _row_verifiers(config: RewardConfig, sources: Sequence[str | None]) -> list[str]:
    """Return one verifier per row under by_row; empty without by_row.

    Raises UsageError that lists sources without a verifier and counts the rows.
    """
    if not config.is_by_row:
        return []
    own = config.own_sources
    known = {source: None if source is None else verifier_of(source, own) for source in set(sources)}
    unknown = Counter(source for source in sources if known[source] is None)
    if not unknown:
        return [known[source] or "" for source in sources]
    column = config.reward_key or DATA_SOURCE
    if None in unknown:
        raise UsageError(
            f"--reward_funcs by_row: {unknown[None]} of {len(sources)} rows have no text in column {column!r}, which "
            "selects the verifier; set another column with --reward_key"
        )
    listed = ", ".join(f"{source} ({count} rows)" for source, count in unknown.most_common(_MAX_LISTED))
    first = json.dumps({str(unknown.most_common(1)[0][0]): "math"})
    raise UsageError(
        f"--reward_funcs by_row: no verifier for {listed} in column {column!r}; set one with "
        f"--reward_by_source '{first}'"
    )


def _trial_fault(outcome: ItemOutcome, trial: str, *, hint: str) -> str:
    """Return a warning about a test call, or "" on success. Raises UsageError for bugs in the reward function."""
    failure = outcome.failure
    if failure is None:
        wrong = next((result["problem"] for result in outcome.value if result["malformed"]), None)
        if wrong is not None:
            raise UsageError(f"{trial} {wrong}")
        return ""
    is_of_text = "NoneType" in failure.reason or not failure.reason.startswith(_FAULTS_OF_CODE)
    if failure.kind == "bad_result" or (failure.kind == "raised" and not is_of_text):
        raise UsageError(f"{trial} {failure.reason}{hint if failure.kind == 'raised' else ''}")
    return f"{trial} {failure.reason}; such a reward counts as failed"


def _reward_servers(config: RewardConfig, tell: Callable[[str], None] | None) -> RemoteRewards:
    """Create the reward server client. Checks that every server responds."""
    key = api_key(config.remote_rm_api_key_env)
    check_servers(config.remote_rm_url, key=key, timeout=config.remote_rm_timeout)
    return RemoteRewards(
        config.remote_rm_url,
        key=key,
        timeout=config.remote_rm_timeout,
        retries=config.reward_retries,
        batch_size=config.remote_rm_batch_size,
        tell=tell,
    )


def _judges(stack: ExitStack, config: RewardConfig, tell: Callable[[str], None] | None) -> RemoteRewards:
    """Create the client of the judges. Checks that every judge responds and has a model."""
    key = api_key(config.judge_api_key_env)
    models = models_of_judges(config.judge, config.judge_model, key=key, timeout=config.judge_timeout)
    # Closed after the client, which uses it.
    cache = None if config.judge_cache is None else stack.enter_context(closing(CompletionCache(config.judge_cache)))
    return stack.enter_context(
        RemoteRewards(
            config.judge,
            key=key,
            timeout=config.judge_timeout,
            retries=config.reward_retries,
            batch_size=1,
            tell=tell,
            wire=judge_wire(models, json.loads(config.judge_args), num_calls=config.judge_concurrency, cache=cache),
        )
    )
