"""Tokenised solutions: label positions, truncation, and each format with rows of its data sets."""

import json
from itertools import pairwise

import numpy as np
import pytest
from chat_tokenizers import CHATML, SPECIALS, TRAINABLE, make_metaspace_tokenizer, make_tokenizer
from pydantic import ValidationError
from template_settings import split_settings

from rlhf_cli.config.data import StepDataConfig
from rlhf_cli.data.formats.conversations import Message, Solution
from rlhf_cli.data.formats.steps import StepColumns, choose_step_format
from rlhf_cli.data.reading.sources import load_rows
from rlhf_cli.data.solution_steps import joined_steps, step_ends, token_step_ends
from rlhf_cli.data.step_data import STEPS
from rlhf_cli.errors import UsageError

ASKED = {"prompt": "What is 12 + 34?", "completions": ["12 + 30 = 42.", "42 + 4 = 46.", "The answer is 46."]}
JANET = (
    "Janet has 16 eggs. She eats 3 and sells the rest for $2 each. How much does she make? "
    "Step 1: She sells 16 - 3 = <<16-3=13>>13 eggs. ки\nStep 2: She makes 13 * 2 = <<13*2=26>>26 dollars. ки\n"
    "Step 3: The answer is: 18 ки"
)
"""A text in the format of peiyi9979/Math-Shepherd."""


def write(tmp_path, rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def steps(tmp_path, tokenizer, *rows, **settings):
    of_data, template = split_settings(settings)
    config = StepDataConfig(**{"dataset": write(tmp_path, rows), **of_data})
    return STEPS.load(config, tokenizer, dataset=config.dataset, split="train", seed=0, template=template)


def solutions(tmp_path, *rows, data_format="auto", tokens=("+", "-"), placeholder="ки", **keys):
    """Return the detected format and the solutions of all rows."""
    wanted = {"input_key": None, "output_key": None, "label_key": None, **keys}
    read = load_rows(write(tmp_path, rows), split="train", probs=None, seed=0, max_samples=99, data_format="auto")
    columns = StepColumns(**wanted, placeholder_token=placeholder, reward_tokens=tokens)
    form = choose_step_format(read.sources[0], columns, data_format=data_format)
    return form.name, [solution for row in read for solution in form.read(row)]


def texts_of(tokenizer, item):
    """Decode the prompt and each step."""
    bounds = [0, item.start, *item.ends.tolist()]
    return [tokenizer.decode(item.token_ids[a:b]) for a, b in pairwise(bounds)]


@pytest.mark.parametrize("name", TRAINABLE)
@pytest.mark.parametrize("separator", ["\n", "\n\n", " ки\n"])
def test_each_label_stands_at_the_token_that_completes_the_step_with_its_separator(name, separator, tmp_path):
    tokenizer = make_tokenizer(TRAINABLE[name])
    data = steps(tmp_path, tokenizer, ASKED | {"labels": [True, 0.25, False]}, step_separator=separator)
    (item,) = data.items
    first, second, third = ASKED["completions"]
    texts = texts_of(tokenizer, item)
    assert texts[1].endswith(first + separator)
    assert texts[2] == second + separator
    assert texts[3].replace(" <|", "<|") == third + "<|im_end|>"
    assert tokenizer.decode(item.token_ids[item.ends[-1] - 1 :]) == "<|im_end|>"
    assert item.labels.tolist() == [1.0, 0.25, 0.0]
    assert (data.columns["length"][0], data.columns["num_trained"][0]) == (len(item.token_ids), 3)


def test_the_prompt_of_a_solution_is_the_start_of_a_rollout(tmp_path):
    tokenizer = make_tokenizer(TRAINABLE["ChatML"])
    (item,) = steps(tmp_path, tokenizer, ASKED | {"labels": [1, 1, 0]}).items
    asked = [{"role": "user", "content": ASKED["prompt"]}]
    assert item.token_ids[: item.start].tolist() == tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_dict=False
    )


