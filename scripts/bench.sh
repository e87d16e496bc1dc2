#!/usr/bin/env bash
# Measures what docs/benchmarks.md shows: every @perf case, the long ones once, decode with its state in cache, pairs
# of layouts, and Kimi delta attention beside the gated delta rule, on two threads, with AVX-512 (where the machine has
# it; beside it AMX where a pass has such a row) and AVX2 kernels.
#
#   scripts/bench.sh OUT.jsonl [PROCESSES [SECONDS]]     (5 processes of 1 second by default; more than an hour,
#                                                most of it verification)
#
# The machine should be idle. Then: bench/report.py.
set -euo pipefail
out=$(realpath "${1:?OUT.jsonl, got nothing, expected the file for the records}")
processes=${2:-5} seconds=${3:-1}
cd "$(dirname "$0")/.."
tool=${THALWEG:-build/cpu/tools/thalweg/thalweg}
[ -x "$tool" ] || { echo "bench: tool, got no $tool, expected it built (make build) or named by THALWEG" >&2; exit 2; }
export THALWEG_NUM_THREADS=2
: >"$out"

bench() { "$tool" bench "$@" --processes "$processes" --seconds "$seconds" --json - >>"$out"; }

main=B1,T4096,H16,HV32,K128,V128
heads_first=q=@0213,k=@0213,v=@0213
isas=(avx2)
case "$("$tool" list --json | python3 -c 'import json,sys; print(json.load(sys.stdin)["machine"]["isa"])')" in
  avx512 | amx) isas=(avx512 avx2) ;;
esac
for isa in "${isas[@]}"; do
  echo "== $isa" >&2
  export THALWEG_ISA=$isa
  bench @perf
  "$tool" bench @long --seconds "$seconds" --json - >>"$out"
  bench gated_delta_rule.decode:f32,N1,H16,HV32,K128,V128,g,beta --warm
  bench gated_delta_rule.decode:f32,N1,H16,HV32,K128,V128,g,beta,state=@0132 --warm
  bench kimi_delta_attention.decode:f32,N1,H16,HV32,K128,V128,g,beta --warm
  for pass in fwd bwd; do
    bench --pair "kimi_delta_attention.$pass:f32,$main,g,beta" "gated_delta_rule.$pass:f32,$main,g,beta"
  done
  bench --pair "gated_delta_rule.fwd:f32,$main,g=@021,beta=@021" "gated_delta_rule.fwd:f32,$main,g,beta"
  bench --pair "gated_delta_rule.fwd:f32,$main,g,beta,$heads_first" "gated_delta_rule.fwd:f32,$main,g,beta"
done
