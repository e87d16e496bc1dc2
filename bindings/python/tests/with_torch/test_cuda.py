"""thalweg.torch on a GPU: the same numbers as on the CPU, gradients, streams and graphs. Skipped without one."""

import pytest
import torch

import thalweg.torch as ops

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and ops.runs_on(torch.device("cuda", 0))), reason="needs a Hopper GPU and CUDA rows"
)


def leaf(*shape, scale=1.0, dtype=torch.float32):
    return (scale * torch.randn(*shape)).to(dtype).requires_grad_()


def delta_inputs(channels=None, dtype=torch.float32):
    torch.manual_seed(0)
    B, T, H, HV, K = 2, 100, 2, 4, 64
    gate = (B, T, HV, K) if channels else (B, T, HV)
    q, k, v = leaf(B, T, H, K, dtype=dtype), leaf(B, T, H, K, scale=0.1, dtype=dtype), leaf(B, T, HV, K, dtype=dtype)
    g = (-torch.rand(*gate)).requires_grad_()
    beta = torch.rand(B, T, HV).requires_grad_()
    return q, k, v, g, beta


def both(function, inputs, tolerance):
    """Outputs and gradients on the GPU against those on the CPU."""
    results = []
    for device in ("cpu", "cuda"):
        leaves = [x.detach().to(device).requires_grad_(x.requires_grad) for x in inputs]
        out = function(*leaves)
        out = out[0] if isinstance(out, tuple) else out
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape).to(device)
        (out * weights).sum().backward()
        results.append([out] + [x.grad for x in leaves if x.requires_grad])
    for cpu, gpu in zip(*results):
        assert gpu.device.type == "cuda"
        error = (gpu.cpu().double() - cpu.double()).norm() / cpu.double().norm()
        assert error < tolerance, float(error)


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


def test_mixed_devices_are_refused():
    q, k, v, g, beta = (x.detach() for x in delta_inputs())
    with pytest.raises(ValueError, match="gated_delta_rule.fwd: k: device, got the CPU, expected cuda:0"):
        ops.gated_delta_rule(q.cuda(), k, v.cuda(), g.cuda(), beta.cuda())


def test_a_stream_and_a_graph():
    inputs = [x.detach().cuda() for x in delta_inputs(dtype=torch.bfloat16)]
    want = ops.gated_delta_rule(*inputs)
    want = want[0] if isinstance(want, tuple) else want
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = ops.gated_delta_rule(*inputs)
    stream.synchronize()
    got = got[0] if isinstance(got, tuple) else got
    assert torch.equal(got, want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ops.gated_delta_rule(*inputs)
    captured = captured[0] if isinstance(captured, tuple) else captured
    inputs[2].mul_(2)
    graph.replay()
    torch.cuda.synchronize()
    again = ops.gated_delta_rule(*inputs)
    assert torch.equal(captured, again[0] if isinstance(again, tuple) else again)
    assert not torch.equal(captured, want)


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
    import subprocess
    import sys

    subprocess.run([sys.executable, "-c", FIRST_CALL], check=True, timeout=60)
