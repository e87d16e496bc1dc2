#!/usr/bin/env bash
# The shared library exports what symbols.txt lists, and nothing else.
#   check_symbols.sh LIBRARY SYMBOLS [--write]
set -euo pipefail
library=${1:?library} list=${2:?list}
got=$(nm -D --defined-only --format=posix "$library" | awk '$2 != "A" {print $1}' | LC_ALL=C sort)
if [ "${3:-}" = --write ]; then
  echo "$got" >"$list"
  exit
fi
if ! diff <(LC_ALL=C sort "$list") <(echo "$got"); then
  echo "exported symbols (>) differ from $(basename "$list") (<); an intended change: $0 LIBRARY SYMBOLS --write" >&2
  exit 1
fi
echo "$(echo "$got" | wc -l) symbols"
