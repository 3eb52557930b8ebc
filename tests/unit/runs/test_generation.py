"""`rlhf generate` without processes: output folder, resume, seeds, rows and scores."""

import json
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from samples import sample_of
from transformers import AutoConfig, PretrainedConfig

from rlhf_cli.backends.rollout.backend_choice import rollout_backend
from rlhf_cli.backends.training.checkpoint import differences
from rlhf_cli.commands.generate import GenerateConfig
from rlhf_cli.config.generate import GenerateOutputConfig
from rlhf_cli.data.formats.conversations import Conversation, Message
from rlhf_cli.data.preparing import DataReport
from rlhf_cli.data.prompts import Prompt, PromptData
from rlhf_cli.data.reading.sources import Row, Source
from rlhf_cli.data.rollouts import Generation, SamplingParams, sampling_params, scattered_seed
from rlhf_cli.errors import RunError, UsageError
from rlhf_cli.models.finding import FoundModel
from rlhf_cli.options import build_config
from rlhf_cli.rewards.records import Score
from rlhf_cli.runs.inference.model import InferenceModel
from rlhf_cli.runs.inference.output_folder import (
    WHOLE_MODEL,
    Chunks,
    answers_folder,
    check_folder,
    num_lines,
    prepare_folder,
    rows_done,
)
from rlhf_cli.runs.inference.run import (
    InferenceHooks,
    InferenceRun,
    ModelUnderTest,
    answer_chunks,
    model_under_test,
    settings_identity,
)
from rlhf_cli.trainers.online.rollout import Sampler
from rlhf_cli.trainers.online.step_scoring import StepFinder, StepScorer, step_metrics

IDENTITY = {"seed": 42, "temperature": 1.0}


def config(**settings) -> GenerateConfig:
    return build_config(GenerateConfig, {"pretrain": "m", "prompt_data": "p", "output": "o", **settings})


@pytest.mark.parametrize(
    ("rows", "whole"), [(0, 0), (5, 0), (6, 1), (11, 1), (12, 2), (13, 2), (14, 3)]
)  # 7 prompts with 2 samples, 3 at a time: chunks of 6, 6 and 2 rows
def test_only_whole_chunks_count(rows, whole):
    chunks = Chunks(num_prompts=7, size=3, num_samples=2)
    assert [chunks.bounds(number) for number in range(len(chunks))] == [(0, 3), (3, 6), (6, 7)]
    assert chunks.whole(rows) == whole


def test_a_torn_last_line_is_no_line(tmp_path):
    file = tmp_path / "samples.jsonl"
    assert num_lines(file) == 0
    file.write_text("{}\n{}\n{")
    assert num_lines(file) == 2


