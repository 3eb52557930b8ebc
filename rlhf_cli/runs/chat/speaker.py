"""One model of a chat: its template, its tokens, and its answers as text."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, Protocol

from rlhf_cli.backends.rollout.streaming import StreamingModel
from rlhf_cli.config.chat import ChatSamplingConfig, ChatTextConfig
from rlhf_cli.data.formats.conversations import Conversation, Message
from rlhf_cli.data.pictures.placing import placed_pictures
from rlhf_cli.data.rollouts import GenerationRequest, sampling_params
from rlhf_cli.data.templates.chat_template import ChatTemplate
from rlhf_cli.data.templates.rendering import in_input_template
from rlhf_cli.data.templates.text import TemplateFault
from rlhf_cli.data.templates.turn_spans import THOUGHT_START
from rlhf_cli.data.tokenizing.decoding import text_of
from rlhf_cli.data.tokenizing.text_stream import TextStream
from rlhf_cli.data.tokenizing.tokenizer import check_token_ids
from rlhf_cli.errors import UsageError
from rlhf_cli.models.dtypes import DTYPES
from rlhf_cli.models.loading import num_parameters
from rlhf_cli.models.requirements import known_positions
from rlhf_cli.models.vision.families.table import find_family
from rlhf_cli.models.vision.pictures import PlacedPicture, unexpanded
from rlhf_cli.models.weight_files import folder_of
from rlhf_cli.runs.chat.prompt_ids import PromptIds
from rlhf_cli.runs.chat.session import ShownPicture
from rlhf_cli.runs.inference.model import InferenceModel


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """What a model is asked, as text and as token ids; `opens_thought` if the template begins the answer's thought.

    `pictures` stand in the ids; the text has a placeholder for each.
    """

    text: str
    ids: list[int]
    opens_thought: bool = False
    pictures: tuple[PlacedPicture, ...] = ()


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """The text of an answer as a message of the history, and the reason of its end."""

    text: str
    finish_reason: Literal["stop", "length", "interrupted"]


@dataclass(slots=True)
class LargestToken:
    """The largest token id of a prompt, and a name for the prompt."""

    largest_token: int
    largest_token_at: str


class Speaker(Protocol):
    """A model that answers."""

    name: str

    @property
    def takes_pictures(self) -> bool:
        """Whether messages may have pictures."""
        ...

    def prompt(self, conversation: Conversation, sampling: ChatSamplingConfig) -> ChatPrompt:
        """Return the prompt of a conversation. Raise UsageError if it cannot be rendered or leaves no room."""
        ...

    def answer(
        self,
        prompt: ChatPrompt,
        sampling: ChatSamplingConfig,
        *,
        seed: int,
        write: Callable[[str], None],
        should_stop: Callable[[], bool],
    ) -> ChatAnswer:
        """Return the answer; `write` gets its text in pieces."""
        ...


class ConversationText:
    """Conversations as the text that a model continues: by its chat template, or as they are without one."""

    def __init__(self, config: ChatTextConfig, tokenizer: Any) -> None:
        """Raise UsageError for template variables without a template."""
        self._kwargs = json.loads(config.chat_template_kwargs)
        self._input_template = config.input_template
        self.is_plain = not config.apply_chat_template or tokenizer.chat_template is None
        if self.is_plain and self._kwargs:
            raise UsageError("--chat_template_kwargs are variables of a chat template, and the tokenizer has none")
        self.template = None if self.is_plain else ChatTemplate(tokenizer, self._kwargs)

    @property
    def description(self) -> str:
        """The way from messages to text in a few words."""
        if self.is_plain:
            return "no chat template: it continues the text"
        return f"its chat template{f' with {json.dumps(self._kwargs)}' if self._kwargs else ''}"

    def of(self, conversation: Conversation) -> str:
        """Return the text. Raise UsageError if the template does not take the conversation."""
        if self.template is None:
            return "".join(map(self._plain, conversation.messages))
        try:
            return self.template.prompt(conversation)
        except TemplateFault as fault:
            raise UsageError(str(fault)) from fault

    def _plain(self, message: Message) -> str:
        if message.role == "system":
            raise UsageError("a system prompt needs a chat template: give --tokenizer_chat_template FILE")
        return in_input_template(message.content, self._input_template) if message.role == "user" else message.content

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The token that ends a turn by the template, if it has one."""
        return () if self.template is None else self.template.end_ids


