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
RUN pip install ".[vllm,liger,hybrid]"
# Packed attention runs PyTorch's own variable-length kernel, which shares prompts. --build-arg FLASH=1 adds
# FlashAttention 2 for models with a cap on attention scores (Gemma 2): it compiles against the torch just installed,
# for up to an hour if no wheel fits. FLASH_ARCHS are the compute capabilities of your cards without the dot.
ARG FLASH=0
ARG FLASH_ARCHS="80;90;100"
ARG MAX_JOBS=8
RUN if [ "$FLASH" = 1 ]; then \
        pip install wheel packaging psutil \
        && FLASH_ATTN_CUDA_ARCHS="$FLASH_ARCHS" MAX_JOBS=$MAX_JOBS pip install --no-build-isolation ".[flash]"; \
    fi
# --build-arg MAMBA=1 adds kernels for Mamba layers (Nemotron-H, Granite hybrid, Falcon-H1), compiled in the same way.
ARG MAMBA=0
RUN if [ "$MAMBA" = 1 ]; then \
        pip install wheel packaging ninja \
        && MAX_JOBS=$MAX_JOBS pip install --no-build-isolation ".[mamba]"; \
    fi

# Files of a mounted folder belong to the user that most machines give the number 1000. ubuntu24.04 has one already.
RUN userdel --remove ubuntu 2>/dev/null || true; useradd --create-home --uid 1000 rlhf
USER rlhf
WORKDIR /home/rlhf/work
ENTRYPOINT ["rlhf"]
CMD ["--help"]
