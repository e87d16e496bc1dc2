#!/usr/bin/env bash
# Builds the Python wheel, installs it into the virtual environment build/python/venv and tests it there.
#
#   scripts/python.sh [--all]
#
# Without --all: NumPy only. With it, torch and transformers are installed too (about 5.6 GB on disk, 2.5 minutes) and
# everything runs, examples included; then the tests that another package changes run again with it beside them: the oldest
# transformers that has the models, and flash-linear-attention (which transformers would take for its own functions).
# Packages come from PyPI (bindings/python/requirements-*.txt) and are listed with their sizes. The library that build/cpu
# (with CUDA=1: build/cuda) holds is linked; without one it is compiled. THALWEG_NO_INSTALL=1 installs nothing; then packages that are not there are
# a reason to skip, which is said.
set -euo pipefail
cd "$(dirname "$0")/.."

here=bindings/python
venv=build/python/venv
python=$venv/bin/python
backend=cpu
[ "${CUDA:-}" != 1 ] || backend=cuda
library=$PWD/build/$backend/thalweg/libthalweg_static.a
lists=($here/requirements-test.txt)
[ "${1:-}" != --all ] || lists+=($here/requirements-test-all.txt)

fail() {
  echo "python: $*" >&2
  exit 1
}

# Name, version and size on disk of every package in the environment.
list_packages() {
  "$python" - <<'END'
import importlib.metadata as metadata
from pathlib import Path

rows, total = [], 0
for package in metadata.distributions():
    size = sum(Path(file.locate()).stat().st_size for file in package.files or () if Path(file.locate()).is_file())
    rows.append((package.name, package.version, size / 1e6))
    total += size / 1e6
for name, version, size in sorted(rows, key=lambda row: -row[2]):
    print(f"  {name:32} {version:16} {size:9.1f} MB")
print(f"  {'in all':49} {total:9.1f} MB")
END
}

# beside NAME TEST [pip-option]: runs a test file with the packages of requirements-NAME.txt before the environment's
beside() {
  local folder=build/python/$1 list=$here/requirements-$1.txt packages
  packages=$(grep -vE '^ *(#|$)' "$list" | paste -sd ' ')
  if ! cmp -s "$list" "$folder/installed.txt"; then
    if [ "${THALWEG_NO_INSTALL:-}" = 1 ]; then
      echo "python: skipped: $2 with $packages, since THALWEG_NO_INSTALL=1 and $folder does not have them"
      return
    fi
    rm -rf "$folder"
    "$python" -m pip install --quiet --no-compile --disable-pip-version-check --target "$folder" "${@:3}" -r "$list"
    cp "$list" "$folder/installed.txt"
    echo "python: installed from PyPI into $folder, $(du -sm "$folder" | cut -f 1) MB"
  fi
  echo "python: $2 with $packages"
  PYTHONPATH=$folder "$python" -m pytest -q -rs "$here/tests/with_torch/$2"
}

stamp=$venv/installed.txt
missing=$(grep -hvE '^ *(#|$)' "${lists[@]}" | grep -vxFf <(cat "$stamp" 2>/dev/null || true) || true)
if [ -n "$missing" ]; then
  missing=$(tr '\n' ' ' <<<"$missing")
  if [ "${THALWEG_NO_INSTALL:-}" = 1 ]; then
    echo "python: skipped, since THALWEG_NO_INSTALL=1 and $venv does not have: $missing"
    exit 0
  fi
  echo "python: to install from PyPI into $venv: $missing"
  [ "${1:-}" != --all ] || echo "python: torch brings its CUDA libraries, about 5.6 GB in all; this takes minutes"
  python3 -m venv $venv || fail "python3 -m venv failed; on Debian it needs the package python3-venv"
  "$python" -m pip install --quiet --no-compile --disable-pip-version-check "${lists[@]/#/-r}"
  list_packages
  grep -hvE '^ *(#|$)' "${lists[@]}" >"$stamp"
fi

echo "python: building the wheel"
options=(-C build-dir=build/python/cmake-$backend)
[ $backend = cpu ] || options+=(-C cmake.define.THALWEG_CUDA=ON)
[ ! -f "$library" ] || options+=(-C "cmake.define.THALWEG_PREBUILT=$library")
rm -rf build/python/wheel
"$python" -m pip wheel --quiet --no-build-isolation --no-deps --disable-pip-version-check \
  --wheel-dir build/python/wheel "${options[@]}" .
"$python" -m pip install --quiet --no-deps --force-reinstall --disable-pip-version-check build/python/wheel/*.whl

shown=$("$venv/bin/auditwheel" show build/python/wheel/*.whl 2>&1)
tag=$(grep -oE '(many)?linux(_[0-9]+_[0-9]+)?_x86_64"' <<<"$shown" | tail -n 1 | tr -d '"')
echo "python: $(basename build/python/wheel/*.whl), $(stat -c %s build/python/wheel/*.whl) bytes, tag $tag"
! grep -qE 'lib(stdc\+\+|gcc_s)' <<<"$shown" || fail "the wheel asks for libstdc++ or libgcc, expected neither"

if [ "${1:-}" = --all ]; then
  "$python" -m pytest -q -rs $here/tests
  beside oldest test_transformers.py
  beside fla test_fla.py --no-deps
  for example in examples/python/*.py; do
    [ -f "$example" ] || continue
    echo "python: $example"
    "$python" "$example"
  done
else
  "$python" -m pytest -q -rs --ignore $here/tests/with_torch $here/tests
  echo "python: skipped: $here/tests/with_torch and examples/python, which need torch and transformers ('make test-all', 5.6 GB)"
fi
