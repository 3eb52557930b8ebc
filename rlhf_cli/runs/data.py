"""`rlhf data`: preview how a command reads a dataset, test its rewards, or search it for benchmark prompts."""

import json

from rich.console import Console

from rlhf_cli.commands.data import DataCommandConfig
from rlhf_cli.errors import RunError, UsageError
from rlhf_cli.runs.contamination import find_overlaps, overlaps_as_json, show_overlaps
from rlhf_cli.runs.data_preview import inspect_data
from rlhf_cli.runs.data_view import show
from rlhf_cli.runs.episode_view import line_reader, show_episode
from rlhf_cli.runs.reward_probe import probe_rewards
from rlhf_cli.runs.reward_probe_view import as_json, show_test
from rlhf_cli.tracking.terminal.console import LastingStream, open_console


def show_data(config: DataCommandConfig) -> None:
    """Print a preview of each dataset, and play an episode with an environment; or run a test."""
    console = open_console(LastingStream(1))
    if config.test.rewards:
        _test_rewards(config, console)
        return
    if name := config.reward.changed(*config.supported("reward")):
        raise UsageError(f"--{name} has no effect here without --rewards")
    if config.show.contamination is not None:
        _test_contamination(config, console)
        return
    previews = inspect_data(config)
    show(previews, console, command=config.show.for_)
    for preview in previews:
        if preview.rehearsal is not None:
            read_line = line_reader(console, has_script=config.episodes.turns is not None)
            show_episode(preview.rehearsal, console, special_tokens=preview.special_tokens, read_line=read_line)


def _test_rewards(config: DataCommandConfig, console: Console) -> None:
    """Print the results of the reward test. Raises RunError (exit status 1) if there are faults."""
    test = probe_rewards(config)
    if config.show.as_json:
        print(json.dumps(as_json(test), indent=1))
    else:
        show_test(test, console)
    if test.num_faults:
        raise RunError(f"the reward test found {test.num_faults} fault{'s' if test.num_faults > 1 else ''}")


def _test_contamination(config: DataCommandConfig, console: Console) -> None:
    """Print the benchmark prompts in the data. Raises RunError (exit status 1) if there are any."""
    report = find_overlaps(config)
    if config.show.as_json:
        print(json.dumps(overlaps_as_json(report), indent=1))
    else:
        show_overlaps(report, console)
    if report.overlaps:
        raise RunError(f"{len(report.overlaps):,} of {report.num_prompts:,} benchmark prompts overlap with the data")
