#!/usr/bin/env bash
# Everything `make test` runs after the packages are there: the release build with every test, then the
# smoke set under AddressSanitizer with UndefinedBehaviorSanitizer, then under ThreadSanitizer.
# Between them the Python wheel and its NumPy tests; with --all those that need torch and transformers too.
# CUDA=1: the release build has the CUDA backend too (scripts/cuda.sh finds or fetches its compiler); its rows are compiled,
# and run where there is a GPU.
# Goes on after a failure, ends with a table, and exits non-zero when anything failed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
jobs=${JOBS:-$(nproc)}
export JOBS=$jobs
rows=() failed=0

step() {  # step NAME command...
  local name=$1 start=$SECONDS result=passed
  shift
  echo "== $name"
  "$@" || { result=FAILED && failed=1; }
  rows+=("$(printf '%-40s %-8s %4d s' "$name" "$result" $((SECONDS - start)))")
  [ "$result" = passed ]
}

on=(-DTHALWEG_BUILD_TESTS=ON -DTHALWEG_BUILD_TOOLS=ON -DTHALWEG_BUILD_EXAMPLES=ON)
smoke=(--set -DTHALWEG_SMOKE_ONLY=ON --target thalweg_tests thalweg_fuzz)  # what ctest -L smoke runs
test_in() { ctest --test-dir "build/$1" --output-on-failure --no-tests=error --parallel "$jobs" "${@:2}"; }

# Where the tools of the Ascend tests are installed for them, one that is missing is a failure, not a skip.
if [ "${CI:-}" = true ] || [ "${1:-}" = --all ]; then
  step "ascend tools" scripts/ascend.sh
  THALWEG_ASCEND_BIN=$(scripts/ascend.sh --bin)
  export THALWEG_ASCEND_BIN THALWEG_ASCEND_REQUIRED=1
fi
main=cpu
if [ "${CUDA:-}" = 1 ]; then
  main=cuda
  step "cuda compiler" scripts/cuda.sh
  CUDACXX=$(scripts/cuda.sh)
  export CUDACXX
fi
step "build (release, $main)" scripts/build.sh $main --set "${on[@]}" && step "all tests" test_in $main
step "python" scripts/python.sh "$@"
step "build (address, undefined)" scripts/build.sh asan "${smoke[@]}" && step "smoke tests (address, undefined)" test_in asan -L smoke
step "build (thread)" scripts/build.sh tsan "${smoke[@]}" && step "smoke tests (thread)" test_in tsan -L smoke

echo
printf '%s\n' "${rows[@]}"
echo "$SECONDS seconds in all; $([ $failed = 0 ] && echo passed || echo FAILED)"
exit $failed
