"""The pass table: what every pass is called, takes and returns. Read from the library, never written by hand.

Both the NumPy functions (_functions.py) and the torch operators (torch.py) are made from it.
"""

from __future__ import annotations

from . import _native

# thalweg_kind, thalweg_role and thalweg_layout of thalweg/core/types.h
TENSOR, FLAG, COUNT, REAL, CHOICE = range(5)
IN, OUT, INOUT, OPTION = range(4)
ROWS, STATE, ANY = range(3)

# DLPack's code | bits << 8 | lanes << 16, as thalweg_dtype has them.
DTYPE_CODES = {
    "i8": 0x10800, "i32": 0x12000, "i64": 0x14000, "u8": 0x10801, "bool": 0x10806,
    "f16": 0x11002, "f32": 0x12002, "f64": 0x14002, "bf16": 0x11004,
}  # fmt: skip

# Sizes of outputs that no input need have: the keyword that gives them.
SIZE_KEYWORDS = {
    ("lightning_indexer.fwd", "E"): ("topk", "entries of each query's list"),
    ("sparse_flash_attention.fwd", "V"): (
        "v_dim",
        "without v: how many elements of k are the value; with v not needed",
    ),
}


class Field:
    """One argument of a pass."""

    def __init__(self, position: int, row: dict):
        self.position = position
        self.name: str = row["name"]
        self.kind: int = row["kind"]
        self.role: int = row["role"]
        self.optional: bool = row["optional"]
        self.dims: list[tuple[str, int]] = []  # ("N", 1) is N+1
        for word in (row["dims"] or "").split():
            letters, _, extra = word.partition("+")
            self.dims.append((letters, int(extra or 0)))
        self.dtypes: list[str] = (row["dtypes"] or "").split()
        self.layout: int = row["layout"]
        self.choices: list[str] = (row["choices"] or "").split()
        self.doc: str = row["doc"]

    @property
    def shape_text(self) -> str:
        return "[" + " ".join(name + (f"+{extra}" if extra else "") for name, extra in self.dims) + "]"

    def number(self, value, where: str) -> float:
        """An option's value as the C interface takes it; None is the default."""
        if value is None:
            return 0
        if self.kind == CHOICE:
            if value not in self.choices:
                raise ValueError(f"{where}: {self.name}: got {value!r}, expected one of {' '.join(self.choices)}")
            return self.choices.index(value)
        try:
            number = float(value)
            if self.kind == REAL or number == int(number):
                return number
        except (TypeError, ValueError, OverflowError):
            pass
        expected = {FLAG: "True or False", COUNT: "a whole number", REAL: "a number"}[self.kind]
        raise TypeError(f"{where}: {self.name}: got {value!r}, expected {expected}")


class Pass:
    """One pass of an operator."""

    def __init__(self, row: dict):
        self.index: int = row["index"]
        self.op: str = row["op"]
        self.name: str = row["name"]
        self.doc: str = row["doc"]
        self.refused: str | None = row["refused"]
        self.kernels: list[str] = row["kernels"]
        self.where = f"{self.op}.{self.name}"
        self.fields = [Field(i, f) for i, f in enumerate(row["fields"])]
        self.by_name = {f.name: f for f in self.fields}
        self.inputs = [f for f in self.fields if f.role in (IN, INOUT)]
        self.outputs = [f for f in self.fields if f.role == OUT]
        self.options = [f for f in self.fields if f.role == OPTION]
        self.size_keywords = {
            keyword: (letter, doc) for (where, letter), (keyword, doc) in SIZE_KEYWORDS.items() if where == self.where
        }
        self._places = self._find_sizes()

    def _find_sizes(self) -> list:
        """Where each letter that outputs' shapes need can be read: (letter, [(input, axis, extra), ...])."""
        letters = {"B", "T", "N"} | {name for field in self.outputs for name, _ in field.dims}
        places = {}
        for field in self.inputs:
            for axis, (letter, extra) in enumerate(field.dims):
                if letter in letters:
                    places.setdefault(letter, []).append((field.name, axis, extra))
        return list(places.items())

    def sizes(self, shapes: dict, every=0, **given) -> dict:
        """Sizes by name, from the shapes of the inputs that are present. Only outputs' shapes are made of them: whether
        the inputs agree with each other is the library's to check, so that there is one text for it."""
        sizes = {letter: given[keyword] for keyword, (letter, _) in self.size_keywords.items() if given.get(keyword)}
        for letter, places in self._places:
            for name, axis, extra in places:
                shape = shapes.get(name)
                if letter not in sizes and shape is not None and len(shape) > axis:
                    sizes[letter] = shape[axis] - extra
        if "B" in sizes:
            sizes.setdefault("N", sizes["B"])  # without cu_seqlens each row of the batch is a sequence
            sizes["R"] = sizes["B"] * sizes.get("T", 0) // (every or 64) + sizes["N"]
        return sizes

    def shape(self, field: Field, sizes: dict) -> tuple:
        return tuple(sizes.get(name, 0) + extra for name, extra in field.dims)

    def dtype(self, field: Field, dtypes: dict) -> str:
        """The dtype an output gets when the caller brings no array: that of another tensor where the table says so,
        i32 for indices, f64 where the first input is f64, else f32."""
        first = field.dtypes[0]
        if first.startswith("="):
            return dtypes.get(first[1:], "f32")
        if first.startswith("i"):
            return first
        return "f64" if dtypes.get(self.inputs[0].name) == "f64" else "f32"

    def wanted_by_default(self, field: Field, present) -> bool:
        """Outputs that are computed unless the caller says otherwise: the required ones, and the gradients of what is
        given."""
        if not field.optional:
            return True
        return field.name.startswith("d_") and field.name[2:] in present


PASSES = {p.where: p for p in map(Pass, _native.passes())}
