#!/usr/bin/env python3
"""Compiles kernels of every family with several versions of NVRTC; needs no GPU.

    tools/nvrtc_versions.py [--every N] [--jobs N] [--json FILE] [--markdown FILE] [VERSION...]

VERSIONs are those of the wheels on PyPI, by default 12.0 12.4 12.8 13. They are fetched into build/nvrtc, once. The
kernels are those of fa_spec_cubins (build/release/tests/sass): each of the family list by every version, each golden
one by one or two versions of four, each of the pairwise list by one. --every N takes each Nth of all. A kernel that a
version does not know the architecture of counts as not served; anything else that it refuses is a failure, and the exit
code is 1.
"""

import argparse
import collections
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEFAULT_VERSIONS = ["12.0", "12.4", "12.8", "13"]
GOLDEN_TURNS = 3  # versions between which the golden list is shared


def package(version):
    return f"nvidia-cuda-nvrtc-cu12=={version}.*" if version.startswith("12.") else f"nvidia-cuda-nvrtc=={version}.*"


def fetch(version):
    """The folder of a version's library."""
    folder = ROOT / "build/nvrtc" / version
    found = sorted(folder.glob("nvidia/*/lib/libnvrtc.so.*"))
    if not found:
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest"]
        subprocess.run([*command, str(folder), package(version)], check=True)
        for wheel in folder.glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(folder)
        found = sorted(folder.glob("nvidia/*/lib/libnvrtc.so.*"))
    if not found:
        raise SystemExit(f"{package(version)} holds no libnvrtc.so")
    return found[0].parent


def kernels_of(program):
    return json.loads(subprocess.run([program, "list"], check=True, capture_output=True, text=True).stdout)


def share(kernels, place, versions, every):
    """The kernels that version number `place` compiles."""
    family, golden, pairwise = ([kernel for kernel in kernels if kernel["list"] == name][::every]
                                for name in ("family", "golden", "pairwise"))
    return family + golden[place % GOLDEN_TURNS::GOLDEN_TURNS] + pairwise[place::versions]


def compile_all(program, library, kernels, jobs):
    """Facts of each kernel, by digest."""
    environment = {**os.environ, "FA_NVRTC_PATH": str(library)}
    with tempfile.TemporaryDirectory(prefix="fa_nvrtc_") as folder:
        digests = "".join(kernel["digest"] + "\n" for kernel in kernels)
        subprocess.run([program, "compile", folder, str(jobs)], input=digests, text=True, check=True, env=environment)
        return {path.stem: json.loads(path.read_text()) for path in pathlib.Path(folder).glob("*.json")}


def outcome(facts):
    if "error" in facts:
        return "not served" if "cannot compile for" in facts["error"] else "failed"
    return "spills" if facts["local_bytes"] > 0 else "clean"


def spilling(results):
    """Markdown: the kernels that spill, by version, with the greatest number of bytes of a thread."""
    lines = ["| NVRTC | Architecture | Kernel | Spill | Bytes, at most |", "|---|---|---|---|---|"]
    for version, items in results.items():
        spills = collections.defaultdict(list)
        for item in items:
            if item["outcome"] == "spills":
                spills[item["target"], item["kernel"]].append(item["local_bytes"])
        for (target, kernel), found in sorted(spills.items()):
            lines.append(f"| {version} | {target} | {kernel.removeprefix('fa_')} | {len(found)} | {max(found)} |")
    return "\n".join(lines) + "\n"


def table(results):
    """Markdown: kernels by version and architecture."""
    lines = ["| NVRTC | Architecture | Compiled | Of these spill | Failed |", "|---|---|---|---|---|"]
    for version, items in results.items():
        for target in sorted({item["target"] for item in items}, key=lambda name: int("".join(filter(str.isdigit, name)))):
            count = collections.Counter(item["outcome"] for item in items if item["target"] == target)
            if count["not served"]:
                lines.append(f"| {version} | {target} | not served | | |")
                continue
            compiled = count["clean"] + count["spills"]
            lines.append(f"| {version} | {target} | {compiled} | {count['spills']} | {count['failed']} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=DEFAULT_VERSIONS, metavar="VERSION")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--program", default=str(ROOT / "build/release/tests/sass/fa_spec_cubins"))
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--markdown", type=pathlib.Path)
    arguments = parser.parse_args()
    kernels = kernels_of(arguments.program)
    results = {}
    for place, version in enumerate(arguments.versions):
        chosen = share(kernels, place, len(arguments.versions), arguments.every)
        facts = compile_all(arguments.program, fetch(version), chosen, arguments.jobs)
        missing = [kernel for kernel in chosen if kernel["digest"] not in facts]
        if missing:
            raise SystemExit(f"{version}: {len(missing)} kernels have no result")
        results[version] = [{**kernel, **facts[kernel["digest"]], "outcome": outcome(facts[kernel["digest"]])}
                            for kernel in chosen]
        count = collections.Counter(item["outcome"] for item in results[version])
        print(f"NVRTC {version}: " + ", ".join(f"{number} {name}" for name, number in sorted(count.items())), flush=True)
        for item in results[version]:
            if item["outcome"] == "failed":
                print(f"  failed: {item['spec']}\n    {item['error']}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    if arguments.markdown:
        arguments.markdown.write_text(table(results) + "\n" + spilling(results))
    failed = sum(item["outcome"] == "failed" for items in results.values() for item in items)
    served = sum(item["outcome"] in ("clean", "spills") for items in results.values() for item in items)
    print(f"nvrtc: {served} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
