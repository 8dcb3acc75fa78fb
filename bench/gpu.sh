#!/usr/bin/env bash
# All that only a GPU can tell, in one command: builds for the GPU that is there, runs the tests on it,
# looks for bad accesses and races, times the ops beside their peers, and decoding end to end beside
# transformers. No download.
#
#   bench/gpu.sh [FOLDER [PART...]]
#
#   FOLDER      gets gpu-<device>[-decode].json and .md, and the logs (bench/results)
#   PART        first, tests, bench, decode, runtime, memcheck, racecheck: these instead of all, behind the
#               build. first is a little of each, and what is likeliest to go wrong. The limits of the
#               steps and of the build are 9 minutes for it, 26 for all
#
#   PYTHON      an interpreter that has torch >= 2.10 for CUDA, pybind11, cmake, ninja, setuptools, pytest and
#               pytest-timeout (python3); nothing is installed into it
#   MAX_JOBS    compilations at a time
#   BUILT       anything: nothing is built, python/eecore has the modules
set -euo pipefail
cd "$(dirname "$0")/.."

all_parts=(first tests bench decode runtime memcheck racecheck)
folder=${1:-bench/results}
parts=("${@:2}")
python=${PYTHON:-python3}
own_path=PYTHONPATH=python${PYTHONPATH:+:$PYTHONPATH}
begin=$SECONDS
failed=0

die() {
  printf 'gpu.sh: %s\n' "$*" >&2
  exit 2
}

wants() { # PART
  [ ${#parts[@]} -eq 0 ] || [[ " ${parts[*]} " == *" $1 "* ]]
}

# The name of the device for files, and its architecture for CMake.
describe_device() {
  "$python" - <<'PYTHON'
import re
import torch

if tuple(int(n) for n in torch.__version__.split(".")[:2]) < (2, 10):
    raise SystemExit(f"expected torch >= 2.10, got {torch.__version__}")
if not torch.cuda.is_available():
    raise SystemExit(f"expected a GPU that torch {torch.__version__} can use, got none")
major, minor = torch.cuda.get_device_capability()
if major < 8:
    raise SystemExit(f"expected a GPU of compute capability 8.0 or newer, got {major}.{minor}")
name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
print(name, f"{major}{minor}a-real" if major == 9 else f"{major}{minor}-real")
PYTHON
}

# step NAME SECONDS COMMAND...: runs it under a limit, with its output in a log, and notes how it ended.
step() {
  local name=$1 limit=$2 started=$SECONDS status=0 outcome
  shift 2
  printf '== %s\n' "$name" >&2
  timeout --kill-after=10 "$limit" "$@" >"$folder/gpu-$name.log" 2>&1 || status=$?
  case $status in
    0) outcome=passed ;;
    124 | 137) outcome="not finished in $limit s" ;;
    *)
      outcome="FAILED ($status)"
      failed=1
      ;;
  esac
  printf '%s\t%s\t%s\t%s\n' "$name" "$outcome" "$((SECONDS - started))" \
    "$(grep -E '[0-9]+ (passed|failed|error)|ERROR SUMMARY|RACECHECK SUMMARY' "$folder/gpu-$name.log" |
      tail -n 2 | tr '\n\t' '; ' || true)" >>"$steps"
  printf '   %s, %s s\n' "$outcome" "$((SECONDS - started))" >&2
  if [ $status -ne 0 ]; then tail -n 40 "$folder/gpu-$name.log" >&2; fi
  return 0
}

jobs=$(nproc)
side_by_side=() # tests, where pytest-xdist is there
if "$python" -c "import xdist" 2>/dev/null; then side_by_side=(-n "$((jobs < 12 ? jobs : 12))"); fi

pytest_on_cuda() { # NAME SECONDS VARIABLE...: the tests of the backend cuda
  local name=$1 limit=$2
  shift 2
  step "$name" "$limit" env "$own_path" "$@" "$python" -m pytest tests/ops \
    tests/decoding/test_cuda_path.py tests/decoding/test_programs.py -k "cuda and not emulated" -p no:cacheprovider --timeout=120 \
    --durations=5 "${side_by_side[@]}"
}

for part in "${parts[@]}"; do
  [[ " ${all_parts[*]} " == *" $part "* ]] || die "expected parts among ${all_parts[*]}, got $part"
done
mkdir -p "$folder"
device=$(describe_device) || die "no GPU to measure on"
read -r name arch <<<"$device"
if ! command -v nvcc >/dev/null && [ -z "${CUDACXX:-}" ]; then
  if [ -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ]; then
    export CUDACXX="${CUDA_HOME:-/usr/local/cuda}/bin/nvcc"
  else
    die "no nvcc was found: put it on PATH, or set CUDACXX or CUDA_HOME"
  fi
fi
steps=$(mktemp)
trap 'rm -f "$steps"' EXIT

[ -n "${BUILT:-}" ] || step build 240 env EECORE_CUDA=ON EECORE_CUDA_ARCHS="$arch" "$python" setup.py build_ext --inplace
if [ $failed -ne 0 ]; then die "the build failed: see $folder/gpu-build.log"; fi
if wants first; then
  for early in 1 0; do # with programmatic dependent launch, and without
    step "first-body-early-$early" 45 env EECORE_EARLY_START=$early "$own_path" "$python" \
      -m bench gpu-first body
  done
  step first-splits 45 env "$own_path" "$python" -m bench gpu-first splits
  pytest_on_cuda first-tests 110 EECORE_REDUCED_CASES=1
  step first-decode 45 env "$own_path" "$python" -m bench gpu-decode \
    --model 1b --batch 1 --tokens 4 --rounds 1 --seconds 5
fi
if wants tests; then pytest_on_cuda tests 150; fi
if wants bench; then
  step bench 140 env "$own_path" "$python" -m bench gpu --seconds 110 \
    --json "$folder/gpu-$name.json" --markdown "$folder/gpu-$name.md"
fi
if wants decode; then
  step decode 200 env "$own_path" "$python" -m bench gpu-decode --seconds 150 \
    --json "$folder/gpu-$name-decode.json" --markdown "$folder/gpu-$name-decode.md"
fi
if wants runtime; then
  step runtime 240 env "$own_path" EECORE_TEST_DEVICE=cuda "$python" -m pytest tests/decoding \
    tests/engine tests/models tests/scheduling -p no:cacheprovider --timeout=120 --durations=5 \
    "${side_by_side[@]}"
fi
sanitizer=$(command -v compute-sanitizer || echo "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer")
for tool in memcheck racecheck; do
  if ! wants $tool; then continue; fi
  if [ -x "$sanitizer" ]; then
    step $tool 150 env "$own_path" "$python" -m bench.gpu.sanitize $tool --sanitizer "$sanitizer"
  else
    printf '%s\tno compute-sanitizer on this machine\t0\t\n' $tool >>"$steps"
  fi
done

"$python" -m bench.gpu.steps "$steps" "$folder/gpu-$name.json" "$folder/gpu-$name.md"
printf '== %s s; %s\n' "$((SECONDS - begin))" "$folder/gpu-$name.md" >&2
exit $failed
