#!/usr/bin/env bash
# Configures a preset where needed and builds it.
#
#   scripts/build.sh PRESET [--new -DNAME=VALUE ...] [--set -DNAME=VALUE ...] [--target NAME ...]
#
# --new options count only when build/PRESET is new, --set options always. Ninja is used when it is
# there and the folder was not made by another generator. JOBS is the number of compilers at once.
set -euo pipefail
cd "$(dirname "$0")/.."

preset=${1:?preset, got nothing, expected cpu, asan or tsan}
shift
new=() set=() target=() mode=
for word in "$@"; do
  case "$word" in
    --new | --set | --target) mode=${word#--} ;;
    *)
      case "$mode" in
        new) new+=("$word") ;;
        set) set+=("$word") ;;
        target) target+=("$word") ;;
        *) echo "build: option, got $word, expected it after --new, --set or --target" >&2 && exit 2 ;;
      esac
      ;;
  esac
done

folder=build/$preset
options=("${set[@]}")
if [ ! -f "$folder/CMakeCache.txt" ]; then
  options=("${new[@]}" "${set[@]}")
  if command -v ninja >/dev/null; then options+=(-G Ninja); fi
fi
log=$folder/configure.log
mkdir -p "$folder"
if ! cmake --preset "$preset" "${options[@]}" >"$log" 2>&1; then
  cat "$log" >&2
  exit 1
fi
cmake --build "$folder" --parallel "${JOBS:-$(nproc)}" ${target[0]:+--target "${target[@]}"}
