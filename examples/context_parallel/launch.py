#!/usr/bin/env python3
"""Starts a program once for each GPU of this machine, with the variables that ranks.hpp reads:

    launch.py 2 build/release/examples/fa_example_two_gpus
"""

import os
import subprocess
import sys
import tempfile
import time


def main() -> int:
    if len(sys.argv) < 3 or not sys.argv[1].isdigit() or int(sys.argv[1]) < 1:
        print(__doc__, file=sys.stderr)
        return 2
    count, command = int(sys.argv[1]), sys.argv[2:]
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(count):
            variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count,
                         "FA_RENDEZVOUS": os.path.join(folder, "nccl_id")}
            environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
            processes.append(subprocess.Popen(command, env=environment))
        # The first that fails ends the others, once they have had time to say why.
        failed = None
        while any(process.poll() is None for process in processes):
            if failed is None and any(process.poll() not in (None, 0) for process in processes):
                failed = time.monotonic()
            if failed is not None and time.monotonic() - failed > 30:
                for process in processes:
                    if process.poll() is None:
                        process.terminate()
            time.sleep(0.05)
        codes = [process.returncode for process in processes]
        return next((code for code in codes if code != 0), 0)


if __name__ == "__main__":
    sys.exit(main())
