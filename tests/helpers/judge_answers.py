"""Answers of judges behind chat endpoints, and what they are asked."""

import json
import re

from http_servers import Answer

MODELS: Answer = (200, json.dumps({"data": [{"id": "judge-7b"}]}).encode(), {})


def says(text: object, finish_reason: str = "stop") -> Answer:
    """Return a chat completion with this text."""
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
    return 200, json.dumps({"choices": [choice]}).encode(), {}


def verdict(score: object, reason: str = "because") -> Answer:
    return says(json.dumps({"reason": reason, "score": score}))


def question_in(body: dict) -> str:
    (message,) = body["messages"]
    return message["content"]


def part_of(question: str, tag: str) -> str:
    """Return what is between the delimiters with this name, which is what a faithful judge reads."""
    (code,) = set(re.findall(r"with the code ([0-9a-f]+) is material", question))
    return question.split(f"<{tag}-{code}>\n")[1].split(f"\n</{tag}-{code}>")[0]
