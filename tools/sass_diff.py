#!/usr/bin/env python3
"""Tells whether a change of the templates changes machine code, kernel by kernel; needs NVRTC and no GPU.

    tools/sass_diff.py OLD NEW [--filter REGEX] [--jobs N]

OLD and NEW are folders of templates, commits, or fa_spec_cubins programs of two builds. A folder is compiled with the
units of --build, so that it must take the same launch parameters and shared memory; a commit is built with its own. The
kernels are those of the lists of the tests (tests/unit/render/spec_list.hpp) and of the tuned tables. For each of them:

    source      nothing that it is compiled from differs
    identical   the instructions are the same, byte for byte but for addresses
    renamed     the same after renaming registers
    equal       other instructions, but as many of those that count (HGMMA, HMMA, MUFU, UTMA*, barriers, local loads and
                stores, USETMAXREG), as many registers and local bytes, main loops within 1 %, no new advice of ptxas
    different   anything else; the exit code is 1

nvdisasm is FA_NVDISASM, or is looked for in PATH, in CUDA_HOME and in Python packages: those of NVIDIA (pip install
nvidia-cuda-nvdisasm) and Triton. `tools/sass_diff.py --find-nvdisasm` prints where it is, and nothing where there is none.
"""

import argparse
import collections
import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

from find_nvdisasm import find_nvdisasm

STATES = ["source", "identical", "renamed", "equal", "different"]
LOOP_TOLERANCE = 0.01
COUNTED = {
    "HGMMA": r"HGMMA", "HMMA": r"HMMA", "MUFU": r"MUFU", "UTMA": r"UTMA\w*", "USETMAXREG": r"USETMAXREG",
    "barriers": r"(BAR|SYNCS|BARRIER|MEMBAR|FENCE|WARPSYNC|UCGABAR\w*|ACQBULK|ARRIVES|DEPBAR|WARPGROUP)",
    "local": r"(LDL|STL)",
}


# ---- instructions ----

class Instruction:
    """One line of a listing: `guard` is its predicate, `operands` are as they stand."""

    def __init__(self, guard, opcode, operands):
        self.guard, self.opcode, self.operands = guard, opcode, operands
        self.name = opcode.split(".")[0]


def split_operands(text):
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += c in "[({"
        depth -= c in "])}"
        if c == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    parts.append(text[start:].strip())
    return [part for part in parts if part]


class Listing:
    """The instructions of one function; labels by the instruction that they stand before."""

    def __init__(self):
        self.instructions = []
        self.labels = {}

    def target(self, instruction):
        for operand in instruction.operands:
            match = re.fullmatch(r"`\((\.\w+)\)", operand)
            if match and match[1] in self.labels:
                return self.labels[match[1]]
        return None

    def masked(self, operand):
        """An operand without the numbers of registers, and with a place for each label."""
        operand = re.sub(r"`\((\.\w+)\)", lambda m: f"@{self.labels.get(m[1], m[1])}", operand)
        return REGISTER.sub(lambda m: m[1] + "_", operand)

    def shape(self):
        return [(REGISTER.sub(lambda m: m[1] + "_", i.guard), i.opcode, tuple(map(self.masked, i.operands)))
                for i in self.instructions]

    def text(self):
        label = lambda m: f"@{self.labels.get(m[1], m[1])}"
        return [(i.guard, i.opcode, tuple(re.sub(r"`\((\.\w+)\)", label, o) for o in i.operands))
                for i in self.instructions]


REGISTER = re.compile(r"\b(UR|UP|R|P|B)(\d+)\b")
LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
LABEL = re.compile(r"^(\.\w+):\s*$")
FUNCTION = re.compile(r"^\.text\.(\S+):\s*$")


def parse(text):
    """The functions of a listing of nvdisasm -c."""
    functions, current, pending = {}, None, []
    for line in text.splitlines():
        if match := FUNCTION.match(line):
            current = functions.setdefault(match[1], Listing())
            pending = []
        elif current is not None and (match := LABEL.match(line)):
            pending.append(match[1])
        elif current is not None and (match := LINE.match(line)):
            for label in pending:
                current.labels[label] = len(current.instructions)
            pending = []
            current.instructions.append(Instruction(match[1] or "", match[2], split_operands(match[3])))
    return functions


