"""Runs the checks of `rlhf doctor` and prints results: for a terminal, as JSON, or as Markdown for a bug report."""

import getpass
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.text import Text

from rlhf_cli.backends.doctor.cluster import cluster_finding
from rlhf_cli.backends.doctor.finding import Finding
from rlhf_cli.backends.doctor.gpus import gpu_findings, gpus
from rlhf_cli.backends.doctor.machine import machine_findings
from rlhf_cli.backends.doctor.packages import installed_versions, package_findings, torch_cuda, torch_extras_finding
from rlhf_cli.backends.doctor.smoke import smoke_findings
from rlhf_cli.commands.doctor import DoctorConfig, DoctorGroup
from rlhf_cli.environment import SECRET
from rlhf_cli.errors import RunError, UsageError
from rlhf_cli.version import __version__

MARKS = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "error": ("ERROR", "red")}
# Only these prefixes: other variables may contain private data.
_REPORTED_VARIABLES = re.compile(r"(CUDA|NCCL|RAY|VLLM|TORCH|HF|OMP|DS|DEEPSPEED|TRANSFORMERS|PYTORCH|GLOO)_")
"""Environment variables that affect runs."""
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")
# Importing vllm on a slow disk takes tens of seconds.
_IMPORT_SECONDS = 60.0
_TOTAL_SECONDS = 600.0
"""Limit for all checks. The smoke tests share the time that remains after the other checks."""


def run_doctor(config: DoctorGroup) -> None:
    """Run all checks and print the results. Raises RunError (exit status 1) if a check fails."""
    if config.as_json and config.report:
        raise UsageError("--json and --report are different output formats: set only one")
    if config.models:
        # Only here: it imports the modules of all types, while the checks work without torch and transformers.
        from rlhf_cli.models.supported import models_table

        print(models_table())
        return
    # A generator: each finding is printed as soon as its check ends.
    findings = _findings(smoke_tests=config.smoke_tests)
    if config.as_json:
        results = list(findings)
        print(as_json(results))
    elif config.report:
        results = list(findings)
        print(redacted(markdown(results, os.environ)))
    else:
        results = _shown(findings, Console(highlight=False))
    if failed := [one.part for one in results if one.status == "error"]:
        raise RunError(f"{len(failed)} of {len(results)} checks failed: {', '.join(failed)}")


def _findings(*, smoke_tests: bool) -> Iterator[Finding]:
    end = time.monotonic() + _TOTAL_SECONDS
    versions = installed_versions()
    yield from package_findings(versions)
    if (finding := torch_extras_finding(versions, _import_error)) is not None:
        yield finding
    yield from gpu_findings(gpus(), torch_cuda=torch_cuda())
    yield from machine_findings()
    yield cluster_finding(os.environ.get("RAY_ADDRESS"))
    if smoke_tests:
        yield from smoke_findings(end=end)


def _import_error(module: str, *, seconds: float = _IMPORT_SECONDS) -> str | None:
    """Import a module in a new process. Returns the last line of the error, or None on success."""
    # A separate process: an import may abort the interpreter, or initialize CUDA in this one.
    command = [sys.executable, "-c", f"import {module}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"import timed out after {seconds:.0f} s"
    lines = done.stderr.strip().splitlines()
    return (lines[-1] if lines else f"exit status {done.returncode}") if done.returncode else None


def _shown(findings: Iterable[Finding], console: Console) -> list[Finding]:
    """Print each finding when it is available, with the fix on the next line. Returns all findings."""
    shown = []
    for finding in findings:
        mark, colour = MARKS[finding.status]
        line = Text(f"{mark:>7}  ", style=colour).append(f"{finding.part}: ", style="bold default")
        # Print each finding at once, because smoke tests take minutes.
        console.print(line.append(finding.message, style="default"), soft_wrap=True)
        if finding.cure:
            console.print(f"{'':9}fix: {finding.cure}", markup=False, soft_wrap=True)
        shown.append(finding)
    counts = ", ".join(f"{sum(one.status == status for one in shown)} {MARKS[status][0]}" for status in MARKS)
    console.print(f"{counts}; for a bug report: rlhf doctor --report", markup=False)
    return shown


def as_json(findings: Iterable[Finding]) -> str:
    """Format the findings as a JSON object, redacted because users may share it."""
    rows = [asdict(one) | {"message": redacted(one.message), "cure": redacted(one.cure)} for one in findings]
    return json.dumps({"rlhf-cli": __version__, "findings": rows}, indent=1)


def markdown(findings: Iterable[Finding], environment: Mapping[str, str]) -> str:
    """Format the findings as a Markdown table, followed by environment variables that affect runs."""
    rows = [f"| {one.status} | {_cell(one.part)} | {_cell(one.message)} |" for one in findings]
    names = sorted(name for name in environment if _REPORTED_VARIABLES.match(name))
    variables = [f"{name}={'(hidden)' if SECRET.search(name) else environment[name]}" for name in names]
    table = "\n".join([f"rlhf-cli {__version__}", "", "| status | part | finding |", "|---|---|---|", *rows])
    return table + ("\n\n```text\n" + "\n".join(variables) + "\n```" if variables else "")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def redacted(text: str) -> str:
    """Remove home folder, user name, host name and credentials in URLs."""
    text = _CREDENTIALS.sub("(hidden)@", text).replace(str(Path.home()), "~")
    for name, stand_in in ((_user_name(), "(user)"), (socket.gethostname(), "(host)")):
        if name:
            # Whole words only: a short user name may be part of other words.
            text = re.sub(rf"\b{re.escape(name)}\b", stand_in, text)
    return text


def _user_name() -> str:
    try:
        return getpass.getuser()
    # In containers, the user ID may have no name.
    except (KeyError, OSError):
        return ""


def doctor(config: DoctorConfig) -> None:
    """Run `rlhf doctor`."""
    run_doctor(config.doctor)
