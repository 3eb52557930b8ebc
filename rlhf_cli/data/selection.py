"""Selects scored responses as training rows: examples for sft, or pairs for dpo and rm.

Reads samples from `rlhf generate`, with samples of a prompt adjacent. Scores come from rewards.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from rlhf_cli.config.generate import AnswersOutputConfig
from rlhf_cli.data.formats.conversations import Conversation
from rlhf_cli.data.formats.transcripts import is_transcript
from rlhf_cli.data.templates.message_forms import MessageForm

_Cells = dict[str, Any]
_AS_OPENAI = MessageForm(arguments_as_text=True, no_content=None)

_REASONS = {
    "failed": "failed rewards",
    "empty": "empty responses",
    "truncated": "truncated responses",
    "low": "responses below min_score",
    "repeated": "repeated responses",
    "equal": "prompts whose responses score alike",
    "without": "prompts with too few responses left",
}


def prompt_cells(conversation: Conversation) -> _Cells:
    """Return a prompt's columns: the text of a single user message, else the messages, and tools if any."""
    # Templates render a system message, so only a single user message is stored as text.
    messages = conversation.messages
    listed = [_AS_OPENAI.entry(message) for message in messages]
    prompt = messages[0].content if [message.role for message in messages] == ["user"] else listed
    return {"prompt": prompt} | ({"tools": list(conversation.tools)} if conversation.tools else {})


def select_samples(samples: Iterable[_Cells], settings: AnswersOutputConfig, counts: Counter[str]) -> Iterable[_Cells]:
    """Yield training rows in prompt order; `counts` counts skipped rows by reason.

    A truncated response is never selected as good: a model would learn to stop there.
    """
    # The samples of a prompt are adjacent.
    for _, group in groupby(samples, key=lambda sample: sample["group"]):
        rows = _of_prompt(list(group), settings, counts)
        counts["prompts"] += 1
        counts["rows"] += len(rows)
        yield from rows


def _of_prompt(samples: list[_Cells], settings: AnswersOutputConfig, counts: Counter[str]) -> list[_Cells]:
    scored = [sample for sample in samples if sample.get("verdict") != "failed"]
    usable = [sample for sample in scored if _text(sample)]
    whole = [sample for sample in usable if sample["finish_reason"] == "stop"]
    good = [sample for sample in whole if settings.min_score is None or sample["reward"] >= settings.min_score]
    # In this order, so that each sample is counted under its first reason.
    stages = (samples, scored, usable, whole, good)
    for reason, (before, after) in zip(("failed", "empty", "truncated", "low"), pairwise(stages), strict=True):
        counts[reason] += len(before) - len(after)
    if not good:
        counts["without"] += 1
        return []
    if settings.select == "all":
        different: dict[str, _Cells] = {}
        # The first of equal responses stays.
        for sample in good:
            different.setdefault(_text(sample), sample)
        counts["repeated"] += len(good) - len(different)
        return [_example(sample) for sample in different.values()]
    best = max(good, key=lambda sample: sample["reward"])
    return [_example(best)] if settings.select == "best" else _pair(best, usable, counts)


def _pair(best: _Cells, usable: list[_Cells], counts: Counter[str]) -> list[_Cells]:
    """Return the best response with the worst one, which may be truncated; [] if their scores are equal."""
    worst = min(usable, key=lambda sample: sample["reward"])
    margin = best["reward"] - worst["reward"]
    reason = "without" if len(usable) == 1 else "equal" if not margin else "repeated" if _same(best, worst) else None
    if reason is not None:
        counts[reason] += 1
        return []
    prompt, chosen, rejected = best["prompt"], best["response"], worst["response"]
    # Text that looks like a transcript would be read as one.
    if not isinstance(prompt, str) or "messages" in best or any(map(is_transcript, (prompt, chosen, rejected))):
        prompt, chosen, rejected = _opened(best), _turns(best), _turns(worst)
    return [{"prompt": prompt, "chosen": chosen, "rejected": rejected, "margin": margin, **_tools(best)}]


def _example(sample: _Cells) -> _Cells:
    score = {} if sample.get("reward") is None else {"score": sample["reward"]}
    if "messages" in sample:
        return {"messages": [*_opened(sample), *_turns(sample)], **score, **_tools(sample)}
    return {"prompt": sample["prompt"], "response": sample["response"], **score, **_tools(sample)}


def _tools(sample: _Cells) -> _Cells:
    return {"tools": sample["tools"]} if "tools" in sample else {}


def _messages(prompt: str | list[_Cells]) -> list[_Cells]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _opened(sample: _Cells) -> list[_Cells]:
    """Return the prompt as messages, including text that the environment added to the last one."""
    *before, last = _messages(sample["prompt"])
    return [*before, {**last, "content": last["content"] + sample["opening"]} if "opening" in sample else last]


def _turns(sample: _Cells) -> list[_Cells]:
    """Return the response as messages: turns and observations of an episode, or its only turn."""
    only: list[_Cells] = [{"role": "assistant", "content": sample["response"]}]
    return sample.get("messages", only)


def _text(sample: _Cells) -> str:
    """Return a response's text, "" if empty; for an episode, all turns."""
    if "messages" in sample:
        return json.dumps(sample["messages"]) if sample["messages"] else ""
    return str(sample["response"]).strip()


def _same(one: _Cells, other: _Cells) -> bool:
    return _text(one) == _text(other)


def summary(counts: Counter[str]) -> str:
    """Summarize selected and skipped rows, with reasons."""
    left_out = ", ".join(f"{counts[name]:,} {words}" for name, words in _REASONS.items() if counts[name])
    return f"{counts['rows']:,} rows of {counts['prompts']:,} prompts" + (f"; left out: {left_out}" if left_out else "")


def write_rows(path: Path, rows: Iterable[_Cells]) -> None:
    """Write JSON lines atomically."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as lines:
        for row in rows:
            # Sampled text may contain half of a surrogate pair, which is not valid UTF-8.
            lines.write(json.dumps(row, ensure_ascii=False).encode(errors="replace") + b"\n")
        lines.flush()
        # Flush to disk before renaming, or a power failure could leave an empty file.
        os.fsync(lines.fileno())
    os.replace(temporary, path)
