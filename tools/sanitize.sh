#!/usr/bin/env bash
# Runs small shapes of the GPU suite under compute-sanitizer's four tools; needs a GPU. tools/sanitize.sh [BUILD_DIR]
set -euo pipefail
cd "$(dirname "$0")/.."
tests="${1:-build/release}/tests/gpu/fa_gpu_tests"
small='*Lengths*s65x129*:*Lengths*s63x500*:*HeadDims*bf16*d192x128*:*HeadDims*f32*d256x256*'
small+=':Packed.DropoutOf*:Sink/HiddenRows*:All/LateKeys*'
small+=':Forward.OneHead*:*/Overrides.*:*Tall*s453*:Forward.Unaligned*:ForwardStream.ATooSmall*'
# Loads behind tests of random functions: what a compiler may execute in front of them, only a GPU shows.
random='Guarded/RandomFunctions.*:Random/Combinations.*/1?'
# racecheck takes the copies of the Hopper kernels for races: the emulator watches those.
mma='*Lengths*.Sm80*s65x129*:*Lengths*.Sm80*s63x500*:*Lengths/Backward*s65x129*:*Lengths/Backward*s63x500*'
mma+=':*HeadDims*.Sm80*bf16*d192x128*:*HeadDims*f32*d256x256*'

for tool in memcheck initcheck synccheck racecheck; do
  echo "== $tool"
  filter="$small"
  if [ "$tool" = memcheck ]; then filter="$small:$random"; fi
  if [ "$tool" = racecheck ]; then filter="$mma"; fi
  compute-sanitizer --tool "$tool" --error-exitcode 1 "$tests" --gtest_brief=1 --gtest_filter="$filter"
done

# Random functions with captures, small shapes: what a compiler makes of guarded loads shows only here. A pool of
# processes compiles the kernels beforehand.
echo "== memcheck of random calls"
differential="${1:-build/release}/tests/differential/fa_differential"
cache=$(mktemp -d)
trap 'rm -rf "$cache"' EXIT
random=(--device cuda --small --seed 5 --shapes 2 --cache "$cache")
configs=100 checkers=4 status=0
"$differential" "${random[@]}" --configs "$configs" || status=1
checks=()
for ((i = 0; i < checkers; ++i)); do
  compute-sanitizer --tool memcheck --error-exitcode 1 "$differential" "${random[@]}" --in-process --no-guards \
    --configs $((configs / checkers)) --first "$i" --step "$checkers" &
  checks+=($!)
done
for check in "${checks[@]}"; do wait "$check" || status=1; done
exit "$status"
