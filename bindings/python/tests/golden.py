"""The committed golden files (tests/golden): cases with inputs and outputs computed elsewhere in float64."""

from pathlib import Path

import numpy as np

FOLDER = Path(__file__).resolve().parents[3] / "tests" / "golden"


class Record:
    def __init__(self, text: str):
        self.text = text
        self.where, _, settings = text.partition(":")  # "gated_delta_rule.fwd", "f64,B2,...,scale=0.7"
        self.op, _, self.name = self.where.partition(".")
        self.inputs: dict[str, np.ndarray] = {}
        self.outputs: dict[str, np.ndarray] = {}
        self.options: dict = {}
        for word in settings.split(","):
            key, equals, value = word.partition("=")
            if key == "varlen":
                lengths = [int(n) for n in value.split("+")]
                self.inputs["cu_seqlens"] = np.cumsum([0, *lengths]).astype(np.int64)
            elif equals:
                self.options[key] = float(value) if value[-1].isdigit() else value


def records() -> list[Record]:
    found = []
    for stem in ("numpy", "fla"):
        numbers = np.fromfile(FOLDER / f"{stem}.bin", dtype="<f8")
        for line in (FOLDER / f"{stem}.txt").read_text().splitlines():
            role, *words = line.split()
            if role == "case":
                found.append(Record(words[0]))
            elif role in ("in", "out"):
                name, offset, *shape = words[0], *map(int, words[1:])
                array = numbers[offset : offset + int(np.prod(shape))].reshape(shape)
                if name.endswith("_slots"):
                    array = array.astype(np.int64)
                (found[-1].inputs if role == "in" else found[-1].outputs)[name] = array
    return found


def assert_close(got, want, limit=1e-12):
    """Equal to rounding: the error is small against the size of the whole array."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    scale = np.sqrt(np.mean(want**2)) if want.size else 0
    error = np.max(np.abs(got - want), initial=0)
    assert error <= limit * scale + 1e-14, f"largest error {error}, RMS of the values {scale}"
