"""What the package promises beside results: structs as in fa.h, the version, types, an import that needs nothing."""

import ctypes
import os
import pathlib
import re
import subprocess
import sys

import pytest

import fa_attention
from fa_attention import _abi, _library, capi

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
HEADER = ROOT / "include" / "fa" / "fa.h"
VALUES = {"int32_t": ctypes.c_int32, "uint32_t": ctypes.c_uint32, "int64_t": ctypes.c_int64, "uint64_t": ctypes.c_uint64,
          "float": ctypes.c_float, "double": ctypes.c_double, "size_t": ctypes.c_size_t}
SKIPPED = {"fa_compile_event", "fa_attention"}  # nothing in Python reads them


def structs():
    """Name and fields, as (type, name, dimension), of every struct in fa.h."""
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.S)
    for name, body in re.findall(r"typedef struct (\w+) \{(.*?)\} \1;", text, flags=re.S):
        fields = []
        for line in filter(None, (part.strip() for part in body.split(";"))):
            kind, field, count = re.fullmatch(r"(.*?[\s*])(\w+)(?:\[(\d+)\])?", line, flags=re.S).groups()
            fields.append((kind.strip(), field, int(count or 0)))
        yield name, fields


def test_structs_are_those_of_the_header():
    found = dict(structs())
    assert len(found) > 15
    for name, fields in found.items():
        if name in SKIPPED:
            continue
        struct = getattr(_abi, "".join(word.capitalize() for word in name.split("_")[1:]))
        assert [field for field, _ in struct._fields_] == [field for _, field, _ in fields], name
        for (kind, field, count), (_, actual) in zip(fields, struct._fields_):
            if count:
                assert actual._length_ == count
            elif "*" in kind or kind == "fa_compile_callback":
                assert ctypes.sizeof(actual) == ctypes.sizeof(ctypes.c_void_p), (name, field)
            else:
                assert actual is VALUES[kind], (name, field)


def test_every_function_has_its_arguments():
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.S)
    declared = {name: arguments for name, arguments in re.findall(r"FA_C_API int (fa_\w+)\((.*?)\)", text, flags=re.S)}
    for name, count in _library._STATUS_FUNCTIONS.items():
        assert len(declared[name].split(",")) == count, name


def test_version():
    assert f'"{fa_attention.__version__}"' in (ROOT / "include" / "fa" / "version.h").read_text()
    assert capi.load().version() == fa_attention.__version__


def test_import_needs_nothing():
    """Neither the library nor another package is opened by importing."""
    code = ("import sys; sys.path.insert(0, 'python'); import fa_attention\n"
            "assert not {'torch', 'numpy'} & set(sys.modules), 'imports others'\n"
            "try:\n  fa_attention.load()\nexcept OSError as problem:\n  print(problem)")
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "FA_LIBRARY": "/nowhere/libfa.so"},
                         capture_output=True, text=True)
    assert run.returncode == 0 and "/nowhere/libfa.so" in run.stdout, run.stderr


def test_a_kernel_is_compiled_with_the_nvrtc_that_is_found(tmp_path):
    """In a process of its own: which NVRTC serves is settled once."""
    code = ("import sys; sys.path.insert(0, 'python'); from fa_attention import capi\n"
            "library = capi.load()\n"
            "print(capi.find_kernel(library, 'sm_80', (1, 1, 1, 64, 64), 64, 'float16').origin.decode())\n"
            "print(library.nvrtc.report)")
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "FA_CACHE_DIR": str(tmp_path)},
                         capture_output=True, text=True)
    if "NoCompiler" in run.stderr:
        assert "the nvidia-cuda-nvrtc wheel: not installed" in run.stderr and "Tried" in run.stderr
        pytest.skip("no NVRTC")
    assert run.returncode == 0 and run.stdout.startswith("compiled"), run.stderr
    print(run.stdout)


def test_a_broken_nvrtc_is_passed_over(tmp_path):
    """A wheel whose library cannot be opened: the next place serves, or all of them are told of."""
    broken = tmp_path / "site" / "nvidia" / "cu13" / "lib" / "libnvrtc.so.13"
    broken.parent.mkdir(parents=True)
    broken.write_text("no library")
    code = (f"import sys; sys.path[:0] = ['python', {str(tmp_path / 'site')!r}]; from fa_attention import capi, NoCompiler\n"
            "library = capi.load()\n"
            "try:\n  print(capi.find_kernel(library, 'sm_80', (1, 1, 1, 64, 64), 64, 'float16').origin.decode())\n"
            "except NoCompiler as problem:\n  print('none', problem)\n"
            "print(library.nvrtc.report)")
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "FA_CACHE_DIR": str(tmp_path / "cache")},
                         capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout.startswith(("compiled", "none")), run.stderr
    report = run.stdout.splitlines()[-1]
    assert str(broken) in report and report.count(str(broken)) >= 2, "the loader's reason names the file again"
    assert "the system's" in report or "PyTorch's own: /" in report


def test_types():
    pytest.importorskip("mypy")
    pytest.importorskip("torch")  # without its types half of the package is of any type
    run = subprocess.run([sys.executable, "-m", "mypy", "--cache-dir", str(ROOT / "build" / "mypy")], cwd=ROOT,
                         capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
    assert (ROOT / "python" / "fa_attention" / "py.typed").is_file()


def test_log_levels():
    fa_attention.set_log_level("warning")
    with pytest.raises(ValueError, match="level is 'loud': accepted are debug"):
        fa_attention.set_log_level("loud")


def snippets():
    for page in (ROOT / "README.md", ROOT / "docs" / "python.md", ROOT / "docs" / "python_caches.md"):
        for n, text in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.S | re.M)):
            yield pytest.param(text, id=f"{page.name}-{n}")


@pytest.mark.parametrize("text", list(snippets()))
def test_snippets_of_the_pages_run_as_pasted(text):
    for name in ("torch", "numpy", "transformers"):
        if re.search(rf"^(import|from) {name}\b", text, flags=re.M):
            pytest.importorskip(name)
    exec(compile(text, "snippet", "exec"), {"__name__": "snippet"})  # noqa: S102
