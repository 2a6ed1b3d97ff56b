#!/usr/bin/env python3
"""Names sentences of more than 30 words in pages (*.md) and in the comments of headers (*.h, *.hpp), and links of pages
that lead nowhere, or to sources without the name in front (`name` in [file](path)); headings that are none; functions of
the C header that docs/api.md, the map of the API, leaves out; and kernels of the catalogue that no page of docs/kernels names.

    tools/check_prose.py README.md CONTRIBUTING.md docs include

Prose alone counts: code blocks, tables and headings are left out, and `code` is one word.
"""

import pathlib
import re
import sys

MOST_WORDS = 30
ITEM = re.compile(r"^\s*([-*]|\d+\.)\s+")
END = re.compile(r"([.!?][)*\"]*)\s+(?=[^a-z\s])")  # of a sentence: what follows begins with no small letter
WHOLE = re.compile(r"\s*(?:///<|///?|/\*+|\*)(.*)")  # a line that is all comment
TRAILING = re.compile(r".*?[;,({\w]\s*(?:///?<?|/\*)\s(.*)")  # a comment behind code


def page_lines(lines):
    """Yields (begins, text) for each line: whether a paragraph begins there; None for what is no prose."""
    fenced, in_list, in_text = False, False, False
    for line in lines:
        fence = line.lstrip().startswith("```")
        item = bool(ITEM.match(line)) and (in_list or not in_text or line.lstrip()[0] in "-*")
        indented = line.startswith("    ") and not in_text and not in_list
        prose = line.strip() and not (fence or fenced or indented or line.startswith(("|", "#", "![")))
        fenced ^= fence
        in_list = item or (in_list and (not line or line.startswith(" ") or in_text))
        in_text = bool(prose)
        yield item, (ITEM.sub("", line) if item else line) if prose else None


def header_lines(lines):
    """Likewise for comments. What is indented in its comment is code, "- " begins an item."""
    block = behind = False
    for line in lines:
        whole = WHOLE.match(line) if block or re.match(r"\s*(//|/\*)", line) else None
        found = whole or TRAILING.match(line)
        text = found.group(1).split("*/")[0] if found else ""
        begins = bool(ITEM.match(text)) or (not whole and bool(found)) or (behind and "///<" not in line and not block)
        behind = (bool(found) and not whole) or (behind and "///<" in line)
        block = ("/*" in line or block) and "*/" not in line
        code = whole and text.startswith("   ") and "///<" not in line
        yield begins, ITEM.sub("", text) if text.strip() and not code else None


def paragraphs(kind, lines):
    """Yields (line number, text)."""
    start, parts = 0, []
    for number, (begins, text) in enumerate([*kind(lines), (False, None)], 1):
        if parts and (begins or text is None):
            yield start, " ".join(parts)
            parts = []
        if text is not None:
            start = start if parts else number
            parts.append(text.strip())


def sentences(text):
    text = re.sub(r"`[^`]*`", "Code", text)
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    return END.sub(r"\1\n", text).split("\n")


def long_sentences(path):
    kind = page_lines if path.suffix == ".md" else header_lines
    for line, text in paragraphs(kind, path.read_text(encoding="utf-8").splitlines()):
        for sentence in sentences(text):
            count = sum(1 for word in sentence.split() if re.search(r"\w", word))
            if count > MOST_WORDS:
                yield f"{path}:{line}: {count} words: {sentence}"


def anchors(page):
    """Those that a page's headings make."""
    lines = page.read_text(encoding="utf-8").splitlines()
    titles = (line.lstrip("#").strip().lower() for line in lines if line.startswith("#"))
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def dead_links(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        place, _, anchor = link.partition("#")
        target = page.parent / place if place else page
        if "://" not in link and (not target.exists() or (anchor and anchor not in anchors(target))):
            yield f"{page}: link to {link}, which is not there"


def names_elsewhere(page):
    """`name` in [file](path), or in brackets, or in a table: the file has the name."""
    link = r"\[[^\]]*\]\(([^)#]+\.(?:cuh|cpp|hpp|h))\)"
    text = page.read_text(encoding="utf-8")
    for name, place in re.findall(rf"`([A-Za-z_:]+)(?:\([^`]*\))?`(?:\s+in\s+|\s+\(|[^|`\n]*(?:, | in )){link}", text):
        target = page.parent / place
        own = name.split("::")[-1]
        if target.exists() and not re.search(rf"\b{own}\b", target.read_text(encoding="utf-8")):
            yield f"{page}: {name} is not in {place}"


def headings_without_blank(page):
    fenced = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fenced ^= line.lstrip().startswith("```")
        if not fenced and re.match(r"#+[^#\s]", line):
            yield f"{page}:{number}: no heading without a blank behind #"


def unnamed_functions(page, header=pathlib.Path("include/fa/fa.h")):
    declared = re.findall(r"^FA_C_API [^;(]*?(\w+)\(", header.read_text(encoding="utf-8"), re.MULTILINE)
    named = set(re.findall(r"`(fa_\w+)`", page.read_text(encoding="utf-8")))
    for function in declared:
        if function not in named:
            yield f"{page}: {function} of {header} is not named"


def unnamed_kernels(page, catalogue=pathlib.Path("src/plan")):
    pages = "".join(path.read_text(encoding="utf-8") for path in page.parent.glob("*.md"))
    for source in sorted(catalogue.rglob("*.cpp")):
        for kernel in re.findall(r'\.name = "(\w+)"', source.read_text(encoding="utf-8")):
            if not re.search(rf"\b{kernel}\b", pages):
                yield f"{page}: no page of {page.parent} names {kernel}, a kernel of {source}"


def messages_of(path):
    yield from long_sentences(path)
    if path.suffix == ".md":
        yield from dead_links(path)
        yield from names_elsewhere(path)
        yield from headings_without_blank(path)
    if path.parts[-2:] == ("docs", "api.md"):
        yield from unnamed_functions(path)
    if path.parts[-3:] == ("docs", "kernels", "README.md"):
        yield from unnamed_kernels(path)


def main(arguments):
    found = 0
    for place in map(pathlib.Path, arguments):
        for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if path.suffix in (".md", ".h", ".hpp"):
                for message in messages_of(path):
                    found += 1
                    print(message)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
