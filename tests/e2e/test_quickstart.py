"""`rlhf quickstart` as a newcomer runs it: from nothing to a model that adds, through the real parts."""

import json
import re
import shlex
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]


def accuracy(folder, stage):
    (result,) = json.loads((folder / f"eval_{stage}" / "eval.json").read_text())["results"]
    return result["figures"]["accuracy"]["value"]


def test_ppo_makes_a_model_right_that_was_right_a_third_of_the_time(tmp_path):
    folder = tmp_path / "quickstart"
    words = [sys.executable, "-m", "rlhf_cli", "quickstart", "--output", str(folder), "--seed", "1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=1400, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert 0.2 < accuracy(folder, "sft") < 0.6
    assert accuracy(folder, "ppo") >= 0.95
    report = (folder / "report.html").read_text()
    assert "accuracy after ppo" in report
    assert "http" not in re.sub(r"http://www\.w3\.org\S*", "", report)  # one file, nothing fetched
    printed = [shlex.split(line)[2:] for line in done.stdout.splitlines() if line.startswith("$ rlhf ")]
    assert [command[0] for command in printed] == ["scratch", "sft", "eval", "ppo", "eval"]
