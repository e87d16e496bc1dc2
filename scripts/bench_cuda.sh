#!/usr/bin/env bash
# Measures what docs/benchmarks.md shows of a GPU: every @gpu case with the row that the library chooses.
#
#   scripts/bench_cuda.sh OUT.jsonl [SECONDS]     (1 second a case by default)
#
# Needs the build of `scripts/build.sh cuda`. Then: bench/report.py.
set -euo pipefail
out=$(realpath "${1:?OUT.jsonl, got nothing, expected the file for the records}")
cd "$(dirname "$0")/.."
tool=${THALWEG:-build/cuda/tools/thalweg/thalweg}
[ -x "$tool" ] || { echo "bench_cuda: tool, got no $tool, expected it built or named by THALWEG" >&2; exit 2; }
"$tool" bench @gpu --cuda --seconds "${2:-1}" --jobs "${JOBS:-8}" --json "$out"
