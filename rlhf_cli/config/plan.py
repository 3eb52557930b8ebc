"""Settings of a plan: hardware, lengths and price."""

from typing import Literal

from pydantic import Field

from rlhf_cli.config.base import SettingsGroup

GpuName = Literal["a100-40", "a100-80", "h100", "h200", "b200", "l40s", "rtx4090"]


class PlanConfig(SettingsGroup):
    """Plan"""

    gpu: Literal["a100-40", "a100-80", "h100", "h200", "b200", "l40s", "rtx4090", "cpu"] | None = None
    """Kind of GPU to plan for. Default: this machine's GPUs, or its CPU."""
    num_gpus: int | None = Field(None, gt=0)
    """GPUs per node. Default: those of this machine, or 1."""
    num_nodes: int = Field(1, gt=0)
    """Number of nodes."""
    gpu_memory_gib: float | None = Field(None, gt=0)
    """Memory of a GPU in GiB. Default: from the table of GPUs."""
    gpu_tflops: float | None = Field(None, gt=0)
    """Dense bf16 speed of a GPU in TFLOP/s. Default: from the table of GPUs."""
    gpu_bandwidth: float | None = Field(None, gt=0)
    """Memory bandwidth of a GPU in TB/s. Default: from the table of GPUs."""
    gpu_link: float | None = Field(None, gt=0)
    """Bandwidth between GPUs on a node in GB/s per GPU and direction. Default: from the table of GPUs."""
    network: float | None = Field(None, gt=0)
    """Bandwidth between nodes in GB/s per GPU and direction. Default: from the table of GPUs."""
    host_memory_gib: float | None = Field(None, gt=0)
    """Host memory per node in GiB. Default: if the plan is for this machine, its memory; otherwise not checked."""
    price_per_gpu_hour: float | None = Field(None, gt=0)
    """Price of one GPU for one hour, in any currency."""
    images_per_row: int = Field(0, ge=0)
    """Images per row or prompt, in the largest size that the model and max_pixels allow. Default: 1 with image_key,
    otherwise 0."""
    row_tokens: int | None = Field(None, gt=0)
    """Mean tokens per sequence in the data of offline commands, including images. Default: half of max_len; with
    images, their tokens and half of the rest."""
    prompt_tokens: int | None = Field(None, gt=0)
    """Mean tokens per prompt, including images. Default: half of max_len minus max_new_tokens; with images, their
    tokens and half of the rest."""
    response_tokens: int | None = Field(None, gt=0)
    """Mean tokens per sampled response. Default: half of max_new_tokens."""
    num_rows: int | None = Field(None, gt=0)
    """Rows or prompts in the data, to plan the whole run. Default: one step."""
    calibration: bool = True
    """Scale times by measurements of earlier, similar runs on this machine."""
    as_json: bool = Field(False, alias="json")
    """Print the plan as a JSON object."""

    @property
    def describes_gpu(self) -> bool:
        """Whether memory and speed of a GPU are given."""
        return self.gpu_memory_gib is not None


class ProofConfig(SettingsGroup):
    """Proof"""

    proof: str | None = None
    """Run directory: compare the plan of this run with its measured memory and times, instead of planning a command.
    Default hardware: this machine."""
