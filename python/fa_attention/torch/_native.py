"""The operators' compiled library, where there is one: calls that nothing watches then cost the host little more than a call of
PyTorch's own. Without it, and for whatever it refuses, calls go by ctypes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor

from .. import _library
from .._options import make_options

_NAME = "libfa_torch_ops.so"
_PACKAGE = Path(__file__).resolve().parent.parent
_PLACES = (_PACKAGE / _NAME, _PACKAGE.parent.parent / "build" / "release" / _NAME)

loaded = False
path = ""
problem = "FA_TORCH_OPS is off"  # why it is not loaded

_forward: Any = None
_forward_lse: Any = None
_backward: Any = None
_node: Any = None  # forward with a node of PyTorch's own C++; None where this PyTorch has another signature
_gpu_node: Any = None  # one for GPUs alone, which costs less
_numbers: dict[Any, int] = {}

_NODE = "_scaled_dot_product_fused_attention_overrideable"
_GPU_NODE = "_scaled_dot_product_flash_attention_for_cpu"
_NODE_SCHEMAS = {
    _NODE: (
        "(Tensor query, Tensor key, Tensor value, Tensor? attn_bias=None, float dropout_p=0., bool is_causal=False, "
        "bool return_debug_mask=False, *, float? scale=None) -> (Tensor output, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, "
        "SymInt max_q, SymInt max_k, Tensor philox_seed, Tensor philox_offset, Tensor debug_attn_mask)",
        "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor attn_bias, bool[4] grad_input_mask, "
        "Tensor out, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, "
        "bool is_causal, Tensor philox_seed, Tensor philox_offset, *, float? scale=None) -> (Tensor grad_query, Tensor grad_key, "
        "Tensor grad_value, Tensor grad_attn_bias)"),
    _GPU_NODE: (
        "(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, *, Tensor? attn_mask=None, "
        "float? scale=None) -> (Tensor output, Tensor logsumexp)",
        "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, float dropout_p, bool is_causal, *, "
        "Tensor? attn_mask=None, float? scale=None) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)"),
}


def _is_known(name: str) -> bool:
    """Whether PyTorch's attention `name` and its derivative have the signatures that the library has kernels for."""
    names = (name, f"{name}_backward")
    overloads = [getattr(getattr(torch.ops.aten, each, None), "default", None) for each in names]
    return all(overload is not None and str(overload._schema) == f"aten::{each}{schema}"
               for each, overload, schema in zip(names, overloads, _NODE_SCHEMAS[name]))


def _find_node() -> Any:
    """PyTorch's attention whose kernels others give."""
    if not _is_known(_NODE):
        return None
    overload = getattr(torch.ops.aten, _NODE).default
    return getattr(overload, "_op", overload)


def _find_gpu_node() -> Any:
    """PyTorch's attention that has kernels for CPUs alone: the library gives it those for GPUs."""
    return getattr(torch._C._VariableFunctions, _GPU_NODE, None) if _is_known(_GPU_NODE) else None


def _call_of(name: str) -> Any:
    """An operator without the checks of arguments that torch.ops makes in Python."""
    overload = getattr(torch.ops.fa_attention, name).default
    return getattr(overload, "_op", overload)


def _later() -> None:
    """Where libfa will be found by a call of an operator that comes before any other of the package."""
    try:
        torch.ops.fa_attention._open(_library.find(), False)
    except ImportError:
        pass


def load(define: Any) -> bool:
    """Loads the library that FA_TORCH_OPS names, else the package's or the checkout's. `define` is the torch.library.Library of
    the operators. One that FA_TORCH_OPS names and that cannot be loaded raises an OSError; "off" loads none."""
    global loaded, path, problem, _forward, _forward_lse, _backward, _node, _gpu_node
    given = os.environ.get("FA_TORCH_OPS", "")
    if given == "off":
        return False
    found = [given] if given else [os.fspath(place) for place in _PLACES if place.is_file()]
    if not found:
        problem = f"there is none of {', '.join(map(str, _PLACES))}"
        return False
    try:
        torch.ops.load_library(found[0])
    except OSError as error:
        if given:
            raise
        problem = str(error)
        return False
    for name in ("_attend", "_attend_lse", "_attend_backward"):  # below autograd: no node refuses or warns
        define.impl(name, torch.library.fallthrough_kernel, "Autograd")
    _forward, _forward_lse, _backward = map(_call_of, ("_attend", "_attend_lse", "_attend_backward"))
    _node, _gpu_node = _find_node(), _find_gpu_node()
    loaded, path, problem = True, found[0], ""
    _library.when_opened(lambda libfa: torch.ops.fa_attention._open(libfa, True), _later)
    return True


