"""The contents of a run's reward file: it is code that people mend in the middle of a run, so a change is reported.

Modules that the file imports are not looked at.
"""

from rlhf_cli.backends.training.checkpoint import Checkpoint
from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.runs.plugin_files import file_hash

REWARD_FILE = "contents of the reward file"
"""Name of the hash in the state of a checkpoint and in the identity of answers."""


def reward_file_hash(reward: RewardConfig) -> str | None:
    """Return a hash of the reward file; None without one, or if it cannot be read, which its loading reports."""
    return None if reward.reward_func is None else file_hash(reward.reward_func)


def reward_file_notice(checkpoint: Checkpoint | None, reward: RewardConfig) -> list[str]:
    """Return a line if the reward file is not the one that the checkpoint's run had."""
    written = None if checkpoint is None else checkpoint.state.get(REWARD_FILE)
    if checkpoint is None or written is None or written == reward_file_hash(reward):
        return []
    return [
        f"the reward file {reward.reward_func} has changed since the checkpoint of iteration {checkpoint.step}: "
        "from here on it is the new one that scores"
    ]
