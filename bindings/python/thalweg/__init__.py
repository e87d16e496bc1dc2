"""Thalweg: linear-attention and sparse-attention operators for CPUs and Hopper GPUs, on NumPy arrays and on any that speak DLPack.

One function per pass: gated_delta_rule_fwd, gated_delta_rule_bwd, gated_delta_rule_decode and so on; `dir(thalweg)`
lists them, help() on each tells shapes, dtypes and errors. `prepare` binds the arguments of a call that repeats.
thalweg.torch has the same operators for PyTorch, differentiable; thalweg.fla has them under the names and arguments of
flash-linear-attention; patch_transformers makes Hugging Face models use them.
"""

from . import _native
from ._functions import FUNCTIONS, PreparedCall, prepare

__version__ = _native.version()
cpu_isa = _native.cpu_isa
default_threads = _native.default_threads

globals().update(FUNCTIONS)
__all__ = [
    "PreparedCall",
    "cpu_isa",
    "default_threads",
    "patch_transformers",
    "prepare",
    "unpatch_transformers",
    *FUNCTIONS,
]


def patch_transformers(models=None, verbose: bool = True) -> list:
    """Makes Qwen3-Next, Qwen3.5, OLMo-hybrid and Kimi-style models of transformers compute with Thalweg, on the CPU
    and on Hopper GPUs.

    models: names of transformers.models (default: all that thalweg.transformers knows). Models that exist already
    change too. Returns the names of what was replaced, and prints them when verbose; unpatch_transformers() puts all
    back. """
    from . import transformers

    return transformers.patch(models, verbose)


def unpatch_transformers() -> list:
    """Undoes patch_transformers, and returns the names of what was put back."""
    from . import transformers

    return transformers.unpatch()
