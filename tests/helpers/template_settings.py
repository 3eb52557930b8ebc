"""Settings of data and of the template among keywords, for tests that take both by name."""

from typing import Any

from rlhf_cli.config.data import TemplateConfig


def split_settings(settings: dict[str, Any]) -> tuple[dict[str, Any], TemplateConfig]:
    """Return the settings of the data, and the template's."""
    of_data = {name: value for name, value in settings.items() if name not in TemplateConfig.model_fields}
    return of_data, TemplateConfig(**{name: value for name, value in settings.items() if name not in of_data})
