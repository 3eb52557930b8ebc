"""`rlhf gkd`: distillation on the student's own responses."""

from rlhf_cli.config.commands.gkd import GKDConfig


def gkd(config: GKDConfig) -> None:
    """Distill a teacher on the student's own responses, mixed with a fraction of fixed responses (GKD)."""
    from rlhf_cli.runs.online.run import run_online

    run_online(config, "gkd", estimator="gkd")