def test_without_a_template_the_last_step_ends_with_the_end_of_sequence(tmp_path):
    tokenizer = make_tokenizer(TRAINABLE["ChatML"])
    plain = {"apply_chat_template": False, "input_template": "Q: {}\\nA: "}
    (item,) = steps(tmp_path, tokenizer, ASKED | {"labels": [1, 1, 0]}, **plain).items
    assert texts_of(tokenizer, item)[0] == "Q: What is 12 + 34?\nA: "
    assert item.token_ids[-1] == tokenizer.eos_token_id
    assert item.ends[-1] == len(item.token_ids)


def test_steps_of_a_tokenizer_that_merges_blanks_end_at_the_separator_too(tmp_path):
    tokenizer = make_metaspace_tokenizer(CHATML, specials=SPECIALS, bos=None, eos="<|im_end|>")
    (item,) = steps(tmp_path, tokenizer, ASKED | {"labels": [1, 1, 0]}, step_separator="\n").items
    squeezed = ["".join(text.split()) for text in texts_of(tokenizer, item)[1:]]
    assert squeezed == ["12+30=42.", "42+4=46.", "Theansweris46.<|im_end|>"]


@pytest.mark.parametrize(("max_len_over", "num_kept"), [(0, 2), (-1, 1), (1, 2)])
def test_max_len_cuts_between_steps_and_the_report_names_the_row(max_len_over, num_kept, tmp_path):
    tokenizer = make_tokenizer(TRAINABLE["ChatML"])
    row = ASKED | {"labels": [True, False, False]}
    (whole,) = steps(tmp_path, tokenizer, row).items
    data = steps(tmp_path, tokenizer, row, max_len=int(whole.ends[1]) + max_len_over)
    (item,) = data.items
    assert item.ends.tolist() == whole.ends[:num_kept].tolist()
    assert item.token_ids.tolist() == whole.token_ids[: whole.ends[num_kept - 1]].tolist()
    assert data.report.truncated == 1
    assert data.report.noted["truncated"] == [
        f"{tmp_path}/rows.jsonl line 1: {num_kept} of 3 steps are within {int(whole.ends[1]) + max_len_over:,} tokens"
    ]


def test_a_solution_whose_labelled_steps_are_all_cut_off_is_dropped(tmp_path):
    tokenizer = make_tokenizer(TRAINABLE["ChatML"])
    long = ASKED | {"labels": [None, None, True]}
    (whole,) = steps(tmp_path, tokenizer, long).items
    data = steps(tmp_path, tokenizer, long, ASKED | {"labels": [True, None, None]}, max_len=int(whole.ends[1]))
    assert [item.labels[0] for item in data.items] == [1.0]
    assert "line 1: no labelled step in the 2 of 3 steps within max_len" in data.report.noted["dropped_untrained"][0]


def test_only_the_last_labelled_step_is_trained_if_the_settings_want_it(tmp_path):
    tokenizer = make_tokenizer(TRAINABLE["ChatML"])
    row = ASKED | {"labels": [True, False, None]}
    (item,) = steps(tmp_path, tokenizer, row, train_on_last_step_only=True).items
    assert np.isnan(item.labels).tolist() == [True, False, True]
    assert item.labels[1] == 0


def test_steps_with_the_separator_inside_are_counted(tmp_path):
    tokenizer = make_tokenizer(TRAINABLE["ChatML"])
    row = {"prompt": "Why?", "completions": ["one\ntwo", "three"], "labels": [True, True]}
    data = steps(tmp_path, tokenizer, row, ASKED | {"labels": [True, True, True]})
    assert data.report.details["solutions with the step separator within a step"] == 1
    assert texts_of(tokenizer, data.items[0])[1:] == ["one\ntwo\n", "three<|im_end|>"]


def test_math_shepherds_rows_give_the_question_and_its_labelled_steps(tmp_path):
    label = JANET.replace("ки", "+", 2).replace("ки", "-")
    name, found = solutions(tmp_path, {"input": JANET, "label": label, "task": "GSM8K"})
    question = "Janet has 16 eggs. She eats 3 and sells the rest for $2 each. How much does she make?"
    assert name == "placeholder"
    assert found == [
        Solution(
            (Message("user", question),),
            (
                "Step 1: She sells 16 - 3 = <<16-3=13>>13 eggs.",
                "Step 2: She makes 13 * 2 = <<13*2=26>>26 dollars.",
                "Step 3: The answer is: 18",
            ),
            (1.0, 1.0, 0.0),
        )
    ]


