#!/usr/bin/env python3
"""Compiles kernels of every family with several versions of NVRTC; needs no GPU.

    tools/nvrtc_versions.py [--whole] [--every N] [--jobs N] [--json FILE] [--markdown FILE] [VERSION...]
    tools/nvrtc_versions.py --self-test

VERSIONs are those of the wheels on PyPI, by default 12.0 12.4 12.8 13. They are fetched into build/nvrtc, once. The
kernels are those of fa_spec_cubins (build/release/tests/sass). Each version compiles the family list, and of the golden
and the pairwise list a pairwise cover: every two values of different fields that a kernel of an architecture which the
version knows has, meet in one that it compiles. --whole compiles all of the golden list by one version of three in turn,
and all of the pairwise list by one of four, instead of the cover. --every N takes each Nth of the lists. A kernel of
which a version does not know the architecture, or the instructions, counts as not served. Anything else that it refuses
is a failure, and the exit code is 1.
"""

import argparse
import collections
import itertools
import json
import os
import pathlib
import resource
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


def of_list(kernels, name, every=1):
    return [kernel for kernel in kernels if kernel["list"] == name][::every]


def share(kernels, place, versions, every):
    """Of the golden and the pairwise list what version number `place` compiles if all versions share them."""
    golden, pairwise = (of_list(kernels, name, every) for name in ("golden", "pairwise"))
    return golden[place % GOLDEN_TURNS::GOLDEN_TURNS] + pairwise[place::versions]


# ---- a pairwise cover ----

def head_dim_class(columns):
    """Head dims fall into the powers of two that they fit in, whole rows of tensor cores and others."""
    return f"{max(64, 1 << (columns - 1).bit_length())}{'' if columns % 16 == 0 else ' in part'}"


def fields_of(kernel):
    """What a kernel is and does, by the fields of its canonical text. Of captured tensors it counts whether they have
    gradients."""
    name, *words = kernel["spec"].split(" ")
    fields = {"kernel": name, **dict(word.split("=", 1) for word in words)}
    for field in {"d_qk", "d_v"} & fields.keys():
        fields[field] = head_dim_class(int(fields[field]))
    if "captures" in fields:
        fields["captures"] = "gradients" if ":grad" in fields["captures"] else "read"
    return fields


def pairs_of(kernels):
    """Every two values of different fields that a kernel's text has, by digest."""
    return {kernel["digest"]: set(itertools.combinations(sorted(fields_of(kernel).items()), 2)) for kernel in kernels}


def cover(candidates, given):
    """Few of `candidates` in which, and in `given`, every pair of values of any candidate is. Returns them, and how many
    pairs they add to those of `given`."""
    pairs = pairs_of(candidates + given)
    wanted = set().union(*(pairs[kernel["digest"]] for kernel in candidates))
    wanted -= set().union(*(pairs[kernel["digest"]] for kernel in given))
    adds = {kernel["digest"]: pairs[kernel["digest"]] & wanted for kernel in candidates}
    left = {digest: set(found) for digest, found in adds.items()}
    chosen, missing = [], set(wanted)
    while missing:
        best = max(left, key=lambda digest: len(left[digest]))
        found = left.pop(best)
        missing -= found
        chosen.append(best)
        for others in left.values():
            others -= found
    # What was taken early may be superfluous behind what came later.
    times = collections.Counter(pair for digest in chosen for pair in adds[digest])
    for digest in chosen[::-1]:
        if all(times[pair] > 1 for pair in adds[digest]):
            times.subtract(adds[digest])
            chosen.remove(digest)
    return [kernel for kernel in candidates if kernel["digest"] in set(chosen)], len(wanted)


