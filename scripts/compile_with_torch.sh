#!/usr/bin/env bash
# Does the tensor boundary compile against another torch? Fetches the headers of its wheel and checks
# the syntax of csrc/ for both backends, so that "torch >= 2.10" stays true without installing one.
#
#   scripts/compile_with_torch.sh 2.10.0 [2.11.0 ...]      PYTHON: an interpreter with pip and pybind11
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
flags=(-std=c++20 -fsyntax-only -Wall -Wextra -Wno-psabi -Iinclude -Icsrc -Icsrc/cpu
  -DTORCH_TARGET_VERSION=0x020a000000000000 -DEECORE_WITH_CUDA=1
  '-DEECORE_VERSION="0"' '-DEECORE_COMPILER=""' '-DEECORE_TORCH_VERSION=""'
  '-DEECORE_CUDA_ARCHITECTURES=""' '-DEECORE_CUDA_NOTE=""')
while read -r include; do flags+=(-isystem "$include"); done < <("$python" -c '
import pybind11, sysconfig
print(sysconfig.get_path("include"), pybind11.get_include(), sep="\n")')

for version in "${@:?which versions of torch?}"; do
  "$python" -m pip download --quiet --no-deps --dest "$folder" "torch==$version"
  wheel=$(compgen -G "$folder/torch-$version*.whl")
  "$python" -m zipfile -e "$wheel" "$folder/$version"
  rm "$wheel"
  headers=(-isystem "$folder/$version/torch/include"
    -isystem "$folder/$version/torch/include/torch/csrc/api/include")
  for source in csrc/*.cpp csrc/ops/*.cpp; do
    "${CXX:-c++}" "${flags[@]}" "${headers[@]}" "$source"
    case $source in
      csrc/ops/decoder_layers.cpp | csrc/module.cpp) ;;
      *) "${CXX:-c++}" "${flags[@]}" "${headers[@]}" -DEECORE_BACKEND_CUDA -DUSE_CUDA "$source" ;;
    esac
  done
  rm -rf "${folder:?}/$version"
  echo "torch $version: compiles"
done
