#!/usr/bin/env bash
# Installs the build, then builds and runs a program that knows only the installed files: by the CMake
# package and by pkg-config, against the installed folder and after moving it.
#   install.sh CMAKE BUILD_DIR CONSUMER_DIR COMPILER
set -euo pipefail
cmake=${1:?cmake} build=${2:?build} consumer=${3:?consumer} compiler=${4:?compiler}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$cmake" --install "$build" --prefix "$folder/first" >"$folder/log" || { cat "$folder/log"; exit 1; }
mv "$folder/first" "$folder/prefix"
prefix=$folder/prefix
library=$(dirname "$(find "$prefix" -name 'libthalweg.so*' -o -name libthalweg.a | head -1)")

echo "-- CMake package"
"$cmake" -S "$consumer" -B "$folder/consumer" -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_CXX_COMPILER="$compiler" >"$folder/log" 2>&1 || { cat "$folder/log"; exit 1; }
"$cmake" --build "$folder/consumer" >"$folder/log" 2>&1 || { cat "$folder/log"; exit 1; }
LD_LIBRARY_PATH=$library "$folder/consumer/consumer"

echo "-- pkg-config file"
if command -v pkg-config >/dev/null; then
  export PKG_CONFIG_PATH=$library/pkgconfig
  read -ra flags <<<"$(pkg-config --cflags --libs thalweg)"
else  # the same by hand: ${pcfiledir} and variables of the file itself
  pc=$library/pkgconfig/thalweg.pc
  flags=("-I$prefix/include" "-L$library" -lthalweg)
  grep -q '^Libs:.*-lthalweg' "$pc" && grep -q '^Cflags:.*-I' "$pc"
fi
"$compiler" -std=c++20 "$consumer/consumer.cpp" "${flags[@]}" -o "$folder/by_pkg_config"
LD_LIBRARY_PATH=$library "$folder/by_pkg_config"

echo "-- headers alone, as C11 and C++20"
find "$prefix/include" -name '*.h' | while read -r header; do
  name=${header#"$prefix/include/"}
  echo "#include \"$name\"" | "$compiler" -std=c++20 -Wall -Wextra -Wpedantic -Werror -I"$prefix/include" -fsyntax-only -x c++ -
  case $name in */tensor.h | */error.h) continue ;; esac
  echo "#include \"$name\"" | "${CC:-cc}" -std=c11 -Wall -Wextra -Wpedantic -Werror -I"$prefix/include" -fsyntax-only -x c -
done
