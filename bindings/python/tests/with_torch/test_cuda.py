"""thalweg.torch and thalweg.fla on a GPU: the same numbers as on the CPU, gradients, autocast, compiled graphs,
checkpoints, streams and CUDA graphs. Skipped without one. Models: test_transformers.py."""

import copy
import subprocess
import sys

import pytest
import torch
import torch._dynamo.testing
from test_operators import SAMPLES, every_sample, operator_arguments

import thalweg
import thalweg.torch as ops
from thalweg import fla
from thalweg.torch import _OPERATORS

if not (torch.cuda.is_available() and ops.runs_on(torch.device("cuda", 0))):
    pytest.skip("needs a Hopper GPU and CUDA rows", allow_module_level=True)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    torch._dynamo.reset()


def leaf(*shape, scale=1.0, dtype=torch.float32):
    return (scale * torch.randn(*shape)).to(dtype).requires_grad_()


def delta_inputs(channels=None, dtype=torch.float32, K=64):
    torch.manual_seed(0)
    B, T, H, HV = 2, 100, 2, 4
    gate = (B, T, HV, K) if channels else (B, T, HV)
    q, k, v = leaf(B, T, H, K, dtype=dtype), leaf(B, T, H, K, scale=0.1, dtype=dtype), leaf(B, T, HV, K, dtype=dtype)
    g = (-torch.rand(*gate)).requires_grad_()
    beta = torch.rand(B, T, HV).requires_grad_()
    return q, k, v, g, beta


def detached(tensors, device="cuda"):
    return [x.detach().to(device, copy=True) for x in tensors]


def leaves(tensors, device="cuda"):
    return [x.detach().to(device, copy=True).requires_grad_(x.requires_grad) for x in tensors]


def loss(outputs):
    """A sum with weights that are exact in every dtype and the same on every device."""
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    outputs = [x for x in outputs if x is not None and x.is_floating_point()]
    weights = [(torch.arange(x.numel(), device=x.device) % 7 - 3).view(x.shape).to(x.dtype) for x in outputs]
    return sum((x * w).sum() for x, w in zip(outputs, weights))


def both(function, inputs, tolerance):
    """Outputs and gradients on the GPU against those on the CPU."""
    results = []
    for device in ("cpu", "cuda"):
        tensors = leaves(inputs, device)
        out = function(*tensors)
        loss(out).backward()
        out = [x for x in (out if isinstance(out, tuple) else (out,)) if x is not None]
        results.append(out + [x.grad for x in tensors if x.requires_grad])
    for cpu, gpu in zip(*results):
        assert gpu.device.type == "cuda" and gpu.dtype == cpu.dtype
        if not gpu.is_floating_point():
            assert torch.equal(gpu.cpu(), cpu)
            continue
        error = (gpu.detach().cpu().double() - cpu.detach().double()).norm() / (cpu.detach().double().norm() + 1e-30)
        assert error < tolerance, float(error)


# ---- The same numbers as on the CPU ----


def on(device, sample):
    """The sample with its other tensors (masks, indices, borders) on the device."""
    moved = copy.copy(sample)
    moved.rest = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in sample.rest.items()}
    return moved


@every_sample
def test_every_function_in_float64(sample):
    both(lambda *values: on(values[0].device, sample)(*values), sample.values(), 1e-10)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
def test_gated_delta_rule(dtype, tolerance):
    both(ops.gated_delta_rule, delta_inputs(dtype=dtype), tolerance)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
def test_kimi_delta_attention(dtype, tolerance):
    both(ops.kimi_delta_attention, delta_inputs(channels=True, dtype=dtype), tolerance)


def test_rows():
    torch.manual_seed(1)
    both(lambda x, w: ops.gated_rms_norm(x, weight=w), (leaf(33, 96), leaf(96)), 1e-5)
    both(lambda x, w: ops.short_conv(x, w), (leaf(2, 50, 24), leaf(24, 4)), 1e-5)


