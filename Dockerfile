# syntax=docker/dockerfile:1
# eecore on a CPU. docs/containers.md says how it is built and run; Dockerfile.cuda is for a GPU.
ARG PYTHON=3.12
FROM python:${PYTHON}-slim-bookworm AS base
ARG TORCH=2.13.0
ENV PATH=/srv/venv/bin:$PATH \
    PIP_CACHE_DIR=/var/cache/pip \
    PIP_DISABLE_PIP_VERSION_CHECK=1
# The build for CPUs is 200 MB, PyPI's is several GB.
RUN --mount=type=cache,target=/var/cache/pip \
    python -m venv /srv/venv \
    && pip install --extra-index-url https://download.pytorch.org/whl/cpu "torch==${TORCH}+cpu" numpy

# Compiles the kernels of every x86-64 CPU into one wheel.
FROM base AS build
ARG MAX_JOBS=""
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
RUN --mount=type=cache,target=/var/cache/pip \
    pip install "setuptools>=77" wheel "cmake>=3.25" ninja "pybind11>=2.13"
WORKDIR /src
COPY pyproject.toml setup.py CMakeLists.txt README.md LICENSE NOTICE ./
COPY scripts/build_backend.py scripts/
COPY include include
COPY csrc csrc
COPY python python
RUN EECORE_CUDA=OFF MAX_JOBS=${MAX_JOBS} \
    pip wheel --no-build-isolation --no-deps --wheel-dir /wheels .

FROM base
RUN --mount=type=cache,target=/var/cache/pip \
    --mount=type=bind,from=build,source=/wheels,target=/wheels \
    for wheel in /wheels/*.whl; do pip install "${wheel}[serve]"; done
RUN useradd --create-home --home-dir /srv/eecore --uid 10001 eecore \
    && install --directory --owner eecore --group eecore /cache /cache/huggingface
USER 10001
WORKDIR /srv/eecore
# Models of the hub are fetched into it.
ENV HF_HOME=/cache/huggingface
VOLUME /cache/huggingface
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --start-interval=2s --retries=3 \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["eecore"]
CMD ["serve", "--host", "0.0.0.0"]
