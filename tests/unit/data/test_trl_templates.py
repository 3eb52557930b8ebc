"""Comparison with TRL 1.16's chat templates: trained characters equal TRL's mask without the generation prompt, or the
conversation is rejected with the expected reason.

The templates are read from the folder in RLHF_TRL_TEMPLATES or from an installed `trl`; the project contains none.
"""

import importlib.util
import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import jinja2
import pytest
from chat_tokenizers import make_tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from rlhf_cli.data.formats.conversations import Conversation, Message, ToolCall
from rlhf_cli.data.reading.columns import REASONING_KEYS
from rlhf_cli.data.templates.chat_template import ChatTemplate, Rendered
from rlhf_cli.data.templates.message_forms import MESSAGE_FORMS
from rlhf_cli.data.templates.text import TemplateFault
from rlhf_cli.data.templates.turn_spans import num_shared

TRAINING = "_training.jinja"
BOS, EOS = "<bos-x>", "<eos-x>"
THOUGHT_TAGS = ("<think>", "</think>")
SPECIAL = re.compile(
    r"<\|[^|<>{}']{1,40}\|>|<\uff5c[^\uff5c<>]{1,40}\uff5c>|</?s>|\[/?INST\]|<(?:start|end)_of_turn>|<[a-z_]{3,20}\|>|<\|[a-z_]{3,20}>"
    r"|<end_of_utterance>|<fake_token_around_image>|\[EOS\]|<eot>"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "look up",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "a city"}}},
    },
}
ASK, ANSWER = Message("user", "What?"), Message("assistant", "Paris.")
CALLS = (
    Message("user", "Weather?"),
    Message("assistant", "", (ToolCall("weather", {"city": "Paris"}, "abcdefghi"),)),
    Message("tool", "sunny", tool_call_id="abcdefghi", name="weather"),
    Message("assistant", "It is sunny."),
)
CONVERSATIONS = {
    "single": Conversation((ASK, ANSWER)),
    "multi": Conversation((ASK, ANSWER, Message("user", "And?"), Message("assistant", "Rome."))),
    "system": Conversation((Message("system", "Be brief."), ASK, ANSWER)),
    "reason": Conversation((ASK, replace(ANSWER, reasoning="Let me see."))),
    "call": Conversation(CALLS, (TOOL,)),
    "call,user": Conversation((*CALLS, Message("user", "Thanks"), Message("assistant", "Welcome.")), (TOOL,)),
}
MIN_EQUAL = 278
"""Number of cases equal to TRL 1.16; fewer mean that more are rejected."""
OTHER_TEXT = "another text"
PHI = ({f"-{EOS}"}, "the turn ends with <|end|>, where generation stops; the end of text behind is not trained")
DIFFERENCES = {
    "diffusion_gemma": ({"+<|tool_response>"}, "the model ends a call with this token; TRL counts it to the answer"),
    "phi3": PHI,
    "phi3_5": PHI,
    "qwen3": ({OTHER_TEXT}, "TRL's template keeps empty thoughts that the original leaves out"),
    "qwen3_5_nothink": ({OTHER_TEXT}, "the same"),
    "qwen3_5_think": ({OTHER_TEXT}, "the same"),
    "qwen3_6": ({OTHER_TEXT}, "the same"),
}
"""Differences from TRL 1.16 by template (+ trained only here, - trained only by TRL) and their cause."""
CALLED = ("call", "call,user")
NO_CALLS, NO_TOOLS = "has no place for calls of functions", "leaves out the tools of the row: it has no place for them"
NO_SYSTEM, NO_END = "System role not supported", "no end of turn after the assistant's last text"
NO_THOUGHT = "leaves out the thought of the last turn"
BOTH, ORIGINAL = ("original", "training"), ("original",)
TEXT_ALONE = ("cohere", "cohere2", "gemma", "gemma3", "idefics3", "lfm2", "llama3", "llava_next", "phi3", "phi3_5")
REFUSALS = (
    *((stem, BOTH, CALLED, NO_CALLS) for stem in (*TEXT_ALONE, "qwen2_5_vl", "smolvlm")),
    *((stem, BOTH, CALLED, NO_TOOLS) for stem in ("deepseek_r1_distill", "deepseekv3")),
    ("gemma", BOTH, ("system",), NO_SYSTEM),
    ("deepseek_r1_distill", ORIGINAL, ("reason",), NO_THOUGHT),  # TRL's variant keeps thoughts
    ("deepseekv3", BOTH, ("reason",), NO_THOUGHT),
    ("glm4moe", ORIGINAL, tuple(CONVERSATIONS), NO_END),  # the next header ends a turn; TRL's variant adds an end
)
"""All rejected cases, by template, its text, and conversation, with part of the reason."""


def expected_refusals() -> dict[tuple[str, str, str], str]:
    """Return part of the reason by template, `original` or `training`, and conversation."""
    return {(stem, text, kind): words for stem, texts, kinds, words in REFUSALS for text in texts for kind in kinds}


