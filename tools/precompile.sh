#!/usr/bin/env bash
# Compiles what the GPU tests ask for on a machine without a GPU, for one where time is short: with a driver that launches
# nothing the tests fail, but leave their kernels in DIRECTORY. There: XDG_CACHE_HOME=DIRECTORY fa_gpu_tests, in shards.
#
#   tools/precompile.sh DIRECTORY [BUILD_DIR [GTEST_FILTER]]
set -euo pipefail
directory=$(mkdir -p "$1" && cd "$1" && pwd)
cd "$(dirname "$0")/.."
source tools/lib.sh
build="${2:-build/release}"
# What measures, wants much memory or replays graphs compiles little; what reads lengths back finds none.
filter="${3:--Store*:Tuning*:*Large*:*Stream*:Packed.WrongLengths*}"

shards=()
for ((i = 0; i < jobs; ++i)); do
  LD_LIBRARY_PATH="$build/tests/fake_driver/lib" XDG_CACHE_HOME="$directory" GTEST_TOTAL_SHARDS="$jobs" \
    GTEST_SHARD_INDEX="$i" nice "$build/tests/gpu/fa_gpu_tests" --gtest_brief=1 --gtest_filter="$filter" >/dev/null 2>&1 &
  shards+=($!)
done
for shard in "${shards[@]}"; do wait "$shard" || true; done
echo "$(find "$directory" -name '*.fac' | wc -l) kernels, $(du -sh "$directory" | cut -f 1)"
