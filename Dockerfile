# megatfm in a container, for CPUs and for NVIDIA GPUs; docs/guide/slurm.md shows it under Docker, Apptainer and Enroot.
#
#   docker build -t megatfm .                                      torch as it comes for Linux: with CUDA's libraries
#   docker build -t megatfm:cpu --build-arg TORCH_INDEX=URL .      torch from another index: that of its CPU builds
#   docker run --rm -v "$PWD:/work" megatfm megatfm quickstart
#
# The driver is the host's (--gpus all, --nv). Nothing of `make test` needs this image.
FROM python:3.11-slim-bookworm

ARG EXTRAS=prep,wandb,remote
ARG TORCH_INDEX=

# A compiler, for torch.compile; git, for the commit in a run's record.
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ git \
 && rm -rf /var/lib/apt/lists/*

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
WORKDIR /opt/megatfm
COPY constraints.txt ./
RUN python -m pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' constraints.txt)"
COPY pyproject.toml README.md LICENSE ./
COPY megatfm megatfm
COPY data_prep data_prep
COPY launchers launchers
COPY slurm slurm
RUN python -m pip install -c constraints.txt ".[$EXTRAS]" && megatfm --version

# Runs and corpora lie where the host's folder is mounted.
WORKDIR /work
CMD ["megatfm", "--help"]
