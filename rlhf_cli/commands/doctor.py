"""`rlhf doctor`: check the installation and this machine, with a fix for each problem."""

from rlhf_cli.config.commands.doctor import DoctorConfig


def doctor(config: DoctorConfig) -> None:
    """Check versions, GPUs, memory, disk and Ray, and run each component once.

    The exit status is 1 if a run would fail. For a bug report, paste the output of `rlhf doctor --report`.
    """
    from rlhf_cli.runs.doctor import run_doctor

    run_doctor(config.doctor)
