#!/usr/bin/env bash
# All that only a GPU can tell, in one command of nine minutes: builds the kernels, times
# decoding, single kernels and ops beside torch's, and runs tests and compute-sanitizer. No download. What was cut off goes on where it stopped when it is called again.
#
#   bench/gpu.sh [FOLDER [PART...]] [--seconds 540] [--show] [--built]
#
#   FOLDER       gets gpu-<device>*.json, .log and .md (build/gpu)
#   PART         these alone; --show prints the plan
#   --built      nothing is built, python/eecore has the modules, of a machine with nvcc, say
#
#   PYTHON       an interpreter that has torch >= 2.10 for CUDA, pybind11, cmake, ninja, setuptools,
#                pytest and pytest-timeout (python3); nothing is installed into it
#   MAX_JOBS     compilations at a time
set -euo pipefail
cd "$(dirname "$0")/.."
if ! command -v nvcc >/dev/null && [ -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ]; then
  export CUDACXX="${CUDACXX:-${CUDA_HOME:-/usr/local/cuda}/bin/nvcc}"
fi
export PATH="$PATH:${CUDA_HOME:-/usr/local/cuda}/bin"
PYTHONPATH=python${PYTHONPATH:+:$PYTHONPATH} exec "${PYTHON:-python3}" -m bench gpu-run "$@"
