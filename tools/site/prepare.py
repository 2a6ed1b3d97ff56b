"""Writes the pages of the documentation site into a folder, for MkDocs: the guide, reference, examples and plots."""

import json
import os
import re
import shutil
import sys
from collections import Counter
from pathlib import Path

import header_pages
import plots

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
LANGUAGES = {".cpp": "cpp", ".hpp": "cpp", ".cuh": "cuda", ".h": "c", ".py": "python", ".sh": "bash", ".txt": "cmake",
             ".c": "c", ".cu": "cuda", ".md": "markdown"}
PYTHON_MODULES = ("fa_attention", "fa_attention.torch", "fa_attention.functions", "fa_attention.flash_attn",
                  "fa_attention.transformers", "fa_attention.parallel", "fa_attention.capi")
ROOT_PAGES = {"README.md": "index.md", "CHANGELOG.md": "CHANGELOG.md", "CONTRIBUTING.md": "CONTRIBUTING.md"}

# What has links of its own, or none: fenced and indented code; a link, whose label may have code; code within a line.
MARKDOWN = re.compile(r"""
    ^[ ]*```.*?^[ ]*```
  | ^(?:[ ]{4}[^\n]*\n)+
  | (?P<label>!?\[(?:`[^`]*`|[^\[\]`])*\])\((?P<target>[^)#\s]*)(?P<anchor>\#[^)\s]*)?\)
  | (?P<ticks>`+)(?:(?!\n\s*\n).)+?(?<!`)(?P=ticks)(?!`)
""", re.M | re.S | re.X)

CSS = """\
.md-grid { max-width: 80rem; }
.md-typeset table:not([class]) { font-size: .7rem; }
.md-typeset table code { word-break: normal; }
.md-typeset img { max-width: 100%; }
.md-typeset pre > code { font-size: .65rem; }
.md-typeset :is(.language-cpp, .language-c, .language-cuda) pre > code { white-space: pre-wrap; }
.md-typeset .doc-heading code { white-space: normal; }
.md-typeset :is(h2, h3) { overflow-wrap: anywhere; }
"""


class Pages:
    def __init__(self, output: Path) -> None:
        self.output = output
        self.sources: set[Path] = set()  # files of the project that pages link to

    def write(self, place: str, text: str) -> None:
        file = self.output / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def place_of(self, file: Path) -> str | None:
        """Where the site has a file of the project; None for what it does not have."""
        inside = file.relative_to(ROOT)
        if str(inside) in ROOT_PAGES:
            return ROOT_PAGES[str(inside)]
        if file.is_relative_to(DOCS):
            return str(file.relative_to(DOCS) / "README.md" if file.is_dir() else file.relative_to(DOCS))
        if file.parent == ROOT / "include/fa":
            return f"reference/{file.name}.md"
        if file.is_dir():
            return "examples.md" if inside.parts[0] == "examples" else None
        self.sources.add(file)
        return f"source/{inside}.md"

    def relinked(self, text: str, file: Path, place: str) -> str:
        """Markdown of `file` with links that lead where the site has what they name."""

        def link(match: re.Match[str]) -> str:
            label, target, anchor = match["label"], match["target"], match["anchor"] or ""
            if re.match(r"[a-z]+:", target) or not target:
                return match[0]
            path = Path(os.path.normpath(file.parent / target))
            if not path.exists():
                raise FileNotFoundError(f"{file}: {target}")
            found = self.place_of(path)
            if found is None:
                return label.removeprefix("!").strip("[]")
            return f"{label}({os.path.relpath(found, Path(place).parent)}{anchor})"

        return MARKDOWN.sub(lambda match: link(match) if match["target"] is not None else match[0], text)


def with_blank_before_lists(text: str) -> str:
    """Python-Markdown begins a list behind a blank line alone."""
    result, in_code = [], False
    for line in text.splitlines():
        in_code ^= line.lstrip().startswith("```")
        item = re.match(r"(- |\d+\. )", line)
        if item and not in_code and result and result[-1] and not re.match(r"(- |\d+\. | )", result[-1]):
            result.append("")
        result.append(line)
    return "\n".join(result) + "\n"


def write_guide(pages: Pages) -> None:
    for file in sorted(DOCS.rglob("*.md")):
        place = str(file.relative_to(DOCS))
        pages.write(place, pages.relinked(with_blank_before_lists(file.read_text()), file, place))
    for file in DOCS.rglob("*.svg"):
        target = pages.output / file.relative_to(DOCS)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    for name, place in ROOT_PAGES.items():
        pages.write(place, pages.relinked(with_blank_before_lists((ROOT / name).read_text()), ROOT / name, place))


def write_reference(pages: Pages) -> list[str]:
    guide = {file.name for file in DOCS.glob("*.md")}
    written = []
    for file in sorted((ROOT / "include/fa").iterdir()):
        if not file.name.startswith("fa.h"):
            written.append(f"reference/{file.name}.md")
        pages.write(f"reference/{file.name}.md", header_pages.header_page(file.name, file.read_text(), guide))
    python = "# Python\n\nThe guide is [Python](../python.md).\n\n"
    pages.write("reference/python.md", python + "".join(f"::: {module}\n\n" for module in PYTHON_MODULES))
    return written


