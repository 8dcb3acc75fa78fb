#!/usr/bin/env bash
# All that only a GPU can tell, in one command of nine minutes: builds the kernels, times
# decoding, single kernels and ops beside torch's, and runs tests and compute-sanitizer, the most
# telling first, each with a time limit. No download. Rows of figures that are there for the same
# commit, sources and device are not measured again.
#
#   bench/gpu.sh [FOLDER [PART...]] [--seconds 540] [--show] [--built]
#
#   FOLDER       gets gpu-<device>.json, gpu-<device>-decode.json, a .log and a .md (build/gpu)
#   PART         these alone; --show prints the plan; some parts run only where they are named
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
export PYTHONPATH=python${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
python=${PYTHON:-python3}

seconds=540 folder='' parts=' ' show='' built=''
while [ $# -gt 0 ]; do
  case $1 in
    --seconds) seconds=$2 && shift ;;
    --show) show=1 ;;
    --built) built=1 ;;
    -*) echo "gpu.sh: expected FOLDER, PART, --seconds, --show or --built, got $1" >&2 && exit 2 ;;
    *) if [ -z "$folder" ]; then folder=$1; else parts+="$1 "; fi ;;
  esac
  shift
done
folder=${folder:-build/gpu}
device='<device>' archs='<archs>'
if [ -z "$show" ]; then
  found=$("$python" - <<'PYTHON'
import re
import sys

import torch

if tuple(int(n) for n in torch.__version__.split(".")[:2]) < (2, 10):
    sys.exit(f"gpu.sh: expected torch >= 2.10, got {torch.__version__}")
if not torch.cuda.is_available():
    sys.exit(f"gpu.sh: expected a GPU that torch {torch.__version__} can use, got none")
major, minor = torch.cuda.get_device_capability()
if major < 8:
    sys.exit(f"gpu.sh: expected a GPU of compute capability 8.0 or newer, got {major}.{minor}")
name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
print(name, f"{major}{minor}-real")
PYTHON
  )
  read -r device archs <<<"$found"
  mkdir -p "$folder"
fi
log=$folder/gpu-$device.log page=$folder/gpu-$device.md failed=0
[ -n "$show" ] || printf '| step | outcome | s | |\n| --- | --- | ---: | --- |\n' >"$page"

step() { # PART SECONDS NAME COMMAND...: a command of a part, with a time limit
  local part=$1 limit=$2 name=$3 left=$((seconds - SECONDS)) status=0 begin=$SECONDS from outcome said
  shift 3
  if [ "$part" = build ]; then
    [ -z "$built" ] || return 0
  elif [ "$parts" != ' ' ]; then
    [[ $parts == *" $part "* ]] || return 0
  elif [[ ' runtime racecheck all-tests ' == *" $part "* ]]; then
    return 0
  fi
  if [ -n "$show" ]; then
    printf '%4d s  %-10s %s: %s\n' "$limit" "$part" "$name" "$*"
    return
  fi
  if [ "$left" -lt 5 ]; then
    echo "| $name | no time was left | 0 | |" | tee -a "$page"
    return
  fi
  echo "== $name: $*" >>"$log"
  from=$(wc -l <"$log")
  # The step's own processes end with it.
  timeout --kill-after=10 $((limit < left ? limit : left)) "$@" >>"$log" 2>&1 || status=$?
  case $status in
    0) outcome=passed ;;
    3) outcome='no time was left for all of it' ;;
    124 | 137) outcome="not finished in $((SECONDS - begin)) s" ;;
    *)
      outcome="FAILED ($status)" failed=1
      tail -n 30 "$log" >&2
      ;;
  esac
  said=$(tail -n +"$((from + 1))" "$log" |
    grep -E '[0-9]+ (passed|failed|error)|(ERROR|RACECHECK) SUMMARY' | tail -n 1 | tr -d '=|' || true)
  echo "| $name | $outcome | $((SECONDS - begin)) | $said |" | tee -a "$page"
  if [ "$part" = build ] && [ "$status" != 0 ]; then exit 1; fi
}

figures() { # BENCHMARK SUFFIX SECONDS OPTION...
  "$python" -m bench "$1" --json "$folder/gpu-$device$2.json" --seconds "$3" "${@:4}"
}

tests() {
  local workers=()
  if "$python" -c 'import xdist' 2>/dev/null; then workers=(-n "$(($(nproc) < 12 ? $(nproc) : 12))"); fi
  "$python" -m pytest -q -p no:cacheprovider --timeout=120 --durations=5 "${workers[@]}" "$@"
}

export -f figures tests
export python folder device
cuda=(-k 'cuda and not emulated') run=(bash -c '"$@"' step)
programs=(tests/decoding/test_cuda_path.py tests/decoding/test_programs.py)
# Tests of code that no kept run has: bench/results/gpu.md, "What has run".
never_run=(tests/decoding/test_coded_on_cuda.py tests/decoding/test_cache_dtypes.py
  tests/decoding/test_head_drafts.py tests/models/test_t5.py)
runtime=(tests/decoding tests/engine tests/models tests/scheduling)
decode=(figures gpu-decode -decode) models=(--model 135m 1b)

step build 240 build env EECORE_CUDA=ON EECORE_CUDA_ARCHS="$archs" "$python" setup.py build_ext --inplace
step decode 80 modes "${run[@]}" "${decode[@]}" 72 --only modes
step kernels 20 kernels "${run[@]}" "${decode[@]}" 12 --only kernels "${models[@]}" --batch 1 32
step ops 60 ops "${run[@]}" figures gpu '' 54
step decode 25 prompts "${run[@]}" "${decode[@]}" 18 --only prompts --batch 1
step decode 40 speculation "${run[@]}" "${decode[@]}" 28 --only speculation transformers --model 1b
step tests 72 tests env EECORE_REDUCED_CASES=1 "${run[@]}" tests tests/ops "${programs[@]}" "${cuda[@]}"
step tests 55 'never run' env EECORE_REDUCED_CASES=1 EECORE_TEST_DEVICE=cuda "${run[@]}" tests \
  "${never_run[@]}"
step memcheck 45 memcheck "$python" -m bench.gpu.sanitize memcheck
# Parts that run only where they are named.
step runtime 240 runtime env EECORE_TEST_DEVICE=cuda "${run[@]}" tests "${runtime[@]}"
step racecheck 150 racecheck "$python" -m bench.gpu.sanitize racecheck
step all-tests 240 'all tests' "${run[@]}" tests tests/ops "${programs[@]}" "${cuda[@]}"
exit "$failed"
