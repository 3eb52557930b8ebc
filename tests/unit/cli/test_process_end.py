"""How a process of the program exits, and Python's garbage collector during that."""

import gc
import subprocess
import sys

import pytest

from rlhf_cli.environment import SELDOM, USUAL, rest_collector, resume_collector


@pytest.mark.parametrize(
    ("words", "status", "run"),
    [("--version", 0, "run()"), ("ppo --nonsense 1", 2, "run()"), ("--version", 130, "sys.exit(130)")],
    ids=["done", "refused", "interrupted"],
)
def test_a_process_ends_with_its_status_after_everything_that_was_to_be_closed(words, status, run):
    code = (
        "import atexit, sys\n"
        "from rlhf_cli.__main__ import main\n"
        f"sys.argv = ['rlhf', *{words.split()}]\n"
        "class Left:\n"
        "    def __del__(self):\n"
        "        print('taken apart')\n"
        "left = Left()\n"
        "from rlhf_cli import cli\n"
        "run = cli.main\n"
        f"cli.main = lambda: (atexit.register(print, 'closed'), {run})[1]\n"
        "sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    assert done.stdout.splitlines()[-1] == "closed"


def test_the_collector_looks_as_usual_again_when_a_model_is_built():
    rest_collector()
    assert gc.get_threshold() == SELDOM > USUAL
    resume_collector()
    assert gc.get_threshold() == USUAL
    assert gc.get_freeze_count() > 0
    gc.unfreeze()
