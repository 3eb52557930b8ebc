"""Solutions of word problems, marked right or wrong, as preference pairs for `rlhf rm` and `rlhf dpo`.

    python gsm8k_pairs.py SOLUTIONS.jsonl TRAIN.jsonl EVAL.jsonl

SOLUTIONS.jsonl is what was published with GSM8K as example_model_solutions.jsonl: a line has a "question" and, under
the name of each model, {"solution": text, "is_correct": true or false}. Every right solution of a question is paired
with every wrong one of the same question. Answers are written as the training data write them, "#### 18" where the
solutions have "A: 18". A tenth of the questions, chosen by their text, is for evaluation; the others are for training.
"""

import json
import re
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

ANSWER = re.compile(r"^A: ", re.MULTILINE)
EVAL_QUESTIONS = 10
"""One in so many questions is kept for evaluation."""


def solutions_of(row: dict, *, are_correct: bool) -> list[str]:
    """The different solutions of a row that are marked so, in the form of the training data."""
    marked = [value for value in row.values() if isinstance(value, dict) and value["is_correct"] == are_correct]
    return list(dict.fromkeys(ANSWER.sub("#### ", value["solution"]) for value in marked))


def pairs_of(row: dict) -> Iterator[dict[str, str]]:
    """Every right solution against every wrong one; none where the models agree."""
    for chosen in solutions_of(row, are_correct=True):
        for rejected in solutions_of(row, are_correct=False):
            yield {"prompt": row["question"], "chosen": chosen, "rejected": rejected}


def is_for_evaluation(question: str) -> bool:
    """The same for equal questions, whatever else is in the file."""
    return zlib.crc32(question.encode()) % EVAL_QUESTIONS == 0


def main(solutions: str, train: str, evaluation: str) -> None:
    """Write both files and say how many pairs they have."""
    rows = [json.loads(line) for line in Path(solutions).read_text(encoding="utf-8").splitlines()]
    for path, wanted in ((train, False), (evaluation, True)):
        pairs = [pair for row in rows if is_for_evaluation(row["question"]) == wanted for pair in pairs_of(row)]
        Path(path).write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
        print(f"{path}: {len(pairs)} pairs of {len({pair['prompt'] for pair in pairs})} questions")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(f"usage: {sys.argv[0]} SOLUTIONS.jsonl TRAIN.jsonl EVAL.jsonl")
    main(*sys.argv[1:])
