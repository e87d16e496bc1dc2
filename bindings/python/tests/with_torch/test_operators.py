"""thalweg.torch: the operators' registration, their gradients, and what torch does with functions."""

import inspect
import math
import pathlib
import re

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from golden import assert_close, records

import thalweg
import thalweg.torch as ops
from thalweg.torch import _OPERATORS

F64 = torch.float64


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    torch._dynamo.reset()


def leaf(*shape, dtype=F64, scale=1.0):
    return (torch.randn(*shape, dtype=F64) * scale).to(dtype).requires_grad_()


class Sample:
    """A differentiable function of the module, its tensors with gradients, and its other arguments."""

    def __init__(self, name, tensors: dict, **rest):
        self.name, self.tensors, self.rest = name, tensors, rest
        self.function = getattr(ops, name)

    def __call__(self, *values):
        result = self.function(**dict(zip(self.tensors, values)), **self.rest)
        outputs = result if isinstance(result, tuple) else (result,)
        return tuple(t for t in outputs if t is not None and t.is_floating_point())

    def values(self):
        return [t.detach().clone().requires_grad_() for t in self.tensors.values()]


def delta_rule(name, T=5, dtype=F64, K=3, per_channel=False, packed=False, **rest):
    B, H, HV, V = 1 if packed else 2, 1, 2, K + 1
    N = 3 if packed else B
    tensors = dict(q=leaf(B, T, H, K, dtype=dtype), k=leaf(B, T, H, K, dtype=dtype), v=leaf(B, T, HV, V, dtype=dtype),
                   g=leaf(B, T, HV, *[K] * per_channel), beta=leaf(B, T, HV),
                   initial_state=leaf(N, HV, K, V))  # fmt: skip
    if rest.get("use_gate"):
        tensors |= dict(A_log=leaf(HV, scale=0.3), dt_bias=leaf(HV, *[K] * per_channel))
    else:
        tensors["g"] = (-tensors["g"].detach().abs()).requires_grad_()
    if packed:
        rest["cu_seqlens"] = torch.tensor([0, 3, 3, T])
    return Sample(name, tensors, output_final_state=True, use_qk_l2norm=True, **rest)


def samples():
    B, T, S, H, K = 2, 5, 9, 2, 4
    mask = torch.rand(B, H, 2, 3) < 0.7
    indices = torch.randint(-1, S, (B, T, 4))
    p = torch.rand(B, T, S, dtype=F64).softmax(-1)
    gate = dict(use_gate=True, use_beta_sigmoid=True, allow_neg_eigval=True)
    qk = lambda heads: dict(q=leaf(B, T, H, K), k=leaf(B, S, *heads, K))  # noqa: E731
    rope = dict(q_rope=leaf(B, T, H, 2), k_rope=leaf(B, S, 2))
    conv = dict(x=leaf(B, T, K), weight=leaf(K, 4), bias=leaf(K), initial_state=leaf(B, K, 4))
    kimi, packed = dict(name="kimi_delta_attention", per_channel=True), dict(packed=True, **gate)
    return {
        "gated_delta_rule": delta_rule("gated_delta_rule"),
        "gated_delta_rule, gate, packed": delta_rule("gated_delta_rule", **packed),
        "kimi_delta_attention": delta_rule(**kimi, scale=0.7),
        "kimi_delta_attention, gate, packed": delta_rule(**kimi, **packed, lower_bound=-5.0),
        "kda_gate": Sample("kda_gate", dict(x=leaf(B, T, H, K), A_log=leaf(H), dt_bias=leaf(H * K))),
        "kda_gate, lower bound": Sample(
            "kda_gate", dict(x=leaf(3, 1, B, T, H, K), A_log=leaf(H), dt_bias=leaf(H, K)), lower_bound=-5.0
        ),
        "short_conv": Sample("short_conv", conv, activation="silu", output_final_state=True),
        "gated_rms_norm": Sample("gated_rms_norm", dict(x=leaf(B, T, K), gate=leaf(B, T, K), weight=leaf(K))),
        "gated_rms_norm, plain": Sample("gated_rms_norm", dict(x=leaf(T, K))),
        "block_sparse_attention": Sample(
            "block_sparse_attention", qk([1]) | dict(v=leaf(B, S, 1, K), sink=leaf(H)),
            block_mask=mask, block_q=4, block_k=3, causal=True, output_lse=True,
        ),
        "sparse_flash_attention": Sample(
            "sparse_flash_attention", qk([]) | rope | dict(sink=leaf(H)), indices=indices, v_dim=3, output_lse=True
        ),
        "sparse_flash_attention, v": Sample("sparse_flash_attention", qk([]) | dict(v=leaf(B, S, 3)), indices=indices),
        "lightning_indexer": Sample("lightning_indexer", qk([]) | dict(w=leaf(B, T, H)), topk=3),
        "lightning_indexer_loss": Sample("lightning_indexer_loss", qk([]) | dict(w=leaf(B, T, H)), p=p),
    }  # fmt: skip


