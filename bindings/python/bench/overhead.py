#!/usr/bin/env python3
"""What the binding adds to a decode call, in microseconds: python bindings/python/bench/overhead.py

Each line is the time of one call from Python less the time of the same call from C (many calls of the same arguments
without Python between them). The problem is one token of one sequence, small, so that the call itself is short; what is
added does not depend on sizes. Medians of 31 rounds of 2,000 calls, C and Python taking turns, in CPU time of the one
thread that works: the elapsed time of a machine where nothing else runs.
"""

import statistics
import time

import numpy as np

import thalweg

ROUNDS, CALLS = 31, 2000


def arrays(N, H, HV, K, V):
    random = np.random.default_rng(0)
    made = dict(q=random.normal(size=(N, 1, H, K)), k=random.normal(size=(N, 1, H, K)))
    made |= dict(v=random.normal(size=(N, 1, HV, V)), g=-random.random((N, 1, HV)), beta=random.random((N, 1, HV)))
    return {name: array.astype(np.float32) for name, array in made.items()}, np.zeros((N, HV, K, V), np.float32)


def rounds(step, native, calls=CALLS):
    """Medians of a call from Python and of the same from C."""
    python, c = [], []
    for _ in range(ROUNDS):
        c.append(native.seconds(calls) / calls)
        start = time.thread_time()
        for _ in range(calls):
            step()
        python.append((time.thread_time() - start) / calls)
    return statistics.median(python) * 1e6, statistics.median(c) * 1e6


def report(name, step, native):
    python, c = rounds(step, native)
    print(f"{name:58} {python:9.2f} {c:9.2f} {python - c:9.2f}")


def main():
    a, state = arrays(1, 1, 1, 16, 16)
    options = dict(use_qk_l2norm=True, num_threads=1)
    prepared = thalweg.prepare(thalweg.gated_delta_rule_decode, **a, state=state, **options)
    native = prepared._call
    o = np.empty_like(prepared().o)

    def set_and_call():
        prepared.set(**a)
        prepared()

    print(f"{'gated_delta_rule.decode, microseconds a call':58} {'Python':>9} {'C':>9} {'added':>9}")
    report("prepared call", prepared, native)
    report("prepared call, 5 inputs set anew", set_and_call, native)
    report("function", lambda: thalweg.gated_delta_rule_decode(**a, state=state, o=o, **options), native)
    try:
        import torch

        import thalweg.torch as ops
    except ImportError:
        print("torch is not installed: its operator is not measured")
        return
    torch.set_num_threads(1)
    tensors = {name: torch.from_numpy(array) for name, array in a.items()}
    pool = torch.from_numpy(state)
    with torch.inference_mode():
        report("thalweg.torch.gated_delta_rule_decode, inference mode",
               lambda: ops.gated_delta_rule_decode(**tensors, state=pool, use_qk_l2norm=True), native)  # fmt: skip
    report("thalweg.torch.gated_delta_rule_decode",
           lambda: ops.gated_delta_rule_decode(**tensors, state=pool, use_qk_l2norm=True), native)  # fmt: skip


if __name__ == "__main__":
    main()
