"""`rlhf serve-tinker` as a process with vLLM: trained weights reach the engine, and a signal ends it."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from engine_under_test import make_engine_model
from tinker_server import KEY, NAME, TinkerServer, output, sampled, training_request

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.parametrize("push", ["merged", "adapter"])
def test_samples_of_vllm_agree_with_the_trainer_after_training(tmp_path: Path, push: str):
    model = make_engine_model(tmp_path / "model")
    words = [
        "--pretrain",
        model,
        "--model_name",
        NAME,
        "--output",
        str(tmp_path / "out"),
        "--port",
        "0",
        "--lora_push",
        push,
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "rlhf_cli", "serve-tinker", *words, "--param_dtype", "fp32"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TINKER_API_KEY": KEY},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        found = next(match for line in process.stdout if (match := re.match(r"export TINKER_BASE_URL=(\S+)", line)))
        server = TinkerServer(found[1])
        session = server.session()
        trained = server.model(session, rank=8)
        if push == "adapter":
            body = {"session_id": session, "model_seq_id": 1, "base_model": NAME, "lora_config": {"rank": 65}}
            assert "rank 65 is above 64 (--max_lora_rank)" in server.result("create_model", body)["error"]
        for seq in (1, 3, 5):
            server.result("forward_backward", training_request(trained, seq))
            adam = {"model_id": trained, "seq_id": seq + 1, "adam_params": {"learning_rate": 1e-2}}
            server.result("optim_step", adam)
        save = {"model_id": trained, "seq_id": 7, "sampling_session_seq_id": 0}
        sampler = server.result("save_weights_for_sampler", save)["sampling_session_id"]
        body = {
            "sampling_session_id": sampler,
            "seq_id": 0,
            "num_samples": 8,
            "prompt": {"chunks": [{"tokens": [5, 6, 7]}]},
            "sampling_params": {"max_tokens": 16, "stop": [], "seed": 1},
        }
        tokens, logprobs, _ = sampled(server.result("asample", body))
        for number, (own, scores) in enumerate(zip(tokens, logprobs, strict=True)):
            whole = [5, 6, 7, *own]
            inputs = {"target_tokens": whole[1:], "weights": [1.0] * (len(whole) - 1)}
            request = training_request(trained, 8 + number, tokens=whole[:-1], inputs=inputs, forward_only=True)
            np.testing.assert_allclose(scores, output(server.result("forward_backward", request))[0][2:], atol=1e-3)
        end = tokens[0][4]
        stopped = body | {"seq_id": 1, "sampling_params": {"max_tokens": 16, "stop": [end], "seed": 1}}
        assert sampled(server.result("asample", stopped))[0][0] == tokens[0][: tokens[0].index(end) + 1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 130
        assert not list((tmp_path / "out").glob("*/sampler_weights/snapshot-*"))
    finally:
        process.kill()
