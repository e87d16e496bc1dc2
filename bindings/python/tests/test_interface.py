"""What the binding itself does: arrays in and out, strides, dtypes, errors, threads, prepared calls, state pools."""

import gc
import inspect
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest

import thalweg
from thalweg import _native
from thalweg._tables import PASSES

ml_dtypes = pytest.importorskip("ml_dtypes")
bfloat16 = np.dtype(ml_dtypes.bfloat16)
random = np.random.default_rng(1)
FUNCTIONS = {f"{p.op}_{p.name}": p for p in PASSES.values()}


def inputs(B=1, T=6, H=2, HV=4, K=8, V=8, dtype=np.float32):
    """q, k, v, g and beta of a delta rule."""
    make = lambda *shape: random.normal(size=shape)  # noqa: E731
    arrays = dict(q=make(B, T, H, K), k=make(B, T, H, K), v=make(B, T, HV, V), g=-random.random((B, T, HV)),
                  beta=random.random((B, T, HV)))  # fmt: skip
    return {name: array.astype(dtype) for name, array in arrays.items()}


def rule(**arrays):
    return thalweg.gated_delta_rule_fwd(**arrays, use_qk_l2norm=True)


# ---- The functions and their documents ----


def test_one_function_for_each_pass():
    assert len(FUNCTIONS) >= 20
    assert set(FUNCTIONS) <= set(thalweg.__all__)
    for op in ("gated_delta_rule", "kimi_delta_attention", "short_conv", "gated_rms_norm", "block_sparse_attention",
               "sparse_flash_attention", "lightning_indexer", "kda_gate"):  # fmt: skip
        assert callable(getattr(thalweg, f"{op}_fwd")) and callable(getattr(thalweg, f"{op}_bwd"))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signature_and_docstring(name):
    function, pass_ = getattr(thalweg, name), FUNCTIONS[name]
    signature = inspect.signature(function)
    kinds = {p.kind for p in signature.parameters.values()}
    assert kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    for field in pass_.fields:
        parameter = signature.parameters[field.name]
        required = field in pass_.inputs and not field.optional
        assert (parameter.default is inspect.Parameter.empty) == required
        assert f"    {field.name}: " in function.__doc__ and field.doc in function.__doc__
        if field.dims:
            assert field.shape_text in function.__doc__
    assert "Raises ValueError" in function.__doc__


