"""Multi-turn episodes and their environments. User environment files may import `run_python`."""

from rlhf_cli.agents.run_python import run_python

__all__ = ["run_python"]
