#!/usr/bin/env bash
# Builds fa and runs every test that this machine can run. Installs what is missing where it may (Debian, Ubuntu).
#
#   tools/test.sh                   what a change has to pass, in at most 30 minutes on 2 cores
#   tools/test.sh --quick           the release build and its tests only
#   tools/test.sh --full            everything, whatever it takes
#   tools/test.sh --windows         the tests of a build for Windows, under Wine, and nothing else (docs/platforms.md)
#   tools/test.sh --aarch64         likewise for 64-bit Arm, under QEMU
#   tools/test.sh --nvrtc           likewise: kernels of every family by several versions of NVRTC
#   tools/test.sh --since COMMIT    with clang-tidy over the files that differ from COMMIT (tools/tidy.sh has a default)
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/lib.sh

mode=normal tidy=()
while (($# > 0)); do
  case "$1" in
    --quick | --full) mode=${1#--} ;;
    --windows | --aarch64) exec tools/cross_tests.sh "${1#--}" ;;
    --nvrtc) exec tools/nvrtc_tests.sh ;;
    --since) tidy=(--since "${2:?"--since takes a commit"}") && shift ;;
    *) echo "$0: argument '$1'; accepted are --quick, --full, --windows, --aarch64, --nvrtc and --since COMMIT" >&2 && exit 2 ;;
  esac
  shift
done
if [[ $mode == full ]]; then
  tidy=(--all)
  export FA_TESTS=thorough  # every combination, where a test otherwise tries some in turn
fi

passed=0 failed=0 skipped=0
failures=()
budget=30  # minutes, on this number of cores:
budget_cores=2
stages=()  # "wall-clock seconds|CPU seconds|minutes that it may take|name"

end_stage() {
  [[ -n "${stage_name:-}" ]] || return 0
  read_cpu
  stages+=("$((SECONDS - stage_start))|$((cpu - stage_cpu))|$stage_minutes|$stage_name")
  stage_name=''
}

# Begins a stage, and ends the one before. MINUTES is its part of the budget; 0 where it belongs to --full alone.
stage() {  # stage MINUTES NAME
  end_stage
  read_cpu
  stage_cpu=$cpu stage_minutes=$1 stage_name=$2 stage_start=$SECONDS
  say "$2"
}

say_times() {
  local entry wall cpu minutes name all_cpu=0 note
  say "time of each stage"
  printf '%9s %9s %9s  %s\n' clock CPU/"$budget_cores" budget ''
  for entry in "${stages[@]}"; do
    IFS='|' read -r wall cpu minutes name <<<"$entry"
    all_cpu=$((all_cpu + cpu)) note=''
    [[ $mode == full ]] || ((cpu <= 60 * minutes * budget_cores)) || note=' (over its budget)'
    printf '%7d s %7d s %7d s  %s%s\n' "$wall" $((cpu / budget_cores)) $((60 * minutes)) "$name" "$note"
  done
  note=''
  [[ $mode == full ]] || ((all_cpu <= 60 * budget * budget_cores)) || note=' (over the budget)'
  printf '%7d s %7d s %7d s  in all%s\n' $((SECONDS - start)) $((all_cpu / budget_cores)) $((60 * budget)) "$note"
}

count() {  # count RESULT NAME
  case "$1" in
    pass) passed=$((passed + 1)) ;;
    fail) failed=$((failed + 1)) failures+=("$2") ;;
    skip) skipped=$((skipped + 1)) ;;
  esac
  printf '%s: %s\n' "$1" "$2"
}

check() {  # check NAME COMMAND...
  local name=$1
  shift
  if "$@"; then count pass "$name"; else count fail "$name"; fi
}

# Runs ctest and adds its numbers to ours. What skips itself counts as skipped.
run_ctest() {  # run_ctest NAME BUILD_DIR ARGUMENTS...
  local name=$1 build=$2 log
  shift 2
  log="$build/ctest-$name.log"
  local status=0
  ctest --test-dir "$build" --output-on-failure --no-tests=error -j "$jobs" "$@" | tee "$log" || status=$?
  local skips total fails
  skips=$(grep -c -E '\*\*\*(Skipped|Not Run)' "$log" || true)
  total=$(sed -n -E 's/.*tests passed, ([0-9]+) tests failed out of ([0-9]+).*/\2/p' "$log")
  fails=$(sed -n -E 's/.*tests passed, ([0-9]+) tests failed out of ([0-9]+).*/\1/p' "$log")
  if [[ -z "$total" || ( "$status" != 0 && "$fails" == 0 ) ]]; then
    count fail "ctest $name"
    return
  fi
  passed=$((passed + total - fails - skips)) failed=$((failed + fails)) skipped=$((skipped + skips))
  # By name, so that the last lines tell what to look at.
  while read -r test; do
    failures+=("$name: $test")
  done < <(sed -n -E 's/^[[:space:]]+[0-9]+ - (.*) \((Failed|Timeout|SEGFAULT|Subprocess aborted|Not Run)\).*/\1/p' "$log")
}

