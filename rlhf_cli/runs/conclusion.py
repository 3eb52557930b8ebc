"""End of a training command: model card and final terminal output."""

import logging
from collections.abc import Mapping

from rlhf_cli.config.base import CommandConfig
from rlhf_cli.errors import UsageError
from rlhf_cli.runs.model_card import write_model_card
from rlhf_cli.runs.recorded_runs import read_run
from rlhf_cli.runs.run_directory import REPORT, RunDirectory
from rlhf_cli.tracking.tracker import SilentTracker, Tracker
from rlhf_cli.trainers.offline.loop import Finished

logger = logging.getLogger(__name__)


def conclude(
    tracker: Tracker | SilentTracker,
    paths: RunDirectory,
    finished: Finished,
    config: CommandConfig,
    facts: Mapping[str, str] | None = None,
) -> None:
    """Write the card of the saved model, and print the outcome, result paths and `facts`."""
    if finished.interrupted:
        tracker.close(outcome="interrupted", facts={"Continue": "the same command with --load_checkpoint"})
        return
    if isinstance(tracker, Tracker):
        _write_cards(paths, config)
    tracker.close(facts={"Model": str(paths.model), **(facts or {}), "Report": str(paths.root / REPORT)})


def _write_cards(paths: RunDirectory, config: CommandConfig) -> None:
    # The models are saved, so a full disk may not fail the run.
    try:
        run = read_run(paths.root)
        for folder in filter(lambda path: path.is_dir(), (paths.model, paths.ema)):
            write_model_card(folder, config, run)
    except (OSError, UsageError) as error:
        logger.warning("the model card is not written: %s", error)