def without_padding(listing):
    """Behind the last instruction a function is filled up."""
    while listing.instructions and listing.instructions[-1].name in ("NOP", "BRA"):
        if listing.instructions[-1].name == "BRA":
            if listing.target(listing.instructions[-1]) != len(listing.instructions) - 1:
                break
        listing.instructions.pop()
    return listing


# ---- renaming ----

NO_RESULT = re.compile(r"^(ST|RED|BRA|EXIT|BAR|BSSY|BSYNC|UTMA|UBLKCP|WARPSYNC|NOP|MEMBAR|FENCE|DEPBAR|CCTL|ERRBAR|RET|"
                       r"CALL|JMP|BRX|KILL|NANOSLEEP|LDGSTS|USETMAXREG|WARPGROUP|ACQBULK|LDGDEPBAR|YIELD|PREEXIT)")
PLAIN = re.compile(r"^(UR|UP|R|P|B)(\d+)(\.\w+)*$")


def results(instruction):
    """How many operands in front are written."""
    if NO_RESULT.match(instruction.name) or not instruction.operands:
        return 0
    first = instruction.operands[0]
    if not re.match(r"^(UR|UP|R|P)(\d+|Z|T)\b", first):
        return 0
    second = instruction.operands[1] if len(instruction.operands) > 1 else ""
    if re.match(r"^U?P(\d+|T)$", first):
        return 2 if re.match(r"^(UR|UP|R|P)(\d+|Z|T)$", second) else 1
    return 2 if re.match(r"^U?P\d+$", second) else 1


def width(instruction):
    """How many registers a result has."""
    opcode = instruction.opcode
    if instruction.name == "HGMMA":
        columns = int(re.search(r"\.64x(\d+)x", opcode)[1])
        return columns // (2 if ".F32" in opcode else 4)
    if instruction.name == "HMMA":
        return 4 if ".F32" in opcode else 2
    if match := re.search(r"\.MT?\d+\.([24])$", opcode):
        return int(match[1])
    if ".128" in opcode:
        return 4
    return 2 if re.search(r"\.64\b|WIDE", opcode) or instruction.name in ("DADD", "DMUL", "DFMA") else 1


class Renaming:
    """Which register of one listing is which of the other. What a result of unknown width has filled is not known, and
    agrees with anything once."""

    def __init__(self, pairs=None):
        self.forth = dict(pairs or {})
        self.back = {b: a for a, b in self.forth.items()}

    def forget(self, a=None, b=None):
        if a is not None and a in self.forth:
            del self.back[self.forth.pop(a)]
        if b is not None and b in self.back:
            del self.forth[self.back.pop(b)]

    def bind(self, a, b):
        self.forget(a=a)
        self.forget(b=b)
        self.forth[a], self.back[b] = b, a

    def agrees(self, a, b):
        if a in self.forth or b in self.back:
            return self.forth.get(a) == b
        self.bind(a, b)
        return True

    def meet(self, other):
        return Renaming({a: b for a, b in self.forth.items() if other.forth.get(a) == b})


def registers(text):
    return [(m[1], int(m[2])) for m in REGISTER.finditer(text)]


def step(renaming, old, new):
    """Follows one pair of instructions; False when they read different values."""
    count = results(old)
    reads = [(old.guard, new.guard)] + list(zip(old.operands[count:], new.operands[count:]))
    for a, b in reads:
        for pair in zip(registers(a), registers(b)):
            if not renaming.agrees(*pair):
                return False
    for a, b in zip(old.operands[:count], new.operands[:count]):
        first, second = PLAIN.match(a), PLAIN.match(b)
        if not first or not second:
            continue
        wide = width(old) if first[1] in ("R", "UR") else 1
        for i in range(wide):
            renaming.bind((first[1], int(first[2]) + i), (second[1], int(second[2]) + i))
    return True


def renames(old, new):
    """Whether two listings of the same shape compute the same after renaming registers. Follows each path once."""
    arriving = {}
    state = Renaming()
    for i, (a, b) in enumerate(zip(old.instructions, new.instructions)):
        if i in arriving:
            state = arriving[i].meet(state) if state is not None else arriving[i]
        if state is None:
            state = Renaming()
        if not step(state, a, b):
            return False
        target = old.target(a)
        if a.name in ("BRA", "BSSY") and target is not None and target > i:
            leaving = Renaming(state.forth)
            arriving[target] = arriving[target].meet(leaving) if target in arriving else leaving
        if a.name in ("BRA", "EXIT", "RET", "BRX") and not a.guard and len(a.operands) <= 1:
            state = None
    return True


