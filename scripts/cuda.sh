#!/usr/bin/env bash
# Prints the path of nvcc 13 or newer, which the CUDA backend is compiled with. One on PATH or in /usr/local/cuda is
# taken; without one, NVIDIA's compiler comes from PyPI (four packages, 100 MB to fetch) into build/cuda-toolkit.
# THALWEG_NO_INSTALL=1 installs nothing. No GPU is needed to compile.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=$PWD/build/cuda-toolkit
packages=("nvidia-cuda-nvcc==13.0.*" "nvidia-nvvm==13.0.*" "nvidia-cuda-crt==13.0.*" "nvidia-cuda-runtime==13.0.*")

is_new_enough() {
  local version
  version=$("$1" --version 2>/dev/null | sed -nE 's/.*release ([0-9]+)\..*/\1/p') && [ "${version:-0}" -ge 13 ]
}
for nvcc in "${CUDACXX:-}" "$(command -v nvcc || true)" /usr/local/cuda/bin/nvcc "$folder/nvidia/cu13/bin/nvcc"; do
  if [ -n "$nvcc" ] && [ -x "$nvcc" ] && is_new_enough "$nvcc"; then
    echo "$nvcc"
    exit 0
  fi
done

if [ "${THALWEG_NO_INSTALL:-}" = 1 ]; then
  echo "cuda: nvcc, got none of release 13 or newer on PATH or in /usr/local/cuda, and THALWEG_NO_INSTALL=1" >&2
  exit 1
fi
python3 -m venv build/cuda-venv >&2
build/cuda-venv/bin/pip install --quiet --no-compile --disable-pip-version-check --target "$folder" "${packages[@]}" >&2
echo "cuda: installed from PyPI into build/cuda-toolkit, $(du -sm "$folder" | cut -f 1) MB: ${packages[*]}" >&2
root=$folder/nvidia/cu13
chmod +x "$root"/bin/* "$root"/nvvm/bin/* 2>/dev/null || true
[ -e "$root/lib64" ] || ln -s lib "$root/lib64"
is_new_enough "$root/bin/nvcc" || { echo "cuda: nvcc, got none after the installation, expected $root/bin/nvcc" >&2; exit 1; }
echo "$root/bin/nvcc"
