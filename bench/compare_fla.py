#!/usr/bin/env python3
"""Times GPU calls of thalweg.torch beside flash-linear-attention's, on the same tensors in the same process.

    python bench/compare_fla.py [--out FILE.ndjson] [--seconds 60]

Each shape is captured in a CUDA graph after a warm-up call of each library (which compiles and tunes FLA's kernels; that
time is reported too), and the graphs are replayed by turns. Outputs are compared first. A line is one shape: medians in
microseconds, their ratio, and the relative difference of the outputs. Needs a Hopper GPU, a Python package built with
CUDA, torch and flash-linear-attention.
"""
import argparse
import json
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

import thalweg.torch as ops


def delta_inputs(B, T, H, HV, K, V, dtype=torch.bfloat16):
    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": dtype}
    q = F.normalize(torch.randn(B, T, H, K, **options), dim=-1)
    k = F.normalize(torch.randn(B, T, H, K, **options), dim=-1)
    v = torch.randn(B, T, HV, V, **options)
    g = F.logsigmoid(torch.randn(B, T, HV, device="cuda")) / 16
    beta = torch.rand(B, T, HV, device="cuda")
    state = torch.randn(B, HV, K, V, device="cuda")
    return q, k, v, g, beta, state


def forward(B, T, H, HV, K, V):
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    q, k, v, g, beta, state = delta_inputs(B, T, H, HV, K, V)
    return (
        lambda: ops.gated_delta_rule(q, k, v, g, beta, initial_state=state, output_final_state=True)[0],
        lambda: chunk_gated_delta_rule(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True)[0],
    )


def backward(B, T, H, HV, K, V):
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    *inputs, state = delta_inputs(B, T, H, HV, K, V)
    leaves = [x.requires_grad_() for x in inputs]
    q, k, v, g, beta = leaves
    d_o = torch.randn_like(v)
    ours = ops.gated_delta_rule(q, k, v, g, beta, initial_state=state, output_final_state=True)[0]
    theirs = chunk_gated_delta_rule(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True)[0]
    return (
        lambda: torch.autograd.grad(ours, leaves, d_o, retain_graph=True)[0],
        lambda: torch.autograd.grad(theirs, leaves, d_o, retain_graph=True)[0],
    )


def decode(N, HV):
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    q, k, v, g, beta, state = delta_inputs(N, 1, HV // 2, HV, 128, 128)
    pool = state.clone()
    return (
        lambda: ops.gated_delta_rule_decode(q, k, v, g, beta, state=pool),
        lambda: fused_recurrent_gated_delta_rule(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True)[0],
    )


def gate(T, HV, K, dtype):
    from fla.ops.kda.gate import kda_gate_fwd

    torch.manual_seed(0)
    x = torch.randn(1, T, HV, K, device="cuda", dtype=torch.bfloat16)
    A_log, bias = torch.rand(HV, device="cuda"), torch.randn(HV, K, device="cuda")
    return (
        lambda: ops.kda_gate(x, A_log, bias, output_dtype=dtype),
        lambda: kda_gate_fwd(x, A_log=A_log, dt_bias=bias.reshape(-1), output_dtype=dtype),
    )


SHAPES = {
    "gated_delta_rule.decode N128 HV32": lambda: decode(128, 32),
    "gated_delta_rule.decode N1 HV32": lambda: decode(1, 32),
    "kda_gate.fwd T2048 HV16 K128 bf16 to f32": lambda: gate(2048, 16, 128, torch.float32),
    "gated_delta_rule.fwd 1x8192 H16/HV32": lambda: forward(1, 8192, 16, 32, 128, 128),
    "gated_delta_rule.fwd 1x8192 H2/HV8": lambda: forward(1, 8192, 2, 8, 128, 128),
    "gated_delta_rule.fwd B2 T2048 H4/HV8 K64 V64": lambda: forward(2, 2048, 4, 8, 64, 64),
    "gated_delta_rule.bwd 1x8192 H16/HV32": lambda: backward(1, 8192, 16, 32, 128, 128),
    "gated_delta_rule.bwd B2 T2048 H4/HV8 K64 V64": lambda: backward(2, 2048, 4, 8, 64, 64),
}


def captured(call):
    torch.cuda.synchronize()
    start = time.perf_counter()
    out = call()
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            call()
    return out, first, graph


def replay_us(graph):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 100  # of one of ten calls


def median(values):
    return sorted(values)[len(values) // 2]


def compare(name, calls):
    (ours, first_ours, graph_ours), (theirs, first_theirs, graph_theirs) = map(captured, calls)
    samples = [(replay_us(graph_ours), replay_us(graph_theirs)) for _ in range(25)][5:]
    us, fla_us = median([a for a, _ in samples]), median([b for _, b in samples])
    difference = ((ours.float() - theirs.float()).norm() / theirs.float().norm()).item()
    return {"case": name, "thalweg_us": us, "fla_us": fla_us, "times_as_fast": fla_us / us, "difference": difference,
            "thalweg_first_s": first_ours, "fla_first_s": first_theirs}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON lines are added to this file")
    parser.add_argument("--seconds", type=float, default=60, help="no further shape is begun after so many")
    options = parser.parse_args()
    import fla

    commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True).stdout.strip()
    start = time.perf_counter()
    for name, make in SHAPES.items():
        if time.perf_counter() - start > options.seconds:
            print(f"{name}: not begun, {options.seconds:g} s are over")
            continue
        try:
            record = compare(name, make())
        except Exception as error:  # a peer that cannot take the shape is said to be so
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}")
            continue
        record |= {"commit": commit, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "fla": fla.__version__,
                   "command": " ".join(sys.argv), "date": time.strftime("%Y-%m-%d", time.gmtime())}  # fmt: skip
        print(json.dumps(record), flush=True)
        if options.out:
            with open(options.out, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