# ---- counts ----

def counts(listing):
    result = collections.Counter()
    for instruction in listing.instructions:
        for name, pattern in COUNTED.items():
            result[name] += re.fullmatch(pattern, instruction.name) is not None
    return result


def main_loops(listing):
    """Instructions of each innermost loop with products on the tensor cores, the longest first."""
    products = {x.name for x in listing.instructions if x.name in ("HGMMA", "HMMA")}
    product = "HGMMA" if "HGMMA" in products else "HMMA"  # beside wgmma, mma.sync repairs what is rare
    loops = set()
    for i, instruction in enumerate(listing.instructions):
        target = listing.target(instruction)
        if instruction.name == "BRA" and target is not None and target <= i:
            if any(x.name == product for x in listing.instructions[target:i + 1]):
                loops.add((target, i))
    inner = [l for l in loops if not any(o != l and l[0] <= o[0] and o[1] <= l[1] for o in loops)]
    return sorted((end - begin + 1 for begin, end in inner), reverse=True)


def advice(log):
    """What ptxas said, without places and names."""
    lines = [re.sub(r"'[^']*'|\b\d+\b|0x[0-9a-f]+", "_", line).strip() for line in log.splitlines()]
    return collections.Counter(line for line in lines if line)


def differences(old, new):
    """Why two functions are not equal in what counts; empty if they are."""
    found = []
    before, after = counts(old), counts(new)
    found += [f"{name} {before[name]} -> {after[name]}" for name in COUNTED if before[name] != after[name]]
    first, second = main_loops(old), main_loops(new)
    if len(first) != len(second):
        found.append(f"main loops {first} -> {second}")
    else:
        found += [f"main loop of {a} -> {b} instructions" for a, b in zip(first, second)
                  if abs(a - b) > LOOP_TOLERANCE * a]
    return found


def compare_listings(old, new):
    """(state, reasons) of two parsed cubins."""
    if old.keys() != new.keys() and len(old) == len(new) == 1:  # an entry point under another name
        new = dict(zip(old, new.values()))
    if old.keys() != new.keys():
        return "different", [f"functions {sorted(old)} -> {sorted(new)}"]
    state, reasons = "identical", []
    for name in old:
        a, b = without_padding(old[name]), without_padding(new[name])
        if a.text() == b.text():
            continue
        if a.shape() == b.shape() and renames(a, b):
            state = max(state, "renamed", key=STATES.index)
            continue
        found = differences(a, b)
        state = max(state, "different" if found else "equal", key=STATES.index)
        reasons += found or [f"{len(a.instructions)} -> {len(b.instructions)} instructions"]
    return state, reasons


# ---- sides ----

class Side:
    """A program that lists and compiles kernels, and the templates that it is given."""

    def __init__(self, what, options):
        self.environment = dict(os.environ)
        self.environment.pop("FA_TEMPLATE_DIR", None)
        if os.path.isdir(what):
            if not any(pathlib.Path(what).rglob("*.cuh")):
                sys.exit(f"sass_diff: {what} has no .cuh file; a folder of templates is accepted")
            self.program = program_of(options.build)
            self.environment["FA_TEMPLATE_DIR"] = os.path.abspath(what)
        elif os.access(what, os.X_OK):
            self.program = os.path.abspath(what)
        else:
            self.program = build_commit(what, options)
        self.kernels = json.loads(self.run(["list"]))

    def run(self, arguments, stdin=None):
        done = subprocess.run([self.program, *arguments], env=self.environment, input=stdin, text=True,
                              stdout=subprocess.PIPE)
        if done.returncode != 0:
            sys.exit(f"sass_diff: {self.program} failed")
        return done.stdout

    def compile(self, digests, options):
        missing = [d for d in digests if not os.path.exists(os.path.join(options.cache, d + ".json"))]
        chunk = 8 * max(options.jobs, 1)
        for i in range(0, len(missing), chunk):
            show(f"compiling {i} of {len(missing)}")
            self.run(["compile", options.cache, str(options.jobs)], "\n".join(missing[i:i + chunk]) + "\n")


def program_of(build):
    program = os.path.join(build, "tests", "sass", "fa_spec_cubins")
    if not os.access(program, os.X_OK):
        sys.exit(f"sass_diff: {program} is not there; cmake --build {build} --target fa_spec_cubins makes it")
    return os.path.abspath(program)