def self_test():
    levels = {"arch": ["a", "b"], "d_qk": ["24", "64", "72"], "dropout": ["1", ""], "captures": ["x:f32:1", "y:f16:3", ""]}
    kernels = []
    for values in itertools.product(*levels.values()):
        words = [f"{name}={value}" for name, value in zip(levels, values) if value]
        kernels.append({"spec": " ".join(["forward", *words]), "digest": "/".join(values)})
    few, added = cover(kernels, [])
    pairs = pairs_of(kernels)
    whole = set().union(*pairs.values())
    reached = set().union(*(pairs[kernel["digest"]] for kernel in few))
    # One name of a kernel, two architectures, three classes of head dims, dropout, captures.
    assert len(whole) == added == 2 + 3 + 1 + 1 + 2 * 3 + 2 + 2 + 3 + 3 + 1, added
    assert reached == whole and 6 <= len(few) <= 8, [kernel["spec"] for kernel in few]
    for out in few:  # none of them can be left out
        rest = set().union(*(pairs[kernel["digest"]] for kernel in few if kernel is not out))
        assert rest != whole, out["spec"]
    assert cover(kernels, kernels) == ([], 0)
    more, added = cover(kernels, kernels[:1])
    assert 0 < added < len(whole) and kernels[0] not in more
    print("self-test: passed")
    return 0


# ---- compiling ----

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
    lines = ["| NVRTC | Architecture | Compiled | Of these spill | Not served | Failed |", "|---|---|---|---|---|---|"]
    for version, items in results.items():
        for target in sorted({item["target"] for item in items}, key=lambda name: int("".join(filter(str.isdigit, name)))):
            count = collections.Counter(item["outcome"] for item in items if item["target"] == target)
            compiled = count["clean"] + count["spills"]
            lines.append(f"| {version} | {target} | {compiled} | {count['spills']} | {count['not served']} | {count['failed']} |")
    return "\n".join(lines) + "\n"


def compile_by(version, place, kernels, arguments):
    """Results of a version, and a sentence about its pairs."""
    results = []

    def add(chosen):
        facts = compile_all(arguments.program, fetch(version), chosen, arguments.jobs)
        missing = [kernel for kernel in chosen if kernel["digest"] not in facts]
        if missing:
            raise SystemExit(f"{version}: {len(missing)} kernels have no result")
        results.extend({**kernel, **facts[kernel["digest"]], "outcome": outcome(facts[kernel["digest"]])}
                       for kernel in chosen)

    family = of_list(kernels, "family", arguments.every)
    if arguments.whole:
        add(family + share(kernels, place, len(arguments.versions), arguments.every))
        return results, ""
    others = [kernel for name in ("golden", "pairwise") for kernel in of_list(kernels, name, arguments.every)]
    known = {kernel["target"] for kernel in family}
    probes = list({kernel["target"]: kernel for kernel in others[::-1] if kernel["target"] not in known}.values())
    add(family + probes)
    refused = {item["target"] for item in results} - {item["target"] for item in results if item["outcome"] != "not served"}
    given = [kernel for kernel in family + probes if kernel["target"] not in refused]
    few, pairs = cover([kernel for kernel in others if kernel["target"] not in refused], given)
    add(few)
    return results, f"; {pairs} pairs of values beside those of the families in {len(few)} kernels"


def cpu_seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=DEFAULT_VERSIONS, metavar="VERSION")
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--program", default=str(ROOT / "build/release/tests/sass/fa_spec_cubins"))
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--markdown", type=pathlib.Path)
    parser.add_argument("--self-test", action="store_true")
    arguments = parser.parse_args()
    if arguments.self_test:
        return self_test()
    kernels = kernels_of(arguments.program)
    results = {}
    for place, version in enumerate(arguments.versions):
        fetch(version)
        before = cpu_seconds()
        results[version], pairs = compile_by(version, place, kernels, arguments)
        count = collections.Counter(item["outcome"] for item in results[version])
        print(f"NVRTC {version}: " + ", ".join(f"{number} {name}" for name, number in sorted(count.items())) +
              f"{pairs}; {cpu_seconds() - before:.0f} s of CPU time", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1))
        if arguments.markdown:
            arguments.markdown.write_text(table(results) + "\n" + spilling(results))
        for item in results[version]:
            if item["outcome"] == "failed":
                print(f"  failed: {item['spec']}\n    {item['error']}")
    failed = sum(item["outcome"] == "failed" for items in results.values() for item in items)
    served = sum(item["outcome"] in ("clean", "spills") for items in results.values() for item in items)
    print(f"nvrtc: {served} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
