#!/usr/bin/env bash
# Builds the documentation site into build/site: the pages of docs/, reference pages of headers and docstrings, examples, and
# plots of bench/results. Warnings are errors, among them links and anchors that lead nowhere, and pages that the nav lacks.
#
#   tools/site.sh [PYTHON]   an interpreter with venv, whose package index has tools/site/requirements.txt
set -euo pipefail
cd "$(dirname "$0")/.."
venv=build/site-venv
stamp=$venv/requirements.txt
if ! cmp -s tools/site/requirements.txt "$stamp"; then
  "${1:-python3}" -m venv "$venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check -r tools/site/requirements.txt
  cp tools/site/requirements.txt "$stamp"
fi

# Without --quiet, which hides warnings from --strict too.
build() {  # build CONFIG
  NO_MKDOCS_2_WARNING=1 "$venv/bin/mkdocs" build --strict --clean --config-file "$1"
}

# A site of the same settings and a mistake has to fail, by the warning that names it.
check_refusal() {  # check_refusal PAGE TEXT WARNING
  local probe=build/site-probe log
  rm -rf "$probe"
  mkdir -p "$probe/docs"
  printf 'INHERIT: ../site-pages.yml\ndocs_dir: docs\nsite_dir: site\nextra_css: []\nplugins: []\nnav: [index.md]\n' >"$probe/mkdocs.yml"
  printf '# Home\n' >"$probe/docs/index.md"
  build "$probe/mkdocs.yml" >"$probe/log" 2>&1 || { cat "$probe/log" && echo "a site without a mistake fails" && return 1; }
  printf '%s\n' "$2" >>"$probe/docs/$1"
  if build "$probe/mkdocs.yml" >"$probe/log" 2>&1; then
    echo "the build accepts '$2' in $1" && return 1
  fi
  log=$(<"$probe/log")
  [[ $log == *"$3"*"Aborted with 1 warnings in strict mode"* ]] || { echo "$log" && return 1; }
}

"$venv/bin/python" -B tools/site/prepare.py build/site-pages
check_refusal index.md '[a page](nowhere.md)' "'nowhere.md', but the target is not found"
check_refusal index.md '[a heading](#nowhere)' "'#nowhere', but there is no such anchor"
check_refusal other.md '# A page that the nav lacks' 'not included in the "nav" configuration'
build build/site-pages.yml
echo "build/site/index.html"
