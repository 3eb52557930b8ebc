"""Hash of the reward file. Users fix it during a run, so changes are reported on resuming.

Imported modules are not included.
"""

import hashlib
from pathlib import Path

from rlhf_cli.backends.training.checkpoint import Checkpoint
from rlhf_cli.config.scoring import RewardConfig
from rlhf_cli.runs.plugin_files import file_hash

REWARD_FILE = "contents of the reward file"
"""Key for the hash in a checkpoint's state and in the identity of generated responses."""


def reward_file_hash(reward: RewardConfig) -> str | None:
    """Hash the reward file; None without one or if it does not exist, in which case loading reports the error."""
    return None if reward.reward_func is None else file_hash(reward.reward_func)


JUDGE_TEMPLATE = "judge template"
"""Key for the hash in identities."""


def judge_template_hash(reward: RewardConfig) -> str | None:
    """Hash the judge template; None without one."""
    if reward.judge_template is None:
        return None
    return hashlib.sha256(Path(reward.judge_template).expanduser().read_bytes()).hexdigest()[:32]


def reward_file_notice(checkpoint: Checkpoint | None, reward: RewardConfig) -> list[str]:
    """Return a notice if the reward file has changed since the checkpoint."""
    written = None if checkpoint is None else checkpoint.state.get(REWARD_FILE)
    if checkpoint is None or written is None or written == reward_file_hash(reward):
        return []
    return [
        f"the reward file {reward.reward_func} has changed since the checkpoint of iteration {checkpoint.step}: "
        "the run continues with the new file"
    ]
