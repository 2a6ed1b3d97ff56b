#!/usr/bin/env bash
# Runs small shapes of the GPU suite under compute-sanitizer's four tools; needs a GPU. tools/sanitize.sh [BUILD_DIR]
set -euo pipefail
cd "$(dirname "$0")/.."
tests="${1:-build/release}/tests/gpu/fa_gpu_tests"
small='*Lengths*s65x129*:*Lengths*s63x500*:*HeadDims*bf16*d192x128*:*HeadDims*f32*d256x256*'
small+=':Packed.DropoutOf*:Sink/HiddenRows*:All/LateKeys*'
small+=':Forward.OneHead*:*/Overrides.*:*Tall*s453*:Forward.Unaligned*:ForwardStream.ATooSmall*'
# racecheck takes the copies of the Hopper kernels for races: the emulator watches those.
mma='*Lengths*.Sm80*s65x129*:*Lengths*.Sm80*s63x500*:*Lengths/Backward*s65x129*:*Lengths/Backward*s63x500*'
mma+=':*HeadDims*.Sm80*bf16*d192x128*:*HeadDims*f32*d256x256*'

for tool in memcheck initcheck synccheck racecheck; do
  echo "== $tool"
  filter="$small"
  if [ "$tool" = racecheck ]; then filter="$mma"; fi
  compute-sanitizer --tool "$tool" --error-exitcode 1 "$tests" --gtest_brief=1 --gtest_filter="$filter"
done
