"""`rlhf serve-rm` in a separate process."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass

KEY = "of-this-test"


@dataclass
class Served:
    """`rlhf serve-rm` in a separate process."""

    process: subprocess.Popen
    url: str


def serve(*words: str) -> Served:
    """Start a server in a separate process group, like in a terminal, and wait until it listens."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rlhf_cli", "serve-rm", "--port", "0", *words],
        env=os.environ | {"OMP_NUM_THREADS": "1", "RLHF_RM_API_KEY": KEY},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    said = process.stdout.readline()
    found = re.search(r"--remote_rm_url (\S+)", said)
    assert found, said
    return Served(process, found[1])
