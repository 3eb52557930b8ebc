"""Episodes of several turns and their environments; `run_python` is for users' files."""

from rlhf_cli.agents.run_python import run_python

__all__ = ["run_python"]
