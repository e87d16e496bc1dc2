#!/usr/bin/env python3
"""The gated delta rule of transformers' torch path and Thalweg's, on the same inputs: difference, time, memory.

    bench/compare_transformers.py [--out FILE.jsonl] [--rounds 3] [--tokens 4096] [--threads 2] [--passes forward]

Needs torch, transformers and the thalweg package. What is compared is the function that Qwen3-Next, Qwen3.5 and
OLMo-hybrid layers call where no other package is installed, `torch_chunk_gated_delta_rule`, with q and k normalised
inside and the final state returned; and what takes its place after thalweg.patch_transformers(). Sizes are those of
Qwen3.5's layers: B1, H16, HV32, K=V=128.

Each measurement is a process of its own, the two libraries taking turns. In it one call is made for memory: the peak
resident size less the size before, less the results (and gradients) that the call returns. Then calls are timed;
a round's time is their median, and the record's the median over rounds. `cpu` is the CPU time of all threads, which
suffers less where the machine is shared.

Both allocators of glibc are tried: as it comes, where every large temporary is mapped and unmapped again and its pages
are faulted in on each call, and told by the environment to keep memory (MALLOC_MMAP_MAX_=0, MALLOC_TRIM_THRESHOLD_).
One JSON line for each pass and allocator is appended to --out, the machine's load average with it; bench/report.py
makes a table of them.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
ALLOCATORS = {
    "glibc default": {},
    "glibc keeping memory": {
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": "17179869184",
        "MALLOC_TOP_PAD_": "67108864",
    },
}
PASSES = ("forward", "forward+backward")
SIZES = dict(B=1, H=16, HV=32, K=128, V=128)
LIMIT = 1e-4  # of the relative difference, over all elements, of every result in float32


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, help="file that records are appended to")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3, help="least time of the timed calls of a round")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--passes", nargs="+", default=PASSES, choices=PASSES)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(options, *options.child)
    failed = False
    for allocator, environment in ALLOCATORS.items():
        for name in options.passes:
            record = compare(options, name, allocator, environment)
            print(text(record), flush=True)
            failed |= not record["verified"]
            if options.out:
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
    return int(failed)


def compare(options, name, allocator, environment):
    rounds = {"transformers": [], "thalweg": []}
    with tempfile.TemporaryDirectory() as folder:
        for i in range(options.rounds):
            for library in rounds:
                results = os.path.join(folder, library) if i == 0 else ""
                command = [sys.executable, __file__, "--child", library, name, results]
                command += [f"--{key}={getattr(options, key)}" for key in ("tokens", "threads", "seconds", "dtype")]
                done = subprocess.run(
                    command, env=os.environ | environment, stdout=subprocess.PIPE, check=True, text=True
                )
                rounds[library].append(json.loads(done.stdout))
        difference = differences(folder)
    ours, theirs = rounds["thalweg"], rounds["transformers"]
    median, other = (statistics.median(r["us"] for r in x) for x in (ours, theirs))
    cpu, other_cpu = (statistics.median(r["cpu_us"] for r in x) for x in (ours, theirs))
    sizes = ",".join(f"{key}{value}" for key, value in (SIZES | {"T": options.tokens}).items())
    return {
        "case": f"gated_delta_rule {name}: {options.dtype},{sizes}",
        "kernel": "thalweg.torch",
        "threads": options.threads,
        "library": f"transformers {importlib.metadata.version('transformers')}, torch {theirs[0]['torch']}",
        "allocator": allocator,
        "environment": environment,
        "median_us": median,
        "library_us": other,
        "speedup": other / median,
        "cpu_us": cpu,
        "library_cpu_us": other_cpu,
        "cpu_speedup": other_cpu / cpu,
        "spread": statistics.pstdev([r["us"] for r in ours]) / median if len(ours) > 1 else 0.0,
        "peak_bytes": min(r["peak_bytes"] for r in ours),
        "library_peak_bytes": min(r["peak_bytes"] for r in theirs),
        "difference": difference,
        "verified": all(d["relative"] < (LIMIT if options.dtype == "float32" else 3e-2) for d in difference.values()),
        "rounds": options.rounds,
        "load": os.getloadavg()[0],
        "commit": commit(),
        "machine": machine(ours[0]["isa"]),
        "command": " ".join(["bench/compare_transformers.py", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def text(record):
    lines = [f"{record['case']}, {record['threads']} threads, {record['allocator']}"]
    for who, prefix in ((record["library"], "library_"), ("thalweg", "")):
        us = record["library_us" if prefix else "median_us"]
        lines.append(f"  {who:36} {us / 1e3:9.1f} ms   cpu {record[prefix + 'cpu_us'] / 1e3:9.1f} ms   "
                     f"{record[prefix + 'peak_bytes'] / 2**20:7.1f} MiB beyond inputs and results")  # fmt: skip
    lines.append(f"  {record['speedup']:.1f} times as fast, {record['cpu_speedup']:.1f} times by CPU time")
    worst = max(record["difference"].items(), key=lambda d: d[1]["relative"])
    lines.append(
        f"  largest difference: {worst[0]}, {worst[1]['relative']:.1e}, {worst[1]['largest']:.1e} in one element"
        f"{'' if record['verified'] else '  TOO LARGE'}"
    )
    return "\n".join(lines)


def commit():
    def git(*arguments):
        return subprocess.run(["git", "-C", str(ROOT), *arguments], stdout=subprocess.PIPE, text=True).stdout.strip()

    return git("rev-parse", "--short=12", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else "")


def machine(isa):
    """As the tool describes it in its records, where the tool is built."""
    tool = os.environ.get("THALWEG", ROOT / "build/cpu/tools/thalweg/thalweg")
    if os.access(tool, os.X_OK):
        listed = subprocess.run([tool, "list", "--json"], stdout=subprocess.PIPE, check=True, text=True).stdout
        return json.loads(listed)["machine"]
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = f"{facts.get('model name', 'unknown')} (family {facts.get('cpu family')} model {facts.get('model')})"
    return {"cpu": name, "cores": os.cpu_count(), "isa": isa, "system": f"{platform.system()} {platform.machine()}"}


# ---- In the process of one measurement ----


def child(options, library, name, results):
    import torch

    import thalweg

    torch.set_num_threads(options.threads)
    call = function(library)
    run = forward if name == "forward" else forward_backward
    dtype = getattr(torch, options.dtype)
    run(call, inputs(65, dtype, B=1, H=1, HV=1, K=16, V=16))  # threads and code, but next to no workspace
    tensors = inputs(options.tokens, dtype, **SIZES)
    before = reset_peak()
    outputs = run(call, tensors)
    peak = status("VmHWM") - before - sum(t.numel() * t.element_size() for t in outputs.values())
    if results:
        torch.save({n: t.detach() for n, t in outputs.items()}, results)
    del outputs
    us, cpu_us, start = [], [], time.perf_counter()
    while not us or time.perf_counter() - start < options.seconds:
        wall, cpu = time.perf_counter(), time.process_time()
        run(call, tensors)
        us.append(1e6 * (time.perf_counter() - wall))
        cpu_us.append(1e6 * (time.process_time() - cpu))
    print(json.dumps({"us": statistics.median(us), "cpu_us": statistics.median(cpu_us), "peak_bytes": max(peak, 0),
                      "torch": torch.__version__, "isa": thalweg.cpu_isa()}))  # fmt: skip


def function(library):
    """What a layer calls, of (q, k, v, g, beta)."""
    options = dict(initial_state=None, output_final_state=True, use_qk_l2norm_in_kernel=True)
    if library == "thalweg":
        from thalweg import fla

        return lambda q, k, v, g, beta: fla.chunk_gated_delta_rule(q, k, v, g=g, beta=beta, **options)

    from transformers import logging
    from transformers.models.qwen3_next import modeling_qwen3_next as module

    logging.set_verbosity_error()  # it warns that it is slow
    repeats = hasattr(module, "is_fast_path_available")  # before 5.15 layers repeat q and k

    def call(q, k, v, g, beta):
        if repeats:
            q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
        return module.torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, **options)

    return call


def inputs(tokens, dtype, B, H, HV, K, V):
    import torch

    random = torch.Generator().manual_seed(0)
    q, k = (torch.randn(B, tokens, H, K, generator=random).to(dtype) for _ in range(2))
    v = torch.randn(B, tokens, HV, V, generator=random).to(dtype)
    g = -0.1 * torch.rand(B, tokens, HV, generator=random)
    beta = torch.rand(B, tokens, HV, generator=random).to(dtype)
    d_o = torch.randn(B, tokens, HV, V, generator=random).to(dtype)
    return [x.requires_grad_() for x in (q, k, v, g, beta)] + [d_o]


def forward(call, tensors):
    import torch

    with torch.no_grad():
        o, state = call(*tensors[:-1])
    return {"o": o, "final_state": state}


def forward_backward(call, tensors):
    import torch

    *leaves, d_o = tensors
    o, state = call(*leaves)
    gradients = torch.autograd.grad([o], leaves, [d_o])
    return {"o": o.detach(), "final_state": state.detach()} | dict(
        zip(("d_q", "d_k", "d_v", "d_g", "d_beta"), gradients)
    )


def differences(folder):
    import torch

    ours, theirs = (torch.load(os.path.join(folder, n)) for n in ("thalweg", "transformers"))
    result = {}
    for name, expected in theirs.items():
        difference = ours[name].double() - expected.double()
        result[name] = {
            "relative": (difference.norm() / expected.double().norm()).item(),
            "largest": difference.abs().max().item(),
        }
    return result


def status(key):
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return 1024 * int(line.split()[1])
    raise KeyError(key)


def reset_peak():
    """Forgets the peak resident size so far; returns the size now."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


if __name__ == "__main__":
    sys.exit(main())
