"""Episodes with an environment in a command: found and checked early, played by the engines of the run."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rlhf_cli.agents.file_environments import FileEnvironments
from rlhf_cli.agents.records import EnvironmentDescription
from rlhf_cli.backends.rollout.engine import eos_token_ids
from rlhf_cli.config.data import PromptConfig
from rlhf_cli.config.episodes import EnvironmentConfig
from rlhf_cli.data.prompts import PromptData
from rlhf_cli.data.templates.dialogue import ChatDialogue
from rlhf_cli.data.templates.rendering import Renderer
from rlhf_cli.errors import UsageError
from rlhf_cli.models.finding import FoundModel
from rlhf_cli.models.weight_files import description_of
from rlhf_cli.trainers.online.episodes import EpisodeEngines, EpisodeLimits
from rlhf_cli.trainers.online.interfaces import Engines


@dataclass(frozen=True)
class EpisodePlan:
    """The environment of a run and the dialogue with it, before any engine starts."""

    settings: EnvironmentConfig
    prompts: PromptConfig
    environments: FileEnvironments
    dialogue: ChatDialogue

    @property
    def description(self) -> EnvironmentDescription:
        """The tools of the environment."""
        return self.environments.description

    def check_rows(self, data: PromptData) -> None:
        """Raise UsageError if `reset` needs a column that the first row of a data set does not have."""
        self.environments.check_columns(tuple(data.row_of(data.prompts[0])))

    @contextmanager
    def played_by(self, engines: Engines) -> Iterator[EpisodeEngines]:
        """Yield engines whose responses are episodes, as long as the environments' processes live."""
        limits = EpisodeLimits(self.settings.max_turns, self.prompts.max_len)
        with _environments(self.settings) as environments:
            yield EpisodeEngines(engines, environments, self.dialogue, limits)


def find_episodes(
    settings: EnvironmentConfig, prompts: PromptConfig, found: FoundModel, tokenizer: Any
) -> EpisodePlan | None:
    """Return the episodes that the settings ask for, None without an environment.

    Raises:
        UsageError: the file has no environment, or the chat template has no place for its observations and calls.
    """
    if settings.environment is None:
        return None
    if prompts.prompt_template is not None or not prompts.apply_chat_template:
        given = "--prompt_template" if prompts.prompt_template is not None else "--no_apply_chat_template"
        raise UsageError(f"{given}: turns of an environment need the chat template of the model")
    with _environments(settings) as environments:  # loads the file; its processes end here
        description = environments.description
    dialogue = ChatDialogue(
        Renderer(prompts, tokenizer).template,
        tokenizer,
        description.tools,
        end_ids=eos_token_ids(description_of(found.path)),
        vocab_size=found.architecture.get_text_config().vocab_size,
    )
    return EpisodePlan(settings, prompts, environments, dialogue)


def _environments(settings: EnvironmentConfig) -> FileEnvironments:
    assert settings.environment is not None
    return FileEnvironments(
        settings.environment, timeout=settings.environment_timeout, num_workers=settings.num_workers
    )
