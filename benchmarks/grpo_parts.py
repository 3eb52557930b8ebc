"""One part of a GRPO iteration alone, without anything around it; grpo_vs_trl.py starts it.

    python grpo_parts.py SPEC.json

`generation` is plain vLLM on the prompts of every step, with log-probabilities of the sampled tokens, which training
needs, and without seeds of the requests. `training` is forward and backward of `rlhf`'s model on the packs of every
step, without an optimizer; random tokens stand for the responses. Prints nothing: seconds and samples of every step are
written to the file that the specification names.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_cli.environment import SPIN_COUNT

MAX_TOKENS = 16_192  # of a micro-batch, as in `rlhf grpo`

Steps = Sequence[Sequence[dict[str, Any]]]
"""The rows of every step: `prompt_ids`, and how many `responses` there are to each."""


def generation(spec: dict[str, Any], steps: Steps) -> Iterator[Callable[[], object]]:
    """What generates the responses of each step: vLLM without processes of its own, on all cores."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    llm = LLM(
        model=spec["model"],
        skip_tokenizer_init=True,
        dtype={"bf16": "bfloat16", "fp32": "float32"}[spec["dtype"]],
        max_model_len=spec["max_len"],
        enforce_eager=True,
        enable_prefix_caching=False,
        logprobs_mode="processed_logprobs",
        worker_extension_cls="rlhf_cli.backends.weight_sync.vllm_worker.WorkerExtension",  # readies AMX
    )
    sampling = SamplingParams(
        n=steps[0][0]["responses"],
        max_tokens=spec["max_new_tokens"],
        temperature=1.0,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    for rows in steps:
        prompts: list[Any] = [{"prompt_token_ids": row["prompt_ids"]} for row in rows]
        yield partial(llm.generate, prompts, sampling, use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()


def training(spec: dict[str, Any], steps: Steps) -> Iterator[Callable[[], object]]:
    """What computes the gradient of each step."""
    import numpy as np

    from rlhf_cli.config.model import ModelConfig
    from rlhf_cli.data.packing.packs import Pack, TokenSequence
    from rlhf_cli.data.packing.shared_prompts import pack_groups, plan_groups
    from rlhf_cli.models.cost import quadratic_cost
    from rlhf_cli.models.host_memory import keep_freed_memory
    from rlhf_cli.models.loading import load_causal_lm
    from rlhf_cli.models.policy import PolicyModel

    keep_freed_memory()
    hf_model = load_causal_lm(ModelConfig(pretrain=spec["model"], param_dtype=spec["dtype"])).train()
    model, rng = PolicyModel(hf_model), np.random.default_rng(0)
    cost = quadratic_cost(hf_model.config)

    def sequence(prompt_ids: list[int]) -> TokenSequence:
        response = rng.integers(0, hf_model.config.vocab_size, spec["max_new_tokens"])
        token_ids = np.concatenate([prompt_ids, response]).astype(np.int32)
        return TokenSequence(token_ids, np.arange(token_ids.size) >= len(prompt_ids))

    def gradient(packs: list[Pack]) -> None:
        for batch in packs:
            logprobs_K, _ = model(batch)
            logprobs_K.mean().backward()
        model.zero_grad()

    for rows in steps:
        sequences = [sequence(row["prompt_ids"]) for row in rows for _ in range(row["responses"])]
        (plan,) = plan_groups(sequences, max_tokens=MAX_TOKENS, num_ranks=1, quadratic_cost=cost)
        packs = [pack_groups([sequences[i] for i in members]) for members in plan]
        yield partial(gradient, packs)


PARTS = {"generation": generation, "training": training}


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    rows = [json.loads(line) for line in Path(spec["rows"]).read_text().splitlines()]
    size = spec["prompts_per_step"]
    steps = [rows[first : first + size] for first in range(0, len(rows), size)]
    seconds = []
    for part in PARTS[spec["part"]](spec, steps):
        begin = time.perf_counter()
        part()
        seconds.append(time.perf_counter() - begin)
    trained = [sum(row["responses"] for row in rows) for rows in steps]
    Path(spec["result"]).write_text(json.dumps({"seconds": seconds, "trained": trained, "course": []}))


if __name__ == "__main__":
    main()
