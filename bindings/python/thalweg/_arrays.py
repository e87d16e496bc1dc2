"""Arrays of whichever library the caller uses: NumPy's, or anything that speaks DLPack."""

from __future__ import annotations

import sys

import numpy as np

from . import _native
from ._tables import DTYPE_CODES

_FULL_NAMES = {
    "i8": "int8", "i32": "int32", "i64": "int64", "u8": "uint8", "bool": "bool",
    "f16": "float16", "f32": "float32", "f64": "float64", "bf16": "bfloat16",
}  # fmt: skip
_SHORT_NAMES = {full: short for short, full in _FULL_NAMES.items()}
_BF16 = DTYPE_CODES["bf16"]
_CUDA = 2  # DLPack's device type


_NUMPY_DTYPES: dict = {}  # names by dtype, as they come: NumPy makes a dtype's name anew each time, slowly


def dtype_name(array) -> str | None:
    """'f32' and so on; None for what the library does not have."""
    if not isinstance(array, np.ndarray):
        return _SHORT_NAMES.get(str(getattr(array, "dtype", None)).rpartition(".")[2])
    dtype = array.dtype
    if dtype not in _NUMPY_DTYPES:
        _NUMPY_DTYPES[dtype] = _SHORT_NAMES.get(dtype.name)
    return _NUMPY_DTYPES[dtype]


def bind(call, field, array, where: str) -> None:
    """Points an argument of `call` at the array's memory."""
    code = 0
    if isinstance(array, np.ndarray):
        if array.dtype.kind == "V" and array.dtype.name == "bfloat16":  # ml_dtypes': neither buffer nor DLPack
            array, code = array.view(np.uint16), _BF16
    elif getattr(array, "requires_grad", False):
        raise TypeError(
            f"{where}: {field.name}: got a tensor that requires grad, expected a detached one "
            "(thalweg.torch has functions with gradients)"
        )
    elif hasattr(array, "__dlpack_device__") and array.__dlpack_device__()[0] == _CUDA:
        raise ValueError(
            f"{where}: {field.name}: device, got cuda:{array.__dlpack_device__()[1]}, expected the CPU "
            "(thalweg.torch has functions for CUDA tensors)"
        )
    call.bind(field.position, array, code)


class _Bfloat16Memory:
    """NumPy memory (uint16) as a DLPack producer of bfloat16, which NumPy itself cannot export."""

    def __init__(self, memory):
        self.memory = memory

    def __dlpack_device__(self):
        return (1, 0)  # CPU

    def __dlpack__(self, **_):
        return _native.bfloat16_capsule(self.memory)


def empty(like, shape, dtype: str):
    """A new array of the kind that `like` is: the array, and the one to write into, which shares its memory."""
    if type(like).__module__.partition(".")[0] == "torch":
        torch = sys.modules["torch"]
        array = torch.empty(shape, dtype=getattr(torch, _FULL_NAMES[dtype]))
        return array, array
    if isinstance(like, np.ndarray) or not hasattr(like, "__array_namespace__"):
        memory = np.empty(shape, bfloat16() if dtype == "bf16" else _FULL_NAMES[dtype])
        return memory, memory
    from_dlpack = like.__array_namespace__().from_dlpack
    if dtype == "bf16":
        memory = np.empty(shape, np.uint16)
        return from_dlpack(_Bfloat16Memory(memory)), memory.view(bfloat16())
    memory = np.empty(shape, _FULL_NAMES[dtype])
    return from_dlpack(memory), memory


def bfloat16() -> np.dtype:
    """NumPy's bfloat16, which the package ml_dtypes brings."""
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError("a bfloat16 NumPy array needs the package ml_dtypes: pip install 'thalweg[bf16]'") from error
    return np.dtype(ml_dtypes.bfloat16)
