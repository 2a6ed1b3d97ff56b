"""What the library's failures become."""

from __future__ import annotations

from typing import NamedTuple, Optional

from . import _abi

_FIELDS = ("argument", "value", "accepted", "column", "log", "options", "call", "result", "command", "tried", "remedy",
           "tensor", "b", "h", "q", "kv", "d", "index")


class Location(NamedTuple):
    """Where a debug call met its first NaN or infinity. `tensor` is an input, the name of a capture, something on the way
    ("score", "p", "dp", "ds"), or a result; `result` is the first one that it reached. Axes that the tensor does not have
    are -1; h is a KV head of k, v, their scales, dk, dv and sums of KV heads. `index` is the element of a captured tensor."""

    tensor: str
    value: float
    b: int
    h: int
    q: int
    kv: int
    d: int
    index: tuple[int, ...]  # type: ignore[assignment]  # tuples have a method of this name
    result: str


class Error(RuntimeError):
    """A failure of the library. `code` is a number of enum fa_status; `fields` are its named facts, among them
    "argument", "value" and "accepted"."""

    code: int = _abi.INTERNAL

    def __init__(self, message: str, code: int | None = None, fields: dict[str, str] | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code
        self.fields = fields or {}


class InvalidArgument(Error, ValueError):
    """An argument breaks its contract. Nothing was launched."""

    code = _abi.INVALID_ARGUMENT


class Unsupported(Error, NotImplementedError):
    """Valid, but no kernel of this library or GPU can do it."""

    code = _abi.UNSUPPORTED


class NoCompiler(Error):
    """A kernel had to be compiled and NVRTC could not be opened. The message lists the places that were tried."""

    code = _abi.NO_COMPILER


class OutOfMemory(Error):
    """Host or device memory ran out."""

    code = _abi.OUT_OF_MEMORY


class NotFinite(Error, ArithmeticError):
    """A call with debug kernels met a NaN or an infinity: `location` says where."""

    code = _abi.NOT_FINITE
    location: Optional[Location] = None


_CLASSES: dict[int, type[Error]] = {
    kind.code: kind for kind in (InvalidArgument, Unsupported, NoCompiler, OutOfMemory, NotFinite)
}


def make_error(code: int, message: str, fields: dict[str, str]) -> Error:
    return _CLASSES.get(code, Error)(message, code, fields)


def field_names() -> tuple[str, ...]:
    return _FIELDS


def type_name(value: object) -> str:
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"