configure() {  # configure PRESET OPTIONS...
  local preset=$1
  shift
  cmake --preset "$preset" "$@" >"build/configure-$preset.log" 2>&1 || { cat "build/configure-$preset.log"; return 1; }
}

check_install() {  # check_install KIND BUILD_DIR
  local kind=$1 prefix="$PWD/build/install-$1"
  rm -rf "$prefix" "build/consumer-$kind"
  cmake --install "$2" --prefix "$prefix" >/dev/null &&
    cmake -S tests/consumer -B "build/consumer-$kind" -G Ninja -DCMAKE_BUILD_TYPE=Release \
      -DCMAKE_PREFIX_PATH="$prefix" >/dev/null &&
    cmake --build "build/consumer-$kind" &&
    "build/consumer-$kind/consumer" && [[ $("build/consumer-$kind/readme") == 0.5 ]] &&
    "build/consumer-$kind/consumer_c" && "build/consumer-$kind/consumer_parallel" &&
    "build/consumer-$kind/consumer_parallel_c" && check_c_only "$kind" "$prefix"
}

check_c_only() {  # check_c_only KIND PREFIX
  local build="build/consumer-c-only-$1"
  rm -rf "$build"
  cmake -S tests/consumer/c_only -B "$build" -G Ninja -DCMAKE_PREFIX_PATH="$2" >/dev/null &&
    cmake --build "$build" && "$build/consumer_c_only"
}

check_pkg_config() {  # check_pkg_config KIND
  local prefix="$PWD/build/install-$1" program="build/consumer-pkg-config-$1" folder flags
  folder=$(dirname "$(find "$prefix" -name fa.pc)") &&
    flags=$(PKG_CONFIG_PATH="$folder" pkg-config --cflags --libs fa) &&
    read -ra flags <<<"$flags" &&
    c++ -std=c++20 -x c++ - "${flags[@]}" -o "$program" <<<'#include <fa/attention.hpp>
      int main() { return fa::Device::host() == fa::Device::current() || fa::version() == nullptr; }' &&
    cc -std=c99 tests/consumer/main.c "${flags[@]}" -o "$program-c" &&
    flags=$(PKG_CONFIG_PATH="$folder" pkg-config --cflags --libs fa_parallel) &&
    read -ra flags <<<"$flags" &&
    c++ -std=c++20 tests/consumer/parallel.cpp "${flags[@]}" -o "$program-parallel" &&
    LD_LIBRARY_PATH="$(dirname "$folder")" "$program" && LD_LIBRARY_PATH="$(dirname "$folder")" "$program-c" &&
    LD_LIBRARY_PATH="$(dirname "$folder")" "$program-parallel"
}

check_subproject() {  # check_subproject EXPECTED_FA OPTIONS...
  local expected=$1
  shift
  rm -rf build/subproject
  cmake -S tests/consumer/subproject -B build/subproject -G Ninja -DEXPECTED_FA="$expected" "$@" >/dev/null
}

# The C++ API promises nothing beyond a minor version until 1.0.
check_soname() {
  readelf -d build/release/libfa.so | grep -E 'SONAME.*\[libfa\.so\.(0\.[0-9]+|[1-9][0-9]*)\]'
}

check_size() {
  local stripped=build/libfa.stripped.so limit=$((3 * 1024 * 1024)) size
  strip -o "$stripped" build/release/libfa.so
  size=$(stat -c %s "$stripped")
  echo "stripped libfa.so: $size bytes"
  ((size <= limit))
}

# The driver and NVRTC are opened at run time: a program that links fa starts on a machine with neither.
check_links() {
  ! readelf -d build/release/libfa.so build/release/libfa_parallel.so |
    grep -E 'NEEDED.*(libcuda|libnvrtc|libcudart|libnccl)'
}

