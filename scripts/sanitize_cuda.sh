#!/usr/bin/env bash
# Runs every CUDA row over the smoke cases under compute-sanitizer: memcheck, racecheck, initcheck, synccheck.
#
#   scripts/sanitize_cuda.sh [SECONDS]     for each tool and pass at most so many (60 by default)
#
# Needs a GPU, compute-sanitizer, and the build of `scripts/build.sh cuda`. A pass that a tool does not finish in time is
# said to be so and is no failure; an error that a tool reports is.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
tool=${THALWEG:-build/cuda/tools/thalweg/thalweg}
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
seconds=${1:-60}
for program in "$tool" "$sanitizer"; do
  [ -x "$program" ] || { echo "sanitize_cuda: got no $program" >&2; exit 2; }
done
passes=$("$tool" list --json | python3 -c 'import json, sys
for p in json.load(sys.stdin)["passes"]: print(p["operator"] + "." + p["pass"])')
export tool sanitizer seconds

check() {  # check TOOL PASS
  local log code result=clean
  log=$(mktemp)
  timeout "$seconds" "$sanitizer" --tool "$1" --error-exitcode 9 "$tool" verify "$2@smoke" --cuda >"$log" 2>&1
  code=$?
  case $code in
    0) ;;
    124) result="not finished in $seconds s" ;;
    *) result=FAILED ;;
  esac
  printf '%-10s %-32s %s\n' "$1" "$2" "$result"
  if [ "$result" = FAILED ]; then tail -n 25 "$log"; fi
  rm -f "$log"
  [ "$result" != FAILED ]
}
export -f check

for check in memcheck racecheck initcheck synccheck; do
  for pass in $passes; do echo "$check $pass"; done
done | xargs -P "${JOBS:-8}" -L 1 bash -c 'check "$@"' _
