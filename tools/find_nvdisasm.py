"""Where nvdisasm is: FA_NVDISASM names it, or it is in PATH, in a CUDA toolkit or in a Python package."""

import os
import shutil
import sys

PACKAGES = [("nvidia", "cu13"), ("nvidia", "cuda_nvdisasm"), ("triton", "backends", "nvidia")]


def find_nvdisasm():
    named = os.environ.get("FA_NVDISASM")
    if named:
        return named if os.access(named, os.X_OK) else sys.exit(f"FA_NVDISASM = {named}: no program is there")
    places = [shutil.which("nvdisasm")]
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            places.append(os.path.join(os.environ[variable], "bin", "nvdisasm"))
    places.append("/usr/local/cuda/bin/nvdisasm")
    places += [os.path.join(folder, *package, "bin", "nvdisasm") for folder in sys.path for package in PACKAGES]
    return next((place for place in places if place and os.access(place, os.X_OK)), None)
