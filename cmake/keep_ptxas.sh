#!/bin/sh
# Runs nvcc and keeps what ptxas says of registers, spills and products in OBJECT.ptxas, which tests/check_ptxas.py
# reads; the rest of its words, and all of them when it fails, are printed.
object=
previous=
for word in "$@"; do
  [ "$previous" = -o ] && object=$word
  previous=$word
done
"$@" >"$object.ptxas" 2>&1
code=$?
if [ $code -ne 0 ]; then
  cat "$object.ptxas" >&2
else
  grep -vE '^ptxas|bytes stack frame|^ *$' "$object.ptxas" >&2
fi
exit $code
