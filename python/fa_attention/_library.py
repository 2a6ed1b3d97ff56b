"""libfa, opened once: where it is, how its functions are called, and its failures as exceptions."""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path
from typing import Any, Callable, Optional, Union

from . import _abi, _nvrtc
from ._errors import Error, Location, NotFinite, field_names, make_error

_PACKAGE = Path(__file__).resolve().parent
_CHECKOUT = _PACKAGE.parent.parent / "build" / "release"

_STATUS_FUNCTIONS: dict[str, int] = {  # how many arguments
    "fa_create": 3, "fa_forward": 5, "fa_backward": 5, "fa_prepare": 2, "fa_prepare_backward": 2, "fa_workspace_size": 3,
    "fa_prepare_async": 2, "fa_prepare_backward_async": 2, "fa_is_ready": 3, "fa_backward_is_ready": 3,
    "fa_backward_workspace_size": 3, "fa_mask_tiles_size": 3, "fa_backward_mask_tiles_size": 3, "fa_kernel_info_get": 3,
    "fa_backward_kernel_info_get": 3, "fa_cache_counters_get": 2, "fa_find_kernel": 4, "fa_find_backward_kernel": 4,
    "fa_append": 3, "fa_schedule": 4, "fa_schedule_size": 3, "fa_merge": 4, "fa_quantize": 3, "fa_prepare_quantize": 2,
    "fa_dropout_mask": 7, "fa_set_nvrtc_path": 1, "fa_set_log_level": 1, "fa_prepare_shared": 4, "fa_shared_workspace_size": 5,
    "fa_prepare_append": 2, "fa_prepare_merge": 2, "fa_append_kernel_info_get": 3, "fa_merge_kernel_info_get": 3,
    "fa_find_append_kernel": 4, "fa_find_merge_kernel": 4, "fa_last_error_location": 1,
}


class Library:
    """libfa.so at `path`. `fa` is the ctypes library, for the functions that are called often."""

    def __init__(self, path: Union[str, "os.PathLike[str]"]) -> None:
        self.path = os.fspath(path)
        self.fa: Any = ctypes.CDLL(self.path)
        for name in ("fa_last_error_message", "fa_last_error_field", "fa_version"):
            getattr(self.fa, name).restype = ctypes.c_char_p
        self.fa.fa_last_error_field.argtypes = [ctypes.c_char_p]
        for name, count in _STATUS_FUNCTIONS.items():
            getattr(self.fa, name).argtypes = [ctypes.c_void_p] * count
        self.fa.fa_create.argtypes = [ctypes.c_void_p, _abi.Device, ctypes.c_void_p]
        self.fa.fa_destroy.argtypes = [ctypes.c_void_p]
        self.fa.fa_destroy.restype = None
        self.fa.fa_dropout_mask.argtypes = [ctypes.c_void_p, ctypes.c_float, *[ctypes.c_int64] * 4, ctypes.c_void_p]
        self.fa.fa_set_log_level.argtypes = [ctypes.c_int]
        self.fa.fa_set_nvrtc_path.argtypes = [ctypes.c_char_p]
        self.nvrtc = _nvrtc.Places(lambda path: self.call("fa_set_nvrtc_path", path))

    def version(self) -> str:
        text: bytes = self.fa.fa_version()
        return text.decode()

    def last_error(self, status: int) -> Error:
        fields = {name: self.fa.fa_last_error_field(name.encode()).decode() for name in field_names()}
        message = self.fa.fa_last_error_message().decode()
        if status == _abi.NO_COMPILER:
            message = _nvrtc.explain(message, self.nvrtc.report)
        error = make_error(status, message, {name: value for name, value in fields.items() if value})
        if isinstance(error, NotFinite):
            error.location = self.last_location()
        return error

    def last_location(self) -> Optional[Location]:
        at = _abi.ErrorLocation()
        if self.fa.fa_last_error_location(ctypes.byref(at)) != _abi.OK:
            return None
        index = tuple(at.index[i] for i in range(at.index_count))
        return Location(at.tensor.decode(), at.value, at.b, at.h, at.q, at.kv, at.d, index, at.result.decode())

    def failed(self, status: int, again: Callable[[], int]) -> None:
        """Raises what a status other than OK stands for. Where NVRTC could not be opened, `again` is called once more for
        each other place that may have it."""
        error = self.last_error(status)
        while status == _abi.NO_COMPILER and self.nvrtc.next(error.fields.get("tried", "")):
            status = again()
            if status == _abi.OK:
                return
            error = self.last_error(status)
        raise error

    def call(self, name: str, *arguments: Any) -> None:
        function = getattr(self.fa, name)
        status = function(*arguments)
        if status != _abi.OK:
            self.failed(status, lambda: int(function(*arguments)))

    def dropout_mask(self, state: _abi.DropoutState, probability: float, b: int, h_q: int, s_q: int, s_kv: int) -> bytearray:
        """keep, the bytes of [b, h_q, s_q, s_kv]: 1 for an element that dropout keeps."""
        keep = bytearray(b * h_q * s_q * s_kv)
        memory = (ctypes.c_uint8 * len(keep)).from_buffer(keep) if keep else None
        self.call("fa_dropout_mask", ctypes.byref(state), probability, b, h_q, s_q, s_kv, memory)
        return keep


_lock = threading.Lock()
_opened: Optional[Library] = None
_when_opened: list[Callable[[str], None]] = []


def find() -> str:
    """The path of the library that `load` opens unless it is told another."""
    given = os.environ.get("FA_LIBRARY")
    if given:
        return given
    places = [_PACKAGE / "libfa.so", _CHECKOUT / "libfa.so"]
    for place in places:
        if place.is_file():
            return os.fspath(place)
    raise ImportError("libfa.so is not found: neither FA_LIBRARY names it, nor is it one of "
                      + ", ".join(map(str, places)))


def load(path: Union[str, "os.PathLike[str]", None] = None) -> Library:
    """The library of this process. The first call decides which: `path`, else FA_LIBRARY, else the package's own."""
    global _opened
    if _opened is None:
        with _lock:
            if _opened is None:
                opened = Library(path or find())
                for act in _when_opened:
                    act(opened.path)
                _opened = opened
    return _opened


def when_opened(act: Callable[[str], None], later: Callable[[], None]) -> None:
    """Calls `act` with the path of the library: now, or when it is opened. `later` is called now where it is not open."""
    with _lock:
        _when_opened.append(act)
        if _opened is not None:
            act(_opened.path)
        else:
            later()


def set_nvrtc_path(path: Union[str, "os.PathLike[str]", None]) -> None:
    """Where NVRTC is: its file, or the folder that holds it; None restores the search. Of effect until the first kernel is
    compiled."""
    load().nvrtc.order(os.fsencode(path) if path else b"")


def set_log_level(level: str) -> None:
    """"debug", "info", "warning" (the default), "error" or "off"; other levels raise a ValueError."""
    levels = ("debug", "info", "warning", "error", "off")
    if level not in levels:
        raise ValueError(f"level is {level!r}: accepted are {', '.join(levels)}")
    load().call("fa_set_log_level", levels.index(level))
