#!/usr/bin/env python3
"""Names sentences of more than 30 words in pages (*.md) and in the comments of headers.

    tools/check_prose.py README.md docs include

Prose alone counts: code blocks, tables, headings and formulas are passed over, and `code` is one word.
"""

import pathlib
import re
import sys

MOST_WORDS = 30
ITEM = re.compile(r"\s*([-*]|\d+\.)\s")
END = re.compile(r"(?<=[.!?])[)*]*\s+(?=[^a-z\s])")  # of a sentence: what follows begins with no small letter


def paragraphs_of_page(lines):
    """Yields (line, text): a paragraph or list item, without code, tables and headings."""
    start, text, fenced, in_list = 0, [], False, False
    for number, line in enumerate([*lines, ""], 1):
        fence = line.lstrip().startswith("```")
        indented = line.startswith("    ") and not text and not in_list
        other = fence or fenced or indented or line.startswith(("|", "#", "!["))
        fenced ^= fence
        if other or not line.strip() or ITEM.match(line):
            if text:
                yield start, " ".join(text)
            text = []
        if not line.strip() or other:
            in_list = in_list and not other
            continue
        in_list = in_list and line.startswith(" ") or bool(ITEM.match(line))
        start = start if text else number
        text.append(ITEM.sub("", line, 1).strip())


def paragraphs_of_header(lines):
    """Yields the same for comments; a line that is indented in its comment is code, one with '- ' an item."""
    start, text, block = 0, [], False
    for number, line in enumerate([*lines, ""], 1):
        trailing = re.match(r".*[;,({\w]\s*(?:///?<?|/\*)\s(.*)", line)
        whole = re.match(r"\s*(?:///?|/\*|\*)(.*)", line) if block or re.match(r"\s*(//|/\*)", line) else None
        body = (whole or trailing).group(1) if whole or trailing else ""
        block = ("/*" in line or block) and "*/" not in line
        body = body.split("*/")[0].rstrip()
        code = whole and body.startswith("   ") and not trailing
        if not body.strip() or code or ITEM.match(body) or (trailing and not whole):
            if text:
                yield start, " ".join(text)
            text = []
        if body.strip() and not code:
            start = start if text else number
            text.append(ITEM.sub("", body, 1).strip())


def sentences(text):
    text = re.sub(r"`[^`]*`", "Code", text)
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    return END.split(text)


def words(sentence):
    return [word for word in sentence.split() if re.search(r"\w", word)]


def main(arguments):
    kinds = {".md": paragraphs_of_page, ".h": paragraphs_of_header, ".hpp": paragraphs_of_header}
    found = 0
    for place in map(pathlib.Path, arguments):
        for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if path.suffix not in kinds:
                continue
            for line, text in kinds[path.suffix](path.read_text(encoding="utf-8").splitlines()):
                for sentence in sentences(text):
                    count = len(words(sentence))
                    if count > MOST_WORDS:
                        found += 1
                        print(f"{path}:{line}: {count} words: {sentence}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
