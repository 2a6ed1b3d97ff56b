#!/usr/bin/env bash
# Runs everything beside this file at the same time: run.sh [SECONDS of a fuzzer [CALLS of the C ABI [THREADS for them]]]
cd "$(dirname "$0")" || exit 2
seconds=${1:-600} calls=${2:-1000000} threads=${3:-4}
mkdir -p found logs
for fuzzer in fa_fuzz_*; do
  mkdir -p "corpus/$fuzzer"
  "./$fuzzer" -max_total_time="$seconds" -timeout=25 -rss_limit_mb=4096 -max_len=8192 -print_final_stats=1 \
    -artifact_prefix="found/$fuzzer-" "corpus/$fuzzer" "seeds/${fuzzer#fa_fuzz_}" >"logs/$fuzzer" 2>&1 &
done
status=0
for program in fa_c_abi_fuzz fa_parallel_abi_fuzz; do
  result=0
  "./$program" --calls "$calls" --threads "$threads" >"logs/$program" 2>&1 || result=$? status=1
  echo "$program: status $result, $(tail -n 1 "logs/$program")"
done
wait
for fuzzer in fa_fuzz_*; do
  runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "logs/$fuzzer")
  echo "$fuzzer: ${runs:-?} runs, $(find found -name "$fuzzer-*" | wc -l) findings"
done
[[ $status == 0 && -z "$(ls found)" ]]
