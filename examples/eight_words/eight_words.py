"""A reward file for answers of exactly eight words, and the prompts that ask for them.

    python eight_words.py TRAIN.jsonl EVAL.jsonl

A small model rarely hits the number at first, so an answer that misses it by little gets a part of the reward. Without
that part most groups would have equal rewards, from which nothing is learned.
"""

import json
import re
import sys
from pathlib import Path

WORDS = 8
THINGS = (
    "a bridge,a lighthouse,the sea,a winter morning,an old clock,a market,a train,the moon,a garden,a violin,a storm,"
    "a library,a river,a loaf of bread,a mountain,a cat,a desert,a candle,a school,a harbour,a forest,a bicycle,a kite,"
    "a castle,a snowflake,a farmer,a doctor,a painter,a whale,an island,a rainbow,a campfire,"
    "a mirror,a piano,a volcano,a spider,a lantern,a waterfall,a carpenter,a submarine"
)
EVAL_THINGS = 8
"""So many of them, the last ones, are for evaluation."""


def num_words(response: str) -> int:
    """Words between white space that have a letter or a digit."""
    return sum(any(character.isalnum() for character in word) for word in response.split())


def reward_func(responses: list[str]) -> list[dict[str, float]]:
    """1 for exactly eight words, a half for one more or less, a third for two, and so on."""
    misses = [abs(num_words(response) - WORDS) for response in responses]
    return [{"reward": 1 / (1 + miss), "exact": float(miss == 0)} for miss in misses]


def naming_reward(responses: list[str], prompts: list[str]) -> list[dict[str, float]]:
    """The same for answers that name the thing, and 0 for all others."""
    things = [re.findall(r"Describe (.+) in one sentence", prompt)[-1].split()[-1] for prompt in prompts]
    named = [float(thing in response.lower()) for thing, response in zip(things, responses, strict=True)]
    return [
        {"reward": name * score["reward"], "exact": name * score["exact"], "named": name}
        for name, score in zip(named, reward_func(responses), strict=True)
    ]


def rows(things: list[str]) -> str:
    """Return one prompt a line about each of these things."""
    asked = [{"prompt": f"Describe {thing} in one sentence of exactly eight words."} for thing in things]
    return "".join(json.dumps(row) + "\n" for row in asked)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} TRAIN.jsonl EVAL.jsonl")
    things = THINGS.split(",")
    for file, part in zip(sys.argv[1:], (things[:-EVAL_THINGS], things[-EVAL_THINGS:]), strict=True):
        Path(file).write_text(rows(part), encoding="utf-8")
