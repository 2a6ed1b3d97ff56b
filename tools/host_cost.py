#!/usr/bin/env python3
"""What a warm call costs the host, build by build in turns, with the stand-in driver of the tests.

    tools/host_cost.py build/release ../before/build/release

Of each build it runs `tools/fa bench --host-cost`, once with a driver that writes down what it is asked for, and once
with one that does nothing: what is left then is the library's own code. A turn is a process of a fraction of a second,
so that whatever else a machine does meets all builds alike. Printed are the least and the median of the turns' medians.
The driver is that of the first build. Needs no GPU; builds of other commits may lack an operation.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess


def cost(build: pathlib.Path, operation: str, environment: dict[str, str]) -> float | None:
    """Microseconds a call, the median of a turn; None where the build cannot measure it."""
    command = [build / "tools" / "fa", "bench", "--host-cost", "--op", operation, "--json"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return json.loads(result.stdout)["median_us"] if result.returncode == 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("builds", nargs="+", type=pathlib.Path)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--ops", default="forward,backward,decode")
    arguments = parser.parse_args()
    driver = arguments.builds[0].resolve() / "tests" / "fake_driver" / "lib"
    kinds = {"with the stand-in driver": "", "own code": "idle"}
    costs: dict[tuple[str, str, pathlib.Path], list[float]] = {}
    for _ in range(arguments.turns):
        for operation in arguments.ops.split(","):
            for kind, mode in kinds.items():
                for build in arguments.builds:
                    environment = os.environ | {
                        "LD_LIBRARY_PATH": str(driver),
                        "FA_NVRTC_PATH": str(driver / "libfa_fake_nvrtc.so"),
                        "FA_FAKE_DRIVER": mode,
                        "FA_TUNE": "off",
                        "FA_CACHE_DIR": "/nonexistent",
                    }
                    found = cost(build, operation, environment)
                    if found is not None:
                        costs.setdefault((operation, kind, build), []).append(found)
    print(f"{'us a call':<36} {'least':>8} {'median':>8}")
    for (operation, kind, build), values in costs.items():
        print(f"{operation}, {kind:<26} {min(values):8.3f} {statistics.median(values):8.3f}  {build}")


if __name__ == "__main__":
    main()
