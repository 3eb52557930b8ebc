"""Post-training of language models from the command line."""

from rlhf_cli.version import __version__

__all__ = ["__version__"]
