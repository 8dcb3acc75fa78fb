#!/usr/bin/env bash
# Makes .venv in this checkout: torch, eecore built in place, and the extras and dependency groups named
# as arguments.
#
#   scripts/setup_venv.sh test lint
#
# Safe to run again: what has not changed since the last run is left alone, within a second.
#
#   PYTHON         the interpreter to make .venv with, 3.10 or newer (python3)
#   EECORE_TORCH   the torch to install into a new .venv (torch==2.13.0)
#   EECORE_CUDA    AUTO, ON or OFF: build the CUDA kernels (AUTO; with CI=true ON where nvcc is)
#   MAX_JOBS       compilations at a time
set -euo pipefail
cd "$(dirname "$0")/.."

python=.venv/bin/python
torch_requirement=${EECORE_TORCH:-torch==2.13.0}

say() { printf '== %s\n' "$*" >&2; }
die() {
  printf 'setup: %s\n' "$*" >&2
  exit 1
}

# What must be on the machine.

find_python() {
  local base=${PYTHON:-python3}
  command -v "$base" >/dev/null || die "no $base was found: install Python 3.10 or newer" \
    "(Debian/Ubuntu: apt install python3 python3-venv python3-dev; Fedora: dnf install" \
    "python3-devel; macOS: brew install python), or name one with PYTHON=..."
  "$base" scripts/build_backend.py || exit 1
  "$base" -c 'import ensurepip, venv' 2>/dev/null ||
    die "$base cannot make virtual environments: Debian/Ubuntu: apt install python3-venv"
  echo "$base"
}

# Where nvcc is, if it is anywhere.
find_nvcc() {
  local candidate
  for candidate in "${CUDACXX:-}" "$(command -v nvcc || true)" "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc"; do
    if [ -n "$candidate" ] && [ -x "$candidate" ]; then
      echo "$candidate"
      return
    fi
  done
}

choose_cuda() {
  local nvcc
  nvcc=$(find_nvcc)
  if [ -n "$nvcc" ] && ! command -v nvcc >/dev/null; then export CUDACXX=$nvcc; fi
  if [ -z "${EECORE_CUDA:-}" ] && [ "${CI:-}" = true ]; then
    if [ -n "$nvcc" ]; then
      export EECORE_CUDA=ON
    else
      say "************************************************************************"
      say "WARNING: no nvcc on this CI machine, so the CUDA half is NOT compiled"
      say "************************************************************************"
      export EECORE_CUDA=OFF
    fi
  fi
}

# Stamps: a step runs again when what it depends on has changed.

fingerprint() { # of files and of text on stdin
  { cat; for file in "$@"; do printf '%s\n' "$file"; cat "$file"; done; } | cksum
}

is_done() { [ "$(cat ".venv/stamp-$1" 2>/dev/null)" = "$2" ]; }
mark_done() { printf '%s\n' "$2" >".venv/stamp-$1"; }

# Steps.

pip_install() { "$python" -m pip install -qq --disable-pip-version-check "$@"; }

# A .venv that was moved, broken off half-way or made with another Python than PYTHON is made anew.
make_venv() {
  local base
  if is_done venv "$PWD" && "$python" -V >/dev/null 2>&1; then
    if [ -z "${PYTHON:-}" ] || [ "$("$PYTHON" -V 2>&1)" = "$("$python" -V 2>&1)" ]; then return; fi
  fi
  base=$(find_python)
  say "making .venv with $("$base" -V 2>&1)"
  rm -rf .venv
  "$base" -m venv .venv
  mark_done venv "$PWD"
}

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }

install_torch() {
  if is_done torch "$torch_requirement"; then return; fi
  if [ -z "${EECORE_TORCH:-}" ] && "$python" -c 'import torch' 2>/dev/null; then
    mark_done torch "$torch_requirement"
    return
  fi
  say "torch: $torch_requirement"
  # A wheel that pip is configured to find on this machine; then, where there is no GPU, the index of
  # CPU builds, which are a tenth of the size; then whatever the default index has.
  if pip_install --no-index --no-deps "$torch_requirement" 2>/dev/null; then
    say "torch: from a local wheel"
  elif ! has_gpu && pip_install --retries 0 --timeout 15 \
    --index-url https://download.pytorch.org/whl/cpu "$torch_requirement" 2>/dev/null; then
    say "torch: the CPU build"
  else
    say "torch: from pip's own index; PyPI's build is for CUDA, some gigabytes"
  fi
  pip_install "$torch_requirement" numpy # and what torch itself needs; it complains without numpy
  "$python" -c 'import torch' || die "torch was installed, but cannot be imported"
  mark_done torch "$torch_requirement"
}

# The requirements of pyproject.toml, one a line: of the build (torch aside, it is there already), of extras
# or of dependency groups, with what they take from eecore's own extras.
requirements() {
  PYTHONPATH=scripts "$python" - "$@" <<'PYTHON'
import re
import sys

from build_backend import BUILD_TOOLS

try:
    import tomllib
except ModuleNotFoundError:
    from pip._vendor import tomli as tomllib
with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)
groups = {**project["project"]["optional-dependencies"], **project["dependency-groups"]}
groups["build"] = BUILD_TOOLS


def expanded(name):
    for requirement in groups[name]:
        own = re.fullmatch(r"eecore\[([\w,-]+)\]", requirement)
        if own is None:
            yield requirement
        else:
            for extra in own[1].split(","):
                yield from expanded(extra)


for name in sys.argv[1:]:
    if name not in groups:
        sys.exit(f"setup: no extra or group {name!r} in pyproject.toml: there are {', '.join(groups)}")
    print(*dict.fromkeys(expanded(name)), sep="\n")
PYTHON
}

install_package() {
  local settings sources wanted compiled extra
  local missing=()
  settings="$(cat .venv/stamp-torch) ${EECORE_CUDA:-AUTO} ${EECORE_CUDA_ARCHS:-} ${CUDACXX:-} ${CXX:-}"
  sources=$(find csrc include CMakeLists.txt setup.py -type f | LC_ALL=C sort)
  wanted=$(fingerprint pyproject.toml </dev/null)
  # shellcheck disable=SC2086
  compiled=$(fingerprint $sources <<<"$settings")
  if ! compgen -G 'python/eecore/_C*.so' >/dev/null; then rm -f .venv/stamp-compiled; fi

  for extra in "$@"; do
    if ! is_done "$extra" "$wanted"; then missing+=("$extra"); fi
  done
  if [ ${#missing[@]} -gt 0 ]; then
    say "pip install: the requirements of ${missing[*]}"
    requirements "${missing[@]}" >.venv/requirements.txt
    pip_install -r .venv/requirements.txt
    for extra in "${missing[@]}"; do mark_done "$extra" "$wanted"; done
  fi
  if ! is_done package "$wanted"; then
    say "pip install -e . (compiles the kernels, a few minutes the first time)"
    requirements build >.venv/requirements.txt
    pip_install -r .venv/requirements.txt
    pip_install --no-build-isolation -e .
    mark_done package "$wanted"
    mark_done compiled "$compiled"
  fi
  if ! is_done compiled "$compiled"; then
    say "compiling what has changed"
    "$python" setup.py --quiet build_ext --inplace >&2
    mark_done compiled "$compiled"
  fi
}

choose_cuda
make_venv
install_torch
install_package "$@"
