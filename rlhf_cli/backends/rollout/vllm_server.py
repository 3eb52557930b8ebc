"""vLLM's OpenAI-compatible server with a model, for evaluation packages. It answers on the loopback interface only.

The server is a process of its own with the engine arguments of rollouts, except those for training: it tokenizes text
and returns the log-probs of the model instead of the sampling distribution.
"""

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import psutil

from rlhf_cli.backends.rollout.engine import EngineSettings
from rlhf_cli.backends.rollout.processes import end_processes, process_tree
from rlhf_cli.backends.rollout.vllm_arguments import command_words
from rlhf_cli.backends.rollout.vllm_start import all_arguments, check_model, engine_environment, start_failure
from rlhf_cli.backends.training.distributed_env import free_port
from rlhf_cli.errors import RunError

_HOST = "127.0.0.1"
_POLL_SECONDS = 0.5
_ANSWER_SECONDS = 5.0
_FOR_TRAINING = {"skip_tokenizer_init", "logprobs_mode", "scheduler_cls", "weight_transfer_config"}


@dataclass(frozen=True)
class ServedModel:
    """A running server: the address of its API, the key for it, and the name of the model."""

    url: str
    key: str
    name: str


@contextmanager
def served_model(
    model_path: str, settings: EngineSettings, *, name: str, on_cpu: bool, log: Path
) -> Iterator[ServedModel]:
    """Serve the model under `name`. The server writes to `log`, and stops with the block.

    Raises:
        UsageError: vLLM does not support the model on this machine.
        RunError: the server ends before it answers.
    """
    served = ServedModel(f"http://{_HOST}:{(port := free_port())}/v1", f"sk-{secrets.token_urlsafe(32)}", name)
    with log.open("ab") as output, engine_environment(settings, on_cpu=on_cpu):
        check_model(model_path, settings, on_cpu=on_cpu)
        # The user's arguments were checked before. The server parses them itself.
        arguments = all_arguments(model_path, settings, settings.vllm_args, on_cpu=on_cpu)
        words = [*server_words(arguments), f"--served-model-name={name}", f"--host={_HOST}", f"--port={port}"]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words]
        # The key in the environment, because other users can read command lines. In a session of its own, so that
        # Ctrl-C reaches only this process, which then stops the server.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "VLLM_API_KEY": served.key},
            start_new_session=True,
        )
    try:
        _wait_until_ready(process, port, log)
        yield served
    finally:
        stop_with_children(process)


def stop_with_children(process: subprocess.Popen[bytes]) -> None:
    """Terminate a process, and kill it and its children if they do not exit. No-op if it has exited."""
    if process.poll() is None:
        # List the children first: the engine core would otherwise be adopted by another process.
        processes = [psutil.Process(process.pid), *process_tree(process.pid)]
        process.terminate()
        end_processes(processes)
    process.wait()


def server_words(arguments: Mapping[str, object]) -> list[str]:
    """Return the engine arguments for the server's command line."""
    words: list[str] = []
    for name, value in arguments.items():
        if name in _FOR_TRAINING or value is None:
            continue
        if isinstance(value, bool):
            # A switch without a negative form is off by default.
            words += [f"--{name}"] if value else [] if name in _WITHOUT_NEGATION else [f"--no-{name}"]
        else:
            words += command_words(name, value)
    return words


_WITHOUT_NEGATION = {"disable_log_stats"}


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Wait until the server answers. Without a time limit: large models load for many minutes."""
    while not _is_ready(port):
        if process.poll() is not None:
            text = log.read_text(encoding="utf-8", errors="replace")
            reason = start_failure(RuntimeError(f"exit status {process.returncode}"), text)
            raise RunError(f"vLLM's server could not be started ({reason}); see {log}")
        time.sleep(_POLL_SECONDS)


def _is_ready(port: int) -> bool:
    # Not urllib, which would use the proxy of the environment.
    connection = HTTPConnection(_HOST, port, timeout=_ANSWER_SECONDS)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == HTTPStatus.OK
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()