def summary(file: Path) -> str:
    """The first sentence of the comment that a program begins with."""
    words = []
    for line in file.read_text().splitlines():
        text = re.sub(r"^(//|#|\"\"\"|/\*) ?", "", line)
        if text == line or not text.strip():
            break
        words.append(text.strip().removesuffix('"""'))
    return re.split(r"(?<=[.:]) ", " ".join(words))[0].rstrip(":.") + "."


def write_examples(pages: Pages) -> None:
    page = "# Examples\n\nSmall complete programs, which the tests build and run.\n\n| Program | What it shows |\n|---|---|\n"
    for file in sorted((ROOT / "examples").rglob("*")):
        if file.suffix not in (".cpp", ".c", ".py", ".cu"):
            continue
        if file.suffix == ".cpp" and "int main(" not in file.read_text():
            continue
        page += f"| [{file.relative_to(ROOT / 'examples')}]({pages.place_of(file)}) | {summary(file)} |\n"
    pages.write("examples.md", page)


def write_sources(pages: Pages) -> None:
    for file in sorted(pages.sources):
        name = file.relative_to(ROOT)
        language = LANGUAGES.get(file.suffix, "text")
        pages.write(f"source/{name}.md", f"# {name}\n\n````{language}\n{file.read_text()}````\n".replace("_", "_"))


def two_plots(pages: Pages, name: str, description: str, draw) -> str:
    markdown = ""
    for theme in ("light", "dark"):
        file = pages.output / "plots" / f"{name}-{theme}.svg"
        file.parent.mkdir(parents=True, exist_ok=True)
        draw(theme, file)
        markdown += f"![{description}](plots/{file.name}#only-{theme})\n"
    return markdown + "\n"


def commonest_decodes(rows: list[dict]) -> tuple[list[dict], str]:
    """Those of one token that differ in requests and keys alone."""
    facts = ("h_q", "h_kv", "d_qk", "page_size", "variant")
    single = [row for row in rows if row["s_q"] == 1 and "fa" in row["tbps"]]
    common = Counter(tuple(row[fact] for fact in facts) for row in single).most_common(1)[0][0]
    chosen = [row for row in single if tuple(row[fact] for fact in facts) == common]
    h_q, h_kv, d, page, variant = common
    return chosen, f"heads {h_q}/{h_kv}, head dim {d}, pages of {page}{', ' + variant if variant else ''}"


def write_by_gpu(pages: Pages) -> None:
    page = "# Performance by GPU\n\nFor whoever chooses a library or a GPU. How it was measured is in [performance](performance.md).\n\n"
    for file in sorted((ROOT / "bench/results").glob("*.json")):
        result = json.loads(file.read_text())
        page += f"## {result['gpu']}\n\n{result['method']}. Driver {result['driver']}, NVRTC {result['nvrtc']}.\n"
        if "matmul_tflops" in result:
            page += f"A matrix product reaches {result['matmul_tflops']} TFLOP/s, a copy {result['copy_tbps']} TB/s.\n\n"
        best = max((row["family"] for row in result["attention"]), default="")
        for op in ("forward", "backward"):
            rows = [row for row in result["attention"] if row["op"] == op and row["family"] == best
                    and not row["variant"] and row["dtype"] == "bf16" and row["h_q"] == row["h_kv"]]
            if not rows:
                continue
            page += f"### {op.capitalize()}, {result['gpu']}\n\n"
            title = f"{op}, bf16, {result['gpu']}"
            page += two_plots(pages, f"{file.stem}-{op}", f"TFLOP/s of {title}, fa and others by sequence length",
                              lambda theme, to, rows=rows, title=title: plots.grid(rows, title, theme, to))
        if result.get("decode"):
            rows, facts = commonest_decodes(result["decode"])
            page += f"### Decode, {result['gpu']}\n\n"
            title = f"decode, {facts}, {result['gpu']}"
            page += two_plots(pages, f"{file.stem}-decode", f"TB/s of {title}",
                              lambda theme, to, rows=rows, title=title: plots.draw_decodes(rows, title, theme, to))
    pages.write("by_gpu.md", page)


def write_config(config: Path, reference: list[str]) -> None:
    text = (ROOT / "tools/site/mkdocs.yml").read_text()
    text = text.replace("API_PAGES", "[" + ", ".join(reference) + "]")
    config.write_text(text.replace("../../", f"{ROOT}/"))


def main() -> None:
    output = Path(sys.argv[1]).resolve()
    shutil.rmtree(output, ignore_errors=True)
    pages = Pages(output)
    write_guide(pages)
    reference = write_reference(pages)
    write_examples(pages)
    write_by_gpu(pages)
    write_sources(pages)
    pages.write("site.css", CSS)
    write_config(output.with_suffix(".yml"), reference)


if __name__ == "__main__":
    main()
