#!/usr/bin/env python3
"""Compares the functions that a C header declares with those that the sources of its fuzzer name.

    every_function_test.py HEADER FOLDER...

FOLDER has the fuzzer's sources (.cpp, .hpp). Ends with 1, and the names, where a function of the header is named in none
of them, or where the header declares none.
"""

import pathlib
import re
import sys


def without_comments(text: str) -> str:
    """C or C++ source without comments and without what stands in quotes: names there are no calls."""
    return re.sub(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"', " ", text, flags=re.DOTALL)


def declared(header: str) -> set[str]:
    """The functions of a header: FA_C_API int fa_create(...)."""
    return set(re.findall(r"\bFA_\w*C_API\b[^;(]*?\b(fa_\w+)\s*\(", without_comments(header)))


def named(sources: list[str]) -> set[str]:
    """What sources call, or take the address of."""
    return {name for text in sources for name in re.findall(r"\bfa_\w+", without_comments(text))}


def main(arguments: list[str]) -> int:
    header, *folders = arguments
    functions = declared(pathlib.Path(header).read_text(encoding="utf-8"))
    files = [path for folder in folders for path in sorted(pathlib.Path(folder).rglob("*.[ch]pp"))]
    missing = sorted(functions - named([path.read_text(encoding="utf-8") for path in files]))
    print(f"{len(functions)} functions of {header}, {len(files)} files of the fuzzer")
    for name in missing:
        print(f"{name}: no file of the fuzzer calls it")
    return 1 if missing or not functions else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
