#!/usr/bin/env python3
"""Times GPU calls of thalweg.torch beside those of other libraries, on the same tensors.

    python bench/compare_peers.py [--out FILE.ndjson] [--peers FlashInfer FLA FlashQLA] [--cases TEXT ...]

Each library has a process of its own, which goes through the cases that the library has a call for: the first call of
each side is made and their outputs are compared; each side is captured in a CUDA graph of ten calls, and the graphs are
replayed by turns. A line is one case beside one library: median, least and greatest time of a call of both sides in
microseconds, the relative difference (L2) of each output, the seconds of the library's first call (it compiles and
tunes then; FlashQLA's are made ahead, all at once, so that their kernels wait in its cache). Where a library
cannot be imported, refuses, fails or takes longer than --limit, the line says so instead.

Inputs are bf16, gates and states float32, initial and final states are on; the backward has gradients of both outputs
and of every input. What prepares a library's own form of them (FlashInfer takes exp(g) and states as [V, K]) is not
timed. Needs a Hopper GPU, a Python package built with CUDA, torch, and of the libraries those that are there:

    pip install flashinfer-python "nvidia-cutlass-dsl[cu13]" fla-core flash-qla
"""

import argparse
import importlib.metadata
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import traceback

PEERS = {  # kinds of cases that it has a call for, packages whose versions count
    "FlashInfer": (("fwd", "decode"), ("flashinfer-python", "nvidia-cutlass-dsl")),
    "FLA": (("fwd", "bwd", "decode", "gate"), ("fla-core", "triton", "tilelang")),
    "FlashQLA": (("fwd", "bwd"), ("flash-qla", "tilelang")),
}
CASES = {  # kind, arguments of its function
    "gated_delta_rule.decode N128 HV32": ("decode", dict(N=128)),
    "gated_delta_rule.decode N32 HV32": ("decode", dict(N=32)),
    "gated_delta_rule.decode N1 HV32": ("decode", dict(N=1)),
    "gated_delta_rule.decode N128 HV32, states [V K]": ("decode", dict(N=128, value_first=True)),
    "gated_delta_rule.decode N32 HV32, states [V K]": ("decode", dict(N=32, value_first=True)),
    "gated_delta_rule.decode N1 HV32, states [V K]": ("decode", dict(N=1, value_first=True)),
    "kda_gate.fwd T2048 HV16 K128 to f32": ("gate", dict(T=2048, HV=16, K=128, dtype="float32")),
    "kda_gate.fwd T2048 HV16 K128 to bf16": ("gate", dict(T=2048, HV=16, K=128, dtype="bfloat16")),
    "gated_delta_rule.fwd B2 T2048 H4/HV8 K64 V64": ("fwd", dict(B=2, lengths=[2048], H=4, HV=8, K=64)),
    "gated_delta_rule.bwd B2 T2048 H4/HV8 K64 V64": ("bwd", dict(B=2, lengths=[2048], H=4, HV=8, K=64)),
    "gated_delta_rule.fwd 1x8192 H16/HV32": ("fwd", dict(lengths=[8192], H=16, HV=32)),
    "gated_delta_rule.bwd 1x8192 H16/HV32": ("bwd", dict(lengths=[8192], H=16, HV=32)),
    "gated_delta_rule.fwd 1x8192 H2/HV8": ("fwd", dict(lengths=[8192], H=2, HV=8)),
    "gated_delta_rule.bwd 1x8192 H2/HV8": ("bwd", dict(lengths=[8192], H=2, HV=8)),
    "gated_delta_rule.fwd 1x32768 H16/HV32": ("fwd", dict(lengths=[32768], H=16, HV=32)),
    "gated_delta_rule.bwd 1x32768 H16/HV32": ("bwd", dict(lengths=[32768], H=16, HV=32)),
    "gated_delta_rule.fwd 4x2048 packed H16/HV32": ("fwd", dict(lengths=[2048] * 4, H=16, HV=32)),
    "gated_delta_rule.bwd 4x2048 packed H16/HV32": ("bwd", dict(lengths=[2048] * 4, H=16, HV=32)),
    "gated_delta_rule.fwd 8x1024 packed H16/HV64": ("fwd", dict(lengths=[1024] * 8, H=16, HV=64)),
    "gated_delta_rule.fwd 4x8192 packed H16/HV64": ("fwd", dict(lengths=[8192] * 4, H=16, HV=64)),
}
COMPILED_AHEAD = "FlashQLA"  # without running on the GPU for long, so beside the other libraries' turns
CALLS, ROUNDS, UNCOUNTED = 10, 25, 5  # of a graph; replays of each, of which the first do not count


# ---- The calls: each function gives ours and theirs, which return the tensors that are compared ----