@pytest.mark.parametrize("channels", [False, True])
def test_decode_goes_on_from_a_pool(channels):
    """Token by token through a pool of states, as the whole sequence at once."""
    inputs = detached(delta_inputs(channels=channels))
    whole, decode = ((ops.kimi_delta_attention, ops.kimi_delta_attention_decode) if channels else
                     (ops.gated_delta_rule, ops.gated_delta_rule_decode))  # fmt: skip
    want, state = whole(*inputs, output_final_state=True)
    pool, slots = torch.zeros(3, 4, 64, 64, device="cuda"), torch.tensor([2, 0], device="cuda")
    with torch.inference_mode():
        got = [decode(*[x[:, t : t + 1] for x in inputs], state=pool, read_slots=slots) for t in range(100)]
    assert got[0].is_inference()
    torch.testing.assert_close(torch.cat(got, 1), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(pool[slots], state, rtol=1e-4, atol=1e-4)
    assert (pool[1] == 0).all()


def test_mixed_devices_are_refused():
    q, k, v, g, beta = (x.detach() for x in delta_inputs())
    with pytest.raises(ValueError, match="gated_delta_rule.fwd: k: device, got the CPU, expected cuda:0"):
        ops.gated_delta_rule(q.cuda(), k, v.cuda(), g.cuda(), beta.cuda())


def test_numpy_functions_refuse_the_gpu():
    q = torch.zeros(1, 3, 2, 8, device="cuda")
    with pytest.raises(ValueError, match="gated_delta_rule.fwd: q: device, got cuda:0, expected the CPU"):
        thalweg.gated_delta_rule_fwd(q, q, q)


# ---- What torch does with functions ----


@pytest.mark.parametrize("name", [n for n in _OPERATORS if not n.endswith("decode")])
def test_opcheck(name):
    args, kwargs = operator_arguments(name)
    args = [x.detach().cuda().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in args]
    torch.library.opcheck(_OPERATORS[name].op, args, kwargs)


@pytest.mark.parametrize("name", ["gated_delta_rule, gate, packed", "kimi_delta_attention", "short_conv"])
def test_gradcheck(name):
    sample = on("cuda", SAMPLES[name])
    assert torch.autograd.gradcheck(sample, leaves(sample.values()), fast_mode=True)


def test_autocast():
    q, k, v, g, beta = delta_inputs()
    inputs = leaves((q, k.bfloat16(), v, g, beta))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        o, state = ops.gated_delta_rule(*inputs, output_final_state=True)
    assert o.dtype == torch.bfloat16 and state.dtype == torch.float32
    o.sum().backward()
    assert [x.grad.dtype for x in inputs] == [x.dtype for x in inputs]
    low = [x.detach().bfloat16() for x in inputs[:3]] + detached(inputs[3:])
    assert torch.equal(o, ops.gated_delta_rule(*low)[0])  # gates were left in float32


@every_sample
def test_compile_fullgraph(sample):
    """Forward and backward in one graph, bit for bit as without."""
    sample = on("cuda", sample)
    compiled = torch.compile(lambda *values: sample(*values), fullgraph=True, backend="aot_eager")
    got, want = leaves(sample.values()), leaves(sample.values())
    loss(compiled(*got)).backward()
    loss(sample(*want)).backward()
    for x, y in zip(got, want):
        assert torch.equal(x.grad, y.grad)


def layer_inputs(T):
    x, v = torch.randn(1, T, 64, device="cuda"), torch.randn(1, T, 4, 64, device="cuda")
    q, k = torch.randn(1, T, 2, 64, device="cuda"), torch.randn(1, T, 2, 64, device="cuda")
    g, beta = -torch.rand(1, T, 4, device="cuda"), torch.rand(1, T, 4, device="cuda")
    return x, torch.randn(64, 4, device="cuda", requires_grad=True), q, k, v, g, beta


def layer(x, weight, q, k, v, g, beta):
    y, _ = ops.short_conv(x.sin(), weight, activation="silu")
    o, state = ops.gated_delta_rule(q, k, v * y.unsqueeze(2), g, beta, output_final_state=True, use_qk_l2norm=True)
    return ops.gated_rms_norm(o).square() * 0.1, state


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_once_for_every_length(backend):
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    first = 0
    for T in (3, 64, 65, 200):
        inputs = layer_inputs(T)
        want, got = layer(*inputs), compiled(*inputs)
        (want_gradient,) = torch.autograd.grad(loss(want), inputs[1])
        (gradient,) = torch.autograd.grad(loss(got), inputs[1])
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(gradient, want_gradient, rtol=1e-3, atol=1e-3)
        first = first or counter.frame_count
    assert counter.frame_count == first > 0


def test_compile_with_graphs():
    """torch.compile's own CUDA graphs (mode reduce-overhead), replayed on other numbers."""
    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        inputs = layer_inputs(70)
        torch.compiler.cudagraph_mark_step_begin()
        got = compiled(*inputs)
        (gradient,) = torch.autograd.grad(loss(got), inputs[1])
        got, gradient = [x.detach().clone() for x in got], gradient.clone()
        want = layer(*inputs)
        (want_gradient,) = torch.autograd.grad(loss(want), inputs[1])
        torch.testing.assert_close(got, [x.detach() for x in want], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(gradient, want_gradient, rtol=1e-3, atol=1e-3)


def test_inference_mode():
    inputs = detached(delta_inputs(dtype=torch.bfloat16))
    want = ops.gated_delta_rule(*inputs)[0]
    with torch.inference_mode():
        got = ops.gated_delta_rule(*inputs)[0]
    assert got.is_inference() and torch.equal(got, want)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant):
    got, want = leaves(delta_inputs()), leaves(delta_inputs())
    out = torch.utils.checkpoint.checkpoint(ops.gated_delta_rule, *got, use_reentrant=use_reentrant)
    loss(out).backward()
    loss(ops.gated_delta_rule(*want)).backward()
    assert all(torch.equal(x.grad, y.grad) for x, y in zip(got, want))


# ---- Streams and graphs ----


def step(inputs):
    """One forward and backward; outputs and gradients."""
    o, _ = ops.gated_delta_rule(*inputs)
    return [o.detach(), *torch.autograd.grad(loss(o), inputs)]


@pytest.mark.parametrize("dtype, K", [(torch.float32, 32), (torch.bfloat16, 64), (torch.bfloat16, 128)])
def test_streams(dtype, K):
    """Forward and backward on streams of their own, at once, behind work that is still in the queue there."""
    inputs = leaves(delta_inputs(dtype=dtype, K=K))
    want = step(inputs)
    streams = [torch.cuda.Stream() for _ in range(4)]
    results = []
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)  # cycles: a tenth of a second
            results.append(step(leaves(inputs)))
            assert not stream.query()  # issued, not waited for
    torch.cuda.synchronize()
    for got in results:
        assert all(torch.equal(x, y) for x, y in zip(got, want))