@pytest.mark.parametrize("labels", [["<good>", "<bad>", "<good>"], [1.0, 0.0, 1.0], [0.9, 0.2, 1.0]])
def test_placeholder_rows_take_lists_of_reward_tokens_or_numbers(labels, tmp_path):
    row = {"input": JANET.replace("ки", "<mark>"), "value": labels}
    options = {"placeholder": "<mark>", "tokens": ("<good>", "<bad>"), "label_key": "value"}
    _, (found,) = solutions(tmp_path, row, **options)
    known = {"<good>": 1.0, "<bad>": 0.0}
    assert list(found.labels) == [known.get(label, label) for label in labels]


def test_the_question_mark_parts_a_marked_text_without_numbered_steps(tmp_path):
    row = {"input": "How many? First 3. ки\nThen 4. ки", "label": ["+", "-"]}
    _, (found,) = solutions(tmp_path, row)
    assert (found.prompt[0].content, found.steps) == ("How many?", ("First 3.", "Then 4."))


def completion(text, rating):
    return {"text": text, "rating": rating, "flagged": None}


def rated(*completions, chosen=None, human=None):
    return {"completions": list(completions), "chosen_completion": chosen, "human_completion": human}


PRM800K = {
    "labeler": "e90a38f3",
    "generation": 9,
    "is_quality_control_question": False,
    "question": {"problem": "What is $2 + 3 \\cdot 4$?", "ground_truth_answer": "14"},
    "label": {
        "steps": [
            rated(completion("Multiply first.", 1), chosen=0),
            rated(completion("3 times 4 is 11.", -1), completion("3 times 4 is 12.", 0), chosen=1),
            rated(completion("So it is 13.", -1), completion("So it is 14.", 1)),
        ],
        "finish_reason": "found_error",
    },
}
"""A row in the format of openai/prm800k: a neutral rating, a step with two choices, an error at the end."""


def test_prm800k_rows_give_the_solution_and_every_other_rated_step_behind_its_beginning(tmp_path):
    name, found = solutions(tmp_path, PRM800K)
    assert name == "prm800k"
    assert {solution.prompt for solution in found} == {(Message("user", "What is $2 + 3 \\cdot 4$?"),)}
    assert [(solution.steps, solution.labels) for solution in found] == [
        (("Multiply first.", "3 times 4 is 12.", "So it is 13."), (1.0, 1.0, 0.0)),
        (("Multiply first.", "3 times 4 is 11."), (None, 0.0)),
        (("Multiply first.", "3 times 4 is 12.", "So it is 14."), (None, None, 1.0)),
    ]


def test_a_step_that_people_wrote_goes_into_prm800ks_solution(tmp_path):
    label = {
        "steps": [rated(completion("No.", -1), human={"text": "Yes.", "rating": None}), rated(completion("A.", 1))]
    }
    _, found = solutions(tmp_path, PRM800K | {"label": label})
    assert [(solution.steps, solution.labels) for solution in found] == [
        (("Yes.", "A."), (1.0, 1.0)),
        (("No.",), (0.0,)),
    ]


