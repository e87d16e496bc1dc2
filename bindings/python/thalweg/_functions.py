"""One function per pass, made from the pass table: explicit keyword parameters, docstrings, arrays in and out."""

from __future__ import annotations

from collections import namedtuple

from . import _arrays, _native
from ._tables import CHOICE, COUNT, FLAG, IN, INOUT, OPTION, OUT, PASSES, REAL, ROWS, STATE

_LAYOUTS = {ROWS: "last axis contiguous", STATE: "one of the last two axes contiguous"}
_COMMON = (("num_threads", "0", "CPU threads; 0: the default. Results are the same, bit for bit, for any number"),
           ("kernel", "None", "forces a kernel by name, for tests and benchmarks"))  # fmt: skip


class PreparedCall:
    """A pass with its arguments in place, for calls that repeat: decode steps, mostly.

    Made by `thalweg.prepare`. Calling it runs the pass on what the arrays hold then and returns the same result object
    every time; write new inputs into the arrays, or point an argument at another array with `set`. Arrays stay alive as
    long as this object. Not for two threads at once: `set` refuses while a call runs.
    """

    def __init__(self, pass_, result_type, values: dict):
        self._pass, self._call = pass_, _native.Call(pass_.index)
        call, where = self._call, pass_.where
        call.num_threads(values.pop("num_threads") or 0)
        call.kernel(values.pop("kernel"))
        shapes, dtypes = {}, {}
        for field in pass_.inputs:
            array = values[field.name]
            if array is not None:
                _arrays.bind(call, field, array, where)
                shapes[field.name] = getattr(array, "shape", ())
                dtypes[field.name] = _arrays.dtype_name(array)
        for field in pass_.options:
            number = field.number(values[field.name], where)
            if number:
                call.option(field.position, number)
        sizes = None
        results = []
        for field in pass_.outputs:
            wanted = values[field.name]
            if wanted is None:
                wanted = pass_.wanted_by_default(field, shapes)
            if wanted is False:
                results.append(None)
                continue
            if wanted is True:
                if sizes is None:
                    given = {keyword: values[keyword] for keyword in pass_.size_keywords}
                    sizes = pass_.sizes(shapes, values.get("every") or 0, **given)
                like = values[pass_.inputs[0].name]
                wanted, target = _arrays.empty(like, pass_.shape(field, sizes), pass_.dtype(field, dtypes))
            else:
                target = wanted
            _arrays.bind(call, field, target, where)
            results.append(wanted)
        self.result = result_type._make(results)
        self._run = call.run

    def __call__(self):
        self._run()
        return self.result

    def set(self, **arrays) -> None:
        """Points tensor arguments at other arrays, or takes optional inputs away (None)."""
        for name, array in arrays.items():
            field = self._pass.by_name.get(name)
            if field is None or field.role == OPTION:
                raise TypeError(f"{self._pass.where}: got an unexpected argument {name!r}, expected a tensor's name")
            if array is None:
                self._call.clear(field.position)
            else:
                _arrays.bind(self._call, field, array, self._pass.where)
            if field.role == OUT:
                self.result = self.result._replace(**{name: array})

    def explain(self) -> str:
        """Which kernel runs, and why the faster ones do not."""
        return self._call.explain()

    def workspace_bytes(self) -> int:
        """Bytes of scratch memory that a call uses."""
        return self._call.workspace_bytes()


def prepare(function, *args, **kwargs) -> PreparedCall:
    """Binds arguments to one of this module's functions without running it.

    >>> step = thalweg.prepare(thalweg.gated_delta_rule_decode, q, k, v, g=g, beta=beta, state=state)
    >>> o = step().o                       # again and again; q, k, v, g, beta are read anew each time
    """
    make = getattr(function, "_prepare", None)
    if make is None:
        raise TypeError(f"prepare: got {function!r}, expected a pass of thalweg, like thalweg.gated_delta_rule_decode")
    return make(*args, **kwargs)


