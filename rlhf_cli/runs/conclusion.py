"""Final terminal output of a training command."""

from collections.abc import Mapping

from rlhf_cli.runs.run_directory import REPORT, RunDirectory
from rlhf_cli.tracking.tracker import SilentTracker, Tracker
from rlhf_cli.trainers.offline.loop import Finished


def conclude(
    tracker: Tracker | SilentTracker, paths: RunDirectory, finished: Finished, facts: Mapping[str, str] | None = None
) -> None:
    """Print the outcome, result paths and `facts`."""
    if finished.interrupted:
        tracker.close(outcome="interrupted", facts={"Continue": "the same command with --load_checkpoint"})
    else:
        tracker.close(facts={"Model": str(paths.model), **(facts or {}), "Report": str(paths.root / REPORT)})
