"""Locates assistant turns that do not start right after the generation prompt.

Qwen 3 inserts empty reasoning before the turn, DeepSeek R1 starts reasoning only in the generation prompt, Mistral
writes tools before the last user turn, and Qwen 3.5 removes earlier reasoning once another question follows.
"""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from rlhf_cli.data.formats.conversations import Message
from rlhf_cli.data.templates.turn_spans import Said, Span, TurnMarks, num_shared, turn_at, turn_from


@dataclass(frozen=True)
class TurnSearch:
    """One turn, with the texts used to find its position in the conversation's `text`.

    - `floor`: earliest start of the turn.
    - `context`: text of the messages before the turn; `prompt` includes the generation prompt.
    - `as_last`: text of the conversation that ends with the turn.
    - `previous`: message before the turn.
    """

    text: str
    floor: int
    said: Said
    prompt: str
    context: str
    as_last: str
    previous: Message | None
    marks: TurnMarks
    tokenizer: PreTrainedTokenizerBase

    def turn(self) -> Span | None:
        """Return the turn's span from the first successful strategy. Turns with only calls contain no text to find."""
        # From the most exact strategy to the most tolerant.
        by_words = (self._behind_prompt, self._behind_context, self._behind_previous)
        for strategy in (self._as_in_last, *(by_words if self.said.first else (self._calls,))):
            if span := strategy():
                return span
        return None

    def _as_in_last(self) -> Span | None:
        """Find the characters that the turn has as the last message."""
        is_behind = self.as_last.startswith(self.prompt)
        span = turn_at(self.as_last, len(self.prompt), self.said, self.marks) if is_behind else None
        place = self.text.find(self.as_last[slice(*span)], self.floor) if span else -1
        # Another turn in between means that this text belongs to a later one.
        if span is None or place < 0 or self.marks.any_in(self.text[self.floor : place]):
            return None
        return place, place + span[1] - span[0]

    def _behind_prompt(self) -> Span | None:
        """Find the text after the generation prompt."""
        if not self.text.startswith(self.prompt):
            return None
        return self._with_generated(self._words_from(len(self.prompt)))

    def _behind_context(self) -> Span | None:
        """Find the text after the common prefix of text and context."""
        return self._with_generated(self._words_from(num_shared(self.context, self.text)))

    def _behind_previous(self) -> Span | None:
        """Find the text after the end of the context, for templates that change earlier turns."""
        # Images are written as placeholders, so search for the text after the last one.
        last_text = self.previous.pieces[-1] if self.previous is not None else ""
        place = self.context.rfind(last_text) if last_text else -1
        if place < 0:
            return None
        end_of_context = self.context[place + len(last_text) :]
        return self._words_from(self.floor + num_shared(end_of_context, self.text[self.floor :]))

    def _calls(self) -> Span | None:
        """Find a turn with only calls, after the common prefix with the prompt."""
        start = self._end_of_prompt()
        return turn_at(self.text, start, self.said, self.marks) if start else None

    def _words_from(self, place: int) -> Span | None:
        return turn_from(self.text, max(place, self.floor), self.said, self.marks)

    def _with_generated(self, span: Span | None) -> Span | None:
        """Extend a turn to everything after the generation prompt: the model also generates the characters in between.

        gpt-oss writes a channel name before the text, and Qwen 3 empty reasoning.
        """
        start = self._end_of_prompt() if span else 0
        return (min(start, span[0]), span[1]) if span and start else span

    def _end_of_prompt(self) -> int:
        return end_of_shared_prompt(self.tokenizer, self.prompt, self.context, self.text)


def end_of_shared_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str, context: str, text: str) -> int:
    """Return the end of the common tokens of prompt and text after the context, 0 if there are none."""
    if not (text.startswith(context) and prompt.startswith(context)):
        return 0
    first, second = prompt[len(context) :], text[len(context) :]
    # Tokenize twice the length at most: the common prefix cannot be longer.
    ids = [tokenizer(part, add_special_tokens=False) for part in (first, second[: 2 * len(first)])]
    shared = num_shared(ids[0]["input_ids"], ids[1]["input_ids"])
    return len(context) + ids[0].token_to_chars(shared - 1).end if shared else 0