# Names of a dependency in the dynamic symbol table would collide with the user's own copy of it.
check_symbols() {
  ! nm -D --defined-only -C build/release/libfa.so build/release/libfa_parallel.so | grep -v '^$' | grep -v ':$' |
    cut -d ' ' -f 3- |
    grep -v -E '^((typeinfo|vtable|typeinfo name) for )?fa(::|_)' | head -5 | grep .
}

check_format() {
  git ls-files --cached --others --exclude-standard '*.cpp' '*.hpp' '*.h' '*.c' '*.cuh' | grep -v '^build' |
    xargs clang-format --dry-run --Werror
}

install_packages
mkdir -p build
start=$SECONDS

stage 8 "build: release"
# Tests of arrays are part of what a change has to pass, those of PyTorch of --full.
more=()
[[ $mode != full ]] || more=(--torch)
python=$(tools/python_venv.sh "${more[@]}") || python=''
options=(-DFA_BUILD_TORCH_OPS=OFF -U '*Python3_EXECUTABLE')
# What computes alone is tested here, what handles memory under the sanitizers, and what these try a part of in both
# builds; --full tests everything in both.
rooms="reference;cache;tools;tune;parallel" watched="support;expression;compile;driver;api"
pure="plan;render" mutants=OFF
[[ $mode != full ]] || mutants=ON
release_rooms="$rooms;$pure" asan_rooms="$rooms;$watched"
[[ $mode == normal ]] || release_rooms="$rooms;$pure;$watched"
[[ $mode != full ]] || asan_rooms=$release_rooms
options+=("-DFA_UNIT_ROOMS=$release_rooms" "-DFA_EVERY_MUTANT=$mutants")
[[ -z $python ]] || options+=("-DPython3_EXECUTABLE=$python")
if [[ $mode == full ]]; then
  if [[ -n $python ]] && "$python" -c 'import torch; assert torch.__version__ >= torch.torch_version.TorchVersion("2.10")' 2>/dev/null; then
    options+=(-DFA_BUILD_TORCH_OPS=ON)
  else
    count skip "compiled operators of PyTorch (${python:-python3} has no PyTorch 2.10 or later)"
  fi
fi
# Precompiled headers for speed; the static library below does without, and finds includes that are missing.
configure release -DBUILD_SHARED_LIBS=ON -DFA_PRECOMPILE=ON "${options[@]}"
cmake --build build/release -j "$jobs"

say_gpu
stage 8 "tests: release"
if has_gpu; then
  run_ctest release build/release
else
  gpu_tests=$(ctest --test-dir build/release -L gpu -N | sed -n 's/^Total Tests: //p')
  count skip "$gpu_tests GPU tests (no NVIDIA GPU with a driver)" && skipped=$((skipped + gpu_tests - 1))
  run_ctest release build/release -LE gpu
fi

stage 1 "checks"
check "stripped shared library of at most 3 MB" check_size
check "no link to the CUDA driver, runtime or NVRTC" check_links
check "a SONAME for each minor version before 1.0" check_soname
check "no symbol but those of the API exported" check_symbols
if command -v clang-format >/dev/null; then
  check "clang-format" check_format
else
  count skip "clang-format (not installed)"
fi

if command -v python3 >/dev/null; then
  check "sentences of at most 30 words, links that lead somewhere" \
    python3 tools/check_prose.py README.md CONTRIBUTING.md docs include
  check "sizes of files and functions" python3 tools/check_sizes.py
else
  count skip "pages and sizes (no python3)"
fi