@pytest.mark.parametrize("dtype, K", [(torch.float32, 32), (torch.bfloat16, 64), (torch.bfloat16, 128)])
def test_a_graph_of_a_training_step(dtype, K):
    inputs = leaves(delta_inputs(dtype=dtype, K=K))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(inputs)
    for factor in (1, 2, 0.5):
        with torch.no_grad():
            inputs[2].mul_(factor)
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(captured, step(inputs)))


def test_a_graph_of_packed_sequences_whose_borders_move():
    inputs = [x[:1] for x in detached(delta_inputs(dtype=torch.bfloat16))]
    borders = torch.tensor([0, 30, 100], device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = ops.gated_delta_rule(*inputs, cu_seqlens=borders)
    for middle in (30, 0, 64, 99):
        borders[1] = middle
        graph.replay()
        parts = [(a, b) for a, b in ((0, middle), (middle, 100)) if a < b]
        pieces = [ops.gated_delta_rule(*[x[:, a:b] for x in inputs])[0] for a, b in parts]
        torch.testing.assert_close(captured, torch.cat(pieces, 1), rtol=2e-2, atol=2e-2)
        assert torch.equal(captured, ops.gated_delta_rule(*inputs, cu_seqlens=borders)[0])


def test_a_graph_of_a_decoding_step():
    """Replays move the states of the pool on."""
    q, k, v, g, beta = detached(delta_inputs(dtype=torch.bfloat16))
    token = [x[:, :1].contiguous() for x in (q, k, v, g, beta)]
    pool, expected = torch.zeros(2, 4, 64, 64, device="cuda"), torch.zeros(2, 4, 64, 64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        captured = ops.gated_delta_rule_decode(*token, state=pool)
    for t in range(20):
        for x, y in zip(token, (q, k, v, g, beta)):
            x.copy_(y[:, t : t + 1])
        graph.replay()
        assert torch.equal(captured, ops.gated_delta_rule_decode(*token, state=expected))
    assert torch.equal(pool, expected)


FIRST_CALL = """
import torch, thalweg.torch as ops
assert ops.runs_on(torch.device("cuda", 0))
q, k, v = torch.randn(3, 1, 200, 2, 128, device="cuda", dtype=torch.bfloat16).unbind()
k = k / k.norm(dim=-1, keepdim=True)
beta, g = torch.rand(1, 200, 2, device="cuda"), -torch.rand(1, 200, 2, device="cuda")
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    captured, _ = ops.gated_delta_rule(q, k, v, g=g, beta=beta)
graph.replay()
torch.cuda.synchronize()
assert torch.equal(captured, ops.gated_delta_rule(q, k, v, g=g, beta=beta)[0])
"""


def test_the_first_call_of_a_process_may_be_captured():
    subprocess.run([sys.executable, "-c", FIRST_CALL], check=True, timeout=60)


# ---- flash-linear-attention's functions ----

RULES = ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "chunk_kda", "fused_recurrent_kda"]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 5e-5), (torch.bfloat16, 3e-2)])
def test_fla_rules(name, v_first, dtype, tolerance):
    channels = name.endswith("kda")
    q, k, v, g, beta = delta_inputs(channels, dtype)
    state, A_log, dt_bias = leaf(2, 4, 64, 64, scale=0.1), leaf(4, scale=0.1), leaf(4, *[64] * channels)

    def rule(q, k, v, g, beta, state, A_log, dt_bias):
        return getattr(fla, name)(
            q, k, v, g=g, beta=beta, initial_state=state, A_log=A_log, dt_bias=dt_bias.flatten(),
            use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True,
            state_v_first=v_first, output_final_state=True,
        )  # fmt: skip

    both(rule, (q, k, v, g, beta, state, A_log, dt_bias), tolerance)


