"""`rlhf data`: preview how a command reads a dataset, or test its rewards."""

import json

from rich.console import Console

from rlhf_cli.commands.data import DataCommandConfig
from rlhf_cli.errors import RunError, UsageError
from rlhf_cli.runs.data_preview import inspect_data
from rlhf_cli.runs.data_view import show
from rlhf_cli.runs.episode_view import line_reader, show_episode
from rlhf_cli.runs.reward_probe import probe_rewards
from rlhf_cli.runs.reward_probe_view import as_json, show_test
from rlhf_cli.tracking.terminal.console import LastingStream, open_console


def show_data(config: DataCommandConfig) -> None:
    """Print a preview of each dataset, and play an episode with an environment; or test the rewards."""
    console = open_console(LastingStream(1))
    if config.test.rewards:
        _test_rewards(config, console)
        return
    if name := config.reward.changed(*config.supported("reward")):
        raise UsageError(f"--{name} has no effect here without --rewards")
    previews = inspect_data(config)
    show(previews, console, command=config.show.for_)
    for preview in previews:
        if preview.rehearsal is not None:
            read_line = line_reader(console, has_script=config.episodes.turns is not None)
            show_episode(preview.rehearsal, console, special_tokens=preview.special_tokens, read_line=read_line)


def _test_rewards(config: DataCommandConfig, console: Console) -> None:
    """Print the results of the reward test. Raises RunError (exit status 1) if there are faults."""
    test = probe_rewards(config)
    if config.test.as_json:
        print(json.dumps(as_json(test), indent=1))
    else:
        show_test(test, console)
    if test.num_faults:
        raise RunError(f"the reward test found {test.num_faults} fault{'s' if test.num_faults > 1 else ''}")
