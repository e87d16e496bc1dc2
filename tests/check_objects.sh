#!/usr/bin/env bash
# Objects compiled per instruction set hold no weak symbol, as built and at -O0: the linker could take
# such a function from the wrong instruction set.
#   check_objects.sh COMPILER INCLUDE... -- FILE... -- OBJECT...    (flags in FLAGS_avx2, FLAGS_amx)
set -uo pipefail
compiler=${1:?compiler}
shift
includes=() files=()
while [ "$1" != -- ]; do includes+=("-I$1") && shift; done
shift
while [ "$1" != -- ]; do files+=("$1") && shift; done
shift
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
failed=0 checked=0
check() {  # check OBJECT NAME: W, V and u are weak or unique definitions; a w or v is a use, which is fine
  local weak
  # DW.ref.*: a pointer to the exception personality, the same in every object, no code.
  weak=$(nm --format=posix "$1" | awk '$2 ~ /^[WVu]$/ && $1 !~ /^DW\.ref\./ {print $1}' | c++filt)
  checked=$((checked + 1))
  [ -z "$weak" ] && return
  failed=1
  printf '%s: weak symbols, got %s, expected none:\n%s\n' "$2" "$(echo "$weak" | wc -l)" "$weak"
}
for object in "$@"; do check "$object" "$object"; done
for file in "${files[@]}"; do  # one set is enough here: without inlining all keep the same functions
  isa=avx2 flags=$FLAGS_avx2
  case "$file" in *_tile_*) isa=amx flags=$FLAGS_amx ;; esac
  # shellcheck disable=SC2086
  if ! "$compiler" -std=c++20 -O0 $flags "-DTHALWEG_ISA=$isa" "${includes[@]}" -c "$file" -o "$folder/object.o" 2>"$folder/log"; then
    cat "$folder/log"
    failed=1
    continue
  fi
  check "$folder/object.o" "$file at -O0, $isa"
done
echo "$checked objects"
[ "$checked" -gt 0 ] || failed=1
exit $failed
