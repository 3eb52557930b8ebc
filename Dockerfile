# rlhf-cli for NVIDIA GPUs:  docker build -t rlhf .  &&  docker run --gpus all --shm-size 16g -v "$PWD":/home/rlhf/work rlhf sft --help
# The devel image, because DeepSpeed and flash-attn compile CUDA code with nvcc.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        build-essential git numactl python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

ENV VIRTUAL_ENV=/opt/rlhf PATH=/opt/rlhf/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv "$VIRTUAL_ENV"

WORKDIR /opt/src
COPY pyproject.toml README.md LICENSE ./
COPY rlhf_cli rlhf_cli
RUN pip install ".[vllm]"
# Against the torch just installed; compiles for up to an hour where no wheel fits. --build-arg FLASH=0 leaves it out:
# packed attention then runs PyTorch's own variable-length kernel.
ARG FLASH=1
ARG MAX_JOBS=8
RUN if [ "$FLASH" = 1 ]; then pip install wheel packaging && MAX_JOBS=$MAX_JOBS pip install --no-build-isolation ".[flash]"; fi

RUN useradd --create-home rlhf
USER rlhf
WORKDIR /home/rlhf/work
ENTRYPOINT ["rlhf"]
CMD ["--help"]
