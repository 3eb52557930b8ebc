"""Judge models in engines of the command, with fake engines whose answers a test chooses."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest
from scoring import group
from test_judge_methods import RUBRIC, with_rubric
from test_rewards_judge import INJECTION

from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.data.rollouts import Generation, GenerationRequest, SamplingParams
from rlhf_cli.errors import ProcessDied
from rlhf_cli.rewards.judge.cache import CompletionCache
from rlhf_cli.rewards.judge.engines import ChatModel, JudgeEngines
from rlhf_cli.rewards.judge.wire import Question
from rlhf_cli.rewards.records import BadResult, Score, ScoreRequest
from rlhf_cli.rewards.scorer import Scorer

SAMPLED = SamplingParams(64)
Answer = Callable[[str, GenerationRequest], str]


def score_of_length(question: str, _: GenerationRequest) -> str:
    return json.dumps({"reason": "length", "score": len(question) % 10})


@dataclass
class FakeEngines:
    """Answers each question one look later. A text is a list of its characters' numbers."""

    answer: Answer = score_of_length
    events: list[str] = field(default_factory=list)
    requests: list[GenerationRequest] = field(default_factory=list)
    finish_reason: str = "stop"
    is_dead: bool = False
    left: list[int] = field(default_factory=list)

    def begin(self, requests: list[GenerationRequest], sampling: SamplingParams) -> None:
        self.requests = []
        self.events.append(f"begin {len(requests)}")
        self._take(requests)

    def add(self, requests: list[GenerationRequest]) -> None:
        self.events.append(f"add {len(requests)}")
        self._take(requests)

    def _take(self, requests: list[GenerationRequest]) -> None:
        self.left += range(len(self.requests), len(self.requests) + len(requests))
        self.requests += requests

    @property
    def is_generating(self) -> bool:
        return bool(self.left)

    async def collect(self, timeout: float | None = None) -> list[tuple[int, Generation]]:
        if self.is_dead:
            raise ProcessDied("a judge engine died")
        number = self.left.pop(0)
        request = self.requests[number]
        text = self.answer("".join(map(chr, request.prompt_ids)), request)
        return [(number, Generation([*map(ord, text)], [], self.finish_reason, 0))]  # type: ignore[arg-type]

    def wake_cache(self) -> None:
        self.events.append("wake")

    def sleep(self) -> None:
        self.events.append("sleep")


def encoded(question: Question) -> GenerationRequest:
    if "too long" in question.text:
        raise BadResult("cannot read it")
    schema = json.dumps(question.schema)
    return GenerationRequest([*map(ord, question.text)], seed=5, json_schema=schema)


@pytest.fixture
def engines() -> FakeEngines:
    return FakeEngines()


def settings(**given: object) -> RewardConfig:
    return RewardConfig.model_validate({"judge": ["tiny"], "reward_max_failures": 1.0} | given)


def asked_by(engines: FakeEngines, *, waits: bool = True, greedy: bool = True, cache: str = "") -> JudgeEngines:
    sampling = replace(SAMPLED, greedy=greedy)
    model = ChatModel("tiny", {"model": "f00"}, encoded, lambda ids: "".join(map(chr, ids)), sampling)
    return JudgeEngines(engines, model, waits=waits, retries=2, cache=CompletionCache(cache) if cache else None)


def judged(engines: FakeEngines, *requests: ScoreRequest, reward: RewardConfig, **how: object) -> list[Score]:
    with Scorer(reward, judges=asked_by(engines, **how)) as scorer:  # type: ignore[arg-type]
        return scorer.score(requests)


def test_a_judge_that_waits_is_asked_once_about_all_responses_in_their_order(engines):
    first, second = group("a", "b"), group("c", "d")
    scores = judged(engines, second[1], first[0], second[0], first[1], reward=settings())
    assert engines.events == ["wake", "begin 4", "sleep"]
    questions = ["".join(map(chr, request.prompt_ids)) for request in engines.requests]
    assert [f"\n{text}\n</response" in question for text, question in zip("abcd", questions, strict=True)] == [True] * 4
    assert [score.status for score in scores] == ["scored"] * 4
    assert scores[0].judgements[0]["reason"] == "length"
    assert json.loads(engines.requests[0].json_schema or "")["required"] == ["reason", "score"]


