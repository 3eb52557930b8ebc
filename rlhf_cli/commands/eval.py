"""`rlhf eval`: evaluate one or more models on prompts with labels."""

from rlhf_cli.config.commands.eval import EvalConfig


def eval(config: EvalConfig) -> None:
    """Evaluate models on prompts with labels: accuracy, pass@k and majority votes, with confidence intervals."""
    from rlhf_cli.runs.inference.evaluate import run_evaluation

    run_evaluation(config)
