#!/usr/bin/env python3
"""Writes fla.bin and fla.txt: golden files from flash-linear-attention's own reference functions and PyTorch's autograd.

    python3 -m venv build/fla && build/fla/bin/pip install numpy torch einops && build/fla/bin/pip install --no-deps fla-core
    build/fla/bin/python tests/golden/make_fla.py

The functions named naive_* of that package state what its operators mean. They are read out of its files one by one
(its modules want a GPU compiler), with float32 read as float64. Gradients are PyTorch's, by autograd through them;
the convolution and the norm are PyTorch's own functions. Same format as make.py, whose writer is used.
"""
import ast
import importlib.metadata
import importlib.util
import pathlib
import re

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange

import make

rng = np.random.default_rng(20250)


def naive(path, name):
    """The function `name` of a file of the package, in float64."""
    root = pathlib.Path(importlib.util.find_spec("fla").submodule_search_locations[0])
    text = (root / path).read_text()
    node = next(n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name == name)
    source = "\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno])
    source = re.sub(r"torch\.float(32)?\b", "torch.float64", source).replace(".float()", ".double()")
    space = {"torch": torch, "F": F, "rearrange": rearrange}
    exec(compile("from __future__ import annotations\n" + source, name, "exec"), space)
    return space[name]


gdn_recurrent = naive("ops/gated_delta_rule/naive.py", "naive_recurrent_gated_delta_rule")
gdn_gate = naive("ops/gated_delta_rule/gate.py", "naive_gdn_gate")
kda_recurrent = naive("ops/kda/naive.py", "naive_recurrent_kda")
kda_gate = naive("ops/kda/gate.py", "naive_kda_gate")
kda_bounded_gate = naive("ops/kda/gate.py", "naive_kda_lowerbound_gate")


def spans_of(x, lengths):
    B, T = x["q"].shape[:2]
    if lengths is None:
        return [(b, 0, T) for b in range(B)]
    ends = np.cumsum(lengths)
    return [(0, int(end - n), int(end)) for end, n in zip(ends, lengths)]


def delta_rule(x, opt, lengths, recurrent, gate):
    q, k, g, beta = x["q"], x["k"], x["g"], x["beta"]
    if opt.get("use_qk_l2norm"):
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)  # no eps inside the root: of no account for these lengths
    if opt.get("use_gate"):
        g = gate(g, x, opt)
    if opt.get("use_beta_sigmoid"):
        beta = (2 if opt.get("allow_neg_eigval") else 1) * torch.sigmoid(beta)
    outs, finals = [], []
    for n, (b, begin, end) in enumerate(spans_of(x, lengths)):
        rows = (slice(b, b + 1), slice(begin, end))
        state = x["initial_state"][n : n + 1] if "initial_state" in x else None
        o, final = recurrent(q[rows], k[rows], x["v"][rows], g[rows], beta[rows], opt.get("scale"), state)
        outs.append(o)
        finals.append(final)
    o = torch.cat(outs) if lengths is None else torch.cat(outs, 1)
    return {"o": o, "final_state": torch.cat(finals)}


def gdn(x, opt, lengths):
    def recurrent(q, k, v, g, beta, scale, state):
        G = v.shape[2] // q.shape[2]  # the function has no grouped heads
        q, k = q.repeat_interleave(G, 2), k.repeat_interleave(G, 2)
        return gdn_recurrent(q, k, v, beta, g, scale=scale, initial_state=state, output_final_state=True)

    return delta_rule(x, opt, lengths, recurrent, lambda g, x, opt: gdn_gate(g, x["A_log"], x.get("dt_bias"), torch.float64))


def kda(x, opt, lengths):
    def recurrent(q, k, v, g, beta, scale, state):
        return kda_recurrent(q, k, v, g, beta, scale, state, True)

    return delta_rule(x, opt, lengths, recurrent, kda_gate_of)


def kda_gate_of(g, x, opt):
    bound = opt.get("lower_bound")
    if bound is None:
        return kda_gate(g, x["A_log"], x.get("dt_bias"), torch.float64)
    return kda_bounded_gate(g, x.get("A_log"), x.get("dt_bias"), bound, torch.float64)


def kda_gate_alone(x, opt, lengths):
    return {"g": kda_gate_of(x["x"], x, opt)}


def conv(x, opt, lengths):
    W = x["weight"].shape[1]
    padded = torch.cat([x["initial_state"], x["x"].transpose(1, 2)], 2)
    y = F.conv1d(padded[:, :, 1:], x["weight"][:, None], x.get("bias"), groups=padded.shape[1]).transpose(1, 2)
    return {"y": F.silu(y) if opt.get("activation") == "silu" else y, "final_state": padded[:, :, -W:]}


