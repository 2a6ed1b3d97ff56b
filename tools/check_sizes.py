#!/usr/bin/env python3
"""Names files of more than 600 lines that do not say at their top why ("More than 600 lines: ..."), and functions of
more than 80: of a kernel's main loop 120. Lists of mutations may have 200.

    tools/check_sizes.py [FILES...]         of src, cache, templates and tools; else all of these, and the mutations
"""

import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

MOST_LINES = 600
REASON = "More than 600 lines: "
TOP = 60  # lines in which the reason stands
MOST_OF_FUNCTION, MOST_OF_MAIN_LOOP, MOST_OF_LIST = 80, 120, 200
MAIN_LOOPS = {"accumulate", "accumulate_by_functions", "accumulate_halves", "step"}  # of templates
FOLDERS = ("src", "cache", "templates", "tools", "tests/emulator/mutations")
NO_FUNCTION = re.compile(r"(namespace|struct|class|enum|union|if|for|while|switch|else|do|return|case|catch)\b|[}#/]")


def indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def functions(lines: list[str]) -> Iterator[tuple[int, int, str]]:
    """Yields (first line, lines, name) of each function and list that clang-format has laid out."""
    for opening, line in enumerate(lines):
        if not line.endswith("{"):
            continue
        first, open_brackets = opening, line.count(")") - line.count("(")
        while first > 0 and (open_brackets > 0 or lines[first].lstrip().startswith(": ")):
            first -= 1  # parameters, or what a constructor starts with, over several lines
            open_brackets += lines[first].count(")") - lines[first].count("(")
        head, depth = lines[first].strip(), indent(lines[first])
        if NO_FUNCTION.match(head) or not ("(" in head or head.endswith("[] = {")):
            continue
        last = next((i for i in range(opening + 1, len(lines)) if lines[i].strip() and indent(lines[i]) <= depth), first)
        name = re.search(r"(\w+)(\(|\[\] = \{)", head)
        yield first + 1, last - first + 1, name.group(1) if name else head


def problems(path: pathlib.Path) -> Iterator[str]:
    lines = path.read_text().split("\n")
    count = len(lines) - 1
    if count > MOST_LINES and not any(REASON in line for line in lines[:TOP]):
        yield f"{path}: {count} lines, at most {MOST_LINES} without a sentence at its top: \"{REASON}...\""
    for first, size, name in functions(lines):
        most = MOST_OF_FUNCTION
        if path.parts[0] == "templates" and name in MAIN_LOOPS:
            most = MOST_OF_MAIN_LOOP
        elif path.parts[0] == "tests":
            most = MOST_OF_LIST
        if size > most:
            yield f"{path}:{first}: {name} has {size} lines, at most {most}"


def main() -> int:
    listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard", *FOLDERS],
                            capture_output=True, text=True, check=True).stdout.split()
    wanted = {str(pathlib.Path(name)) for name in sys.argv[1:]} or set(listed)
    files = [pathlib.Path(name) for name in listed if name in wanted and name.endswith((".cpp", ".hpp", ".cuh", ".h"))]
    found = [problem for path in files if path.exists() for problem in problems(path)]
    print("\n".join(found) if found else f"sizes: {len(files)} files")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
