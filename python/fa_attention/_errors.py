"""What the library's failures become."""

from __future__ import annotations

from . import _abi

_FIELDS = ("argument", "value", "accepted", "column", "log", "options", "call", "result", "command", "tried", "remedy")


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


_CLASSES: dict[int, type[Error]] = {
    kind.code: kind for kind in (InvalidArgument, Unsupported, NoCompiler, OutOfMemory)
}


def make_error(code: int, message: str, fields: dict[str, str]) -> Error:
    return _CLASSES.get(code, Error)(message, code, fields)


def field_names() -> tuple[str, ...]:
    return _FIELDS


def type_name(value: object) -> str:
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"
