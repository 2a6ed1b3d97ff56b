"""tools/sass_diff.py on two copies of the templates, one of which was changed."""

import os
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
FILTER = "^golden sm_80 f16 64 causal=0 (sm80_forward|backward_convert) "
SKIPPED = 77


def diff(build, cache, old, new):
    command = [sys.executable, os.path.join(ROOT, "tools", "sass_diff.py"), old, new, "--build", build, "--cache", cache,
               "--filter", FILTER, "--jobs", "2"]
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE)
    print(done.stdout)
    if done.returncode == SKIPPED or "no NVRTC" in done.stdout:
        sys.exit(SKIPPED)
    return done


def changed(folder, name, before, after):
    """A copy of the templates in `folder`/`name`, with a change of what the forward includes."""
    copy = os.path.join(folder, name)
    shutil.copytree(os.path.join(ROOT, "templates"), copy)
    header = os.path.join(copy, "common", "online_softmax.cuh")
    with open(header, encoding="utf-8") as file:
        text = file.read()
    assert before in text, f"{header} has no {before!r}"
    with open(header, "w", encoding="utf-8") as file:
        file.write(text.replace(before, after, 1))
    return copy


def expect(done, status, pattern):
    assert done.returncode == status and re.search(pattern, done.stdout), (done.returncode, done.stdout, pattern)


def main():
    build = os.path.abspath(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        cache = os.path.join(folder, "cache")
        templates = os.path.join(ROOT, "templates")
        comment = changed(folder, "comment", "#define", "// a comment\n#define")
        broken = changed(folder, "broken", "\n}  // namespace", "\nstatic_assert(sizeof(int) == 8);\n}  // namespace")
        scaled = changed(folder, "scaled", "multiply(row_max, scale_log2)", "multiply(row_max, 2 * scale_log2)")
        expect(diff(build, cache, templates, templates), 0, r"2 kernels: 2 source")
        expect(diff(build, cache, templates, comment), 0, r"2 kernels: 1 source, 1 identical, 0 renamed, 0 equal, 0 diff")
        expect(diff(build, cache, templates, broken), 1, r"new does not compile: (.|\n)*1 source, (.|\n)*1 different")
        done = diff(build, cache, templates, scaled)
        assert re.search(r"1 source, 0 identical, 0 renamed, (1 equal, 0|0 equal, 1) different", done.stdout), done.stdout
    print("passed")


main()