def _parameters(pass_) -> list[str]:
    """The parameter list: inputs in the table's order, by position up to the first optional one that has a required
    one behind it; then outputs and options, by keyword."""
    parameters, keyword_only = [], False

    def add(text):
        parameters.append(text)

    for i, field in enumerate(pass_.inputs):
        required_behind = any(not f.optional for f in pass_.inputs[i:])
        if field.optional and required_behind and not keyword_only:
            add("*")
            keyword_only = True
        add(field.name + ("=None" if field.optional else ""))
    if not keyword_only:
        add("*")
    for keyword in pass_.size_keywords:
        letter = pass_.size_keywords[keyword][0]
        needed = not any(letter in (name for name, _ in f.dims) for f in pass_.inputs)
        add(keyword if needed else f"{keyword}=None")
    for field in pass_.outputs:
        add(f"{field.name}=None")
    for field in pass_.options:
        default = {FLAG: "False", COUNT: "0", REAL: "0.0", CHOICE: repr((field.choices or [""])[0])}[field.kind]
        add(f"{field.name}={default}")
    for name, default, _ in _COMMON:
        add(f"{name}={default}")
    return parameters


def _docstring(pass_) -> str:
    def tensor(field):
        facts = [field.shape_text, " ".join(field.dtypes).replace("=", "as ")]
        if field.layout in _LAYOUTS:
            facts.append(_LAYOUTS[field.layout])
        if field.role == INOUT:
            facts.append("read and written")
        if field.optional and field.role == IN:
            facts.append("optional")
        return f"    {field.name}: {', '.join(facts)}\n        {field.doc}"

    lines = [
        f"{pass_.op}, {pass_.name}: {pass_.doc}",
        "",
        "Inputs (NumPy arrays, or any that speak DLPack; never copied):",
    ]
    lines += [tensor(field) for field in pass_.inputs]
    if pass_.size_keywords:
        lines += ["", "Sizes:"]
        lines += [f"    {keyword}: {letter}\n        {doc}" for keyword, (letter, doc) in pass_.size_keywords.items()]
    lines += ["", "Outputs (None: computed if required, or the gradient of an input that is given; True: computed;"]
    lines += ["False: not computed; an array: written into):"]
    lines += [tensor(field) for field in pass_.outputs]
    if pass_.options:
        lines += ["", "Options (None or 0: the default):"]
    for field in pass_.options:
        what = " or ".join(field.choices) if field.choices else ("bool", "int", "float")[field.kind - FLAG]
        lines.append(f"    {field.name}: {what}\n        {field.doc}")
    lines += [f"    {name}\n        {doc}" for name, _, doc in _COMMON]
    names = ", ".join(field.name for field in pass_.outputs)
    lines += ["", f"Returns a named tuple ({names}): arrays of the caller's kind, None for those not computed."]
    lines += ["", "Raises ValueError naming the argument for what the operator does not take, TypeError for what is no"]
    lines += ["array or option, MemoryError without workspace memory. On an error nothing is written."]
    if pass_.refused:
        lines += ["", f"Not taken: {pass_.refused}"]
    return "\n".join(lines)


def _function(pass_):
    """The function of one pass. Its source is made and compiled, as namedtuple does it, so that its signature is real:
    wrong keywords are Python's TypeError, and inspect and help() see every parameter."""
    name = f"{pass_.op}_{pass_.name}"
    result_type = namedtuple(f"{name}_result", [f.name for f in pass_.outputs])

    def make(values):
        return PreparedCall(pass_, result_type, values)

    parameters = ", ".join(_parameters(pass_))
    source = (
        f"def {name}({parameters}):\n    return _make(locals())()\n"
        f"def {name}_prepare({parameters}):\n    return _make(locals())\n"
    )
    scope = {"_make": make, "__name__": "thalweg"}
    exec(compile(source, f"<thalweg {pass_.where}>", "exec"), scope)
    function = scope[name]
    function.__doc__ = _docstring(pass_)
    function._prepare = scope[f"{name}_prepare"]
    function._prepare.__name__ = f"prepare({name})"
    return function


FUNCTIONS = {f"{p.op}_{p.name}": _function(p) for p in PASSES.values()}