def test_a_judge_that_does_not_wait_is_asked_while_responses_arrive(engines):
    with Scorer(settings(), judges=asked_by(engines, waits=False)) as scorer, scorer.session() as session:
        for request in group("a", "b"):
            session.add([request])
            while not session.ready():
                pass
    assert engines.events == ["wake", "begin 1", "sleep"] * 2


def test_engines_do_not_wake_for_known_answers(engines, tmp_path):
    file, requests = str(tmp_path / "verdicts.db"), group("a", "b")
    first = judged(engines, *requests, reward=settings(), cache=file)
    assert judged(engines, *requests, reward=settings(), cache=file) == first
    assert engines.events == ["wake", "begin 2", "sleep"]


@pytest.mark.parametrize(("greedy", "asked"), [(True, 1), (False, 3)])
def test_an_answer_without_a_verdict_is_a_failure_and_is_sampled_again(engines, greedy, asked):
    seeds = []

    def chatters(_: str, request: GenerationRequest) -> str:
        seeds.append(request.seed)
        return "I like it"

    engines.answer = chatters
    (score,) = judged(engines, *group("a"), reward=settings(), greedy=greedy)
    assert (score.value, score.failure) == (None, "bad_result")
    assert score.detail == "judge tiny gave no verdict in JSON: I like it"
    assert score.judgements == [{"failed": "tiny gave no verdict in JSON: I like it"}]
    assert seeds == [*range(5, 5 + asked)]


def test_a_truncated_answer_is_a_failure_even_if_it_quotes_a_verdict(engines):
    engines.answer, engines.finish_reason = lambda *_: INJECTION, "length"
    (score,) = judged(engines, *group("a"), reward=settings())
    limit = "reached its token limit before the verdict (max_tokens in --judge_args, --judge_max_len)"
    assert (score.value, score.detail) == (None, f"judge tiny {limit}")


def test_a_question_that_the_model_cannot_read_fails_alone(engines):
    scores = judged(engines, *group("too long"), *group("b"), reward=settings())
    assert [score.value is None for score in scores] == [True, False]
    assert (scores[0].detail, scores[0].failure) == ("judge tiny cannot read it", "unjudged")


def test_the_end_of_an_engine_ends_the_run_instead_of_failing_rewards(engines):
    engines.is_dead = True
    with Scorer(settings(), judges=asked_by(engines)) as scorer:
        for _ in range(2):
            with pytest.raises(ProcessDied, match="a judge engine died"):
                scorer.score(group("a"))


def test_a_rubric_and_a_group_have_schemas_of_their_size(engines):
    items = [{"item": number, "reason": "", "met": number == 1} for number in (1, 2, 3)]
    engines.answer = lambda *_: json.dumps({"items": items})
    (score,) = judged(engines, with_rubric(RUBRIC), reward=settings(judge_method="rubric"))
    assert score.value == 0.75
    schema = json.loads(engines.requests[0].json_schema or "")["properties"]["items"]
    assert [item["properties"]["item"] for item in schema["prefixItems"]] == [{"const": number} for number in (1, 2, 3)]
    engines.answer = lambda *_: '{"reason": "r", "order": [2, 1]}'
    scores = judged(engines, *group("a", "b"), reward=settings(judge_method="listwise"))
    assert [score.value for score in scores] == [0.5, 0.5]
    assert json.loads(engines.requests[0].json_schema or "")["properties"]["order"]["items"] == {"enum": [1, 2]}


def test_a_judge_that_is_not_started_is_not_asked():
    with Scorer(settings()) as scorer:
        assert scorer.try_judge(group("a")) == ""


@pytest.fixture(autouse=True)
def no_thread_remains() -> Iterator[None]:
    import threading

    yield
    assert "judge" not in {thread.name for thread in threading.enumerate()}