def start(on_cuda: bool) -> None:
    """Opens libfa, and names where NVRTC is before a GPU's first kernel."""
    library = _library.load()
    if on_cuda:
        library.nvrtc.start()


def _number(fixed: tuple[Any, ...], on_cuda: bool) -> Optional[int]:
    """What the library knows these options by; None for options of other types than its arguments have."""
    make_options(*fixed, (), (), False)
    start(on_cuda)
    try:
        number = int(torch.ops.fa_attention._options(*fixed, [], []))
    except (RuntimeError, TypeError, ValueError):
        return None
    if len(_numbers) < 4096:
        _numbers[on_cuda, fixed] = number
    return number


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, number: int, fixed: tuple[Any, ...]) -> Any:
        o, lse = _forward_lse(q, k, v, number)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.call = number, fixed
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, dout: Optional[Tensor], dlse: Optional[Tensor]) -> Any:
        if dout is None and dlse is None:
            return None, None, None, None, None
        needs = ctx.needs_input_grad
        if torch.is_grad_enabled() or torch._C._functorch.peek_interpreter_stack() is not None:
            return (*_Gradients.apply(*ctx.call, needs[:3], dout, dlse, *ctx.saved_tensors), None, None)
        number, fixed = ctx.call
        q, k, v, o, lse = ctx.saved_tensors
        return (*_gradients(number, fixed, needs, dout, dlse, q, k, v, o, lse), None, None)


class _Gradients(torch.autograd.Function):
    """A node of its own, because only a node can refuse to be differentiated."""

    @staticmethod
    def forward(ctx: Any, number: int, fixed: tuple[Any, ...], needs: tuple[bool, ...], dout: Optional[Tensor],
                dlse: Optional[Tensor], q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor) -> Any:
        return tuple(_gradients(number, fixed, needs, dout, dlse, q, k, v, o, lse))

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        from ._ops import REASON

        raise RuntimeError(REASON)


def _gradients(number: int, fixed: tuple[Any, ...], needs: tuple[bool, ...], dout: Optional[Tensor], dlse: Optional[Tensor],
               q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor) -> Any:
    try:
        dq, dk, dv = _backward(dout, dlse, q, k, v, o, lse, number, needs[0] + 2 * needs[1] + 4 * needs[2])
        return dq if needs[0] else None, dk if needs[1] else None, dv if needs[2] else None
    except (RuntimeError, ValueError):
        from . import _raw

        call = _raw.Call(make_options(*fixed, (), (), False))
        q, k, v = _raw.readable(q), _raw.readable(k), _raw.readable(v)
        plan = _raw.find_plan(q, k, v, None, (), call, ())
        return _raw.backward(plan, dout, dlse, q, k, v, o, lse, None, (), call, (*needs[:3], False))[:3]


PLAIN = (torch.Tensor, torch.nn.Parameter)
_any_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
_is_compiling, _is_tracing, _is_grad_enabled = torch.compiler.is_compiling, torch._C._is_tracing, torch.is_grad_enabled
_modes, _transform = torch._C._len_torch_dispatch_stack, torch._C._functorch.peek_interpreter_stack


def is_direct() -> bool:
    """Whether nothing watches calls: no compiler, no mode, no transform."""
    return not (_is_compiling() or _modes() or _transform() is not None or _is_tracing())


def attend(q: Tensor, k: Tensor, v: Tensor, fixed: tuple[Any, ...], return_lse: bool) -> Any:
    """A call without captures, sink, packing and dropout; None where something watches it, and where the library refuses it. The
    caller then goes another way, which works or raises the package's own error."""
    if _is_compiling() or _modes() or _transform() is not None or _is_tracing() or _any_autocast():
        return None
    if type(q) not in PLAIN or type(k) not in PLAIN or type(v) not in PLAIN:
        return None
    try:
        on_cuda = q.is_cuda
        number = _numbers.get((on_cuda, fixed))
        if number is None:
            number = _number(fixed, on_cuda)
            if number is None:
                return None
        needed = q.requires_grad + 2 * k.requires_grad + 4 * v.requires_grad
        if needed and _is_grad_enabled():
            if not return_lse:
                if on_cuda and _gpu_node is not None:
                    return _gpu_node(q, k, v, -1.0 - (8 * number + needed))[0]
                if _node is not None:
                    return _node(q, k, v, None, -1.0 - number)[0]
            both = _Attend.apply(q, k, v, number, fixed)
            return both if return_lse else both[0]
        return _forward_lse(q, k, v, number) if return_lse else _forward(q, k, v, number)
    except (RuntimeError, ValueError, TypeError):
        return None
