"""Dialogues for agent programs, which define tools per request."""

import json
from collections import OrderedDict
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from rlhf_cli.data.formats.conversations import Tool
from rlhf_cli.data.templates.chat_template import ChatTemplate
from rlhf_cli.data.templates.dialogue import ChatDialogue

_MOST_KEPT = 64  # lists of tools, which may change over time, such as with a date in a description


class ToolDialogues:
    """Creates and caches a dialogue per list of tools.

    Args:
        end_ids: tokens at which the engine ends a turn.
        vocab_size: number of embeddings in the model.

    Raises:
        UsageError: the template does not support further user messages.
    """

    def __init__(
        self, template: ChatTemplate, tokenizer: PreTrainedTokenizerBase, *, end_ids: Sequence[int], vocab_size: int
    ) -> None:
        self._template, self._tokenizer = template, tokenizer
        self._end_ids, self._vocab_size = end_ids, vocab_size
        self._kept: OrderedDict[str, ChatDialogue] = OrderedDict()
        # Fail at startup instead of in the first request.
        self.of(())

    def of(self, tools: Sequence[Tool]) -> ChatDialogue:
        """Return the dialogue for these tools.

        Raises:
            UsageError: the template does not support tools, calls or results.
        """
        # Sorted keys: equal tools may be listed in another order of keys.
        key = json.dumps(tools, sort_keys=True)
        if key not in self._kept:
            self._kept[key] = ChatDialogue(
                self._template, self._tokenizer, tools, end_ids=self._end_ids, vocab_size=self._vocab_size
            )
        self._kept.move_to_end(key)
        # Drop the least recently used, because descriptions may contain a date that changes.
        if len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
        return self._kept[key]