def template_folder() -> Path:
    """Return the folder of TRL's templates, or skip the test."""
    if given := os.environ.get("RLHF_TRL_TEMPLATES"):
        return Path(given)
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("no TRL: install trl 1.16, or name the folder of its chat templates in RLHF_TRL_TEMPLATES")
    return Path(spec.origin).parent / "chat_templates"


def rendered_by_trl(training: str, conversation: Conversation, text: str) -> list[tuple[int, int]] | None:
    """Return the spans of TRL's mask, or None if its template renders different text in every message form."""
    inlined = tuple(message.with_reasoning_in_text() for message in conversation.messages)
    tried = itertools.product(MESSAGE_FORMS, REASONING_KEYS, (False, True), (conversation.messages, inlined))
    for form, key, parts, messages in tried:
        try:
            (theirs,), (spans,) = render_jinja_template(
                conversations=[
                    [replace(form, reasoning_key=key, as_parts=parts).entry(message) for message in messages]
                ],
                chat_template=training,
                return_assistant_tokens_mask=True,
                tools=list(conversation.tools) or None,
                bos_token=BOS,
                eos_token=EOS,
                pad_token=EOS,
            )
        except (jinja2.TemplateError, TypeError):
            continue
        if theirs == text:
            return list(spans)
    return None


def given_by_prompts(template: ChatTemplate, conversation: Conversation, text: str) -> set[int]:
    """Return the characters that generation prompts add after the last message."""
    given: set[int] = set()
    for number, message in enumerate(conversation.messages):
        if message.role != "assistant":
            continue
        before = conversation.messages[:number]
        try:
            prompt = template.prompt(replace(conversation, messages=before))
        except TemplateFault:
            continue
        shared = num_shared(prompt, text)
        words = [other.content for other in before if other.role != "assistant" and other.content]
        ends = [place + len(word) for word in words if (place := prompt.rfind(word)) >= 0]
        given |= set(range(max(ends, default=0), shared))
    return given


def differing_runs(ours: set[int], theirs: set[int], text: str) -> Iterator[str]:
    """Yield the runs of characters trained on only one side; whitespace is ignored."""
    alone = sorted(place for place in ours ^ theirs if not text[place].isspace())
    for _, group in itertools.groupby(enumerate(alone), key=lambda pair: pair[1] - pair[0]):
        places = [place for _, place in group]
        yield ("-" if places[0] in theirs else "+") + text[places[0] : places[-1] + 1]


def differences(template: ChatTemplate, ours: Rendered, training: str, conversation: Conversation) -> set[str]:
    """Return the runs in which a rendered conversation differs from TRL's mask."""
    spans = rendered_by_trl(training, conversation, ours.text)
    if spans is None:
        return {OTHER_TEXT}
    theirs = {place for span in spans for place in range(*span)} - given_by_prompts(template, conversation, ours.text)
    return set(differing_runs({place for span in ours.spans for place in range(*span)}, theirs, ours.text))


@dataclass
class Comparison:
    """Number of cases equal to TRL's mask, all differences, and reasons of rejected cases."""

    num_equal: int = 0
    differing: dict[str, set[str]] = field(default_factory=dict)
    refused: dict[tuple[str, str, str], str] = field(default_factory=dict)

    def add(self, stem: str, original: str, training: str) -> None:
        """Compare all conversations under a template and its training variant."""
        found = set(SPECIAL.findall(original) + SPECIAL.findall(training))
        specials = (*sorted(found, key=len, reverse=True), BOS, EOS, *THOUGHT_TAGS, "<tool_call>", "</tool_call>")
        sources = zip(BOTH, (original, training), strict=True)
        for (name, source), (kind, conversation) in itertools.product(sources, CONVERSATIONS.items()):
            template = ChatTemplate(make_tokenizer(source, specials=specials, bos=BOS, eos=EOS))
            try:
                ours = template.example(conversation)
            except TemplateFault as fault:
                self.refused[stem, name, kind] = str(fault)
                continue
            case = differences(template, ours, training, conversation)
            self.num_equal += not case
            if case:
                self.differing[stem] = self.differing.get(stem, set()) | case


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    """Compare each training template of the folder, and the original from which it was made."""
    folder = template_folder()
    paths = sorted(folder.glob(f"*{TRAINING}"))
    assert paths, f"no *{TRAINING} in {folder}"
    found = Comparison()
    for path in paths:
        stem = path.name.removesuffix(TRAINING)
        found.add(stem, (folder / f"{stem}.jinja").read_text(), path.read_text())
    return found


@pytest.mark.slow
def test_trained_characters_are_trl_s_mask_less_the_generation_prompt_or_differ_for_a_named_cause(
    comparison: Comparison,
):
    assert comparison.differing == {stem: expected for stem, (expected, _) in DIFFERENCES.items()}
    assert comparison.num_equal >= MIN_EQUAL


@pytest.mark.slow
def test_a_template_is_refused_for_the_conversations_it_has_no_place_for_and_with_that_reason(comparison: Comparison):
    expected = expected_refusals()
    assert comparison.refused.keys() == expected.keys()
    wrong = {case: reason for case, reason in comparison.refused.items() if expected[case] not in reason}
    assert not wrong
