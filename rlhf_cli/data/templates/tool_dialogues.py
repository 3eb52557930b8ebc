"""The dialogues of agent programs, which bring tools of their own with each request."""

import json
from collections import OrderedDict
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from rlhf_cli.data.formats.conversations import Tool
from rlhf_cli.data.templates.chat_template import ChatTemplate
from rlhf_cli.data.templates.dialogue import ChatDialogue

_MOST_KEPT = 64  # lists of tools; a program that writes the date into a description has a new one each day


class ToolDialogues:
    """Makes the dialogue for each list of tools once.

    Args:
        end_ids: tokens at which the engine ends a turn.
        vocab_size: embeddings of the model.

    Raises:
        UsageError: the template has no place for further messages of the user.
    """

    def __init__(
        self, template: ChatTemplate, tokenizer: PreTrainedTokenizerBase, *, end_ids: Sequence[int], vocab_size: int
    ) -> None:
        self._template, self._tokenizer = template, tokenizer
        self._end_ids, self._vocab_size = end_ids, vocab_size
        self._kept: OrderedDict[str, ChatDialogue] = OrderedDict()
        self.of(())

    def of(self, tools: Sequence[Tool]) -> ChatDialogue:
        """Return the dialogue with these tools.

        Raises:
            UsageError: the template has no place for tools, calls or results.
        """
        key = json.dumps(tools, sort_keys=True)
        if key not in self._kept:
            self._kept[key] = ChatDialogue(
                self._template, self._tokenizer, tools, end_ids=self._end_ids, vocab_size=self._vocab_size
            )
        self._kept.move_to_end(key)
        if len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
        return self._kept[key]
