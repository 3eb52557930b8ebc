"""`rlhf eval`: accuracy of one or several models on prompts with ground truth."""

from rlhf_cli.config.commands.eval import EvalConfig


def eval(config: EvalConfig) -> None:
    """Answer prompts with models and count right answers: accuracy, pass@k and majority votes, with intervals."""
    from rlhf_cli.runs.inference.evaluate import run_evaluation

    run_evaluation(config)
