#!/usr/bin/env bash
# An operator's folder is all it needs: the library builds with that operator alone and passes its smoke set.
#   single_operator.sh CMAKE SOURCE_DIR COMPILER OPERATOR
set -euo pipefail
cmake=${1:?cmake} source=${2:?source} compiler=${3:?compiler} operator=${4:?operator}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
generator=()
if command -v ninja >/dev/null; then generator=(-G Ninja); fi
"$cmake" -S "$source" -B "$folder" "${generator[@]}" -DCMAKE_CXX_COMPILER="$compiler" -DTHALWEG_OPERATORS="$operator" \
  -DCMAKE_CXX_FLAGS_RELEASE=-O0 -DTHALWEG_BUILD_TOOLS=OFF -DTHALWEG_BUILD_EXAMPLES=OFF -DTHALWEG_BUILD_TESTS=ON >"$folder/log" 2>&1 || { cat "$folder/log"; exit 1; }
"$cmake" --build "$folder" --parallel "${JOBS:-2}" --target thalweg_smoke --target thalweg >"$folder/log" 2>&1 || { tail -50 "$folder/log"; exit 1; }
"$folder/tests/thalweg_smoke"