torch.manual_seed(1)
SAMPLES = samples()
every_sample = pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES.keys())


def test_one_operator_for_each_pass():
    assert len(_OPERATORS) >= 20
    for operator in _OPERATORS.values():
        assert getattr(torch.ops.thalweg, operator.name.partition("::")[2]) is not None
    calls = set(ops.__all__) - {"runs_on"}
    assert {sample.name for sample in SAMPLES.values()} | {n for n in calls if n.endswith("_decode")} == calls


# ---- Gradients ----


@every_sample
def test_gradcheck(sample):
    assert torch.autograd.gradcheck(sample, sample.values())


@pytest.mark.parametrize(
    "record", [r for r in records() if r.name == "bwd" and r.op != "kda_gate"], ids=lambda r: r.text
)
def test_golden_gradients(record):
    """Through autograd, the gradients that tests/golden has from elsewhere."""
    inputs = {name: torch.tensor(array) for name, array in record.inputs.items()}
    upstream = {name: inputs.pop(name) for name in list(inputs) if name.startswith("d_")}
    for name, tensor in inputs.items():
        if f"d_{name}" in record.outputs:
            tensor.requires_grad_()
    options = dict(record.options)
    for name in ("use_qk_l2norm", "use_gate", "use_beta_sigmoid", "allow_neg_eigval"):
        if name in options:
            options[name] = bool(options[name])
    function = getattr(ops, record.op)
    if "output_final_state" in inspect.signature(function).parameters:
        options["output_final_state"] = True
    result = function(**inputs, **options)
    o, final_state = result if isinstance(result, tuple) else (result, None)
    grads = [upstream.get("d_o", upstream.get("d_y")), upstream.get("d_final_state")]
    outputs = [(t, g) for t, g in zip((o, final_state), grads) if g is not None]
    torch.autograd.backward([t for t, _ in outputs], [g for _, g in outputs])
    for name, want in record.outputs.items():
        assert_close(inputs[name.removeprefix("d_")].grad, want)


def test_only_the_gradients_that_are_needed():
    sample = delta_rule("gated_delta_rule")
    values = {name: t.detach() for name, t in sample.tensors.items()}
    values["v"].requires_grad_()
    o, _ = ops.gated_delta_rule(**values)
    o.sum().backward()
    assert values["v"].grad is not None and all(t.grad is None for name, t in values.items() if name != "v")


def test_gradient_of_the_state_alone():
    sample = delta_rule("gated_delta_rule")
    values = sample.values()
    _, state = sample(*values)
    state.sum().backward()
    assert values[2].grad.abs().sum() > 0 and (values[0].grad == 0).all()


def test_gradients_have_the_dtype_of_their_tensor():
    sample = delta_rule("gated_delta_rule", dtype=torch.bfloat16)
    values = [t.detach().to(torch.float16).requires_grad_() if name == "initial_state" else t.detach().requires_grad_()
              for name, t in sample.tensors.items()]  # fmt: skip
    o, state = sample(*values)
    assert o.dtype == torch.bfloat16 and state.dtype == torch.float32
    (o.float().sum() + state.sum()).backward()
    assert [t.grad.dtype for t in values] == [t.dtype for t in values]


# ---- torch.library ----


def operator_arguments(name):
    """Arguments of the operator of a pass, as a sample's function or its backward hands them over."""
    seen = {}
    original = type(_OPERATORS[name]).__call__

    def spy(self, **values):
        seen.setdefault(f"{self.pass_.op}.{self.pass_.name}", dict(values))
        return original(self, **values)

    type(_OPERATORS[name]).__call__ = spy
    try:
        for sample in SAMPLES.values():
            outputs = sample(*sample.values())
            sum(t.sum() for t in outputs).backward()
    finally:
        type(_OPERATORS[name]).__call__ = original
    values = seen[name]
    inputs = [values.pop(f.name, None) for f in _OPERATORS[name].pass_.inputs]
    # A backward has no gradient of its own, and opcheck cannot sum gradients of whole-number outputs.
    if name.endswith("bwd") or name == "lightning_indexer.fwd":
        inputs = [t if t is None else t.detach() for t in inputs]
    return inputs, values