def test_without_a_name_nothing_stays_but_the_logs_of_a_failure(tmp_path, monkeypatch):
    def answer(error: BaseException | None = None) -> None:
        with answers_folder(None) as root:
            (root / "engine-0.log").write_text("why")
            if error is not None:
                raise error

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    answer()
    for error in (UsageError("no such model"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            answer(error)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RunError):
        answer(RunError("engine 0 died; see its log"))
    assert [path.read_text() for path in tmp_path.glob("*/engine-0.log")] == ["why"]


FRESH = GenerateOutputConfig(output="out")
AGAIN = GenerateOutputConfig(output="out", load_checkpoint=True)
ANEW = GenerateOutputConfig(output="out", overwrite=True)


def test_a_generation_is_continued_after_its_last_whole_chunk(tmp_path):
    root, chunks = tmp_path / "out", Chunks(num_prompts=7, size=3, num_samples=2)
    assert rows_done(root, AGAIN, IDENTITY) is None
    prepare_folder(root, "seed: 42\n", IDENTITY, keep=False)
    (root / "samples.jsonl").write_text('{"step": 1}\n' * 9 + "{")
    check_folder(root, AGAIN)
    assert chunks.whole(rows_done(root, AGAIN, IDENTITY) or 0) == 1
    (root / WHOLE_MODEL).mkdir()  # the engines of a killed run had loaded it
    prepare_folder(root, "seed: 42\n", IDENTITY, keep=True)
    assert not (root / WHOLE_MODEL).exists()
    assert num_lines(root / "samples.jsonl") == 9


def test_rows_of_other_settings_are_refused_by_the_first_difference(tmp_path):
    prepare_folder(tmp_path / "out", "", IDENTITY, keep=False)
    with pytest.raises(UsageError, match=r"its temperature is 1\.0, not 0\.7; use another --output, or --overwrite"):
        rows_done(tmp_path / "out", AGAIN, {**IDENTITY, "temperature": 0.7})


def test_earlier_responses_are_replaced_only_when_that_is_said(tmp_path):
    root = tmp_path / "out"
    prepare_folder(root, "", IDENTITY, keep=False)
    for name in ("selected.jsonl", "eval.json"):
        (root / name).write_text("{}\n")
    with pytest.raises(UsageError, match="contains earlier responses"):
        check_folder(root, FRESH)
    (root / "notes.txt").write_text("mine")
    check_folder(root, ANEW)
    prepare_folder(root, "", IDENTITY, keep=False)
    assert {path.name for path in root.iterdir()} == {"notes.txt", "generation.json", "config.yaml", "logs"}


@pytest.mark.parametrize("name", ["config.yaml", "samples.jsonl", "selected.jsonl"])
def test_the_folder_of_another_command_is_never_touched(tmp_path, name):
    (tmp_path / name).write_text("mine")
    for settings in (FRESH, ANEW, AGAIN):
        with pytest.raises(UsageError, match="contains other files"):
            check_folder(tmp_path, settings)


PROMPTS = [Prompt([20 + i], f"<{i}>", str(i), "data.jsonl", 10 + i) for i in range(7)]
DATA = PromptData(
    PROMPTS,
    DataReport("prompts"),
    "",
    row_of=lambda prompt: Row({"question": prompt.label}, Source(prompt.source, ()), prompt.index),
    conversation_of=lambda prompt: Conversation((Message("user", f"question {prompt.label}"),)),
    where=str,
    end_ids=(9,),
)


class FakeEngines:
    """Returns the first token and the seed of each request."""

    def __init__(self):
        self.batches = []
        self.end_ids = set()

    def wake_cache(self) -> None: ...

    def sleep(self) -> None: ...

    def begin(self, requests, sampling):
        self.batches.append(len(requests))
        self.end_ids.add(sampling.end_ids)
        self.left = [(n, Generation([*r.prompt_ids, r.seed], [0.0, 0.0], "stop", 0)) for n, r in enumerate(requests)]

    @property
    def is_generating(self):
        return bool(self.left)

    async def collect(self, timeout):
        found, self.left = self.left, []
        return found


class FakeTracker:
    def __init__(self):
        self.journal, self.rows, self.metrics = [], [], {}

    def phase(self, name): ...

    def log(self, step, metrics, phases):
        self.journal.append(f"metrics {step}")
        self.metrics[step] = metrics

    def samples(self, step, rows):
        self.journal.append(f"rows {step}")
        self.rows += [json.loads(json.dumps({"step": step, **row})) for row in rows]


class FakeSession:
    def __init__(self):
        self.requests = []

    def add(self, requests):
        self.requests += requests

    async def finish(self, *, is_all):
        scores = (Score(float(request.label), "scored", "seen", {"reward_func": 1.0}) for request in self.requests)
        return dict(enumerate(scores))


class FakeScorer:
    def session(self):
        return nullcontext(FakeSession())


class FakeRewardModel:
    def __init__(self, value=0.5):
        self.value, self.seen = value, []

    def scores(self, sequences):
        self.seen += [sequence.token_ids.tolist() for sequence in sequences]
        return [self.value] * len(sequences)


def answer(tracker, *, begin=0, stop=lambda: False, size=3, scorer=None, reward_model=None, engines=None, **settings):
    chosen = config(rollout_batch_size=size, n_samples_per_prompt=2, **settings)
    made: Any = engines or FakeEngines()
    sampling = sampling_params(chosen.sampling, end_ids=DATA.end_ids)
    sampler = Sampler(made, scorer, lambda ids: f"said {ids[0]}", sampling, 2, chosen.sampling.seed)
    answering = InferenceRun(sampler, reward_model)
    tested = ModelUnderTest(
        chosen,
        "transformers",
        InferenceModel(chosen.model, FoundModel("m", PretrainedConfig()), None),
        DATA,
        None,
        Chunks(len(PROMPTS), size, 2),
    )
    return answer_chunks(answering, tested, begin=begin, hooks=InferenceHooks(tracker, stop))


def test_every_response_is_a_row_that_says_where_it_comes_from():
    tracker = FakeTracker()
    assert answer(tracker)
    assert [(row["group"], row["sample"]) for row in tracker.rows] == [
        (prompt, sample) for prompt in range(7) for sample in range(2)
    ]
    assert tracker.rows[9] == {
        "step": 2,
        "id": "data.jsonl:14/4.1@0",
        "source": "data.jsonl",
        "row": 14,
        "group": 4,
        "sample": 1,
        "weight_version": 0,
        "prompt": "question 4",
        "response": "said 24",
        "label": "4",
        "reward": None,
        "verdict": None,
        "detail": "",
        "answer": None,
        "length": 2,
        "finish_reason": "stop",
        "rollout_logprob": 0.0,
    }


class FakeProcessModel:
    """Scores each marked token with its id."""

    def __init__(self):
        self.places = []

    def step_scores(self, sequences):
        self.places += [np.flatnonzero(sequence.loss_mask).tolist() for sequence in sequences]
        return [np.zeros(sequence.num_trained, np.float32) for sequence in sequences]


def test_steps_of_the_sampled_tokens_are_scored_and_kept_in_the_rows():
    words = {1: "one", 2: "\n", 3: "two", 4: "<end>"}
    finder = StepFinder("\n", lambda ids: "".join(words[number] for number in ids), frozenset({4}))
    generations = [Generation([1, 2, 3, 4], [0.0] * 4, "stop", 0), Generation([1, 2, 3, 2], [0.0] * 4, "length", 0)]
    model = FakeProcessModel()
    scorer = StepScorer(model, finder)
    samples = [sample_of(*one) for one in zip(PROMPTS, generations, strict=False)]
    found = scorer.probabilities(samples)
    start = len(PROMPTS[0].prompt_ids)
    assert model.places == [[start + 1, start + 3], [start + 1, start + 3]]
    assert found == [[0.5, 0.5], [0.5, 0.5]]
    rewards = scorer.rewards(samples)
    np.testing.assert_equal(rewards, [np.array([np.nan, 0.5, np.nan, 0.5], np.float32)] * 2)
    assert step_metrics(rewards) == {"step_reward": 0.5, "num_steps": 2.0}


def test_memory_is_bounded_by_the_chunk_and_metrics_come_before_rows():
    tracker, engines = FakeTracker(), FakeEngines()
    answer(tracker, engines=engines)
    assert engines.batches == [6, 6, 2]
    assert engines.end_ids == {DATA.end_ids}
    assert tracker.journal == ["metrics 1", "rows 1", "metrics 2", "rows 2", "metrics 3", "rows 3"]
    assert tracker.metrics[1]["num_tokens"] == 12.0
    assert "reward" not in tracker.metrics[1]


def seeds(size, begin=0):
    class Recording(FakeEngines):
        def begin(self, requests, sampling):
            found.extend((request.seed, request.environment_seed) for request in requests)
            super().begin(requests, sampling)

    found: list[tuple[int, int]] = []
    answer(FakeTracker(), size=size, begin=begin, engines=Recording())
    return found


def test_seeds_are_counted_by_position_and_differ():
    whole = seeds(3)
    assert len(set(whole)) == 14
    assert whole == [(scattered_seed(42, place), scattered_seed(42, place // 2)) for place in range(14)]
    assert seeds(7) == whole
    assert seeds(3, begin=2) == whole[12:]


def test_a_stop_ends_after_the_chunk_and_the_rest_follows_when_continued():
    whole, parts = FakeTracker(), FakeTracker()
    answer(whole)
    assert not answer(parts, stop=lambda: True)
    assert parts.journal == ["metrics 1", "rows 1"]
    assert answer(parts, begin=1)
    assert parts.rows == whole.rows


def test_a_stop_during_the_last_chunk_leaves_nothing_to_continue():
    assert answer(FakeTracker(), begin=2, stop=lambda: True)


def test_scores_of_rewards_and_reward_model_are_added_with_its_weight():
    tracker, model = FakeTracker(), FakeRewardModel()
    answer(tracker, scorer=FakeScorer(), reward_model=model, reward_pretrain="rm", reward_model_weight=2.0)
    assert tracker.rows[4]["reward"] == 3.0  # label 2, and twice 0.5
    assert [tracker.rows[4][f"reward/{name}"] for name in ("reward_func", "reward_model")] == [1.0, 0.5]
    assert tracker.metrics[1]["reward"] == pytest.approx(2.0)
    first = model.seen[0]
    assert (first[0], first[1]) == (20, 20)  # the prompt's token, then the response as sampled


def test_a_score_that_is_no_number_is_a_failure():
    with pytest.raises(RunError, match="6 of 6 rewards failed"):
        answer(FakeTracker(), scorer=FakeScorer(), reward_model=FakeRewardModel(float("nan")), reward_pretrain="rm")


def test_a_temperature_of_zero_takes_the_likeliest_token():
    assert sampling_params(config(temperature=0).sampling) == SamplingParams(1024, greedy=True)
    sampled = sampling_params(config(temperature=0.7, top_p=0.9).sampling)
    assert sampled == replace(SamplingParams(1024), temperature=0.7, top_p=0.9)


def test_every_sampling_setting_reaches_the_engine_and_tells_rows_of_two_runs_apart():
    given = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
    sampled = sampling_params(config(**given).sampling)
    assert {name: getattr(sampled, name) for name in given} == given
    assert given.items() <= settings_identity(config(**given), None).items()
    hybrid = AutoConfig.for_model("lfm2", layer_types=["conv"], num_hidden_layers=1)
    assert settings_identity(config(), None, hybrid)["rollout_backend"] == rollout_backend(config().engine, hybrid)
    assert sampling_params(config(top_k=-1).sampling) == sampling_params(config(top_k=0).sampling)
    assert sampling_params(config(temperature=0, repetition_penalty=1.1).sampling).repetition_penalty == 1.1


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_stop_strings_are_part_of_the_sampling_and_of_what_rows_of_one_run_share(temperature):
    settings = config(temperature=temperature, stop="</answer>, User:")
    assert sampling_params(settings.sampling).stop == ("</answer>", "User:")
    assert settings_identity(settings, None)["stop"] == ["</answer>", "User:"]


def test_rows_scored_by_another_text_of_the_reward_file_are_those_of_other_settings(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def reward_func(queries, prompts, labels): return [0.0] * len(queries)")
    settings = config(reward_func=str(file))
    written = settings_identity(settings, None)
    assert differences(written, settings_identity(settings, None)) == ""
    file.write_text(file.read_text().replace("0.0", "1.0"))
    assert "contents of the reward file" in differences(written, settings_identity(settings, None))


def test_a_reward_by_length_is_refused_beside_an_environment(tiny_model_dir):
    given = {"pretrain": tiny_model_dir, "environment": "none.py", "reward_funcs": "soft_overlong(max_len=60,buffer=8)"}
    with pytest.raises(UsageError, match="--reward_funcs soft_overlong applies to a single response"):
        model_under_test(config(max_len=512, max_new_tokens=64, **given))


def test_rows_of_an_environment_file_that_was_mended_are_those_of_other_settings(tmp_path):
    file = tmp_path / "game.py"
    file.write_text("class Game: ...")
    settings = config(environment=f"{file}:Game")
    written = settings_identity(settings, None)
    assert differences(written, settings_identity(settings, None)) == ""
    file.write_text("class Game: mended = True")
    assert "contents of the environment file" in differences(written, settings_identity(settings, None))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"select": "best"}, "select best compares scores: set a reward"),
        ({"select": "all", "min_score": 1}, "min_score requires scores"),
        ({"temperature": 0, "n_samples_per_prompt": 2}, "temperature 0 generates the same response each time"),
        ({"temperature": 0, "top_k": 20}, "top_k has no effect with temperature 0"),
        ({"top_k": -2}, "must be"),
        ({"min_p": 1.5}, "must be"),
        ({"repetition_penalty": 0}, "must be"),
        ({"normalize_reward": True}, "normalize_reward requires --reward_pretrain"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, complaint):
    with pytest.raises(UsageError, match=complaint):
        config(**settings)


def test_generation_needs_no_reward():
    assert not config().reward.is_given
    assert config(reward_pretrain="rm", select="best").reward.is_given
