"""`rlhf why`: how a sampled token, or a row of an offline command, entered the loss."""

import json
from collections.abc import Callable
from pathlib import Path

from rlhf_cli.command_table import ONLINE_TRAINING
from rlhf_cli.commands.why import WhyConfig
from rlhf_cli.config.replay import WhyGroup
from rlhf_cli.runs.run_directory import folder_of_start, recorded_command


def explain(config: WhyConfig) -> None:
    """Print how a response or row, or one of its tokens, changed the model."""
    settings = config.why
    file = None if settings.json_file is None else Path(settings.json_file).absolute()
    with folder_of_start(Path(settings.run).expanduser()) as root:
        lines, as_json = _explained(settings.model_copy(update={"run": str(root)}))
        print("\n".join(lines))
        if file is not None:
            file.write_text(json.dumps(as_json(), ensure_ascii=False, allow_nan=False), encoding="utf-8")


def _explained(settings: WhyGroup) -> tuple[list[str], Callable[[], dict[str, object]]]:
    """Return the lines, and a function that returns JSON values."""
    if recorded_command(Path(settings.run), source=settings.run) in ONLINE_TRAINING:
        from rlhf_cli.runs.online.why import explain_response

        return explain_response(settings)
    from rlhf_cli.runs.offline.why import explain_row

    return explain_row(settings)
