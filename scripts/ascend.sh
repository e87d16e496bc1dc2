#!/usr/bin/env bash
# Installs what the Ascend tests need: MLIR's tools from Debian, the vendor's public compiler from PyPI into build/ascend.
#
#   scripts/ascend.sh          installs what is missing (700 MB on disk); does nothing when all is there
#   scripts/ascend.sh --bin    prints the folder of the compiler's programs
#
# Nothing of it is linked or shipped. The compiler's package is made for CPython 3.11.
set -euo pipefail
cd "$(dirname "$0")/.."

version=1.2.0
bin() { ls -d "$PWD"/build/ascend/lib/python3*/site-packages/ascendnpuir/bin 2>/dev/null || true; }

if [ "${1:-}" = --bin ]; then
  bin
  exit
fi
scripts/setup.sh ascend
folder=$(bin)
if [ -n "$folder" ] && "$folder/bishengir-opt" --version | grep -q "^bishengir-opt $version "; then exit 0; fi
if [ "${THALWEG_NO_INSTALL:-}" = 1 ]; then
  echo "ascend: not installed, since THALWEG_NO_INSTALL=1: ascendnpu-ir==$version"
  exit 0
fi
echo "ascend: ascendnpu-ir $version into build/ascend (161 MB to fetch)"
python3 -m venv build/ascend
build/ascend/bin/pip install --quiet --disable-pip-version-check "ascendnpu-ir==$version"
[ -n "$(bin)" ] || { echo "ascend: bishengir-opt: got none, expected it after pip install ascendnpu-ir==$version" >&2 && exit 2; }
