"""The site's nav has every page of docs/, and links of pages lead where the site has what they name. MkDocs is not needed."""

import re
import sys
import tempfile
import types
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools/site"))
sys.dont_write_bytecode = True
sys.modules["plots"] = types.ModuleType("plots")  # which takes matplotlib

import header_pages  # noqa: E402
import prepare  # noqa: E402

WRITTEN = {"index.md", "CHANGELOG.md", "CONTRIBUTING.md", "examples.md", "by_gpu.md"}  # by prepare.py
DOCS = {str(file.relative_to(ROOT / "docs")) for file in (ROOT / "docs").rglob("*.md")}


def nav_pages() -> list[str]:
    nav = (ROOT / "tools/site/mkdocs.yml").read_text().split("\nnav:\n")[1]
    return re.findall(r"^ +- (?:[^:\n]*: )?([\w./-]+\.md)$", nav, re.M)


class Nav(unittest.TestCase):
    def test_it_has_every_page_of_docs_once(self) -> None:
        pages = nav_pages()
        self.assertGreater(len(DOCS), 30)
        self.assertEqual(DOCS - set(pages), set(), "not in the nav of tools/site/mkdocs.yml")
        self.assertEqual(len(pages), len(set(pages)))

    def test_it_has_no_other_pages(self) -> None:
        others = {page for page in nav_pages() if not page.startswith("reference/")} - DOCS
        self.assertEqual(others, WRITTEN)

    def test_the_reference_has_every_python_module(self) -> None:
        package = ROOT / "python/fa_attention"
        files = {f"fa_attention.{file.stem}" for file in package.glob("[a-z]*.py")}
        found = {"fa_attention"} | files | {f"fa_attention.{file.parent.name}" for file in package.glob("*/__init__.py")}
        # What `fa_attention` itself exports.
        self.assertEqual(found - {"fa_attention.arrays"}, set(prepare.PYTHON_MODULES))


class Links(unittest.TestCase):
    def relinked(self, text: str) -> str:
        with tempfile.TemporaryDirectory() as folder:
            return prepare.Pages(Path(folder)).relinked(text, ROOT / "docs/api.md", "api.md")

    def test_several_labels_of_code_on_a_line(self) -> None:
        text = "| [`api.md`](../docs/api.md) | `x`, [`a` and `b`](../src/plan/planner.cpp), [`c`](../include/fa/fa.h#d) `y` |\n"
        self.assertEqual(self.relinked(text), "| [`api.md`](api.md) | `x`, [`a` and `b`](source/src/plan/planner.cpp.md), "
                                              "[`c`](reference/fa.h.md#d) `y` |\n")

    def test_behind_code(self) -> None:
        for code in ("    [a](b)\n", "```cpp\n[a](b);\n```\n", "`[a](b)`\n", "``[a](`b`)``\n", "    x\n\n    y[`\n"):
            with self.subTest(code):
                self.assertEqual(self.relinked(f"{code}\n[c](../README.md)\n"), f"{code}\n[c](index.md)\n")

    def test_one_that_leads_nowhere(self) -> None:
        for text in ("[a](nowhere.md)", "`x` [`a`](../src/nowhere.cpp), [`b`](api.md)"):
            with self.subTest(text), self.assertRaisesRegex(FileNotFoundError, "nowhere"):
                self.relinked(text)

    def test_elsewhere(self) -> None:
        self.assertEqual(self.relinked("[a](https://example.com/b.md) [b](#c)"), "[a](https://example.com/b.md) [b](#c)")


class Comments(unittest.TestCase):
    def test_brackets_are_no_links(self) -> None:
        self.assertEqual(header_pages.prose(["row of page table[row][j / page_size], `a[i] * b`"], set()),
                         "row of page table\\[row]\\[j / page_size], `a[i] * b`\n")

    def test_names_of_pages_are_links(self) -> None:
        self.assertEqual(header_pages.prose(["as docs/api.md says"], {"api.md"}), "as [docs/api.md](../api.md) says\n")


if __name__ == "__main__":
    unittest.main()
