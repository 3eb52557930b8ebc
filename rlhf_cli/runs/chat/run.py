"""Implementation of `rlhf chat`: finds, checks and loads the models, then runs the chat."""

from collections.abc import Callable

import torch

from rlhf_cli.commands.chat import ChatConfig
from rlhf_cli.errors import RunError
from rlhf_cli.models.dtypes import dtype_note
from rlhf_cli.runs.chat.loop import Chat
from rlhf_cli.runs.chat.screen import Screen, open_screen
from rlhf_cli.runs.chat.session import Session
from rlhf_cli.runs.chat.speaker import ModelSpeaker
from rlhf_cli.runs.inference.model import find_inference_model

_HINT = "Type a message, or /help. Ctrl-C stops an answer, Ctrl-D ends the chat."


def run_chat(config: ChatConfig, *, open_screen: Callable[[], Screen] = open_screen) -> None:
    """Chat until the input ends. The screen is opened after all settings are checked.

    Raises:
        UsageError: a model is not found or does not support the settings.
        RunError: lines in a script failed.
    """
    # Check all models before loading the first, because loading takes minutes.
    speakers = found_speakers(config)
    screen = open_screen()
    if note := dtype_note(config.model, on_gpu=torch.cuda.is_available()).get("Note"):
        screen.tell(f"note: {note}")
    _load_speakers(speakers, screen)
    if screen.is_interactive:
        screen.tell(f"{_HINT}\n")
    chat = Chat(Session(config.sampling, system=config.template.system_prompt), speakers, screen)
    failed = chat.run()
    # In a terminal the user has seen the errors and may have corrected them.
    if failed and not screen.is_interactive:
        raise RunError(f"{failed} lines failed; the errors are printed above")


def found_speakers(config: ChatConfig) -> list[ModelSpeaker]:
    """Find the models without loading weights. Raises UsageError if one does not support the settings."""
    sources = [config.model.model_copy(update={"pretrain": name}) for name in config.model.names]
    models = [find_inference_model(source) for source in sources]
    return [ModelSpeaker(model, config.template, sampling=config.sampling) for model in models]


def _load_speakers(speakers: list[ModelSpeaker], screen: Screen) -> None:
    """Load the models one by one and print a description of each."""
    for speaker in speakers:
        speaker.load(screen.tell)
        screen.tell(f"{speaker.name}: {speaker.description}")
