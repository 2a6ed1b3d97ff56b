#!/usr/bin/env bash
# Builds the documentation site into build/site: the pages of docs/, reference pages of headers and docstrings, examples, and
# plots of bench/results. Warnings are errors, among them links and anchors that lead nowhere.
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
"$venv/bin/python" -B tools/site/prepare.py build/site-pages
NO_MKDOCS_2_WARNING=1 "$venv/bin/mkdocs" build --strict --quiet --clean --config-file build/site-pages.yml
echo "build/site/index.html"
