"""Parts of DeepSpeed's startup that are skipped, tested in a separate process because imports happen once."""

import subprocess
import sys


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_single_rank_starts_without_inductor_and_without_a_compiled_operator():
    printed = run(
        "import sys, torch, deepspeed\n"
        "from rlhf_cli.backends.training.distributed import join_process_group\n"
        "from deepspeed.comm import comm\n"
        "assert deepspeed.ops.__compatible_ops__['deepspeed_shm_comm'], 'the operator has another name'\n"
        "join_process_group()\n"
        "assert comm.cdb.shm_comm_op is None\n"
        "from deepspeed.runtime.zero.utils import is_zero_supported_optimizer\n"
        "assert is_zero_supported_optimizer(torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))]))\n"
        "print('torch._inductor.compile_fx' in sys.modules, torch.compiler.get_default_backend())"
    )
    assert printed.splitlines()[-1] == "False inductor"


def test_the_process_that_starts_an_online_run_imports_neither_deepspeed_nor_vllm():
    printed = run(
        "import sys\n"
        "import rlhf_cli.runs.online.run, rlhf_cli.runs.inference.generate\n"
        "print({'deepspeed', 'vllm', 'peft'} & sys.modules.keys())"
    )
    assert printed.splitlines()[-1] == "set()"