def build_commit(commit, options):
    """Builds the program of a commit in a worktree under the cache, once."""
    resolved = subprocess.run(["git", "rev-parse", "--verify", "--quiet", commit + "^{commit}"], text=True,
                              stdout=subprocess.PIPE)
    if resolved.returncode != 0:
        sys.exit(f"sass_diff: {commit} is no folder, no program and no commit")
    tree = os.path.join(options.cache, "commits", resolved.stdout.strip())
    build = os.path.join(tree, "build", "sass")
    program = os.path.join(build, "tests", "sass", "fa_spec_cubins")
    if os.access(program, os.X_OK):
        return program
    show(f"building {commit}")
    launcher = [f"-DCMAKE_{language}_COMPILER_LAUNCHER=ccache" for language in ("C", "CXX") if shutil.which("ccache")]
    steps = [["cmake", "-S", tree, "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DFA_BUILD_EXAMPLES=OFF",
              *launcher],
             ["cmake", "--build", build, "-j", str(options.jobs), "--target", "fa_spec_cubins"]]
    if not os.path.isdir(tree):
        subprocess.run(["git", "worktree", "prune"], check=True)
        steps.insert(0, ["git", "worktree", "add", "--detach", tree, resolved.stdout.strip()])
    for arguments in steps:
        done = subprocess.run(arguments, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if done.returncode != 0:
            sys.exit(f"sass_diff: {' '.join(arguments)} failed:\n{done.stdout[-3000:]}")
    return program


def matched(old, new):
    """Pairs of kernels: by canonical text, and where that has changed by name and place."""
    by_spec = {kernel["spec"]: kernel for kernel in new}
    pairs, left = [], []
    for kernel in old:
        other = by_spec.pop(kernel["spec"], None)
        if other is not None:
            pairs.append((kernel, other))
        else:
            left.append(kernel)
    by_name = collections.defaultdict(list)
    for kernel in by_spec.values():
        by_name[kernel["list"], kernel["name"]].append(kernel)
    alone = []
    for kernel in left:
        others = by_name[kernel["list"], kernel["name"]]
        if others:
            pairs.append((kernel, others.pop(0)))
        else:
            alone.append("only old: " + kernel["spec"])
    alone += ["only new: " + kernel["spec"] for others in by_name.values() for kernel in others]
    return pairs, alone


def disassemble(nvdisasm, digest, cache):
    listing = subprocess.run([nvdisasm, "-c", os.path.join(cache, digest + ".cubin")], text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if listing.returncode != 0:
        raise RuntimeError(f"nvdisasm: {listing.stderr.strip()}")
    return parse(listing.stdout)


def compare_pair(task):
    """(state, reasons) of two digests in the cache."""
    old, new, cache, nvdisasm = task
    if old == new:
        return "source", []
    facts = []
    for digest in (old, new):
        with open(os.path.join(cache, digest + ".json"), encoding="utf-8") as file:
            facts.append(json.load(file))
    if "error" in facts[0] or "error" in facts[1]:
        if "error" in facts[0] and "error" in facts[1]:
            return "equal", ["neither compiles: " + facts[1]["error"]]
        return "different", [side + " does not compile: " + fact["error"]
                             for side, fact in zip(("old", "new"), facts) if "error" in fact]
    state, reasons = compare_listings(disassemble(nvdisasm, old, cache), disassemble(nvdisasm, new, cache))
    more = [f"{name} {facts[0][name]} -> {facts[1][name]}" for name in ("registers", "local_bytes", "static_shared")
            if facts[0][name] != facts[1][name]]
    more += ["new advice: " + line for line in advice(facts[1]["log"]) - advice(facts[0]["log"])]
    return ("different", reasons + more) if more else (state, reasons)


# ---- the command ----

def show(text):
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def compare(options):
    nvdisasm = find_nvdisasm()
    if nvdisasm is None:
        print("sass_diff: no nvdisasm; pip install nvidia-cuda-nvdisasm, or name FA_NVDISASM or CUDA_HOME")
        return 77
    os.makedirs(options.cache, exist_ok=True)
    old, new = Side(options.old, options), Side(options.new, options)
    pairs, alone = matched(old.kernels, new.kernels)
    wanted = re.compile(options.filter)
    pairs = [p for p in pairs if any(wanted.search(k["name"] + " " + k["spec"]) for k in p)]
    alone = [line for line in alone if wanted.search(line)]
    changed = [p for p in pairs if p[0]["digest"] != p[1]["digest"]]
    old.compile([a["digest"] for a, _ in changed], options)
    new.compile([b["digest"] for _, b in changed], options)
    tasks = [(a["digest"], b["digest"], options.cache, nvdisasm) for a, b in pairs]
    with concurrent.futures.ProcessPoolExecutor(max(options.jobs, 1)) as pool:
        outcomes = list(pool.map(compare_pair, tasks, chunksize=4))
    show("")
    return report(pairs, outcomes, alone, options)


def report(pairs, outcomes, alone, options):
    total = collections.Counter(state for state, _ in outcomes)
    for state in ("equal", "different") if not options.verbose else STATES:
        for (a, _), (found, reasons) in zip(pairs, outcomes):
            if found == state:
                print(f"{state:<10} {a['spec']}")
                if reasons:
                    print("           " + "; ".join(reasons))
    for line in alone:
        print(line)
    print(f"{len(pairs)} kernels: " + ", ".join(f"{total[state]} {state}" for state in STATES))
    if options.json:
        rows = [{"spec": b["spec"], "name": b["name"], "state": state, "reasons": reasons}
                for (_, b), (state, reasons) in zip(pairs, outcomes)]
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"kernels": rows, "unmatched": alone}, file, indent=1)
    return 1 if total["different"] or not pairs else 0


