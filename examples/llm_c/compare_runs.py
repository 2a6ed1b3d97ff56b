#!/usr/bin/env python3
"""Losses and step times of llm.c's runs, build beside build.

    examples/llm_c/compare_runs.py FOLDER --base cudnn --timed 00,01

FOLDER holds what the runs printed, as BUILD-STREAM.log, or BUILD-STREAM-RUN.log where a build ran a stream of tokens more than
once. Differences are paired: of each stream, what a build lost less what the base did, a build's runs of the stream averaged.
Prints their mean, its standard error and their standard deviation, for the training loss of the last step and the validation
loss behind it. The last rows are differences of two runs of one build and stream. --timed names the streams whose runs had the
GPU to themselves: of these come medians of a step, the first ten left out.
"""

import argparse
import collections
import itertools
import math
import pathlib
import re
import statistics

STEP = re.compile(r"^step +(\d+)/(\d+) \| loss +([0-9.naif-]+) .*\| ([0-9.]+) ms \|", re.MULTILINE)
VALIDATION = re.compile(r"^val loss ([0-9.naif-]+)$", re.MULTILINE)
LOSSES = "training", "validation"


def read(path):
    """The losses at the end, and the times of all steps. None where the run has not ended."""
    text = path.read_text()
    steps = STEP.findall(text)
    validation = VALIDATION.findall(text)
    if not steps or steps[-1][0] != steps[-1][1] or len(validation) < 2:
        return None
    return {"training": float(steps[-1][2]), "validation": float(validation[-1])}, [float(step[3]) for step in steps]


def runs_of(folder):
    """build -> stream -> its ended runs."""
    builds = collections.defaultdict(lambda: collections.defaultdict(list))
    for path in sorted(folder.glob("*-*.log")):
        build, stream = path.stem.split("-")[:2]
        run = read(path)
        if run is None:
            print(f"{path.name} has not ended, and is left out")
        else:
            builds[build][stream].append(run)
    return builds


def summary(differences):
    """Mean, its standard error, and standard deviation."""
    deviation = statistics.stdev(differences) if len(differences) > 1 else math.nan
    return statistics.fmean(differences), deviation / math.sqrt(len(differences)), deviation


def paired(builds, base, build, loss):
    """By stream, of both builds' mean over their runs."""
    streams = sorted(builds[base].keys() & builds[build].keys())
    mean = {name: [statistics.fmean(run[0][loss] for run in builds[name][stream]) for stream in streams] for name in (base, build)}
    return [ours - theirs for ours, theirs in zip(mean[build], mean[base])]


def repeated(streams, loss):
    return [second[0][loss] - first[0][loss] for runs in streams.values() for first, second in itertools.combinations(runs, 2)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--base", required=True, metavar="BUILD")
    parser.add_argument("--timed", type=lambda text: text.split(","), default=[], metavar="STREAMS")
    args = parser.parse_args()
    builds = runs_of(args.folder)
    if args.base not in builds or len(builds) < 2:
        raise SystemExit(f"{args.folder} has no ended run of {args.base}, or of no other build")
    for build, streams in sorted(builds.items()):
        medians = [f"{statistics.median(times[10:]):.2f}" for stream in args.timed for _, times in streams.get(stream, [])]
        print(f"{build:<10} {sum(map(len, streams.values())):>3} runs" + (f", step {' '.join(medians)} ms" if medians else ""))
    print(f"{'in thousandths':<28}{'loss':<12}{'n':>4}{'mean':>8}{'error':>8}{'deviation':>11}{'greatest':>10}")
    rows = [(f"{build} less {args.base}", lambda loss, build=build: paired(builds, args.base, build, loss))
            for build in sorted(builds) if build != args.base]
    rows += [(f"{build}, run less run", lambda loss, streams=streams: repeated(streams, loss))
             for build, streams in sorted(builds.items())]
    for name, differences in rows:
        for loss in LOSSES:
            found = [1e3 * each for each in differences(loss)]
            if found:
                mean, error, deviation = summary(found)
                greatest = max(map(abs, found))
                print(f"{name:<28}{loss:<12}{len(found):>4}{mean:>8.2f}{error:>8.2f}{deviation:>11.2f}{greatest:>10.2f}")


if __name__ == "__main__":
    main()
