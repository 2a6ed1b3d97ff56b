#!/usr/bin/env bash
# Runs small shapes of the GPU suite, and random calls, under compute-sanitizer's four tools; needs a GPU.
#
#     tools/sanitize.sh [BUILD_DIR]
#     tools/sanitize.sh --random CONFIGS [BUILD_DIR]   memcheck of so many random configurations alone; ends with 77
#                                                      without compute-sanitizer or a GPU
#     tools/sanitize.sh --filters [BUILD_DIR]          sees that each filter names a test; needs neither
set -euo pipefail
cd "$(dirname "$0")/.."
what=all configs=100
case "${1:-}" in
  --random)
    what=random configs="${2:?--random takes a number of configurations}"
    shift 2
    ;;
  --filters)
    what=filters
    shift
    ;;
esac
build="${1:-build/release}"
tests="$build/tests/gpu/fa_gpu_tests"
differential="$build/tests/differential/fa_differential"

small='*Lengths*s65x129*:*Lengths*s63x500*:*HeadDims*bf16*d192x128*:*HeadDims*f32*d256x256*'
small+=':Packed.DropoutOf*:Sink/HiddenRows*:All/LateKeys*'
small+=':Forward.OneHead*:*/Overrides.*:*Tall*s453*:Forward.Unaligned*:ForwardStream.ATooSmall*'
small+=':Seeds/RandomPaged.*/0:Seeds/RandomStored.*/0:Seeds/RandomU4.*/0:Seeds/RandomSharedPrefixes.*/0'
small+=':Seeds/RandomAppends.*/0:Seeds/RandomMerges.*/0:Mla.WindowsAndSinks*:Fp8Forward.RowsWithoutKeys*'
small+=':Sm80Fp8Forward.WindowsFunctions*:Int8Forward.FunctionsWindows*:GpuStatistics.OfHeads:GpuStatisticsGradients.OfSmallCalls'
# Loads behind tests of random functions: what a compiler may execute in front of them, only a GPU shows. And tables that
# lead out of a cache.
random='Guarded/RandomFunctions.*:Random/Combinations.*/1?:Paged.WrongTablesAndLengths*'
# racecheck takes the copies of the Hopper kernels for races: the emulator watches those.
mma='*Lengths*.Sm80*s65x129*:*Lengths*.Sm80*s63x500*:*Lengths/Backward*s65x129*:*Lengths/Backward*s63x500*'
mma+=':*HeadDims*.Sm80*bf16*d192x128*:*HeadDims*f32*d256x256*'

check_filters() {
  local pattern status=0
  if [ ! -x "$tests" ]; then
    echo "sanitize: $tests is not there; the target fa_gpu_tests makes it" >&2
    return 1
  fi
  while read -r pattern; do
    "$tests" --gtest_list_tests --gtest_filter="$pattern" | grep '^  ' > /dev/null && continue
    echo "sanitize: no test is named $pattern" >&2
    status=1
  done < <(tr ':' '\n' <<< "$small:$random:$mma")
  return "$status"
}

# Random calls with small shapes: what a compiler makes of guarded loads shows only here. A pool of processes compiles the
# kernels beforehand. random_calls CONFIGS OPTION...; 77: there is no GPU.
random_calls() {
  local configs=$1 checkers=4 status=0 i check
  shift
  local options=(--device cuda --small --seed 5 --shapes 2 --cache "$cache" "$@") checks=()
  "$differential" "${options[@]}" --configs "$configs" || status=$?
  if [ "$status" = 77 ]; then return 77; fi
  for ((i = 0; i < checkers && i < configs; ++i)); do
    compute-sanitizer --tool memcheck --error-exitcode 1 "$differential" "${options[@]}" --in-process --no-guards \
      --configs $(((configs - i + checkers - 1) / checkers)) --first "$i" --step "$checkers" &
    checks+=($!)
  done
  for check in "${checks[@]}"; do wait "$check" || status=1; done
  return "$status"
}

if [ "$what" = filters ]; then
  check_filters
  exit
fi
PATH="$PATH:/usr/local/cuda/bin"
if ! command -v compute-sanitizer > /dev/null; then
  echo "sanitize: compute-sanitizer is neither in PATH nor in /usr/local/cuda" >&2
  exit 77
fi
if [ "$what" = all ]; then
  for tool in memcheck initcheck synccheck racecheck; do
    echo "== $tool"
    filter="$small"
    if [ "$tool" = memcheck ]; then filter="$small:$random"; fi
    if [ "$tool" = racecheck ]; then filter="$mma"; fi
    compute-sanitizer --tool "$tool" --error-exitcode 1 "$tests" --gtest_brief=1 --gtest_filter="$filter"
  done
fi

cache=$(mktemp -d)
trap 'rm -rf "$cache"' EXIT
status=0
for kind in "" --appends; do
  echo "== memcheck of random calls $kind"
  found=0
  random_calls "$configs" ${kind:+"$kind"} || found=$?
  if [ "$found" = 77 ]; then exit 77; fi
  if [ "$found" != 0 ]; then status=1; fi
done
exit "$status"
