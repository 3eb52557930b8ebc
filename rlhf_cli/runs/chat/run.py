"""The body of `rlhf chat`: find the models, check them, load them, and talk."""

from collections.abc import Callable

import torch

from rlhf_cli.config.commands.chat import ChatConfig
from rlhf_cli.errors import RunError
from rlhf_cli.models.dtypes import dtype_note
from rlhf_cli.runs.chat.loop import Chat
from rlhf_cli.runs.chat.screen import Screen, open_screen
from rlhf_cli.runs.chat.session import Session
from rlhf_cli.runs.chat.speaker import ModelSpeaker
from rlhf_cli.runs.inference.model import find_inference_model

HINT = "Type a message, or /help. Ctrl-C stops an answer, Ctrl-D ends the chat."


def run_chat(config: ChatConfig, *, open_screen: Callable[[], Screen] = open_screen) -> None:
    """Talk until the input ends; lines come from the screen, which is opened once all settings are checked.

    Raises:
        UsageError: a model cannot be found, or does not take the settings.
        RunError: lines of a script failed.
    """
    speakers = found_speakers(config)
    screen = open_screen()
    if note := dtype_note(config.model, on_gpu=torch.cuda.is_available()).get("Note"):
        screen.tell(f"note: {note}")
    load_speakers(speakers, screen)
    if screen.is_interactive:
        screen.tell(f"{HINT}\n")
    chat = Chat(Session(config.sampling, system=config.text.system_prompt), speakers, screen)
    failed = chat.run()
    if failed and not screen.is_interactive:
        raise RunError(f"{failed} of the lines failed, each for the reason above")


def found_speakers(config: ChatConfig) -> list[ModelSpeaker]:
    """Return the models of the settings without their weights. Raise UsageError if one does not take the settings."""
    sources = [config.model.model_copy(update={"pretrain": name}) for name in config.model.names]
    models = [find_inference_model(source) for source in sources]
    return [ModelSpeaker(model, config.text, sampling=config.sampling) for model in models]


def load_speakers(speakers: list[ModelSpeaker], screen: Screen) -> None:
    """Load the models one after the other and describe each in a line."""
    for speaker in speakers:
        speaker.load(screen.tell)
        screen.tell(f"{speaker.name}: {speaker.description}")
