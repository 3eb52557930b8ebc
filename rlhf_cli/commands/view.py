"""`rlhf view`: a page in the browser about runs."""

from rlhf_cli.config.base import CommandConfig
from rlhf_cli.config.view import ViewGroup


class ViewConfig(CommandConfig):
    """Show runs in the browser while they train or afterwards: curves, samples, groups, histograms and settings.

    RUNS are run directories, or folders that contain them; new runs appear. The page works offline. It is served on
    127.0.0.1 only, at an address with a random key, until Ctrl-C.
    """

    positional = "runs"

    view: ViewGroup