def test_import_needs_numpy_alone():
    code = (
        "import sys, importlib.abc\n"
        "class Block(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, *_):\n"
        "        if name in ('torch', 'ml_dtypes', 'transformers', 'jax'): raise ImportError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "import numpy as np\n"
        "before = set(sys.modules)\n"
        "import thalweg\n"
        "x = np.ones((1, 3, 1, 4), np.float32)\n"
        "assert thalweg.gated_delta_rule_fwd(x, x, x).o.shape == (1, 3, 1, 4)\n"
        "new = {m.partition('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)\n"
        "print(sorted(m for m in new if not m.startswith('_')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = set(eval(done.stdout)) - {"nanobind"}
    assert loaded <= {"numpy", "thalweg"}, loaded


# ---- Arrays ----


def test_results_are_new_numpy_arrays_and_inputs_stay():
    a = inputs()
    before = {name: array.copy() for name, array in a.items()}
    result = rule(**a, final_state=True)
    assert type(result.o) is np.ndarray and result.o.dtype == np.float32 and result.chunk_states is None
    assert result.final_state.shape == (1, 4, 8, 8)
    assert all(np.array_equal(a[name], before[name]) for name in a)
    assert not any(np.shares_memory(result.o, array) for array in a.values())


def test_outputs_are_written_where_the_caller_says():
    a = inputs()
    wide = np.full((1, 6, 4, 16), 7, np.float32)
    state = np.zeros((1, 4, 8, 8), np.float64).swapaxes(2, 3)  # value-first memory, another dtype
    result = rule(**a, o=wide[..., :8], final_state=state)
    want = rule(**a, final_state=True)
    assert result.final_state is state and np.array_equal(state.astype(np.float32), want.final_state)
    assert np.array_equal(wide[..., :8], want.o) and (wide[..., 8:] == 7).all()


def test_strides_are_passed_on():
    a = inputs()
    want = rule(**a).o
    apart = np.zeros((1, 12, 2, 16), np.float32)
    apart[:, ::2, :, :8] = a["q"]
    assert np.array_equal(rule(**{**a, "q": apart[:, ::2, :, :8]}).o, want)
    backwards = np.ascontiguousarray(a["g"][:, ::-1])[:, ::-1]
    assert backwards.strides[1] < 0 and np.array_equal(rule(**{**a, "g": backwards}).o, want)
    decay = np.broadcast_to(np.float32(-0.5), (1, 6, 4))
    assert decay.strides == (0, 0, 0)
    assert np.array_equal(rule(**{**a, "g": decay}).o, rule(**{**a, "g": decay.copy()}).o)


def test_nothing_is_copied_silently():
    a = inputs()
    a["q"] = np.asfortranarray(a["q"])
    with pytest.raises(ValueError, match=r"gated_delta_rule.fwd: q: stride of the last axis, got \d+, expected 1"):
        rule(**a)


def test_read_only_inputs_are_fine_and_read_only_outputs_are_not():
    a = inputs()
    want = rule(**a).o
    for array in a.values():
        array.flags.writeable = False
    o = np.zeros_like(want)
    assert np.array_equal(rule(**a, o=o).o, want)
    o.flags.writeable = False
    with pytest.raises(ValueError, match="gated_delta_rule.fwd: o: got a read-only array"):
        rule(**a, o=o)


@pytest.mark.parametrize("dtype, limit", [(np.float32, 1e-5), (np.float16, 4e-3), (bfloat16, 3e-2)])
def test_dtypes(dtype, limit):
    a = inputs(dtype=dtype)
    got = rule(**a, final_state=True)
    want = rule(**{name: array.astype(np.float64) for name, array in a.items()}, final_state=True)
    assert got.o.dtype == dtype and got.final_state.dtype == np.float32 and want.final_state.dtype == np.float64
    for x, y in zip(got, want):
        if x is not None:
            x = x.astype(np.float64)
            assert np.sqrt(np.mean((x - y) ** 2)) < limit * np.sqrt(np.mean(y**2))


def test_dtypes_may_differ_where_the_operator_says_so():
    a = inputs()
    a["g"], a["beta"] = a["g"].astype(np.float64), a["beta"].astype(bfloat16)
    r = thalweg.gated_delta_rule_bwd(**a, d_o=np.ones((1, 6, 4, 8), np.float32))
    assert (r.d_q.dtype, r.d_g.dtype, r.d_beta.dtype) == (np.float32, np.float64, bfloat16)
    assert r.d_A_log is None and r.d_initial_state is None


def test_gradients_only_of_what_is_asked():
    a = inputs()
    r = thalweg.gated_delta_rule_bwd(**a, d_o=np.ones((1, 6, 4, 8), np.float32), d_q=False, d_initial_state=True)
    assert r.d_q is None and r.d_k.shape == (1, 6, 2, 8) and r.d_initial_state.shape == (1, 4, 8, 8)


def test_empty_and_packed():
    assert rule(**inputs(T=0), final_state=True).o.shape == (1, 0, 4, 8)
    a = inputs(T=5)
    r = rule(**a, cu_seqlens=np.array([0, 2, 2, 5], np.int32), final_state=True, chunk_states=True, every=2)
    assert r.final_state.shape == (3, 4, 8, 8) and r.chunk_states.shape == (5 // 2 + 3, 4, 8, 8)
    assert (r.final_state[1] == 0).all()


class OnlyDlpack:
    """An array of no library, with nothing but the two methods of DLPack."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_any_dlpack_array_comes_in():
    a = inputs()
    want = rule(**a).o
    got = rule(**{name: OnlyDlpack(array) for name, array in a.items()}, o=np.empty_like(want)).o
    assert np.array_equal(got, want)


def test_the_callers_kind_of_array_comes_out():
    xp = pytest.importorskip("array_api_strict")
    a = inputs()
    r = rule(**{name: xp.asarray(array) for name, array in a.items()}, final_state=True)
    assert type(r.o) is type(xp.asarray(a["q"])) and type(r.final_state) is type(r.o)
    assert np.array_equal(np.from_dlpack(r.o), rule(**a).o)


# ---- Errors ----


class OnAGpu(OnlyDlpack):
    def __dlpack_device__(self):
        return (2, 1)


def test_arrays_on_a_gpu_are_refused_by_name():
    a = inputs()
    with pytest.raises(ValueError, match=r"gated_delta_rule.fwd: k: device, got cuda:1, expected the CPU \(thalweg.torch"):
        rule(**a | dict(k=OnAGpu(a["k"])))


def change(**arrays):
    return lambda: rule(**{**inputs(), **arrays})


@pytest.mark.parametrize(
    "call, error, text",
    [
        (change(k=np.zeros((1, 6, 2, 4), np.float32)), ValueError,
         r"gated_delta_rule.fwd: k: K, got 4 in \[1, 6, 2, 4\], expected 8 \(from q\)"),
        (change(k=np.zeros((1, 6, 2, 8))), ValueError,
         r"gated_delta_rule.fwd: k: dtype, got f64, expected f32 \(from q\)"),
        (change(q=np.zeros((6, 2, 8), np.float32)), ValueError,
         r"gated_delta_rule.fwd: q: shape, got \[6, 2, 8\], expected \[B T H K\]"),
        (change(q=np.zeros((1,) * 7, np.float32)), ValueError, r"gated_delta_rule.fwd: q: rank, got 7"),
        (change(g=np.zeros((1, 6, 4), np.int16)), ValueError,
         r"gated_delta_rule.fwd: g: dtype, got unknown, expected one of f64 f32 bf16 f16"),
        (change(g=np.zeros((1, 6, 4), ">f4")), TypeError, r"gated_delta_rule.fwd: g: "),
        (change(beta=[[0.5]]), TypeError, r"gated_delta_rule.fwd: beta: got list, expected an array"),
        (change(cu_seqlens=np.array([0, 9])), ValueError, r"gated_delta_rule.fwd: cu_seqlens: "),
        (change(A_log=np.zeros(4, np.float32)), ValueError, r"gated_delta_rule.fwd: .*use_gate"),
        (change(scale="much"), TypeError, r"gated_delta_rule.fwd: scale: got 'much', expected a number"),
        (change(every=1.5), TypeError, r"gated_delta_rule.fwd: every: got 1.5, expected a whole number"),
        (change(allow_neg_eigval=True), ValueError, r"gated_delta_rule.fwd: allow_neg_eigval"),
        (change(initial_state_=None), TypeError, r"unexpected keyword argument 'initial_state_'"),
        (change(num_threads=-1), ValueError, r"num_threads"),
        (change(kernel="fastest"), ValueError, r"gated_delta_rule.fwd: .*fastest"),
        (lambda: thalweg.gated_delta_rule_fwd(np.zeros((1, 2, 1, 4))), TypeError,
         r"missing 2 required positional arguments: 'k' and 'v'"),
        (lambda: thalweg.lightning_indexer_fwd(*np.zeros((3, 1, 1, 1, 1))), TypeError,
         r"missing 1 required keyword-only argument: 'topk'"),
        (lambda: thalweg.gated_rms_norm_fwd(np.ones((1, 4)), gate_activation="tanh"), ValueError,
         r"gated_rms_norm.fwd: gate_activation: got 'tanh', expected one of silu sigmoid"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_nothing_is_written_on_an_error():
    a, o = inputs(), np.full((1, 6, 4, 8), 7, np.float32)
    with pytest.raises(ValueError, match="final_state"):
        rule(**a, o=o, final_state=np.zeros((1, 4, 8, 7), np.float32))
    assert (o == 7).all()


def test_a_forced_kernel_that_declines_says_why():
    a = inputs(dtype=np.float64)
    with pytest.raises(RuntimeError, match="gated_delta_rule.fwd: no kernel for this problem"):
        rule(**a, kernel=next(k for k in PASSES["gated_delta_rule.fwd"].kernels if "chunk" in k))


def test_other_devices_are_refused_by_name():
    """Arrays in memory of another kind (7 is OpenGL's), as their DLPack would tell."""
    a, call = inputs(), _native.Call(PASSES["gated_delta_rule.fwd"].index)
    for position, name in enumerate(("q", "k", "v")):
        array = a[name]
        strides = tuple(s // array.itemsize for s in array.strides)
        call.bind_pointer(position, array.ctypes.data, 0x12002, array.shape, strides, 7, 1, array)
    with pytest.raises(ValueError, match="gated_delta_rule.fwd: q: device, got type 7, expected the CPU"):
        call.run()


# ---- Threads ----


def test_results_do_not_depend_on_the_number_of_threads():
    a = inputs(T=200, H=4, HV=8, K=64, V=64)
    want = rule(**a, num_threads=1)
    for threads in (2, 3, 8):
        assert np.array_equal(rule(**a, num_threads=threads).o, want.o)


def test_other_python_threads_run_during_a_call():
    a = inputs(T=4096, H=4, HV=4, K=64, V=64)
    step = thalweg.prepare(thalweg.gated_delta_rule_fwd, **a, use_qk_l2norm=True, num_threads=1, kernel="cpu_generic")
    ticks, seen, done = [0], [], threading.Event()

    def work():
        seen.append(ticks[0])
        step()
        seen.append(ticks[0])
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not done.is_set():
        ticks[0] += 1
    thread.join()
    assert seen[1] - seen[0] > 1000, "the interpreter stood still"


def test_calls_from_many_threads():
    problems = [inputs(T=100 + i, H=2, HV=4, K=32, V=32) for i in range(8)]
    want = [rule(**p).o for p in problems]
    wrong = []

    def work(i):
        for _ in range(20):
            if not np.array_equal(rule(**problems[i]).o, want[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(problems))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_errors_belong_to_their_thread():
    texts = {}

    def work(size):
        for _ in range(200):
            try:
                rule(**{**inputs(), "g": np.zeros((1, 6, size), np.float32)})
            except ValueError as error:
                texts.setdefault(size, set()).add(str(error))

    threads = [threading.Thread(target=work, args=(size,)) for size in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {
        n: {f"gated_delta_rule.fwd: g: HV, got {n} in [1, 6, {n}], expected 4 (from v)"} for n in (1, 2, 3)
    }


# ---- Prepared calls ----


def decode_arrays(N=2, M=2, dtype=np.float32):
    a = inputs(B=N, T=1, dtype=dtype)
    return a, np.zeros((M, 4, 8, 8), np.float32)


def test_prepared_call_reads_the_arrays_anew():
    a, state = decode_arrays()
    other, other_state = decode_arrays()
    step = thalweg.prepare(thalweg.gated_delta_rule_decode, **a, state=state)
    first = step().o
    assert step().o is first
    state[:] = 0
    for name in a:
        a[name][...] = other[name]
    got = step().o.copy()
    want = thalweg.gated_delta_rule_decode(**other, state=other_state).o
    assert np.array_equal(got, want) and np.array_equal(state, other_state)


def test_prepared_call_takes_other_arrays():
    a, state = decode_arrays()
    step = thalweg.prepare(thalweg.gated_delta_rule_decode, **a, state=state)
    v = a["v"] + 1
    o = np.empty_like(v)
    step.set(v=v, o=o, g=None)
    state[:] = 0
    assert step().o is o
    want = thalweg.gated_delta_rule_decode(a["q"], a["k"], v, beta=a["beta"], state=np.zeros_like(state)).o
    assert np.array_equal(o, want)
    with pytest.raises(TypeError, match="unexpected argument 'scale'"):
        step.set(scale=1)
    with pytest.raises(TypeError, match="prepare: got <built-in function len>"):
        thalweg.prepare(len)


def test_prepared_call_keeps_its_arrays_alive():
    a, state = decode_arrays()
    alive = weakref.ref(a["q"])
    step = thalweg.prepare(thalweg.gated_delta_rule_decode, **a, state=state)
    want = step().o.copy()
    state[:] = 0
    del a
    gc.collect()
    junk = [np.full((2, 1, 2, 8), np.nan, np.float32) for _ in range(100)]
    assert alive() is not None and np.array_equal(step().o, want) and len(junk) == 100
    del step
    gc.collect()
    assert alive() is None


def test_prepared_call_refuses_changes_while_it_runs():
    a = inputs(T=4096, H=4, HV=4, K=64, V=64)
    step = thalweg.prepare(thalweg.gated_delta_rule_fwd, **a, use_qk_l2norm=True, num_threads=1, kernel="cpu_generic")
    refused = []
    thread = threading.Thread(target=step)
    thread.start()
    while thread.is_alive():
        try:
            step.set(v=a["v"])
        except RuntimeError as error:
            refused.append(str(error))
    assert "gated_delta_rule.fwd: arguments change while the call runs" in refused


def test_prepared_call_explains():
    a, state = decode_arrays()
    step = thalweg.prepare(thalweg.gated_delta_rule_decode, **a, state=state)
    assert any(kernel in step.explain() for kernel in PASSES["gated_delta_rule.decode"].kernels)
    assert step.workspace_bytes() >= 0


# ---- State pools ----


def test_decode_step_by_step_equals_forward():
    a = inputs(B=2, T=9, dtype=np.float64)
    want = thalweg.gated_delta_rule_fwd(**a, final_state=True)
    pool = np.zeros((2, 4, 8, 8))
    for t in range(9):
        o = thalweg.gated_delta_rule_decode(**{name: array[:, t : t + 1] for name, array in a.items()}, state=pool).o
        assert np.allclose(o[:, 0], want.o[:, t], rtol=1e-12, atol=1e-14)
    assert np.allclose(pool, want.final_state, rtol=1e-12, atol=1e-14)


def test_slots_and_padding_rows():
    a, pool = decode_arrays(N=3, M=5)
    pool[:] = random.normal(size=pool.shape)
    before = pool.copy()
    r = thalweg.gated_delta_rule_decode(
        **a, state=pool, read_slots=np.array([3, -1, 0]), write_slots=np.array([[1], [-1], [-1]])
    )
    assert (r.o[1] == 0).all() and (r.o[0] != 0).any()
    assert np.array_equal(pool[[0, 2, 3, 4]], before[[0, 2, 3, 4]]) and not np.array_equal(pool[1], before[1])


def test_rejected_draft_tokens_are_undone():
    """Three draft tokens, each state kept; going on from the first of them equals having decoded one token only."""
    a, pool = inputs(B=1, T=3), np.zeros((4, 4, 8, 8), np.float32)
    thalweg.gated_delta_rule_decode(**a, state=pool, read_slots=np.array([0]), write_slots=np.array([[1, 2, 3]]))
    alone = np.zeros((1, 4, 8, 8), np.float32)
    thalweg.gated_delta_rule_decode(**{name: array[:, :1] for name, array in a.items()}, state=alone)
    assert np.array_equal(pool[1], alone[0]) and (pool[0] == 0).all()


def test_a_slot_written_twice_is_refused_and_nothing_is_written():
    a, pool = decode_arrays(N=2, M=3)
    o = np.full((2, 1, 4, 8), 7, np.float32)
    with pytest.raises(ValueError, match="gated_delta_rule.decode: read_slots: slot 1, got two writes"):
        thalweg.gated_delta_rule_decode(**a, state=pool, read_slots=np.array([1, 1]), o=o)
    assert (pool == 0).all() and (o == 7).all()


def test_convolution_pool():
    x, weight = random.normal(size=(1, 6, 5)), random.normal(size=(5, 4))
    want = thalweg.short_conv_fwd(x, weight, activation="silu", final_state=True)
    pool = np.zeros((2, 5, 4))
    got = [thalweg.short_conv_decode(x[:, t : t + 1], weight, state=pool, read_slots=np.array([1]), activation="silu").y
           for t in range(6)]  # fmt: skip
    assert np.allclose(np.concatenate(got, 1), want.y, rtol=1e-12, atol=1e-14)
    assert np.array_equal(pool[1], want.final_state[0]) and (pool[0] == 0).all()
