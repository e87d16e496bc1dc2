"""Thalweg: linear-attention and sparse-attention operators for CPUs, on NumPy arrays and on any that speak DLPack.

One function per pass: gated_delta_rule_fwd, gated_delta_rule_bwd, gated_delta_rule_decode and so on; `dir(thalweg)`
lists them, help() on each tells shapes, dtypes and errors. `prepare` binds the arguments of a call that repeats.
thalweg.torch has the same operators for PyTorch, differentiable.
"""

from . import _native
from ._functions import FUNCTIONS, PreparedCall, prepare

__version__ = _native.version()
cpu_isa = _native.cpu_isa
default_threads = _native.default_threads

globals().update(FUNCTIONS)
__all__ = ["PreparedCall", "cpu_isa", "default_threads", "prepare", *FUNCTIONS]
