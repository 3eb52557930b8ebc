"""vLLM's server for evaluation packages: its command line, a failed start, and the end of its processes."""

import importlib.util
import json
import subprocess
import sys
import time

import psutil
import pytest

from rlhf_cli.backends.rollout import vllm_server
from rlhf_cli.backends.rollout.engine import EngineSettings
from rlhf_cli.backends.rollout.vllm_arguments import engine_arguments
from rlhf_cli.backends.rollout.vllm_server import server_words, stop_with_children
from rlhf_cli.errors import RunError

PARSE = """
import json, sys
from vllm import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
print(json.dumps([vars(parser.parse_args(words)) for words in json.loads(sys.argv[1])], default=str))
"""


def test_the_server_returns_log_probs_of_the_model_and_reads_text() -> None:
    settings = EngineSettings(max_model_len=64, seed=3, enforce_eager=False)
    words = server_words(engine_arguments("m", settings, on_cpu=False))
    assert {"--model=m", "--seed=3", "--max_model_len=64", "--no-enforce_eager", "--disable_log_stats"} <= set(words)
    # Its parser has no negative form of this one, and these are for training.
    assert not {"--no-disable_log_stats"} & set(words)
    assert not [word for word in words if any(name in word for name in ("logprobs_mode", "scheduler_cls", "tokenizer"))]


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_parses_the_command_line() -> None:
    cpu = EngineSettings(max_model_len=64, vllm_args={"compilation_config": {"level": 0}})
    gpu = EngineSettings(max_model_len=64, tensor_parallel_size=2, max_images_per_prompt=1, min_pixels=4, max_pixels=9)
    given = {"max_num_seqs": 7, "speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}
    sets = [engine_arguments("m", cpu, on_cpu=True) | given, engine_arguments("m", gpu, on_cpu=False)]
    done = subprocess.run(
        [sys.executable, "-c", PARSE, json.dumps([server_words(arguments) for arguments in sets])],
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stderr
    for arguments, parsed in zip(sets, json.loads(done.stdout.splitlines()[-1]), strict=True):
        for name, value in arguments.items():
            if name not in vllm_server._FOR_TRAINING and value is not None:
                assert parsed[name] == value, name


def test_a_server_that_ends_is_reported_with_the_reason(tmp_path) -> None:
    log = tmp_path / "server.log"
    with log.open("w") as output:
        code = "print('Traceback:'); print('ValueError: no room'); raise SystemExit(1)"
        process = subprocess.Popen([sys.executable, "-c", code], stdout=output)
    with pytest.raises(RunError, match=r"vLLM's server could not be started \(ValueError: no room\)"):
        vllm_server._wait_until_ready(process, vllm_server.free_port(), log)


def test_children_end_with_the_server() -> None:
    code = "import subprocess, time; subprocess.Popen(['sleep', '100']); time.sleep(100)"
    process = subprocess.Popen([sys.executable, "-c", code])
    while not (children := psutil.Process(process.pid).children()):
        time.sleep(0.01)
    stop_with_children(process)
    assert process.returncode is not None
    assert not children[0].is_running()
    stop_with_children(process)
