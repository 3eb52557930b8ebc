"""Settings of `rlhf compare`."""

from pydantic import Field

from rlhf_cli.config.base import SettingsGroup


class CompareGroup(SettingsGroup):
    """Comparison"""

    models: list[str]
    """Two models, checkpoints or outputs of `rlhf eval`. Select one of an output's models by
    OUTPUT:MODEL; an output with two models can be the only argument. With bisect, the run directory."""
    bisect: bool = False
    """Find the first checkpoint of a run at which a metric is worse than at the best one."""
    metric: str | None = None
    """Metric of the verdict, the categories and the quoted prompts. Default: accuracy, or reward without a verifier."""
    by: str | None = None
    """Also compare per category: source, data_source or a column of the prompts."""
    detect: float | None = Field(None, gt=0)
    """Difference for which to compute the number of prompts, such as 0.02. Default: the observed difference."""
    common: bool = False
    """Compare on the prompts that both outputs have, if they differ."""
    may_differ: list[str] = []
    """Settings in which the outputs may differ, such as temperature."""
    print_samples: int = Field(3, ge=0)
    """Number of prompts to quote, of those with the largest differences."""
    as_json: bool = Field(False, alias="json")
    """Print the comparison as a JSON object."""
    output: str = "evaluations"
    """Folder for evaluations of models that have none. Later comparisons with the same settings read them."""
    overwrite: bool = False
    """Evaluate again, and replace earlier evaluations in the folder."""
