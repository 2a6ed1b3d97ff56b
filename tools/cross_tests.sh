#!/usr/bin/env bash
# Builds fa and its tests for another system, and runs them by an emulator of that: what tools/test.sh --windows and
# tools/test.sh --aarch64 do. Needs no GPU.
#
#   tools/cross_tests.sh windows    MinGW-w64, run by Wine (Debian: g++-mingw-w64-x86-64 wine64 googletest)
#   tools/cross_tests.sh aarch64    GCC for 64-bit Arm, run by QEMU (Debian: g++-aarch64-linux-gnu qemu-user googletest)
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/lib.sh

preset=${1:-}
case "$preset" in
  windows)
    toolchain=mingw-w64 suffix=.exe
    packages=(g++-mingw-w64-x86-64 wine64 googletest)
    have() { command -v x86_64-w64-mingw32-g++-posix >/dev/null && { command -v wine64 || [[ -x /usr/lib/wine/wine64 ]]; } >/dev/null; }
    run=(cmake/cross/wine.sh) left_out='--gtest_filter=*'
    ;;
  aarch64)
    toolchain=aarch64-linux suffix=
    packages=(g++-aarch64-linux-gnu qemu-user googletest)
    have() { command -v aarch64-linux-gnu-g++ qemu-aarch64 >/dev/null; }
    run=(qemu-aarch64 -L /usr/aarch64-linux-gnu)
    export FA_TEST_RUNNER="${run[*]}"  # for tests that start programs
    # GoogleTest starts these programs anew by itself: the system cannot run them without the emulator.
    left_out='--gtest_filter=-*DeathTest*'
    ;;
  *) echo "$0: argument '$preset'; accepted are windows and aarch64" >&2 && exit 2 ;;
esac
if ! have || [[ ! -d /usr/src/googletest ]]; then apt_install "${packages[@]}"; fi

rooms=(support expression plan driver compile tune cache render api reference tools cli)
targets=(fa fa_cli fa_c_abi_test)
for room in "${rooms[@]}"; do targets+=("fa_unit_$room"); done

mkdir -p build
tools/cross_packages.sh "$toolchain"
cmake --preset "$preset" >"build/configure-$preset.log" 2>&1 || { cat "build/configure-$preset.log" && exit 1; }
cmake --build "build/$preset" -j "$jobs" --target "${targets[@]}"
cp -u "build/$preset"/libfa.* "build/$preset/tests/c_abi/" 2>/dev/null || true

passed=0 failed=0 skipped=0 ended=0 failures=()
# Adds what a program of GoogleTest counted, which runs in a part for each core. The output of a part ends with the
# numbers; none means that it did not end.
run_tests() {  # run_tests NAME PROGRAM
  local name=$1 part pids=()
  for ((part = 0; part < jobs; ++part)); do
    GTEST_TOTAL_SHARDS=$jobs GTEST_SHARD_INDEX=$part timeout 2400 "${run[@]}" "$2" --gtest_brief=1 "$left_out" \
      >"build/$preset/$name.$part.log" 2>&1 &
    pids+=($!)
  done
  for ((part = 0; part < jobs; ++part)); do
    local status=0
    wait "${pids[part]}" || status=$?
    count_tests "$name" "$status" "build/$preset/$name.$part.log"
  done
}

count_tests() {  # count_tests NAME STATUS LOG
  local some
  # The last line: tests may print what programs of tests that they start have said.
  some=$(sed -n -E 's/^\[  PASSED  \] ([0-9]+) tests?.*/\1/p' "$3" | tail -1)
  passed=$((passed + ${some:-0}))
  some=$(sed -n -E 's/^\[  SKIPPED \] ([0-9]+) tests?.*/\1/p' "$3" | tail -1)
  skipped=$((skipped + ${some:-0}))
  some=$(sed -n -E 's/^\[  FAILED  \] ([A-Za-z]\S*\.\S+)( \(.*|)$/\1/p' "$3" | sort -u)
  [[ -z "$some" ]] || mapfile -t -O "${#failures[@]}" failures <<<"$some"
  ended=$((ended + 1))
  if (($2 != 0)) || [[ -z "$(grep -E '^\[=+\].*ran' "$3")" ]]; then
    failed=$((failed + 1)) failures+=("$1 (status $2)")
    tail -n 40 "$3"
  fi
  printf '%-12s status %d: %s\n' "$1" "$2" "$(grep -E '^\[=+\].*ran' "$3" | tail -1 || echo 'did not end')"
}

say "tests: $preset"
"${run[@]}" "build/$preset/tools/fa$suffix" --version  # alone: Wine makes its folders
for room in "${rooms[@]}"; do
  run_tests "$room" "build/$preset/tests/unit/${room/cli/tools}/fa_unit_$room$suffix"
done

# An error of this script's own would leave programs out.
((ended == ${#rooms[@]} * jobs)) || { echo "$preset: $ended parts ended, not $((${#rooms[@]} * jobs))" >&2 && exit 1; }

check_run() {  # check_run NAME COMMAND...
  local name=$1
  shift
  if "$@" >"build/$preset/$name.log" 2>&1; then
    passed=$((passed + 1)) && echo "pass: $name"
  else
    failed=$((failed + 1)) failures+=("$name") && tail -n 20 "build/$preset/$name.log"
  fi
}
check_run c_abi "${run[@]}" "build/$preset/tests/c_abi/fa_c_abi_test$suffix"
check_run cli "${run[@]}" "build/$preset/tools/fa$suffix" render --arch sm_90a --head-dim 64

# What a build for this machine has packed serves there: entries are the same bytes everywhere.
native=build/release/tools/fa
pack=build/$preset/native.fapack
grid=(--arch sm_80 --head-dim 64 --dtype bf16 --causal yes --shapes prefill)
if [[ -x "$native" ]] && "$native" pack "$pack" "${grid[@]}" --force --directory "$PWD/build/$preset/native-cache" >/dev/null 2>&1; then
  check_run pack env FA_NVRTC_PATH=/nonexistent "${run[@]}" "build/$preset/tools/fa$suffix" cache verify --pack "$pack"
else
  echo "skip: pack (build/release has no fa, or there is no NVRTC)" && skipped=$((skipped + 1))
fi

for name in "${failures[@]}"; do echo "failed: $name"; done
say_time "$preset"
echo "$preset: $passed passed, $failed failed, $skipped skipped"
((failed == 0))