if [[ $mode != quick ]]; then
  stage 1 "clang-tidy"
  if ! git rev-parse --git-dir >/dev/null 2>&1; then
    count skip "clang-tidy (no repository that says what has changed)"
  elif command -v clang-tidy clang++ >/dev/null || apt_install clang clang-tidy; then
    check "clang-tidy" tools/tidy.sh "${tidy[@]}"
  else
    count skip "clang-tidy (not installed)"
  fi

  stage 2 "install and use: shared, static, as a subdirectory"
  check "consumer of the shared library" check_install shared build/release

  # Not optimised: it is about includes and what a linker needs.
  cmake -S . -B build/static -G Ninja -DCMAKE_BUILD_TYPE= -DBUILD_SHARED_LIBS=OFF -DFA_BUILD_TESTS=OFF \
    -DFA_BUILD_TOOLS=OFF -DFA_BUILD_EXAMPLES=OFF >/dev/null
  cmake --build build/static -j "$jobs"
  check "consumer of the static library" check_install static build/static
  if command -v pkg-config >/dev/null; then
    check "consumer by pkg-config, shared" check_pkg_config shared
    check "consumer by pkg-config, static" check_pkg_config static
  else
    count skip "consumers by pkg-config (not installed)"
  fi

  check "neighbours stay static" check_subproject SHARED
  check "FA_SHARED before BUILD_SHARED_LIBS" check_subproject STATIC -DFA_SHARED=OFF -DBUILD_SHARED_LIBS=ON
  check "static in a project of C alone" check_subproject STATIC -DFA_SHARED=OFF -DCONSUMER_LANGUAGES=C

  stage 7 "AddressSanitizer and UndefinedBehaviorSanitizer"
  accesses=OFF less=(-E self_test)
  [[ $mode != full ]] || accesses=ON less=()
  configure asan -DFA_BUILD_TOOLS=OFF -DFA_BUILD_EXAMPLES=OFF -DFA_SANITIZE_ACCESSES=$accesses "-DFA_UNIT_ROOMS=$asan_rooms"
  cmake --build build/asan -j "$jobs" --target unit_tests
  run_ctest asan build/asan -L unit "${less[@]}"

  stage 3 "ThreadSanitizer"
  configure tsan -DFA_BUILD_TOOLS=OFF -DFA_BUILD_EXAMPLES=OFF
  cmake --build build/tsan -j "$jobs" --target fa_unit_cache fa_unit_tune fa_unit_parallel fa_threads_tests fa_fake_nccl_tests
  # The tests that kill processes in the middle of a write are about files, not threads.
  run_ctest tsan build/tsan -R 'Store|^(ReadyTable|Tuner|Threads|OverNccl|Failure|Agreement|Parallel[A-Z][a-z]+)\.|/(Parallel|Failing)\.'
  [[ $mode != full ]] || run_ctest tsan-again build/tsan -R '^(ReadyTable|Tuner|Threads)\.' --repeat until-fail:50
fi

if [[ $mode == full ]]; then
  stage 0 "models of transformers"
  status=0
  FA_LIBRARY=build/release/libfa.so "${python:-python3}" tests/python/run_pytest.py tests/python/test_transformers.py --full || status=$?
  case $status in
    0) count pass "models of transformers" ;;
    77) count skip "models of transformers (${python:-python3} has no pytest, PyTorch or transformers)" ;;
    *) count fail "models of transformers" ;;
  esac

  stage 0 "documentation site, packages"
  if python3 -c 'import venv, ensurepip' 2>/dev/null && python3 -m pip download --quiet --no-deps --dest build/pip mkdocs 2>/dev/null; then
    check "documentation site without a warning" tools/site.sh
  else
    count skip "documentation site (python3 has no venv, or no package index answers)"
  fi
  status=0
  tests/packaging/wheel.sh || status=$?
  case $status in
    0) count pass "wheel: its size, its tag, and an example in a fresh environment" ;;
    77) count skip "wheel (python3 has no venv, or no package index answers)" ;;
    *) count fail "wheel" ;;
  esac
  status=0
  tests/packaging/conan.sh || status=$?
  case $status in
    0) count pass "Conan recipe" ;;
    77) count skip "Conan recipe (conan is not installed)" ;;
    *) count fail "Conan recipe" ;;
  esac
  for client in vcpkg conda-build; do
    command -v "$client" >/dev/null || count skip "$client's recipe, built ($client is not installed)"
  done
  ! command -v vcpkg >/dev/null || check "vcpkg port" vcpkg install fa --overlay-ports=packaging/vcpkg
  ! command -v conda-build >/dev/null || check "conda recipe" conda-build packaging/conda -c conda-forge

  stage 0 "build: Clang, the library alone"
  if command -v clang++ >/dev/null || apt_install clang; then
    # Not optimised: it is about what Clang accepts and warns of.
    cmake -S . -B build/clang -G Ninja -DCMAKE_BUILD_TYPE= -DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++ \
      -DFA_BUILD_TESTS=OFF -DFA_BUILD_TOOLS=OFF -DFA_BUILD_EXAMPLES=OFF >/dev/null
    cmake --build build/clang -j "$jobs"
    check "consumer of the library that Clang built" check_install clang build/clang
  else
    count skip "Clang (not installed)"
  fi
fi

end_stage
say_times
say "done in $((SECONDS - start)) s"
for name in "${failures[@]}"; do echo "failed: $name"; done
echo "$passed passed, $failed failed, $skipped skipped"
((failed == 0))
