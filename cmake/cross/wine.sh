#!/usr/bin/env bash
# Runs a Windows program that MinGW-w64 has built: with that compiler's libraries, and a Wine prefix of this project's.
#   wine.sh PROGRAM.exe ARGUMENTS...
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
wine=$(command -v wine64 || command -v wine || echo /usr/lib/wine/wine64)
compiler=$(command -v x86_64-w64-mingw32-g++-posix || command -v x86_64-w64-mingw32-g++)
folders=$(dirname "$("$compiler" -print-file-name=libstdc++-6.dll)")
for library in libgcc_s_seh-1.dll libwinpthread-1.dll; do
  folders="$folders;$(dirname "$("$compiler" -print-file-name=$library)")"
done
export WINEPREFIX=${WINEPREFIX:-$root/build/wine}
export WINEDEBUG=${WINEDEBUG:--all} WINEDLLOVERRIDES='mscoree,mshtml=' WINEPATH="${WINEPATH:+$WINEPATH;}$folders"
mkdir -p "$WINEPREFIX"
exec "$wine" "$@"