@pytest.mark.parametrize("name", [n for n in _OPERATORS if not n.endswith("decode")])
def test_opcheck(name):
    args, kwargs = operator_arguments(name)
    torch.library.opcheck(_OPERATORS[name].op, args, kwargs)


@pytest.mark.parametrize("name", [n for n in _OPERATORS if n.endswith("decode")])
def test_opcheck_decode(name):
    if name == "short_conv.decode":
        args = [
            torch.randn(2, 1, 5),
            torch.randn(5, 4),
            torch.randn(5),
            torch.randn(3, 5, 4),
            torch.tensor([2, 0]),
            None,
        ]
        kwargs = dict(activation="silu")
    else:
        channels = [8] if name.startswith("kimi") else []
        args = [torch.randn(2, 1, 2, 8), torch.randn(2, 1, 2, 8), torch.randn(2, 1, 4, 8)]
        args += [-torch.rand(2, 1, 4, *channels), torch.rand(2, 1, 4), None, None]
        args += [torch.randn(3, 4, 8, 8), torch.tensor([2, 0]), None]
        kwargs = {}
    torch.library.opcheck(_OPERATORS[name].op, args, kwargs)


def test_autocast():
    a = {name: t.detach().float() for name, t in delta_rule("gated_delta_rule").tensors.items()}
    a["k"] = a["k"].bfloat16()
    with pytest.raises(ValueError, match="k: dtype, got bf16, expected f32"):
        ops.gated_delta_rule(**a)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, state = ops.gated_delta_rule(**a, output_final_state=True)
    assert o.dtype == torch.bfloat16 and state.dtype == torch.float32
    low = {name: t.bfloat16() if name in "qkv" else t for name, t in a.items()}
    assert torch.equal(o, ops.gated_delta_rule(**low)[0])  # gates and state were left in float32
    doubles = {name: t.detach() for name, t in delta_rule("gated_delta_rule").tensors.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ops.gated_delta_rule(**doubles)[0].dtype == F64


# ---- What torch does with functions ----


@every_sample
def test_compile_fullgraph(sample):
    """Forward and backward in one graph, bit for bit as without."""
    compiled = torch.compile(lambda *values: sample(*values), fullgraph=True, backend="aot_eager")
    got, want = sample.values(), sample.values()
    sum((t * 0.5).sum() for t in compiled(*got)).backward()
    sum((t * 0.5).sum() for t in sample(*want)).backward()
    for x, y in zip(got, want):
        assert torch.equal(x.grad, y.grad)


def test_compile_once_for_every_length():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def layer(x, weight, q, k, v, g, beta):
        y, _ = ops.short_conv(x, weight, activation="silu")
        o, state = ops.gated_delta_rule(q, k, v * y.unsqueeze(2), g, beta, output_final_state=True, use_qk_l2norm=True)
        return ops.gated_rms_norm(o).sum() + state.sum()

    compiled = 0
    for T in (3, 64, 65, 200):
        x, v = torch.randn(1, T, 8), torch.randn(1, T, 4, 8)
        q, k, g, beta = torch.randn(1, T, 2, 8), torch.randn(1, T, 2, 8), -torch.rand(1, T, 4), torch.rand(1, T, 4)
        weight = torch.randn(8, 4, requires_grad=True)
        got = layer(x, weight, q, k, v, g, beta)
        got.backward()
        y, _ = ops.short_conv(x, weight.detach(), activation="silu")
        o, state = ops.gated_delta_rule(q, k, v * y.unsqueeze(2), g, beta, output_final_state=True, use_qk_l2norm=True)
        assert torch.allclose(got, ops.gated_rms_norm(o).sum() + state.sum(), rtol=1e-4)
        assert weight.grad.isfinite().all()
        compiled = compiled or counter.frame_count
    assert counter.frame_count == compiled > 0


def test_compile_inductor():
    """The default backend, beside operations that it generates code for."""

    @torch.compile(fullgraph=True, dynamic=True)
    def layer(q, k, v):
        return ops.gated_delta_rule(q.sin(), k, v, use_qk_l2norm=True)[0] * 2

    for T in (5, 7):
        q, k, v = (torch.randn(1, T, 2, 8) for _ in range(3))
        want = ops.gated_delta_rule(q.sin(), k, v, use_qk_l2norm=True)[0] * 2
        assert torch.allclose(layer(q, k, v), want, rtol=1e-5, atol=1e-6)


def test_compile_decode_writes_the_pool():
    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(q, k, v, state, slots):
        return ops.gated_delta_rule_decode(q, k, v * 2, state=state, read_slots=slots) + 1

    q, k, v = torch.randn(2, 1, 2, 8), torch.randn(2, 1, 2, 8), torch.randn(2, 1, 4, 8)
    pool, slots = torch.randn(3, 4, 8, 8), torch.tensor([2, 0])
    got_pool, want_pool = pool.clone(), pool.clone()
    got = step(q, k, v, got_pool, slots)
    want = ops.gated_delta_rule_decode(q, k, v * 2, state=want_pool, read_slots=slots) + 1
    assert torch.equal(got, want) and torch.equal(got_pool, want_pool) and not torch.equal(want_pool, pool)


def test_inference_mode():
    sample = SAMPLES["gated_delta_rule"]
    want = sample(*sample.values())
    with torch.inference_mode():
        got = sample(*[t.detach().clone() for t in sample.tensors.values()])
        pool = torch.zeros(2, 4, 8, 8)
        ops.gated_delta_rule_decode(
            torch.randn(2, 1, 2, 8), torch.randn(2, 1, 2, 8), torch.randn(2, 1, 4, 8), state=pool
        )
    assert all(torch.equal(x, y) for x, y in zip(got, want)) and got[0].is_inference() and pool.abs().sum() > 0


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant):
    sample = SAMPLES["gated_delta_rule, gate, packed"]
    got, want = sample.values(), sample.values()
    outputs = torch.utils.checkpoint.checkpoint(sample, *got, use_reentrant=use_reentrant)
    sum(t.sum() for t in outputs).backward()
    sum(t.sum() for t in sample(*want)).backward()
    assert all(torch.equal(x.grad, y.grad) for x, y in zip(got, want))


