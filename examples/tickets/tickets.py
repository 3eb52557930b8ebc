"""Messages to a shop and the tickets that they become: rows for the learn pages of the documentation.

    python tickets.py TRAIN.csv HELD_OUT.csv

A message is put together from an opening, an item, a problem, a wish and an order number. Held-out messages use items
and sentences that no message for training has, so a model that only memorizes them fails.
"""

import csv
import random
import sys
from pathlib import Path

ROWS = {"train": 120, "held_out": 40}
ITEMS = {
    "train": [
        "mug",
        "lamp",
        "kettle",
        "chair",
        "blanket",
        "clock",
        "vase",
        "rug",
        "pan",
        "mirror",
        "teapot",
        "desk",
        "pillow",
        "knife",
        "basket",
        "candle",
    ],
    "held_out": ["bowl", "shelf", "curtain", "scale", "towel", "toaster"],
}
PROBLEMS = {
    "broken": {
        "train": (
            "The {item} arrived with a crack.",
            "The {item} was in pieces when I opened the box.",
            "My {item} is broken.",
            "The {item} stopped working after a day.",
            "There is a big dent in the {item}.",
        ),
        "held_out": (
            "The {item} is damaged.",
            "The {item} fell apart on the first evening.",
        ),
    },
    "late": {
        "train": (
            "I am still waiting for my {item}.",
            "The {item} should have been here last week.",
            "My {item} has not arrived yet.",
            "Where is my {item}? It has been ten days.",
            "The {item} is late.",
        ),
        "held_out": (
            "Two weeks have passed and there is no {item}.",
            "When will the {item} finally come?",
        ),
    },
    "wrong": {
        "train": (
            "I got a different {item} from the one I ordered.",
            "This is not the {item} that I chose.",
            "You sent the wrong {item}.",
            "The {item} has the wrong color.",
            "I ordered a small {item} and a large one came.",
        ),
        "held_out": (
            "Somebody packed the wrong {item}.",
            "The {item} in the box is not what the page showed.",
        ),
    },
}
WISHES = {
    "refund": {
        "train": (
            "I want my money back.",
            "Please refund me.",
            "Can I have a refund?",
            "Please return the payment.",
        ),
        "held_out": ("I would like to get the money back.", "A refund, please."),
    },
    "replace": {
        "train": (
            "Please send a new one.",
            "Can you replace it?",
            "I would like another one instead.",
            "A replacement would be great.",
        ),
        "held_out": ("Please replace it soon.", "Could you send me a new one?"),
    },
    "cancel": {
        "train": (
            "Please cancel the order.",
            "I do not want it any more, cancel it.",
            "Cancel this, please.",
            "I would like to cancel.",
        ),
        "held_out": ("Can you cancel my order?", "Just cancel everything."),
    },
}
NUMBERS = {
    "train": (
        "Order {number}.",
        "My order is {number}.",
        "It is about order {number}.",
        "(order no. {number})",
    ),
    "held_out": ("The order number is {number}.", "Number {number}."),
}
OPENINGS = {
    "train": ("Hello.", "Hi there!", "Dear team!", "Good morning.", ""),
    "held_out": ("Hi.", "Good evening.", ""),
}


def row(split: str, chance: random.Random) -> tuple[str, str]:
    """Return a message and its ticket."""
    item, problem, wish = (
        chance.choice(ITEMS[split]),
        chance.choice(list(PROBLEMS)),
        chance.choice(list(WISHES)),
    )
    number = chance.randint(1000, 9999)
    texts = [chance.choice(PROBLEMS[problem][split]), chance.choice(NUMBERS[split])]
    chance.shuffle(texts)
    message = " ".join([chance.choice(OPENINGS[split]), *texts, chance.choice(WISHES[wish][split])])
    return message.format(item=item, number=number).strip(), f"{number} | {item} | {problem} | {wish}"


def main(train: str, held_out: str) -> None:
    """Write both files, always the same."""
    for path, split in ((train, "train"), (held_out, "held_out")):
        chance = random.Random(split)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with Path(path).open("w", encoding="utf-8", newline="") as file:
            table = csv.writer(file)
            table.writerow(("message", "ticket"))
            table.writerows(row(split, chance) for _ in range(ROWS[split]))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} TRAIN.csv HELD_OUT.csv")
    main(*sys.argv[1:])
