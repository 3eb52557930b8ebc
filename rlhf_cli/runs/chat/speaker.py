"""A chat model: template, token IDs, and streamed answers."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, Protocol

from rlhf_cli.backends.rollout.streaming import StreamingModel
from rlhf_cli.config.data import TemplateConfig
from rlhf_cli.config.rollout import SamplingConfig
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
from rlhf_cli.models.positions import known_positions
from rlhf_cli.models.vision.families.table import find_family
from rlhf_cli.models.vision.pictures import PlacedPicture, unexpanded
from rlhf_cli.models.weight_files import folder_of
from rlhf_cli.runs.chat.prompt_ids import PromptIds
from rlhf_cli.runs.chat.session import ShownPicture
from rlhf_cli.runs.inference.model import InferenceModel


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A prompt as text and token IDs. `opens_thought` if the template starts the answer's reasoning.

    `pictures` are expanded in the IDs; the text has one placeholder each.
    """

    text: str
    ids: list[int]
    opens_thought: bool = False
    pictures: tuple[PlacedPicture, ...] = ()


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """Answer text for the history, with the finish reason."""

    text: str
    finish_reason: Literal["stop", "length", "interrupted"]


class Speaker(Protocol):
    """A model in the chat."""

    name: str

    @property
    def takes_pictures(self) -> bool:
        """Whether messages may contain images."""
        ...

    def prompt(self, conversation: Conversation, sampling: SamplingConfig) -> ChatPrompt:
        """Build the prompt of a conversation. Raises UsageError if it cannot be rendered or is too long."""
        ...

    def answer(
        self,
        prompt: ChatPrompt,
        sampling: SamplingConfig,
        *,
        seed: int,
        write: Callable[[str], None],
        should_stop: Callable[[], bool],
    ) -> ChatAnswer:
        """Generate the answer. `write` receives its text in pieces."""
        ...


class _ConversationText:
    """Renders conversations with the chat template, or as plain text without one."""

    def __init__(self, config: TemplateConfig, tokenizer: Any) -> None:
        """Raises UsageError for template variables without a template."""
        self._kwargs = json.loads(config.chat_template_kwargs)
        self._input_template = config.input_template
        # Base models have no template, and continue the text instead.
        self.is_plain = not config.apply_chat_template or tokenizer.chat_template is None
        if self.is_plain and self._kwargs:
            raise UsageError("--chat_template_kwargs requires a chat template, but the tokenizer has none")
        self.template = None if self.is_plain else ChatTemplate(tokenizer, self._kwargs)

    @property
    def description(self) -> str:
        """Short description of the format."""
        if self.is_plain:
            return "no chat template (text completion)"
        return f"chat template{f' with {json.dumps(self._kwargs)}' if self._kwargs else ''}"

    def of(self, conversation: Conversation) -> str:
        """Render a conversation. Raises UsageError if the template rejects it."""
        if self.template is None:
            return "".join(map(self._plain, conversation.messages))
        try:
            return self.template.prompt(conversation)
        except TemplateFault as fault:
            raise UsageError(str(fault)) from fault

    def _plain(self, message: Message) -> str:
        if message.role == "system":
            raise UsageError("a system prompt requires a chat template: set --tokenizer_chat_template FILE")
        return in_input_template(message.content, self._input_template) if message.role == "user" else message.content

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The template's end-of-turn token, if any."""
        return () if self.template is None else self.template.end_ids


