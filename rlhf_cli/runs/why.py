"""`rlhf why`: how a sampled token, or a row of an offline command, entered the loss."""

import json
from pathlib import Path

from rlhf_cli.command_table import ONLINE_TRAINING
from rlhf_cli.commands.why import WhyConfig
from rlhf_cli.runs.run_directory import recorded_command


def explain(config: WhyConfig) -> None:
    """Print how a response or row, or one of its tokens, changed the model."""
    settings = config.why
    if recorded_command(Path(settings.run).expanduser(), source=settings.run) in ONLINE_TRAINING:
        from rlhf_cli.runs.online.why import explain_response

        lines, as_json = explain_response(settings)
    else:
        from rlhf_cli.runs.offline.why import explain_row

        lines, as_json = explain_row(settings)
    print("\n".join(lines))
    if settings.json_file is not None:
        text = json.dumps(as_json(), ensure_ascii=False, allow_nan=False)
        Path(settings.json_file).write_text(text, encoding="utf-8")
