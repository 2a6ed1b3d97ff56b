#!/usr/bin/env bash
# Runs clang-tidy, with Clang's own warnings, over include, src, cache, tools and the templates as the emulator reads
# them.
#
#   tools/tidy.sh                   files that differ from origin/main, on that from the commit before, or are new
#   tools/tidy.sh --since COMMIT    files that differ from COMMIT, or are new
#   tools/tidy.sh --all             all of them
#   tools/tidy.sh FILES...          these, where they are among them
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/lib.sh

usage() {
  echo "$0: argument '$1'; accepted are --all, --since COMMIT and names of files" >&2
  exit 2
}

changed_files() {  # changed_files COMMIT
  git diff --name-only --diff-filter=d "$1"
  git ls-files --others --exclude-standard
}

# What this branch has beside the main one; on that, what the last commit has.
branch_point() {
  local point
  point=$(git merge-base HEAD origin/main 2>/dev/null || true)
  [[ -n "$point" && "$point" != "$(git rev-parse HEAD)" ]] || point=$(git rev-parse --verify --quiet HEAD~1 || true)
  echo "${point:-HEAD}"
}

case "${1:-}" in
  --all) mapfile -t files < <(git ls-files | grep -v '\.hpp$') ;;  # what includes a header checks it
  --since)
    since=$(git rev-parse --verify --quiet "${2:-}^{commit}") || usage "$1 ${2:-}"
    mapfile -t files < <(changed_files "$since")
    ;;
  -*) usage "$1" ;;
  '') mapfile -t files < <(changed_files "$(branch_point)") ;;
  *) files=("$@") ;;
esac

host=() kernel=()
for file in "${files[@]}"; do
  file=${file#"$PWD"/}
  case "$file" in
    *_windows.cpp) ;;  # needs that system's headers
    include/fa/*.hpp | src/*.[ch]pp | cache/*.[ch]pp | tools/*.[ch]pp) host+=("$file") ;;
    templates/ptx/*) ;;  # inline PTX: the emulator has its own
    templates/*.cuh) kernel+=("$file") ;;
  esac
done
((${#host[@]} + ${#kernel[@]} > 0)) || { echo "clang-tidy: none of its files"; exit 0; }

command -v clang-tidy >/dev/null || apt_install clang-tidy
command -v clang++ >/dev/null || apt_install clang
mkdir -p build && : >build/tidy.log
# Configured, never built: of warnings and include paths as Clang gets them.
cmake -S . -B build/tidy -G Ninja -DCMAKE_BUILD_TYPE=Debug -DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++ \
  -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON -DFA_BUILD_TESTS=OFF -DFA_BUILD_EXAMPLES=OFF >build/configure-tidy.log 2>&1 ||
  { cat build/configure-tidy.log; exit 1; }

status=0
# A file that stands in no compilation of its own, such as a header, is read like the one whose name is nearest.
((${#host[@]} == 0)) || printf '%s\0' "${host[@]}" |
  xargs -0 -n 1 -P "$jobs" clang-tidy --quiet -p build/tidy 2>build/tidy.log || status=1
# The emulator's headers stand in for templates/ptx, and NVRTC knows integers of a width without a header.
flags='-x c++ -std=c++20 -include cstdint -isystem tools/tidy -Itests/emulator/include -Itemplates -Itests -Wall -Wextra'
((${#kernel[@]} == 0)) || printf '%s\0' "${kernel[@]}" |
  xargs -0 -n 1 -P "$jobs" sh -c "clang-tidy --quiet --header-filter=- \"\$1\" -- $flags" tidy 2>>build/tidy.log || status=1
((status == 0)) || grep -v -E '^[0-9]+ warnings?' build/tidy.log >&2 || true
echo "clang-tidy: $((${#host[@]} + ${#kernel[@]})) files"
exit "$status"