def test_strides_are_taken_or_made_contiguous():
    sample = SAMPLES["gated_delta_rule"]
    q, k, v, g, beta, state = (t.detach() for t in sample.tensors.values())
    want = ops.gated_delta_rule(q, k, v, g, beta, initial_state=state)[0]
    head_first = q.transpose(1, 2).contiguous().transpose(1, 2)
    last_apart = torch.stack([k, k], -1)[..., 0]
    value_first = state.transpose(-1, -2).contiguous().transpose(-1, -2)
    assert last_apart.stride(-1) == 2
    assert torch.equal(ops.gated_delta_rule(head_first, last_apart, v, g, beta, initial_state=value_first)[0], want)


def test_decode_pool_in_place():
    q, v = torch.randn(2, 1, 2, 8), torch.randn(2, 1, 4, 8)
    pool, value_first = torch.zeros(3, 4, 8, 8), torch.zeros(3, 4, 8, 8).transpose(-1, -2)
    slots, version = torch.tensor([2, 0]), pool._version
    o = ops.gated_delta_rule_decode(q, q, v, state=pool, read_slots=slots)
    assert torch.equal(ops.gated_delta_rule_decode(q, q, v, state=value_first, read_slots=slots), o)
    assert torch.equal(pool, value_first) and (pool[1] == 0).all() and pool._version > version
    with pytest.raises(ValueError, match="gated_delta_rule.decode: state: "):
        ops.gated_delta_rule_decode(q, q, v, state=torch.zeros(3, 4, 8, 16)[..., ::2].transpose(1, 2).transpose(1, 2))
    q.requires_grad_()
    with pytest.raises(RuntimeError, match="no autograd formula"):
        ops.gated_delta_rule_decode(q, q, v, state=pool).sum().backward()


def test_large_outputs_lie_in_large_pages():
    """Where the system grants them on request, memory that malloc has just mapped for an output has the flag."""
    setting = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("the system has no pages of 2 MiB to give")
    y = ops.gated_rms_norm(torch.zeros(1 << 14, 1 << 12))  # 256 MiB, far above what malloc keeps
    middle, flags = y.data_ptr() + y.nbytes // 2, ""
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
            begin, end = (int(x, 16) for x in line.split()[0].split("-"))
        elif line.startswith("VmFlags") and begin <= middle < end:
            flags = line
    assert " hg" in flags


def test_chunk_states_carry_no_gradient():
    sample = SAMPLES["gated_delta_rule"]
    q, k, v, g, beta, state = sample.values()
    o, final, chunks = ops.gated_delta_rule(q, k, v, g, beta, initial_state=state, output_chunk_states=True, every=2)
    assert final is None and o.requires_grad and not chunks.requires_grad
    assert torch.equal(chunks[0], state[0]) and chunks.shape[0] == 2 * 5 // 2 + 2