@pytest.mark.parametrize("name", RULES)
def test_fla_rules_without_gradients(name):
    """Few tokens (decoding), many, and packed sequences with intermediate states."""
    inputs = detached(delta_inputs(name.endswith("kda")), "cpu")
    named = dict(zip(("q", "k", "v", "g", "beta"), inputs))
    cu_seqlens = torch.tensor([0, 40, 40, 100])
    cases = [dict(named), {n: x[:, :3] for n, x in named.items()}]
    cases.append({n: x[:1] for n, x in named.items()} | dict(cu_seqlens=cu_seqlens))
    if name == "chunk_kda":
        cases.append(cases[2] | dict(return_intermediate_states=True))
    for case in cases:
        with torch.no_grad():
            want = getattr(fla, name)(**case, output_final_state=True)
            moved = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in case.items()}
            got = getattr(fla, name)(**moved, output_final_state=True)
        for x, y in zip(got, want):
            assert x.device.type == "cuda"
            torch.testing.assert_close(x.cpu(), y, rtol=1e-4, atol=1e-4)


def test_fla_gates_convolution_and_norm():
    x, A_log, dt_bias = leaf(2, 9, 4, 6), leaf(4), leaf(24)
    both(lambda *a: fla.fused_kda_gate(*a), (x, A_log, dt_bias), 1e-5)
    both(lambda *a: fla.fused_kda_gate(*a, torch.bfloat16), (x, A_log, dt_bias), 1e-2)
    both(lambda *a: fla.fused_kda_gate(*a, lower_bound=-5.0), (x, A_log, dt_bias), 1e-5)
    both(lambda *a: fla.fused_gdn_gate(*a), (leaf(2, 9, 4), A_log, leaf(4)), 1e-5)

    def conv(x, weight, bias, residual, state):
        return fla.causal_conv1d(x, weight, bias, residual, state, True, "silu")

    def update(x, cache, residual, weight, bias):
        return fla.causal_conv1d_update(x, cache.clone(), residual, weight, bias, "silu")

    weight, bias, state = leaf(6, 4), leaf(6), leaf(2, 6, 4)
    both(conv, (leaf(2, 11, 6), weight, bias, leaf(2, 11, 6), state), 1e-5)
    both(update, (leaf(2, 1, 6), state, leaf(2, 1, 6), weight, bias), 1e-5)
    with torch.inference_mode():
        cache, x = state.detach().cuda(), torch.randn(2, 1, 6, device="cuda")
        y, same = fla.causal_conv1d_update(x, cache, weight=weight.detach().cuda())
    assert same is cache and torch.equal(cache[..., -1], x[:, 0])

    def norm(x, g, weight, residual):
        return fla.rms_norm_gated(x, g, weight, None, residual=residual, prenorm=True)

    both(norm, (leaf(3, 5, 8), leaf(3, 5, 8), leaf(8), leaf(3, 5, 8)), 1e-5)
    module = fla.FusedRMSNormGated(8, device="cuda")
    assert module(torch.randn(3, 8, device="cuda"), torch.randn(3, 8, device="cuda")).device.type == "cuda"
