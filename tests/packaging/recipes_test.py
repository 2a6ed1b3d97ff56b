"""The recipes of vcpkg and conda say what the project says. Where their clients are missing this is all that is checked."""

import json
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERSION = re.search(r'define FA_VERSION_STRING "(.*)"', (ROOT / "include/fa/version.h").read_text())[1]
CMAKE = (ROOT / "CMakeLists.txt").read_text()
OPTIONS = set(re.findall(r"^(?:option|set)\((FA_\w+)", CMAKE, re.M))
# What find_package and find_path ask for, and the tools besides.
NEEDED = {"fmt", "spdlog", "nlohmann_json", "xxhash", "cli11"}


def names(text: str) -> set[str]:
    return {name.replace("-", "_").lower() for name in re.findall(r"[\w-]+", text)}


class Recipes(unittest.TestCase):
    def test_options_exist(self) -> None:
        for file in ("vcpkg/fa/portfile.cmake", "conda/meta.yaml", "conan/conanfile.py"):
            text = (ROOT / "packaging" / file).read_text()
            used = set(re.findall(r"FA_(?:SHARED|BUILD_\w+|WARNINGS\w+)", text))
            self.assertGreaterEqual(len(used), 4, file)
            self.assertLessEqual(used, OPTIONS, file)

    def test_vcpkg(self) -> None:
        port = json.loads((ROOT / "packaging/vcpkg/fa/vcpkg.json").read_text())
        self.assertEqual(port["version"], VERSION)
        asked = [*port["dependencies"], *port["features"]["tools"]["dependencies"]]
        self.assertLessEqual(NEEDED, {(d if isinstance(d, str) else d["name"]).replace("-", "_") for d in asked})

    def test_vcpkg_portfile_parses_and_finds_the_checkout(self) -> None:
        """Run by CMake, with functions of vcpkg that write down what they are given."""
        calls = ("vcpkg_check_features vcpkg_cmake_configure vcpkg_cmake_install vcpkg_cmake_config_fixup "
                 "vcpkg_fixup_pkgconfig vcpkg_copy_tools vcpkg_install_copyright").split()
        script = "cmake_minimum_required(VERSION 3.25)\nset(VCPKG_LIBRARY_LINKAGE dynamic)\nset(FEATURES core tools)\n"
        script += "".join(f'function({call})\n  message("{call} ${{ARGN}}")\nendfunction()\n' for call in calls)
        with tempfile.TemporaryDirectory() as folder:
            script += f'set(CURRENT_PACKAGES_DIR "{folder}/packages")\n'
            script += f'include("{ROOT}/packaging/vcpkg/fa/portfile.cmake")\n'
            file = Path(folder) / "run.cmake"
            file.write_text(script)
            done = subprocess.run(["cmake", "-P", file], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        for call in calls:
            self.assertIn(call, done.stderr)
        self.assertIn(f"SOURCE_PATH;{ROOT};", done.stderr)
        self.assertIn("-DFA_SHARED=1", done.stderr)

    def test_conan(self) -> None:
        text = (ROOT / "packaging/conan/conanfile.py").read_text()
        compile(text, "conanfile.py", "exec")
        self.assertEqual(set(re.findall(r'requires\("(\w+)/', text)), NEEDED)

    def test_conda(self) -> None:
        text = (ROOT / "packaging/conda/meta.yaml").read_text()
        pattern = re.search(r"regex_pattern='(.*)'", text)[1]
        self.assertEqual(re.search(pattern, (ROOT / "include/fa/version.h").read_text())[1], VERSION)
        self.assertLessEqual(NEEDED, names(text.split("  host:")[1].split("  run:")[0]))
        try:
            import jinja2
            import yaml
        except ImportError:
            self.skipTest("python3 has no jinja2 or yaml to render it with")
        match = re.search(pattern, (ROOT / "include/fa/version.h").read_text())
        rendered = jinja2.Template(text).render(
            load_file_regex=lambda **_: match, compiler=lambda which: f"{which}_compiler",
            stdlib=lambda which: f"{which}_stdlib", pin_subpackage=lambda name, max_pin: f"{name} {max_pin}")
        recipe = yaml.safe_load(rendered)
        self.assertEqual(recipe["package"], {"name": "fa-attention", "version": VERSION})
        self.assertTrue((ROOT / "packaging/conda" / recipe["source"]["path"] / "CMakeLists.txt").exists())
        self.assertTrue((ROOT / recipe["about"]["license_file"]).exists())


if __name__ == "__main__":
    if shutil.which("cmake") is None:
        sys.exit("cmake is not installed")
    unittest.main()