def delta_inputs(B, T, H, HV, K, N):
    import torch
    import torch.nn.functional as F

    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    q = F.normalize(torch.randn(B, T, H, K, **options), dim=-1)
    k = F.normalize(torch.randn(B, T, H, K, **options), dim=-1)
    v = torch.randn(B, T, HV, K, **options)
    g = F.logsigmoid(torch.randn(B, T, HV, device="cuda")) / 16
    beta = torch.rand(B, T, HV, device="cuda")
    return q, k, v, g, beta, torch.randn(N, HV, K, K, device="cuda")


def forward(peer, lengths, H, HV, K=128, B=1, inputs=None):
    """B sequences of one length, or several of any, packed; V is K."""
    import torch

    import thalweg.torch as ops

    N = B * len(lengths)
    q, k, v, g, beta, state = inputs = inputs or delta_inputs(B, sum(lengths), H, HV, K, N)
    ends = torch.tensor([0, *itertools.accumulate(lengths * B)], device="cuda")
    options = dict(initial_state=state, output_final_state=True, cu_seqlens=ends if len(lengths) > 1 else None)

    def ours():
        return ops.gated_delta_rule(q, k, v, g, beta, **options)

    if peer == "FlashInfer":
        from flashinfer.gdn_prefill import chunk_gated_delta_rule

        packed = [x.flatten(0, 1) for x in (q, k, v, g.exp(), beta)]
        value_first = state.transpose(2, 3).contiguous()
        final_state = torch.empty_like(value_first)

        def theirs():
            o, _ = chunk_gated_delta_rule(
                *packed, initial_state=value_first, output_final_state=True, cu_seqlens=ends, output_state=final_state,
                max_seqlen=max(lengths),
            )  # fmt: skip
            return o.view_as(v), final_state.transpose(2, 3)

        return ours, theirs
    if peer == "FLA":
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    else:
        from flash_qla import chunk_gated_delta_rule
    return ours, lambda: chunk_gated_delta_rule(q, k, v, g=g, beta=beta, **options)


def backward(peer, lengths, H, HV, K=128, B=1):
    import torch

    inputs = delta_inputs(B, sum(lengths), H, HV, K, B * len(lengths))
    inputs = [x.requires_grad_() for x in inputs]
    d_o, d_final_state = torch.randn_like(inputs[2]), torch.randn_like(inputs[5])

    def gradients(call):
        outputs = call()
        return lambda: torch.autograd.grad(outputs, inputs, (d_o, d_final_state), retain_graph=True)

    return map(gradients, forward(peer, lengths, H, HV, K, B, inputs))


