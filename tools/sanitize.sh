#!/usr/bin/env bash
# Runs small shapes of the GPU suite under compute-sanitizer's four tools; needs a GPU. tools/sanitize.sh [BUILD_DIR]
set -euo pipefail
cd "$(dirname "$0")/.."
tests="${1:-build/release}/tests/gpu/fa_gpu_tests"
small='*Lengths*s65x129*:*Lengths*s63x500*:*HeadDims*d192x128*:*HeadDims*f32*d256x256*'
small+=':Forward.OneHead*:Forward.KernelOverrides:Forward.Unaligned*:ForwardStream.ATooSmall*'

for tool in memcheck racecheck initcheck synccheck; do
  echo "== $tool"
  compute-sanitizer --tool "$tool" --error-exitcode 1 "$tests" --gtest_brief=1 --gtest_filter="$small"
done
