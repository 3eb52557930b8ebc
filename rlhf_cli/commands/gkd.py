"""`rlhf gkd`: distillation on the student's own responses."""

from rlhf_cli.config.commands.gkd import GKDConfig


def gkd(config: GKDConfig) -> None:
    """Train a student on a teacher's distributions over its own responses and a share of fixed ones (GKD)."""
    from rlhf_cli.runs.online.run import run_online

    run_online(config, "gkd", estimator="gkd")