def norm(x, opt, lengths):
    rms = (x["x"].square().mean(-1, keepdim=True) + (opt.get("eps") or 1e-6)).sqrt()
    gate = torch.sigmoid(x["gate"]) if opt.get("gate_activation") == "sigmoid" else F.silu(x["gate"])
    return {"y": x["x"] / rms * x["weight"] * gate}


def both(writer, op, forward, sizes, ins, opt, lengths, required):
    """A forward record, and a backward record with every gradient."""
    x = {name: torch.tensor(values, requires_grad=True) for name, values in ins.items()}
    out = forward(x, opt, lengths)
    outs = {name: value.detach().numpy() for name, value in out.items()}
    writer.case(make.tokens(f"{op}.fwd", sizes, ins, outs, opt, lengths, required), ins, outs)
    weights = {name: rng.normal(size=value.shape) for name, value in outs.items()}
    sum((torch.tensor(weights[name]) * out[name]).sum() for name in out).backward()
    grads = {"d_" + name: value.grad.numpy() for name, value in x.items()}
    d_ins = {**ins, **{"d_" + name: value for name, value in weights.items()}}
    writer.case(make.tokens(f"{op}.bwd", sizes, d_ins, grads, opt, lengths, required), d_ins, grads)


def delta_rules(writer, op, forward, g_axes):
    fused = {"use_qk_l2norm": 1, "use_gate": 1, "use_beta_sigmoid": 1}
    sets = [
        (dict(B=2, T=9, H=1, HV=2, K=4, V=3), ["initial_state"], {}, None),
        (dict(B=1, T=70, H=1, HV=1, K=3, V=2), [], {"scale": 0.7}, None),
        (dict(B=1, T=8, H=1, HV=2, K=4, V=3), ["A_log", "dt_bias", "initial_state"], fused, None),
        (dict(B=1, T=10, H=2, HV=4, K=3, V=4), ["A_log", "initial_state"], {**fused, "allow_neg_eigval": 1}, [3, 1, 6]),
    ]
    if g_axes == 4:
        bounded = {**fused, "lower_bound": -5}
        sets += [(dict(B=1, T=7, H=1, HV=2, K=4, V=3), names, bounded, None) for names in (["A_log", "dt_bias"], ["dt_bias"], [])]
    for sizes, names, opt, lengths in sets:
        B, T, H, HV, K, V = (sizes[s] for s in ("B", "T", "H", "HV", "K", "V"))
        N = len(lengths) if lengths else B
        g_shape = (B, T, HV, K)[:g_axes]
        shapes = {"q": (B, T, H, K), "k": (B, T, H, K), "v": (B, T, HV, V), "g": g_shape, "beta": (B, T, HV), "A_log": (HV,),
                  "dt_bias": (HV, K)[: g_axes - 2], "initial_state": (N, HV, K, V)}
        ins = {name: rng.normal(size=shapes[name]) for name in ["q", "k", "v", "g", "beta", *names]}
        ins["k"] *= (1e4 if opt.get("use_qk_l2norm") else 1) / np.sqrt((ins["k"] ** 2).sum(-1, keepdims=True))
        if opt.get("use_qk_l2norm"):
            ins["q"] *= 1e4  # so that the norm's eps is of no account
        if not opt.get("use_gate"):
            ins["g"] = -np.abs(ins["g"])
        both(writer, op, forward, sizes, ins, opt, lengths, {"q", "k", "v", "o"})


def main():
    writer = make.Writer(f"PyTorch {torch.__version__}, fla-core {importlib.metadata.version('fla-core')}, NumPy {np.__version__}")
    delta_rules(writer, "gated_delta_rule", gdn, 3)
    delta_rules(writer, "kimi_delta_attention", kda, 4)
    for W, silu in [(4, True), (3, False)]:
        ins = {"x": rng.normal(size=(2, 7, 3)), "weight": rng.normal(size=(3, W)), "bias": rng.normal(size=3), "initial_state": rng.normal(size=(2, 3, W))}
        both(writer, "short_conv", conv, dict(B=2, T=7, D=3, W=W), ins, {"activation": "silu"} if silu else {}, None, {"x", "weight", "y"})
    for opt in [{}, {"gate_activation": "sigmoid", "eps": 1e-3}]:
        ins = {"x": rng.normal(size=(5, 7)), "gate": rng.normal(size=(5, 7)), "weight": rng.normal(size=7)}
        both(writer, "gated_rms_norm", norm, dict(M=5, D=7), ins, opt, None, {"x", "y", "d_y"})
    writer.write("fla")


if __name__ == "__main__":
    main()