@pytest.mark.parametrize(("label", "labels"), [(-1, (1, 1, 1)), (0, (0, None, None)), (1, (1, 0, None))])
def test_processbench_rows_label_the_steps_up_to_the_first_error(label, labels, tmp_path):
    row = {"id": "gsm8k-0", "problem": "Why?", "steps": ["a", "b", "c"], "final_answer_correct": True, "label": label}
    name, (found,) = solutions(tmp_path, row)
    assert (name, found.labels) == ("processbench", labels)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (ASKED | {"labels": [True, False]}, "3 steps have 2 labels"),
        (ASKED | {"labels": [True, "maybe", True]}, "step 2 has the label 'maybe'.*nor|step 2 has the label 'maybe'"),
        (ASKED | {"labels": [True, 1.5, True]}, "step 2 has the label 1.5"),
        (ASKED | {"labels": "+"}, "column 'labels' is not a list of labels"),
        (ASKED | {"completions": ["a", " ", "b"], "labels": [1, 1, 1]}, "step 2 is empty"),
        (ASKED | {"completions": ["a", 3, "b"], "labels": [1, 1, 1]}, "column 'completions' is not a list of texts"),
        ({"input": JANET, "label": JANET}, r"column 'label' does not have \+ or - .* after step 1"),
        ({"input": JANET + " more", "label": ["+"] * 3}, "has text after its last 'ки'"),
        ({"input": "Say a. ки", "label": ["+"]}, "the start of the first step is unclear"),
        ({"problem": "p", "steps": ["a"], "label": 1}, "not the place of a step, 0 to 0, nor -1"),
        (PRM800K | {"label": {"steps": [rated(completion("a", 2))]}}, "step 1: .* is not a text with a rating"),
        (PRM800K | {"label": {"steps": [rated(completion("a", 1), chosen=3)]}}, "chosen_completion 3 of 1"),
        (PRM800K | {"label": {"steps": [rated(completion("a", None), chosen=0)]}}, "no step has a rating"),
    ],
)
def test_rows_that_cannot_be_used_are_named_with_their_line(row, message, tmp_path):
    tokenizer = make_tokenizer(TRAINABLE["ChatML"])
    with pytest.raises(UsageError, match=f"rows.jsonl line 1: .*({message})"):
        steps(tmp_path, tokenizer, row)


def test_columns_of_no_format_are_named(tmp_path):
    with pytest.raises(UsageError, match=r"no format fits: .*--placeholder_token.*columns present: prompt, answer"):
        solutions(tmp_path, {"prompt": "p", "answer": "a"})


def test_an_empty_separator_is_refused():
    with pytest.raises(ValidationError, match="step_separator"):
        StepDataConfig(dataset="x", step_separator="")


@pytest.mark.parametrize(
    ("text", "separator", "expected"),
    [
        ("a\nb\nc", "\n", ["a\n", "b\n", "c"]),
        ("a\n\n\nb\n", "\n", ["a\n\n\n", "b\n"]),
        ("\n a\nb", "\n", ["\n a\n", "b"]),
        ("a\nb\n\nc", "\n\n", ["a\nb\n\n", "c"]),
        ("a", "\n", ["a"]),
        (" \n", "\n", []),
    ],
)
def test_steps_of_a_text(text, separator, expected):
    ends = step_ends(text, separator)
    assert [text[a:b] for a, b in pairwise([0, *ends])] == expected


def test_joined_steps_are_found_again():
    texts = ["first", "  second", "third."]
    for separator in ("\n", "\n\n", " ки\n"):
        text, ends = joined_steps(texts, separator)
        assert step_ends(text, separator) == ends


@pytest.mark.parametrize("separator", ["\n", "\n\n"])
def test_steps_of_sampled_tokens_end_where_those_of_training_do(separator, tmp_path):
    tokenizer = make_tokenizer(TRAINABLE["ChatML"])
    (item,) = steps(tmp_path, tokenizer, ASKED | {"labels": [1, 1, 0]}, step_separator=separator).items
    response = item.token_ids[item.start :].tolist()
    closing = frozenset(tokenizer.all_special_ids)
    assert token_step_ends(response, separator, tokenizer.decode, closing=closing) == (item.ends - item.start).tolist()
    cut = response[: int(item.ends[1] - item.start) + 2]
    assert token_step_ends(cut, separator, tokenizer.decode, closing=closing)[-1] == len(cut)


def test_sampled_tokens_that_a_tokenizer_would_merge_are_read_as_they_are():
    pieces = ["a", "\n", "\n", "é", "b\nc", "<end>"]  # no tokenizer: a step may end within a token
    decode = lambda ids: "".join(pieces[number] for number in ids)  # noqa: E731
    assert token_step_ends(range(6), "\n", decode, closing=frozenset({5})) == [3, 5, 6]
    assert token_step_ends([5], "\n", decode, closing=frozenset({5})) == [1]
    assert token_step_ends([], "\n", decode, closing=frozenset({5})) == []