def decode(peer, N, HV=32, K=128, value_first=False):
    """One token each, gates and beta made from their raw forms inside. Ours and FlashInfer's states are in place."""
    import torch

    import thalweg.torch as ops

    q, k, v, _, _, state = delta_inputs(N, 1, HV // 2, HV, K, N)
    a, b = torch.randn(2, N, 1, HV, device="cuda", dtype=torch.bfloat16)
    A_log, dt_bias = torch.rand(HV, device="cuda"), torch.randn(HV, device="cuda")
    if value_first:
        state = state.transpose(2, 3).contiguous()
    ours_state, theirs_state, o = state.clone(), state.clone(), torch.empty_like(v)
    ours_view = ours_state.transpose(2, 3) if value_first else ours_state

    def ours():
        return ops.gated_delta_rule_decode(
            q, k, v, a, b, state=ours_view, A_log=A_log, dt_bias=dt_bias, use_gate=True, use_beta_sigmoid=True
        ), ours_state

    if peer == "FlashInfer":
        from flashinfer import gdn_decode

        call = gdn_decode.gated_delta_rule_decode_pretranspose if value_first else gdn_decode.gated_delta_rule_decode
        return ours, lambda: call(q, k, v, theirs_state, A_log, a, dt_bias, b, output=o, use_qk_l2norm=False)
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    return ours, lambda: fused_recurrent_gated_delta_rule(
        q, k, v, g=a, beta=b, A_log=A_log, dt_bias=dt_bias, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        initial_state=theirs_state, output_final_state=True, state_v_first=value_first,
    )  # fmt: skip


def gate(peer, T, HV, K, dtype):
    import torch
    from fla.ops.kda.gate import kda_gate_fwd

    import thalweg.torch as ops

    torch.manual_seed(0)
    x = torch.randn(1, T, HV, K, device="cuda", dtype=torch.bfloat16)
    A_log, bias = torch.rand(HV, device="cuda"), torch.randn(HV, K, device="cuda")
    flat, dtype = bias.flatten(), getattr(torch, dtype)
    return (
        lambda: (ops.kda_gate(x, A_log, bias, output_dtype=dtype),),
        lambda: (kda_gate_fwd(x, A_log=A_log, dt_bias=flat, output_dtype=dtype),),
    )


KINDS = {  # function, names of the tensors that its calls return
    "fwd": (forward, ("o", "final_state")),
    "bwd": (backward, ("d_q", "d_k", "d_v", "d_g", "d_beta", "d_initial_state")),
    "decode": (decode, ("o", "state")),
    "gate": (gate, ("g",)),
}


# ---- In a library's process ----


def captured(call):
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(CALLS):
            call()
    return graph


def replay_us(graph):
    import torch

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / CALLS


def median(values):
    return sorted(values)[len(values) // 2]


def compare(peer, name, first_call_only):
    import torch

    kind, arguments = CASES[name]
    function, outputs = KINDS[kind]
    start = time.perf_counter()
    ours, theirs = function(peer, **arguments)
    their_results = theirs()
    torch.cuda.synchronize()
    record = {"first_call_s": round(time.perf_counter() - start, 2)}
    if first_call_only:
        return record
    pairs = zip(outputs, ours(), their_results)
    record["difference"] = {f: ((a.float() - b.float()).norm() / b.float().norm()).item() for f, a, b in pairs}
    our_graph, their_graph = captured(ours), captured(theirs)
    samples = [(replay_us(our_graph), replay_us(their_graph)) for _ in range(ROUNDS)][UNCOUNTED:]
    for prefix, times in zip(("thalweg_", ""), zip(*samples)):
        for what, of in ("median_us", median), ("min_us", min), ("max_us", max):
            record[prefix + what] = round(of(times), 2)
    return record


def worker(peer, names, first_call_only, limit):
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not a record
    os.environ["FLA_FLASH_QLA"] = "0"  # FLA's own kernels, not FlashQLA's behind its name
    import torch

    torch.cuda.set_stream(torch.cuda.Stream())  # the backward of a capture must have been called on its stream
    for name in names:
        signal.alarm(limit)  # ends the process
        record = {"case": name}
        try:
            record |= compare(peer, name, first_call_only)
        except Exception as error:
            text = str(error).strip() or traceback.extract_tb(error.__traceback__)[-1].line
            record["error"] = f"{type(error).__name__}: {text}".splitlines()[0][:300]
        print(json.dumps(record), file=lines, flush=True)
        if "CUDA error" in record.get("error", ""):
            os._exit(0)  # this process cannot go on; the next one does
        torch.cuda.empty_cache()


# ---- In the process that starts them ----


def start_worker(options, peer, names, *more):
    command = [sys.executable, os.path.abspath(__file__), "--limit", str(options.limit), "--worker", peer, *more]
    return subprocess.Popen([*command, "--cases", *names], stdout=subprocess.PIPE, text=True)


def results(options, peer, names):
    """A record for each case, as they come."""
    end, pending = time.perf_counter() + options.seconds, list(names)
    while pending and (left := end - time.perf_counter()) > 0:
        process = start_worker(options, peer, pending)
        timer = threading.Timer(left, process.kill)
        timer.start()
        for line in process.stdout:
            record = json.loads(line)
            pending.remove(record["case"])
            yield record
        timer.cancel()
        code = process.wait()
        if pending and code and time.perf_counter() < end:
            why = f"more than {options.limit} s" if code == -signal.SIGALRM else f"its process ended with {code}"
            yield {"case": pending.pop(0), "error": why}
    yield from ({"case": name, "error": f"not timed, {options.seconds} s were over"} for name in pending)


def version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON lines are added to this file")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--cases", nargs="+", default=[""], metavar="TEXT", help="whose name has one of these in it")
    parser.add_argument("--limit", type=int, default=200, help="seconds for one case of one library")
    parser.add_argument("--seconds", type=int, default=600, help="for all cases of one library")
    parser.add_argument("--commit", help="that the Python package was built from (git's HEAD by default)")
    parser.add_argument("--worker", choices=PEERS, help=argparse.SUPPRESS)
    parser.add_argument("--first-call", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(options.worker, options.cases, options.first_call, options.limit)
    import torch

    git = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True)
    command = shlex.join(["bench/compare_peers.py", *("FILE" if a == options.out else a for a in sys.argv[1:])])
    about = {"commit": options.commit or git.stdout.strip(), "gpu": torch.cuda.get_device_name(), "command": command,
             "date": time.strftime("%Y-%m-%d", time.gmtime())}  # fmt: skip
    names = {peer: [name for name, (kind, _) in CASES.items()
                    if kind in PEERS[peer][0] and any(text in name for text in options.cases)]
             for peer in options.peers}  # fmt: skip
    ahead = [start_worker(options, COMPILED_AHEAD, [name], "--first-call") for name in names.get(COMPILED_AHEAD, [])]
    for peer in options.peers:
        first_calls = {}
        if peer == COMPILED_AHEAD:
            for process in ahead:
                for record in map(json.loads, process.communicate()[0].splitlines()):
                    first_calls[record["case"]] = record.get("first_call_s")
        versions = {package: version(package) for package in ("torch", *PEERS[peer][1])}
        for record in results(options, peer, names[peer]):
            if first_calls.get(record["case"]):
                record["first_call_s"] = first_calls[record["case"]]
            record = {"case": record.pop("case"), "who": peer} | record | {"versions": versions} | about
            print(json.dumps(record), flush=True)
            if options.out:
                with open(options.out, "a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    sys.exit(main())