def test_threads_follow_torch():
    sample, before = SAMPLES["gated_delta_rule"], torch.get_num_threads()
    want = sample(*sample.values())[0]
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            assert torch.equal(sample(*sample.values())[0], want)
    finally:
        torch.set_num_threads(before)


# ---- Errors ----


def test_errors():
    q, v = torch.randn(1, 3, 2, 8), torch.randn(1, 3, 4, 8)
    with pytest.raises(ValueError, match=r"gated_delta_rule.fwd: k: K, got 4 in \[1, 3, 2, 4\], expected 8 \(from q\)"):
        ops.gated_delta_rule(q, q[..., :4], v)
    with pytest.raises(TypeError, match="unexpected keyword argument 'use_qk_l2norm_in_kernel'"):
        ops.gated_delta_rule(q, q, v, use_qk_l2norm_in_kernel=True)
    with pytest.raises(ValueError, match="gated_delta_rule.fwd: g: dtype, got unknown"):
        ops.gated_delta_rule(q, q, v, torch.zeros(1, 3, 4, dtype=torch.complex64))
    with pytest.raises(ValueError, match="short_conv.fwd: activation: got 'relu', expected one of none silu"):
        ops.short_conv(torch.randn(1, 3, 4), torch.randn(4, 4), activation="relu")
    with pytest.raises(ValueError, match="v_dim: missing"):
        ops.sparse_flash_attention(q, q[:, :, 0], indices=torch.zeros(1, 3, 1, dtype=torch.int32))


def test_tensors_of_other_devices_are_refused_by_name():
    q, v = torch.empty(1, 3, 2, 8, device="meta"), torch.empty(1, 3, 4, 8, device="meta")
    with pytest.raises(ValueError, match=r"gated_delta_rule.fwd: q: device, got meta, expected cpu or cuda"):
        _OPERATORS["gated_delta_rule.fwd"].run(q, q, v, *[None] * 6)


# ---- The NumPy functions on torch tensors ----


def test_numpy_functions_take_and_return_tensors():
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = (torch.randn(1, 5, 2, 8, dtype=dtype) for _ in range(3))
        result = thalweg.gated_delta_rule_fwd(q, k, v, use_qk_l2norm=True, final_state=True)
        assert type(result.o) is torch.Tensor and result.o.dtype == dtype and result.final_state.dtype == torch.float32
        assert torch.equal(result.o, ops.gated_delta_rule(q, k, v, use_qk_l2norm=True)[0])
    with pytest.raises(TypeError, match="gated_delta_rule.fwd: q: got a tensor that requires grad"):
        thalweg.gated_delta_rule_fwd(q.requires_grad_(), k, v)


def test_plain_numbers():
    """The rule written out, one token after the other."""
    q, k, v, g, beta, state = (t.detach() for t in delta_rule("gated_delta_rule").tensors.values())
    o, final = ops.gated_delta_rule(q, k, v, g, beta, initial_state=state, output_final_state=True)
    S = state.clone()
    for t in range(q.shape[1]):
        kt, qt = (x[:, t].repeat_interleave(2, 1) for x in (k, q))
        S = S * g[:, t, :, None, None].exp()
        u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", S, kt))
        S = S + torch.einsum("bhk,bhv->bhkv", kt, u)
        assert torch.allclose(o[:, t], torch.einsum("bhkv,bhk->bhv", S, qt) / math.sqrt(3), rtol=1e-12, atol=1e-14)
    assert torch.allclose(final, S, rtol=1e-12, atol=1e-14)
    assert np.isfinite(final.numpy()).all()


class OtherLibrary:
    """A bfloat16 array of a library with an array namespace that is neither NumPy's nor, by its type, torch's."""

    def __init__(self, tensor):
        self.tensor, self.dtype, self.shape = tensor, tensor.dtype, tuple(tensor.shape)

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()

    def __array_namespace__(self):
        return torch


def test_bfloat16_arrays_of_other_libraries():
    pytest.importorskip("ml_dtypes")
    q, k, v = (torch.randn(1, 5, 2, 8).bfloat16() for _ in range(3))
    got = thalweg.gated_delta_rule_fwd(*map(OtherLibrary, (q, k, v)), use_qk_l2norm=True).o
    assert got.dtype == torch.bfloat16 and torch.equal(got, ops.gated_delta_rule(q, k, v, use_qk_l2norm=True)[0])
