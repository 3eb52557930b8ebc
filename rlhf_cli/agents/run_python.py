"""Python execution as a tool, in the sandbox that code rewards use."""

from rlhf_cli.rewards.sandbox.run import Limits, ProgramOutcome, run_program

_MAX_OUTPUT = 4_000
"""Characters of output that the model receives."""


def run_python(program: str, timeout: float = 5.0, memory_mb: int = 512) -> str:
    """Run Python code in the sandbox. Returns the output, followed by an error message on failure.

    Args:
        program: Python source code.
        timeout: time limit in seconds.
        memory_mb: memory limit in MB.

    Raises:
        SandboxError: this machine cannot run the sandbox. The episode fails.
    """
    limits = Limits(seconds=timeout, memory_bytes=memory_mb << 20)
    outcome = run_program(program, limits=limits)
    output = outcome.stdout
    if len(output) > _MAX_OUTPUT:
        output = f"{output[:_MAX_OUTPUT]}\n[{len(output) - _MAX_OUTPUT:,} more characters]\n"
    return output + _error(outcome, limits)


def _error(outcome: ProgramOutcome, limits: Limits) -> str:
    match outcome.ended:
        case "finished":
            return ""
        case "time":
            return f"Error: the program ran for more than {limits.seconds:g} s."
        case "output":
            return f"Error: the program printed more than {limits.output_bytes} bytes."
        case "killed":
            return f"Error: the program was killed by signal {outcome.signal}."
        case _:
            return outcome.stderr or f"Error: the program ended with exit code {outcome.exit_code}."
