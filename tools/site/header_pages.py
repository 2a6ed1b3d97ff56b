"""Reference pages of the public headers: each declaration under its name, with the comment above it as prose."""

import re
import textwrap
from dataclasses import dataclass, field

WIDTH = 90  # columns of code
DECLARED = (
    r"\benum (?:class )?(\w+)",
    r"\b(?:struct|class) (?:FA_API )?(\w+)(?: final)?(?: :[^{]*)? *\{",
    r"\busing (\w+) *=",
    r"\btypedef struct \w+ (\w+);",
    r"\btypedef [^;{]*\(\*(\w+)\)",
    r"\btypedef [^;{]* (\w+);",
    r"\bconcept (\w+)",
    r"(operator[^\s(]+) *\(",
    r"(~?\w+) *\(",
    r"\bconstexpr [\w:<>, ]* (\w+) *[={]",
    r"\b(?:struct|class) (\w+);",
)


@dataclass
class Block:
    comment: list[str] = field(default_factory=list)
    code: list[str] = field(default_factory=list)

    def name(self) -> str:
        code = re.sub(r"//.*", "", "\n".join(self.code))
        code = re.sub(r"^template <.*> *$|FA_C?_?API |extern \"C\" ", "", code, flags=re.M)
        found = [(match.start(), -order, match[1]) for order, pattern in enumerate(DECLARED)
                 if (match := re.search(pattern, code))]
        return min(found)[2] if found else ""

    def is_class(self) -> bool:
        return any(re.match(r"\s*class .*\{$", line) for line in self.code)


def without_preprocessor(lines: list[str]) -> list[str]:
    """And without namespaces and linkage, which enclose a whole header."""
    kept, continued = [], False
    guarded = re.sub(r"^#ifdef __cplusplus\n.*?^#endif.*?$", "", "\n".join(lines), flags=re.M | re.S)
    # What is no part of the interface.
    guarded = re.sub(r"^namespace (?:api|\w*detail) \{.*?^\}.*?$", "", guarded, flags=re.M | re.S)
    for line in guarded.splitlines():
        directive = continued or line.startswith("#")
        continued = directive and line.endswith("\\")
        if not directive and not re.match(r"(namespace .*\{|\}  // namespace.*)$", line):
            kept.append(line)
    return kept


def blocks_of(lines: list[str]) -> list[Block]:
    """Comments with the declarations behind them; a blank line outside of braces ends a block, a comment begins one."""
    blocks, block, depth, in_comment = [], Block(), 0, False
    inside = False  # a comment of several lines within a declaration

    def end() -> None:
        nonlocal block
        if block.comment or block.code:
            blocks.append(block)
        block = Block()

    for line in lines:
        text = line.strip()
        if depth == 0 and (in_comment or text.startswith(("///", "/*"))) and not text.startswith("///<"):
            if not in_comment and block.code:
                end()
            in_comment = (in_comment or text.startswith("/*")) and not text.endswith("*/")
            text = re.sub(r"^(///|/\*\*?|\*/|\*)( |$)", "", re.sub(r" ?\*/$", "", text))
            block.comment.append(text)
        elif not text and depth == 0:
            end()
        else:
            block.code.append(line)
            code = re.sub(r'//.*|/\*.*?\*/|"(\\.|[^"])*"', "", ("/*" if inside else "") + text)
            inside = "/*" in code
            code = code.split("/*")[0]
            depth += code.count("{") + code.count("(") - code.count("}") - code.count(")")
    end()
    if depth != 0:
        raise ValueError("the braces of a header do not match")
    return blocks


def prose(comment: list[str], pages: set[str]) -> str:
    """A comment as Markdown: lines that are indented are code, names of pages are links."""
    result, code = [], []

    def end_code() -> None:
        if code:
            result.extend(["", "```text", *code, "```", ""])
            code.clear()

    for line in comment:
        is_item = re.match(r" *- ", line) is not None
        if re.match(r" {2,}\S", line) and not is_item and not (result and re.match(r"\s*- ", result[-1])):
            code.append(line)
            continue
        end_code()
        if is_item and result and result[-1] and not re.match(r"\s*- ", result[-1]):
            result.append("")
        # What is between backticks shows as it is.
        line = "".join(part if i % 2 else re.sub(r"([*\[])", r"\\\1", part.replace("<", "&lt;"))
                       for i, part in enumerate(re.split(r"(`[^`]*`)", line)))
        line = re.sub(r"docs/([\w-]+\.md)(#[\w-]+)?",
                      lambda m: f"[{m[0]}](../{m[1]}{m[2] or ''})" if m[1] in pages else m[0], line)
        result.append(line)
    end_code()
    return "\n".join(result).strip() + "\n"


def dedent(lines: list[str]) -> list[str]:
    indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    return [line[indent:] for line in lines]


def reflowed(lines: list[str]) -> list[str]:
    """Comments of their own lines, as wide as a page shows; lists and code in them stay as they are."""
    result: list[str] = []
    for line in lines:
        match = re.match(r"( *)/// (?![ -])(.*)$", line)
        before = re.match(r"( *)/// (?![ -])(.*)$", result[-1]) if result else None
        if match and before and before[1] == match[1]:
            line = f"{result.pop()} {match[2]}"
        result.append(line)
    wide = []
    for line in result:
        match = re.match(r"( *)/// (?![ -])", line)
        wrapped = textwrap.wrap(line, WIDTH, subsequent_indent=match[0], break_long_words=False) if match else [line]
        wide.extend(wrapped)
    return wide


def render_class(block: Block, pages: set[str], language: str) -> str:
    body = block.code[1:]
    private = next((i for i, line in enumerate(body) if line.strip() in ("private:", "protected:")), len(body) - 1)
    body = [line for line in body[:private] if line.strip() != "public:"]
    page = f"```{language}\n" + "\n".join(dedent(block.code[:1])).removesuffix(" {") + ";\n```\n\n"
    for member in blocks_of(body):
        page += render(member, pages, language, 3)
    return page


def render(block: Block, pages: set[str], language: str, level: int) -> str:
    page = ""
    if block.code:
        page += f"{'#' * level} {block.name() or 'Other'}\n\n".replace("_", "\\_")
    if any(block.comment):
        page += prose(block.comment, pages) + "\n"
    if block.is_class():
        return page + render_class(block, pages, language)
    if block.code:
        page += f"```{language}\n" + "\n".join(reflowed(dedent(block.code))) + "\n```\n\n"
    return page


def header_page(name: str, text: str, pages: set[str]) -> str:
    """`pages`: the names of the guide's pages, to which comments refer as docs/NAME."""
    language = "c" if name.endswith(".h") else "cpp"
    page = f"# {name}\n\n```{language}\n#include <fa/{name}>\n```\n\n"
    for block in blocks_of(without_preprocessor(text.splitlines())):
        page += render(block, pages, language, 2)
    exported = set(re.findall(r"^ *(?:FA_API|FA_C_API)\b[^;{(]*?(\w+)\(", text, re.M))
    if missing := {function for function in exported if not re.search(rf"\b{function}\(", page)}:
        raise ValueError(f"{name}: the page has no {', '.join(sorted(missing))}")
    return page
