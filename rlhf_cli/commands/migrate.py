"""`rlhf migrate`: translates commands and configs of other frameworks."""

from rlhf_cli.config.base import CommandConfig
from rlhf_cli.config.migrate import MigrateGroup


class MigrateConfig(CommandConfig):
    """Translate a command, script or config of OpenRLHF, TRL, verl, EasyR1 or prime-rl to an `rlhf` command.

    Nothing is run. The command is printed with one flag per line, settings without an equivalent on stderr with the
    reason: `rlhf migrate run.sh > new.sh`, or `rlhf migrate -- python3 -m verl.trainer.main_ppo data.seed=1 ...`.
    """

    positional = "source"

    migrate: MigrateGroup
