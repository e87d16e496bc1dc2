#!/usr/bin/env bash
# An operator stands alone: the program linked for it holds no code of another operator, its folder includes
# no other operator's file, and its smoke set passes.
#   check_alone.sh PROGRAM OPS_FOLDER OPERATOR
set -uo pipefail
program=${1:?program} ops=${2:?ops folder} operator=${3:?operator}
failed=0
for other in "$ops"/*/; do
  other=$(basename "$other")
  [ "$other" != "$operator" ] || continue
  if code=$(nm -C --defined-only "$program" | grep " thalweg::$other::"); then
    printf '%s: code of %s, expected none:\n%s\n' "$operator" "$other" "$(head -5 <<<"$code")" && failed=1
  fi
  if lines=$(grep -rn "#include \"thalweg/ops/$other/" "$ops/$operator"); then
    printf '%s: includes of %s, expected none:\n%s\n' "$operator" "$other" "$lines" && failed=1
  fi
done
"$program" || failed=1
exit $failed
