#!/usr/bin/env python3
"""Starts a program once for each GPU of this machine, with the variables that ranks.hpp reads:

    launch.py 2 build/release/examples/fa_example_two_gpus
"""

import os
import subprocess
import sys
import tempfile
import time


def run(count: int, command: list[str], grace: float = 30) -> int:
    """The exit status of the first rank that fails; it ends the others, once they have had `grace` seconds to say why."""
    processes: list[subprocess.Popen] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(count):
                variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count,
                             "FA_RENDEZVOUS": os.path.join(folder, "nccl_id")}
                environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
                processes.append(subprocess.Popen(command, env=environment))
            failed, status = None, 0
            while any(process.poll() is None for process in processes):
                codes = [process.poll() for process in processes]
                if failed is None and any(codes):
                    failed, status = time.monotonic(), next(code for code in codes if code)
                if failed is not None and time.monotonic() - failed > grace:
                    break
                time.sleep(0.05)
            return status or next((code for process in processes if (code := process.poll())), 0)
        finally:  # also where this program is interrupted, or a process could not be started
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()


def main() -> int:
    if len(sys.argv) < 3 or not sys.argv[1].isdigit() or int(sys.argv[1]) < 1:
        print(__doc__, file=sys.stderr)
        return 2
    status = run(int(sys.argv[1]), sys.argv[2:])
    return status if status >= 0 else 128 - status  # of one that a signal has ended, as shells say it


if __name__ == "__main__":
    sys.exit(main())
