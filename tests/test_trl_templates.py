"""TRL 1.16's chat templates, if they are at hand: the trained characters are TRL's mask less the generation prompt.

The templates are read from the folder in RLHF_TRL_TEMPLATES, else from an installed `trl`; none is part of the project.
"""

import importlib.util
import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jinja2
import pytest
from chat_tokenizers import make_tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from rlhf_cli.data.columns import REASONING_KEYS
from rlhf_cli.data.conversations import Conversation, Message, ToolCall
from rlhf_cli.data.message_forms import MESSAGE_FORMS
from rlhf_cli.data.templates import ChatTemplate, Rendered, TemplateFault

TRAINING = "_training.jinja"
BOS, EOS = "<bos-x>", "<eos-x>"
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
MIN_EQUAL = 222
"""Cases that were equal with TRL 1.16; fewer of them would be a step back into refusals."""
OTHER_TEXT = "another text"
DIFFERENCES = {
    "deepseek_r1_distill": (
        {"-<\uff5cAssistant\uff5c>"},
        "the generation prompt gives the header, and then opens a thought",
    ),
    "deepseekv3": ({"-<\uff5cAssistant\uff5c>"}, "the generation prompt gives the header, and then opens a thought"),
    "diffusion_gemma": (
        {"+<|tool_response>", "+<|turn>model"},
        "a call ends with the tool's token; a header behind a tool's answer is trained if it is not in the prompt",
    ),
    "nemotron_3_5_lightning": ({"-<think>"}, "the generation prompt gives the token"),
    "nemotron_3_nano": ({"-<think>"}, "the generation prompt gives the token"),
    "nemotron_3_super": ({"-<think>"}, "the generation prompt gives the token"),
    "nemotron_3_ultra": ({"-<think>"}, "the generation prompt gives the token"),
    "phi3": ({f"-{EOS}"}, "the turn ends with <|end|>, where generation stops; the end of text behind is not trained"),
    "phi3_5": (
        {f"-{EOS}"},
        "the turn ends with <|end|>, where generation stops; the end of text behind is not trained",
    ),
    "qwen3": ({OTHER_TEXT}, "TRL's template keeps empty thoughts that the original leaves out"),
    "qwen3_5_nothink": ({OTHER_TEXT, "-<think>"}, "the same; and the generation prompt gives the token"),
    "qwen3_5_think": ({OTHER_TEXT}, "TRL's template keeps empty thoughts that the original leaves out"),
    "qwen3_6": ({OTHER_TEXT}, "TRL's template keeps empty thoughts that the original leaves out"),
}
"""Differences with TRL 1.16 by template, + what only this program trains, - what only TRL does, and their cause."""


def template_folder() -> Path:
    """Return the folder of TRL's templates; skip the test if there is none."""
    if given := os.environ.get("RLHF_TRL_TEMPLATES"):
        return Path(given)
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("no TRL: install trl 1.16, or name the folder of its chat templates in RLHF_TRL_TEMPLATES")
    return Path(spec.origin).parent / "chat_templates"


def rendered_by_trl(training: str, conversation: Conversation, text: str) -> list[tuple[int, int]] | None:
    """Return the spans of TRL's mask; None if its template makes another text in every form of messages."""
    inlined = tuple(message.with_reasoning_in_text() for message in conversation.messages)
    tried = itertools.product(MESSAGE_FORMS, REASONING_KEYS, (conversation.messages, inlined))
    for form, key, messages in tried:
        try:
            (theirs,), (spans,) = render_jinja_template(
                conversations=[[replace(form, reasoning_key=key).entry(message) for message in messages]],
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
    """Return the characters behind the last words of others that generation prompts write."""
    given: set[int] = set()
    for number, message in enumerate(conversation.messages):
        if message.role != "assistant":
            continue
        before = conversation.messages[:number]
        try:
            prompt = template.prompt(replace(conversation, messages=before))
        except TemplateFault:
            continue
        if text.startswith(prompt):
            words = [other.content for other in before if other.role != "assistant" and other.content]
            ends = [place + len(word) for word in words if (place := prompt.rfind(word)) >= 0]
            given |= set(range(max(ends, default=0), len(prompt)))
    return given


def differing_runs(ours: set[int], theirs: set[int], text: str) -> Iterator[str]:
    """Yield the runs of characters that one side trains alone; white space does not count."""
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


def compare(original: str, training: str) -> tuple[int, set[str]]:
    """Return the number of equal cases of a template and its training variant, and all differences."""
    found = set(SPECIAL.findall(original) + SPECIAL.findall(training))
    specials = (*sorted(found, key=len, reverse=True), BOS, EOS, "<think>", "</think>", "<tool_call>", "</tool_call>")
    num_equal = 0
    differing: set[str] = set()
    for source, conversation in itertools.product((original, training), CONVERSATIONS.values()):
        template = ChatTemplate(make_tokenizer(source, specials=specials, bos=BOS, eos=EOS))
        try:
            ours = template.example(conversation)
        except TemplateFault:
            continue  # refused with a reason
        case = differences(template, ours, training, conversation)
        num_equal += not case
        differing |= case
    return num_equal, differing


@pytest.mark.slow
def test_trained_characters_are_trl_s_mask_less_the_generation_prompt_or_differ_for_a_named_cause():
    folder = template_folder()
    paths = sorted(folder.glob(f"*{TRAINING}"))
    assert paths, f"no *{TRAINING} in {folder}"
    num_equal = 0
    differing: dict[str, set[str]] = {}
    for path in paths:
        stem = path.name.removesuffix(TRAINING)
        equal, found = compare((folder / f"{stem}.jinja").read_text(), path.read_text())
        num_equal += equal
        if found:
            differing[stem] = found
    assert differing == {stem: expected for stem, (expected, _) in DIFFERENCES.items()}
    assert num_equal >= MIN_EQUAL