class ModelSpeaker:
    """A model in this process."""

    def __init__(self, model: InferenceModel, config: ChatTextConfig, *, sampling: ChatSamplingConfig) -> None:
        """Check everything that needs no weights; `load` has to follow.

        Raises:
            UsageError: the template does not take the system prompt, or the model has too few positions.
        """
        self.name = model.source.pretrain
        self._model = model
        self.text = ConversationText(config, model.tokenizer)
        self._ids = PromptIds(model.tokenizer, plain=self.text.is_plain)
        self._family = find_family(
            model.found.path,
            model.architecture,
            model.tokenizer,
            trust_remote_code=model.source.trust_remote_code,
        )
        known = known_positions(model.architecture)
        self._positions = None if known is None else known[0]
        self._require_room_for_a_message(config.system_prompt, sampling.max_new_tokens)

    @property
    def takes_pictures(self) -> bool:
        """Whether messages may have pictures, which stand where a chat template puts them."""
        return self._family is not None and not self.text.is_plain

    def _require_room_for_a_message(self, system_prompt: str | None, max_new_tokens: int) -> None:
        trial = Conversation((Message("user", "a"),)).with_system_prompt(system_prompt)
        left = self._room_beside(len(self._ids.of(self.text.of(trial))))
        if left is not None and max_new_tokens > left:
            raise UsageError(
                f"--max_new_tokens {max_new_tokens}: {self.name} has {self._positions:,} positions, which are for the "
                f"conversation too: give {max(left // 2, 1)} for example"
            )

    def _room_beside(self, num_tokens: int) -> int | None:
        """Return the tokens that an answer to a prompt may have; None without a bound."""
        return None if self._positions is None else self._positions - num_tokens

    def load(self, tell: Callable[[str], None]) -> None:
        """Read the weights; those of an adapter or a checkpoint are written as a whole model first, to a folder that
        is gone afterwards.
        """
        source = self._model.source
        with TemporaryDirectory(prefix="rlhf-") as folder, self._model.whole(Path(folder) / "model", tell=tell) as path:
            self._engine = StreamingModel(
                str(folder_of(path)),
                self._model.tokenizer,
                dtype=DTYPES[source.param_dtype],
                trust_remote_code=source.trust_remote_code,
            )

    @property
    def description(self) -> str:
        """The model's size, type, device and template in one line."""
        size = num_parameters(self._engine.model)
        how = f"{self._model.source.param_dtype} on {self._engine.device}, {self.text.description}"
        return f"{size / 1e6:,.1f}M parameters, {how}"

    def prompt(self, conversation: Conversation, sampling: ChatSamplingConfig) -> ChatPrompt:
        """Return the prompt of a conversation. Raise UsageError if it cannot be rendered or leaves no room."""
        text = self.text.of(conversation)
        opens_thought = not self.text.is_plain and text.rstrip().endswith(THOUGHT_START)
        ids, pictures = self._with_pictures(self._ids.of(text), conversation)
        prompt = ChatPrompt(text, ids, opens_thought, pictures)
        if not prompt.ids:
            raise UsageError("the message has no tokens")
        largest = LargestToken(max(prompt.ids), "the conversation")
        check_token_ids(largest, self._model.tokenizer, self._model.architecture, pretrain=self.name)
        left = self._room_beside(len(prompt.ids))
        if left is not None and sampling.max_new_tokens > left:
            cure = f"/set max_new_tokens {left}, " if left > 0 else ""
            raise UsageError(
                f"the conversation has {len(prompt.ids):,} tokens and max_new_tokens is {sampling.max_new_tokens:,}, "
                f"but {self.name} has {self._positions:,} positions: {cure}/undo or /clear"
            )
        return prompt

    def _with_pictures(self, ids: list[int], conversation: Conversation) -> tuple[list[int], tuple[PlacedPicture, ...]]:
        """Return the ids with the tokens of pictures. Raise UsageError if a message writes a placeholder itself."""
        shown = [one.picture for one in conversation.pictures if isinstance(one, ShownPicture)]
        return (ids, ()) if self._family is None else placed_pictures(ids, shown, self._family)

    def answer(
        self,
        prompt: ChatPrompt,
        sampling: ChatSamplingConfig,
        *,
        seed: int,
        write: Callable[[str], None],
        should_stop: Callable[[], bool],
    ) -> ChatAnswer:
        """Return the answer; `write` gets its text in pieces."""
        stream = TextStream(self._model.tokenizer)
        response = self._engine.respond(
            GenerationRequest(prompt.ids, seed, pictures=prompt.pictures),
            sampling_params(sampling, end_ids=self.text.end_ids),
            hear=lambda token: write(stream.add(token)),
            should_stop=should_stop,
        )
        write(stream.rest())
        self._ids.remember(prompt.text, unexpanded(prompt.ids, prompt.pictures), response.token_ids)
        text = text_of(self._model.tokenizer, response.token_ids, skip_special_tokens=True)
        return ChatAnswer(f"{THOUGHT_START}\n{text}" if prompt.opens_thought else text, response.finish_reason)
