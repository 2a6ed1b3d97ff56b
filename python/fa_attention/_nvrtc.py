"""Where NVRTC is, the compiler that the library opens when a kernel has to be compiled for a GPU.

Places, in this order: the nvidia-cuda-nvrtc wheel, PyTorch's own, and what the library's own search finds (an NVRTC that
the process has loaded, the dynamic loader, CUDA toolkits). FA_NVRTC_PATH or `set_nvrtc_path` end the search.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from pathlib import Path
from typing import Callable, Iterable, Optional

_WHEEL_FOLDERS = ("cu13/lib", "cuda_nvrtc/lib")
_SONAMES = ("libnvrtc.so.13", "libnvrtc.so.12")


def _package_folders(name: str) -> list[Path]:
    """The folders of a package that is installed, without importing it."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return []
    return [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []


def _wheel() -> Optional[Path]:
    for folder in _package_folders("nvidia"):
        for part in _WHEEL_FOLDERS:
            for soname in _SONAMES:
                if (folder / part / soname).is_file():
                    return folder / part / soname
    return None


def _of_pytorch() -> Optional[Path]:
    for folder in _package_folders("torch"):
        found = [file for file in sorted((folder / "lib").glob("libnvrtc*.so*")) if "builtins" not in file.name]
        if found:
            return found[0]
    return None


class Places:
    """The places that were not tried yet, and what became of the others. `use` hands a path to the library."""

    def __init__(self, use: Callable[[bytes], None]) -> None:
        self._use = use
        self._lock = threading.Lock()
        self._left: Optional[list[tuple[str, Callable[[], Optional[Path]]]]] = None
        self.report: list[str] = []

    def start(self) -> None:
        """Names the first place; the file is opened when it is needed."""
        with self._lock:
            if self._left is None:
                self._left = [] if os.environ.get("FA_NVRTC_PATH") else [
                    ("the nvidia-cuda-nvrtc wheel", _wheel), ("PyTorch's own", _of_pytorch), ("the system's", lambda: None)]
                self._next()

    def order(self, path: bytes) -> None:
        """The user's path, which no other follows; empty restores the search."""
        with self._lock:
            self._left = [] if path else None
            self.report = []
            self._use(path)

    def next(self, problem: str) -> bool:
        """Names the next place, after the one before had a problem; False where there is none."""
        with self._lock:
            if self.report and problem:
                self.report[-1] += f" ({problem.strip()})"
            return self._next()

    def _next(self) -> bool:
        while self._left:
            name, find = self._left.pop(0)
            file = find()
            if file is not None or not self._left:
                self._use(os.fsencode(file) if file is not None else b"")
                self.report.append(f"{name}: {file if file is not None else 'the search of the library'}")
                return True
            self.report.append(f"{name}: not installed")
        return False


def explain(message: str, report: Iterable[str]) -> str:
    """The library's message, and what Python looked at."""
    lines = "".join(f"\n  {line}" for line in report)
    return (message + "\nPython packages that were looked at:" + lines + "\n`pip install nvidia-cuda-nvrtc` (of CUDA 12: "
            "nvidia-cuda-nvrtc-cu12) installs one; fa_attention.set_nvrtc_path names one.") if lines else message
