"""Times loading a checkpoint at its own ZeRO stage and at the others, where its states are cut anew.

    python benchmarks/checkpoint_conversion.py                      11M parameters in bf16
    python benchmarks/checkpoint_conversion.py --hidden 768 --layers 8 --stages 2 3
    torchrun --nproc_per_node 2 benchmarks/checkpoint_conversion.py   states over two ranks

Each checkpoint is read right after it was written, so files come from the page cache and not from the disk: the figures
are the program's own time. Memory grows with each row, because DeepSpeed's hooks hold the engines of earlier rows: two
stages of 0.4B parameters (`--hidden 1024 --layers 24`) take more than 24 GiB. Leaves out other numbers of ranks, which
read the same files in other pieces.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlhf_cli.backends.training import distributed
from rlhf_cli.backends.training.deepspeed_engine import DeepSpeedEngine
from rlhf_cli.backends.training.partitioned_loading import partitioned_loading
from rlhf_cli.config.model import ModelConfig
from rlhf_cli.config.train import DeepSpeedConfig, OptimConfig
from rlhf_cli.data.packing.packs import TokenSequence, pack
from rlhf_cli.models.loading import load_causal_lm
from rlhf_cli.models.policy import PolicyModel

VOCABULARY = 4096


@dataclass(frozen=True)
class Loaded:
    """How long it took to load a checkpoint of one stage at another one."""

    saved: int
    stage: int
    num_bytes: int
    seconds: float

    def row(self) -> str:
        """Return the row of the table."""
        kind = "as it was" if self.saved == self.stage else "cut anew"
        size = self.num_bytes / 1e9
        return f"| {self.saved} | {self.stage} | {kind} | {size:.3f} | {self.seconds:.2f} | {self.seconds / size:.2f} |"


def save_model(folder: Path, *, hidden: int, layers: int) -> None:
    """Save a random Qwen2 with heads of 64."""
    heads = max(hidden // 64, 1)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2 if heads % 2 == 0 else 1,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def make_engine(model: Path, stage: int) -> DeepSpeedEngine:
    """Return an engine of the model in bf16."""
    settings = DeepSpeedConfig(zero_stage=stage)  # type: ignore[arg-type]
    source = ModelConfig(pretrain=str(model), param_dtype="bf16")
    hf_model = load_causal_lm(source, partition=partitioned_loading(settings, param_dtype="bf16"))
    return DeepSpeedEngine(
        PolicyModel(hf_model), settings, optim=OptimConfig(), learning_rate=1e-4, total_steps=10, param_dtype="bf16"
    )


def save_after_a_step(model: Path, stage: int, folder: Path) -> int:
    """Save an engine that has moments; return the bytes of all ranks."""
    engine = make_engine(model, stage)
    tokens = torch.arange(8, dtype=torch.int32).numpy()
    batch = pack([TokenSequence(tokens, tokens > 0)])
    engine.train_step([batch], lambda policy, packed: (-policy(packed)[0].mean(), {}))
    folder.mkdir(exist_ok=True)
    engine.save(folder)
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def measure(model: Path, folder: Path, stages: list[int], *, repeats: int) -> Iterator[Loaded]:
    """Yield the median of the times for each stage that a checkpoint is saved at, and each that it is loaded at."""
    for saved in stages:
        checkpoint = folder / f"stage{saved}"
        num_bytes = save_after_a_step(model, saved, checkpoint)
        for stage in stages:
            engine = make_engine(model, stage)
            seconds = [load_seconds(engine, checkpoint) for _ in range(repeats)]
            yield Loaded(saved, stage, num_bytes, statistics.median(seconds))
        distributed.barrier()
        shutil.rmtree(checkpoint, ignore_errors=True)


def load_seconds(engine: DeepSpeedEngine, checkpoint: Path) -> float:
    """Return the seconds until all ranks have loaded it."""
    distributed.barrier()
    begin = time.perf_counter()
    engine.load(checkpoint)
    distributed.barrier()
    return time.perf_counter() - begin


def shared_folder() -> Path:
    """Return a new folder that all ranks know."""
    return Path(distributed.by_first_rank(lambda: tempfile.mkdtemp()))


def main() -> None:
    """Read the arguments and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=320)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    distributed.join_process_group()
    folder = shared_folder()
    is_first = dist.get_rank() == 0
    if is_first:
        save_model(folder / "model", hidden=arguments.hidden, layers=arguments.layers)
        print("| saved at | loaded at | states | GB | s | s/GB |\n|---|---|---|---|---|---|")
    distributed.barrier()
    for loaded in measure(folder / "model", folder, arguments.stages, repeats=arguments.repeats):
        if is_first:
            print(loaded.row(), flush=True)
    if is_first:
        shutil.rmtree(folder)
    distributed.leave_process_group()


if __name__ == "__main__":
    main()