class ModelSpeaker:
    """A chat model in this process."""

    def __init__(self, model: InferenceModel, config: TemplateConfig, *, sampling: SamplingConfig) -> None:
        """Check everything that does not require weights. Call `load` afterwards.

        Raises:
            UsageError: the template rejects the system prompt, or the model has too few positions.
        """
        self.name = model.source.pretrain
        self._model = model
        self.text = _ConversationText(config, model.tokenizer)
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
        """Whether messages may contain images, which requires a chat template."""
        return self._family is not None and not self.text.is_plain

    def _require_room_for_a_message(self, system_prompt: str | None, max_new_tokens: int) -> None:
        # The shortest message shows whether any answer fits.
        trial = Conversation((Message("user", "a"),)).with_system_prompt(system_prompt)
        left = self._room_beside(len(self._ids.of(self.text.of(trial))))
        if left is not None and max_new_tokens > left:
            raise UsageError(
                f"--max_new_tokens {max_new_tokens}: {self.name} has {self._positions:,} positions, shared with the "
                f"conversation: set {max(left // 2, 1)}, for example"
            )

    def _room_beside(self, num_tokens: int) -> int | None:
        """Return how many tokens an answer may have; None without a limit."""
        return None if self._positions is None else self._positions - num_tokens

    def load(self, tell: Callable[[str], None]) -> None:
        """Load the weights. Adapters and checkpoints are first merged in a temporary folder."""
        # The folder may be removed after loading: the weights are in memory then.
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
        """Size, dtype, device and template in one line."""
        size = num_parameters(self._engine.model)
        how = f"{self._model.source.param_dtype} on {self._engine.device}, {self.text.description}"
        return f"{size / 1e6:,.1f}M parameters, {how}"

    def prompt(self, conversation: Conversation, sampling: SamplingConfig) -> ChatPrompt:
        """Build the prompt of a conversation. Raises UsageError if it cannot be rendered or is too long."""
        text = self.text.of(conversation)
        # The template has opened the reasoning, so the answer's text begins inside it.
        opens_thought = not self.text.is_plain and text.rstrip().endswith(THOUGHT_START)
        ids, pictures = self._with_pictures(self._ids.of(text), conversation)
        prompt = ChatPrompt(text, ids, opens_thought, pictures)
        if not prompt.ids:
            raise UsageError("the message is empty")
        tokenizer, architecture = self._model.tokenizer, self._model.architecture
        check_token_ids(max(prompt.ids), "the conversation", tokenizer, architecture, pretrain=self.name)
        left = self._room_beside(len(prompt.ids))
        if left is not None and sampling.max_new_tokens > left:
            cure = f"/set max_new_tokens {left}, " if left > 0 else ""
            raise UsageError(
                f"the conversation has {len(prompt.ids):,} tokens and max_new_tokens is {sampling.max_new_tokens:,}, "
                f"but {self.name} has {self._positions:,} positions: {cure}/undo or /clear"
            )
        return prompt

    def _with_pictures(self, ids: list[int], conversation: Conversation) -> tuple[list[int], tuple[PlacedPicture, ...]]:
        """Expand images in the IDs. Raises UsageError if a message contains the placeholder as text."""
        shown = [one.picture for one in conversation.pictures if isinstance(one, ShownPicture)]
        return (ids, ()) if self._family is None else placed_pictures(ids, shown, self._family)

    def answer(
        self,
        prompt: ChatPrompt,
        sampling: SamplingConfig,
        *,
        seed: int,
        write: Callable[[str], None],
        should_stop: Callable[[], bool],
    ) -> ChatAnswer:
        """Generate the answer. `write` receives its text in pieces."""
        stream = TextStream(self._model.tokenizer)
        response = self._engine.respond(
            GenerationRequest(prompt.ids, seed, pictures=prompt.pictures),
            sampling_params(sampling, end_ids=self.text.end_ids),
            hear=lambda token: write(stream.add(token)),
            should_stop=should_stop,
        )
        write(stream.rest())
        # Image tokens are expanded per prompt, so remember the unexpanded IDs, which match the text.
        self._ids.remember(prompt.text, unexpanded(prompt.ids, prompt.pictures), response.token_ids)
        text = text_of(self._model.tokenizer, response.token_ids, skip_special_tokens=True)
        # The history must contain the opening tag, which is part of the prompt and not of the response.
        return ChatAnswer(f"{THOUGHT_START}\n{text}" if prompt.opens_thought else text, response.finish_reason)