# ---- self-test ----

LOOP = """
.text.f:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   S2R R3, SR_TID.X ;
.L_x_1:
        /*0020*/                   HGMMA.64x16x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT ;
        /*0030*/                   FMUL R5, R24, R3 ;
        /*0040*/                   MUFU.EX2 R6, R5 ;
        /*0050*/                   FADD R7, R6, R5 ;
        /*0060*/                   ISETP.NE.AND P0, PT, R7, RZ, PT ;
        /*0070*/              @!P0 BRA `(.L_x_2) ;
        /*0080*/                   IADD3 R3, R3, 0x1, RZ ;
.L_x_2:
%s
        /*0090*/               @P0 BRA `(.L_x_1) ;
        /*00a0*/                   STG.E [R2.64], R7 ;
        /*00b0*/                   EXIT ;
.L_x_3:
        /*00c0*/                   BRA `(.L_x_3) ;
"""
FILLER = "\n".join("        /*0100*/                   FADD R9, R9, R9 ;" for _ in range(400))


def renamed_text(text, names):
    return REGISTER.sub(lambda m: names.get(m[0], m[0]), text)


def self_test():
    base = LOOP % FILLER
    failures = []

    def expect(what, text, state, reason=""):
        found, reasons = compare_listings(parse(base), parse(text))
        if found != state or reason not in "; ".join(reasons):
            failures.append(f"{what}: {found} {reasons}, not {state} {reason}")

    expect("the same", base, "identical")
    expect("other labels", base.replace(".L_x_2", ".L_x_77"), "identical")
    expect("another end", base + "        /*00d0*/                   NOP ;\n", "identical")
    swap = {"R5": "R6", "R6": "R5", "R24": "R40", "P0": "P3", "R9": "R10"}
    expect("renamed", renamed_text(base, swap), "renamed")
    expect("two become one", renamed_text(base, {"R5": "R6"}), "equal")
    expect("another source", base.replace("FADD R7, R6, R5", "FADD R7, R5, R6"), "equal")
    expect("another predicate", base.replace("@!P0 BRA", "@P0 BRA"), "equal")
    expect("another number", base.replace("0x1,", "0x2,"), "equal")
    expect("another target", base.replace("@P0 BRA `(.L_x_1)", "@P0 BRA `(.L_x_2)"), "different", "main loops")
    expect("one more exponential", base.replace("MUFU.EX2 R6, R5 ;", "MUFU.EX2 R6, R5 ;\n /*0041*/ MUFU.EX2 R6, R6 ;"),
           "different", "MUFU 1 -> 2")
    expect("one product less", base.replace("HGMMA.64x16x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT", "FADD R24, R3, R3"),
           "different", "HGMMA 1 -> 0")
    for name, line in {"UTMA": "UTMALDG.4D [UR8], [UR4]", "barriers": "BAR.SYNC.DEFER_BLOCKING 0x1, 0x100",
                       "local": "STL [R1], R3", "USETMAXREG": "USETMAXREG.DEALLOC.CTAPOOL 0x18"}.items():
        expect(name, base.replace("S2R R3, SR_TID.X ;", f"S2R R3, SR_TID.X ;\n /*0011*/ {line} ;"), "different",
               f"{name} 0 -> 1")
    line = "        /*0100*/                   FADD R9, R9, R9 ;\n"
    expect("a loop half a percent longer", LOOP % (2 * line + FILLER), "equal", "instructions")
    expect("a loop two percent longer", LOOP % (8 * line + FILLER), "different", "main loop of")
    expect("another name", base.replace(".text.f:", ".text.g:"), "identical")
    expect("one function more", base + base.replace(".text.f:", ".text.g:"), "different", "functions")

    with tempfile.TemporaryDirectory() as folder:
        facts = {"registers": 168, "local_bytes": 0, "static_shared": 0, "log": ""}

        def facts_differ(change):
            for name, value in (("a", facts), ("b", {**facts, **change})):
                with open(os.path.join(folder, name + ".json"), "w", encoding="utf-8") as file:
                    json.dump(value, file)
                with open(os.path.join(folder, name + ".cubin"), "w", encoding="utf-8") as file:
                    file.write(base)
            cat = os.path.join(folder, "cat")  # a disassembler of texts
            with open(cat, "w", encoding="utf-8") as file:
                file.write('#!/bin/sh\nexec cat "$2"\n')
            os.chmod(cat, 0o700)
            return compare_pair(("a", "b", folder, cat))

        for change, state, reason in (
                ({}, "identical", ""), ({"registers": 176}, "different", "registers 168 -> 176"),
                ({"local_bytes": 8}, "different", "local_bytes 0 -> 8"),
                ({"log": "ptxas info : (C7510) Potential Performance Loss: wgmma serialized in 'f'"}, "different",
                 "new advice: ptxas info"),
                ({"error": "no"}, "different", "new does not compile: no")):
            found, reasons = facts_differ(change)
            if found != state or reason not in "; ".join(reasons):
                failures.append(f"{change}: {found} {reasons}")
    pairs, alone = matched([{"spec": "a", "list": "l", "name": "n"}, {"spec": "b", "list": "l", "name": "n"}],
                           [{"spec": "b", "list": "l", "name": "n"}, {"spec": "c", "list": "l", "name": "n"},
                            {"spec": "d", "list": "l", "name": "m"}])
    if [(a["spec"], b["spec"]) for a, b in pairs] != [("b", "b"), ("a", "c")] or alone != ["only new: d"]:
        failures.append(f"matched: {pairs} {alone}")
    rescue = LOOP.replace("HGMMA.64x16x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT", "HMMA.16816.F32 R24, R4, R8, RZ") % ""
    nested = parse(base.replace("EXIT ;", "EXIT ;\n" + rescue.replace(".text.f:", "").replace("L_x_", "L_y_")))
    if main_loops(nested["f"]) != main_loops(parse(base)["f"]) or len(main_loops(parse(rescue)["f"])) != 1:
        failures.append(f"main loops: {main_loops(nested['f'])}")
    for failure in failures:
        print(failure)
    print("self-test:", "failed" if failures else "passed")
    return 1 if failures else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", nargs="?")
    parser.add_argument("new", nargs="?")
    parser.add_argument("--filter", default="", help="a regular expression that name and canonical text are searched for")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one a CPU)")
    parser.add_argument("--build", default="build/release", help="whose fa_spec_cubins compiles folders of templates")
    parser.add_argument("--cache", default=os.path.join(tempfile.gettempdir(), f"fa_sass_diff_{os.getuid()}"),
                        help="folder of cubins and of builds of commits")
    parser.add_argument("--json", help="a file for all kernels and what was found")
    parser.add_argument("--verbose", action="store_true", help="print identical and renamed kernels too")
    parser.add_argument("--find-nvdisasm", action="store_true", help="print where nvdisasm is, and do nothing else")
    parser.add_argument("--self-test", action="store_true", help="see that differences are found")
    options = parser.parse_args()
    if options.self_test:
        return self_test()
    if options.find_nvdisasm:
        found = find_nvdisasm()
        print(found or "", end="\n" if found else "")
        return 0 if found else 77
    if options.new is None:
        parser.error("OLD and NEW are needed")
    options.cache = os.path.abspath(options.cache)
    return compare(options)


if __name__ == "__main__":
    sys.exit(main())
