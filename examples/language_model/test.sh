#!/usr/bin/env bash
# Tests of the demo program on a tiny model: learning, resuming bitwise, interruption, threads, error texts.
#
#   test.sh PROGRAM FOLDER
set -euo pipefail
program=$1
folder=$2
text=$(dirname "$0")/model.cpp
rm -rf "$folder"
mkdir -p "$folder"

fail() {
  echo "FAILED: $*" >&2
  exit 1
}

tiny=(--layers 2 --width 32 --heads 2 --key 16 --value 16 --hidden 48 --batch 2 --crop 64 --generate 40)

# demo NAME OPTION...: runs it with --out folder/NAME; the output goes to folder/NAME.log.
demo() {
  local name=$1
  shift
  [[ " $* " == *" --text "* ]] || set -- --text "$text" "$@"
  "$program" "${tiny[@]}" --out "$folder/$name" "$@" >"$folder/$name.log" 2>&1
}
same_checkpoint() {  # the files end with the same weights, optimiser and losses; only the times differ
  python3 - "$folder/$1/checkpoint.safetensors" "$folder/$2/checkpoint.safetensors" <<'PY'
import json, struct, sys
def parts(path):
    data = open(path, "rb").read()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    facts = header.pop("__metadata__")
    facts.pop("seconds")
    def values(name, entry):
        begin, end = entry["data_offsets"]
        raw = data[8 + size + begin:8 + size + end]
        if name != "curve":
            return raw
        rows = struct.unpack("<%dd" % (len(raw) // 8), raw)
        return [x for i, x in enumerate(rows) if i % 5 != 1]  # column 1: seconds
    return facts, {name: values(name, entry) for name, entry in header.items()}
a, b = map(parts, sys.argv[1:])
assert a[0] == b[0], (a[0], b[0])
assert a[1].keys() == b[1].keys()
for name in a[1]:
    assert a[1][name] == b[1][name], name
PY
}
# refuses STATUS TEXT OPTION...
refuses() {
  local status=$1 words=$2 got=0
  shift 2
  demo refused "$@" || got=$?
  [ "$got" = "$status" ] || fail "$*: exit code $got, expected $status: $(cat "$folder/refused.log")"
  grep -qF -- "$words" "$folder/refused.log" || fail "$*: expected '$words' in: $(cat "$folder/refused.log")"
}

# A run without interruption. It must learn (below the 8 bits of guessing, and 5.5 is what tells bytes apart
# by frequency), draw, write and find both passes in agreement.
demo whole --steps 60 || fail "the run: $(cat "$folder/whole.log")"
bits=$(sed -n 's/^ *\([0-9.]*\)  this model.*/\1/p' "$folder/whole.log")
awk -v bits="$bits" 'BEGIN { exit !(bits > 0 && bits < 5.5) }' || fail "bits per byte: got '$bits', expected below 5.5"
for file in checkpoint.safetensors curve.svg sample.txt; do
  [ -s "$folder/whole/$file" ] || fail "$file: missing or empty"
done
grep -q '(within 1e-04)' "$folder/whole.log" || fail "decode and chunked forward disagree"

# Stopped in between and gone on with, bit for bit the same; stops fall before, on and after evaluations.
for stop in 1 25 37; do
  status=0
  demo "stop$stop" --steps 60 --stop-after $stop || status=$?
  [ $status = 130 ] || fail "--stop-after $stop: exit code $status, expected 130"
  demo "stop$stop" --steps 60 || fail "going on after $stop: $(cat "$folder/stop$stop.log")"
  grep -q "^resumed .* at step $stop," "$folder/stop$stop.log" || fail "not resumed at step $stop"
  same_checkpoint whole "stop$stop" || fail "resumed at step $stop, the end differs"
done

# A signal, at some step: saves, says so, and goes on to the same end.
"$program" "${tiny[@]}" --text "$text" --out "$folder/signal" --steps 4000 >"$folder/signal.log" 2>&1 &
pid=$!
for _ in $(seq 100); do
  [ -s "$folder/signal/checkpoint.safetensors" ] && break
  sleep 0.1
done
kill -INT $pid 2>/dev/null || fail "the run ended before it could be interrupted"
status=0
wait $pid || status=$?
[ $status = 130 ] || fail "SIGINT: exit code $status, expected 130: $(cat "$folder/signal.log")"
stopped=$(sed -n 's/^interrupted at step \([0-9]*\).*/\1/p' "$folder/signal.log")
demo signal --steps 4000 --stop-after 20 && fail "expected to stop after 20 more steps"
demo unbroken --steps 4000 --stop-after $((stopped + 20)) && fail "expected to stop"
same_checkpoint signal unbroken || fail "interrupted at step $stopped, the end differs"

# Threads do not matter.
demo one --steps 60 --threads 1 || fail "one thread: $(cat "$folder/one.log")"
demo three --steps 60 --threads 3 || fail "three threads: $(cat "$folder/three.log")"
same_checkpoint one three || fail "one and three threads differ"

# The other mixer learns too, and its passes agree.
demo kda --steps 60 --mixer kda || fail "--mixer kda: $(cat "$folder/kda.log")"
bits=$(sed -n 's/^ *\([0-9.]*\)  this model.*/\1/p' "$folder/kda.log")
awk -v bits="$bits" 'BEGIN { exit !(bits > 0 && bits < 5.5) }' || fail "kda: bits per byte: got '$bits', expected below 5.5"
grep -q '(within 1e-04)' "$folder/kda.log" || fail "kda: decode and chunked forward disagree"

# Errors.
: >"$folder/empty"
head -c 60 "$text" >"$folder/short"
refuses 2 "no_such_file: cannot be read (No such file or directory)" --text "$folder/no_such_file"
refuses 2 "empty: is empty" --text "$folder/empty"
refuses 2 "short: has" --text "$folder/short"
refuses 2 "is a directory, expected a text file" --text "$folder"
refuses 2 "cannot be made" --checkpoint "$text/below/file"
refuses 2 "missing, expected a checkpoint to resume from" --resume --checkpoint "$folder/nothing"
refuses 2 "was made with hidden 48, this run has 64" --resume --hidden 64 --checkpoint "$folder/whole/checkpoint.safetensors"
refuses 2 "was made with text" --resume --text "$0" --checkpoint "$folder/whole/checkpoint.safetensors"
refuses 2 "was made with mixer gdn, this run has kda" --resume --mixer kda --checkpoint "$folder/whole/checkpoint.safetensors"
refuses 2 "--minutes" --minutes -3
refuses 2 "--mixer" --mixer lstm
refuses 2 "--no-such-option" --no-such-option
refuses 2 "the checkpoint cannot be used" --resume --checkpoint "$text"
size=$(stat -c %s "$folder/whole/checkpoint.safetensors")
head -c $((size / 2)) "$folder/whole/checkpoint.safetensors" >"$folder/half"
refuses 2 "the checkpoint cannot be used" --resume --checkpoint "$folder/half"
{ printf '\377\377\377\377'; tail -c +5 "$folder/whole/checkpoint.safetensors"; } >"$folder/damaged"
refuses 2 "the checkpoint cannot be used" --resume --checkpoint "$folder/damaged"
if [ "$(id -u)" != 0 ]; then  # root reads everything
  cp "$text" "$folder/locked" && chmod 0 "$folder/locked"
  refuses 2 "cannot be read (Permission denied)" --text "$folder/locked"
fi
echo "all passed"
