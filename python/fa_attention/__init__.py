"""Exact attention, softmax(scale * q k^T + mask) v, and its gradients, on NVIDIA GPUs and on the host.

    import fa_attention
    o = fa_attention.attention(q, k, v, causal=True)   # PyTorch tensors, NumPy arrays, DLPack, the array interface

PyTorch tensors are differentiable (fa_attention.torch). Of other arrays `attention` is forward and `gradients` is backward.
Kernels for a GPU are compiled at run time by NVRTC, and kept; no compiler, CUDA toolkit or GPU is needed to import this.
"""

from __future__ import annotations

from . import functions
from ._errors import Error, InvalidArgument, Location, NoCompiler, NotFinite, OutOfMemory, Unsupported
from ._library import load, set_log_level, set_nvrtc_path
from ._version import __version__
from .arrays import Gradients, attention, gradients, varlen_attention, varlen_gradients

__all__ = ["Error", "Gradients", "InvalidArgument", "Location", "NoCompiler", "NotFinite", "OutOfMemory", "Unsupported",
           "__version__", "attention", "functions", "gradients", "load", "set_log_level", "set_nvrtc_path", "varlen_attention", "varlen_gradients"]
