"""Self-distillation: the teacher reads a text that the policy does not."""

import dataclasses
import json
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from chat_tokenizers import CHATML, make_tokenizer
from online_fakes import PROMPTS, SAMPLES_EACH, WITHOUT_REFERENCE, Run
from online_settings import resolve
from samples import sample_of

from rlhf_cli.config.data import PromptConfig
from rlhf_cli.data.packing.packs import TokenSequence
from rlhf_cli.data.prompts import Prompt, PromptData, load_prompts
from rlhf_cli.data.rollouts import Generation
from rlhf_cli.errors import UsageError
from rlhf_cli.rewards.records import Score
from rlhf_cli.runs.online.checks import check_episodes

QUESTION, HINT = "What is 2+3?", "Add the numbers."


def load(tmp_path, *rows: Mapping[str, object], key: str | None = "hint") -> PromptData:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = PromptConfig(prompt_data=str(path), max_len=256, teacher_context_key=key)
    return load_prompts(config, make_tokenizer(CHATML), max_new_tokens=16, seed=0)


def test_only_the_teachers_prompt_contains_the_context(tmp_path):
    row = {"prompt": QUESTION, "hint": HINT}
    (prompt,) = load(tmp_path, row).prompts
    (asked,) = load(tmp_path, {"prompt": QUESTION}, key=None).prompts
    (helped,) = load(tmp_path, {"prompt": f"{HINT}\n\n{QUESTION}"}, key=None).prompts
    assert (prompt.text, prompt.prompt_ids, asked.teacher_ids) == (asked.text, asked.prompt_ids, None)
    assert prompt.teacher_ids == helped.prompt_ids != asked.prompt_ids


def test_another_context_is_other_data(tmp_path):
    found = {load(tmp_path, {"prompt": QUESTION, "hint": hint}).fingerprint for hint in (HINT, "Count.", HINT)}
    assert len(found) == 2


def test_a_prompt_needs_room_for_the_context(tmp_path):
    rows = [{"prompt": QUESTION, "hint": HINT}, {"prompt": QUESTION, "hint": HINT * 40}]
    data = load(tmp_path, *rows)
    assert [prompt.index for prompt in data.prompts] == [0]
    assert "1 dropped" in data.report.summary


@pytest.mark.parametrize("row", [{}, {"hint": ""}, {"hint": 3}, {"hint": None}])
def test_a_row_without_a_context_is_an_error(tmp_path, row):
    with pytest.raises(UsageError, match=r"line 2: column 'hint' \(--teacher_context_key\) is .*, not a text"):
        load(tmp_path, {"prompt": QUESTION, "hint": HINT}, {"prompt": QUESTION} | row)


def test_both_sequences_end_with_the_response():
    prompt = Prompt([1, 2], "p", None, "a.jsonl", 0, teacher_ids=[7, 8, 9, 1, 2])
    sample = sample_of(prompt, Generation([5, 6], [-0.1, -0.2], "stop", 0), Score(1.0, "scored"), text="r")
    own, teachers = sample.sequence, sample.teacher_sequence
    assert teachers.token_ids.tolist() == [7, 8, 9, 1, 2, 5, 6]
    assert teachers.token_ids[teachers.loss_mask].tolist() == own.token_ids[own.loss_mask].tolist() == [5, 6]


def test_the_teacher_reads_its_own_prompts_and_the_policy_does_not():
    run = Run(policy=WITHOUT_REFERENCE, algorithm="reinforce++", distill_coef=1.0, has_teacher_context=True)
    run.prompts = [dataclasses.replace(prompt, teacher_ids=[99, *prompt.prompt_ids]) for prompt in PROMPTS]
    run.scorer.judge = lambda request: Score(0.0, "scored")  # type: ignore[method-assign]
    teacher, read = run.teacher, list[TokenSequence]()
    assert teacher is not None
    logprobs = teacher.logprobs

    def recorded(sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
        read.extend(sequences)
        return logprobs(sequences)

    teacher.logprobs = recorded  # type: ignore[method-assign]
    run(total_iterations=1)
    ((trained, _),) = run.actor.updates
    assert len(read) == len(trained) == 3 * SAMPLES_EACH
    for teachers, own in zip(read, trained, strict=True):
        assert teachers.token_ids.tolist() == [99, *own.token_ids.tolist()]
        # The advantage of each token: teacher (-0.75) minus policy (-1).
        np.testing.assert_allclose(own.columns["advantages"], 0.25)


def test_a_context_needs_a_teacher():
    assert resolve("grpo", teacher_pretrain="x", teacher_context_key="hint").prompts.teacher_context_key == "hint"
    with pytest.raises(UsageError, match="teacher_context_key requires a teacher: set --teacher_pretrain"):
        resolve("grpo", teacher_context_key="hint")


def test_a_teacher_in_the_students_ranks_reads_contexts_of_sampled_responses_only():
    given = {"teacher_pretrain": "x", "teacher_context_key": "hint"}
    assert resolve("gkd", **given, lmbda="1").prompts.teacher_context_key == "hint"
    with pytest.raises(UsageError, match="teacher_context_key is for sampled responses"):
        resolve("gkd", **given, lmbda="0.5")
    with pytest.raises(UsageError, match="set --sequence_parallel_size 1"):
        resolve("gkd", **given, lmbda="1", sequence_parallel_size="2")


def test_episodes_are_refused(tmp_path):
    settings = {"teacher_pretrain": "x", "teacher_context_key": "hint", "environment": str(tmp_path / "e.py:E")}
    (tmp_path / "e.py").write_text("class E:\n    pass\n")
    with pytest.raises(UsageError, match="--teacher_context_key applies to a single response"):
        check_episodes(resolve("reinforce++", **settings))
    settings["teacher_tokenizer"] = "own"
    del settings["teacher_context_key"]
    with pytest.raises(UsageError, match="--teacher_tokenizer own applies to a single response"):
        check_episodes(resolve("reinforce++", **settings))
