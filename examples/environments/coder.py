"""A code agent: the model tries its program on the examples of the task before it answers.

Rows have `examples`, assertions that a right program passes. The reward is a verifier's, from the last turn:
--reward_funcs code, with further assertions in the column `label`.
"""

from rlhf_cli.agents import run_python


class Environment:
    def reset(self, examples: str, **row: object) -> None:
        """Begin an episode with the examples of the row."""
        self.examples = examples

    def try_examples(self, program: str) -> str:
        """Run a program on the examples of the task.

        Args:
            program: Python code that defines the function of the task.
        """
        return run_python(f"{program}\n\n{self.examples}\nprint('The examples pass.')\n")
