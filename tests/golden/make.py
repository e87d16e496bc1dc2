#!/usr/bin/env python3
"""Writes numpy.bin and numpy.txt: inputs and outputs of every pass, in float64.

    python3 -m venv build/golden-venv && build/golden-venv/bin/pip install numpy
    build/golden-venv/bin/python tests/golden/make.py

A statement of the published recurrences of its own, in NumPy: forwards from the papers' formulas, and
every gradient by complex step through them (f'(x) = Im f(x + ih) / h, h = 1e-30: exact to rounding, no
formula for a backward is used). It shares nothing with the C++ oracles, which tests/golden_test.cpp
holds against these files. Gated delta rule: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (2024), and
Kimi delta attention: Kimi Team, "Kimi Linear" (2025), with the fused steps as flash-linear-attention 0.5.2
defines them; short convolution and gated RMS norm as its modules of those names.

The text has one line a record: "generator <versions>", "case <case string>", then
"in|out <tensor> <offset in doubles> <shape ...>" of that case.
"""
import pathlib
import platform

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
STEP = 1e-30
rng = np.random.default_rng(20240)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softplus(x):
    return np.log(1 + np.exp(x))


# ---- Forwards. Arrays may be complex. ----


def l2norm(x):
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def delta_rule_steps(q, k, v, g, beta, state, scale):
    """One sequence, one head: q, k [T K], v [T V], g [T] or [T K], beta [T], state [K V]."""
    outs, states = [], []
    for t in range(q.shape[0]):
        state = np.exp(g[t]).reshape(-1, 1) * state
        # S (I - beta k k^T) + beta k v^T, as the paper writes the update.
        K = k.shape[1]
        state = (np.eye(K) - beta[t] * np.outer(k[t], k[t])) @ state + beta[t] * np.outer(k[t], v[t])
        outs.append(scale * (q[t] @ state))
        states.append(state)
    empty = np.zeros((0, v.shape[1]), v.dtype)
    return (np.stack(outs) if outs else empty), states, state


def head_gate(x, opt, B, T, HV):
    """The decay of a head, [B T HV]."""
    g = x.get("g", np.zeros((B, T, HV)))
    if opt.get("use_gate"):
        g = -np.exp(x["A_log"]) * softplus(g + x.get("dt_bias", np.zeros(HV)))
    return g


def channel_gate(x, opt, B, T, HV):
    """The decay of a key channel, [B T HV K]."""
    K = x["q"].shape[3]
    g = x.get("g", np.zeros((B, T, HV, K)))
    if opt.get("use_gate"):
        rate = np.exp(x.get("A_log", np.zeros(HV)))[:, None]
        g = g + x.get("dt_bias", np.zeros((HV, K)))
        g = opt["lower_bound"] * sigmoid(rate * g) if opt.get("lower_bound") else -rate * softplus(g)
    return g


def delta_rule(x, opt, lengths, state_of, gate):
    """x: inputs by name, [B T ...]. Returns o [B T HV V] and the states [N HV] as lists of steps."""
    q, k, v = x["q"], x["k"], x["v"]
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    if opt.get("use_qk_l2norm"):
        q, k = l2norm(q), l2norm(k)
    g = gate(x, opt, B, T, HV)
    beta = x.get("beta", np.ones((B, T, HV)))
    if opt.get("use_beta_sigmoid"):
        beta = (2 if opt.get("allow_neg_eigval") else 1) * sigmoid(beta)
    scale = opt.get("scale") or K ** -0.5
    kind = np.result_type(*x.values())
    o = np.zeros((B, T, HV, V), kind)
    finals = []
    spans = []
    if lengths is None:
        spans = [(b, 0, T) for b in range(B)]
    else:
        at = 0
        for n in lengths:
            spans.append((0, at, at + n))
            at += n
    steps = []
    for n, (b, begin, end) in enumerate(spans):
        heads, head_steps = [], []
        for hv in range(HV):
            h = hv // (HV // H)
            rows = slice(begin, end)
            out, states, last = delta_rule_steps(q[b, rows, h], k[b, rows, h], v[b, rows, hv], g[b, rows, hv], beta[b, rows, hv],
                                                 state_of(n, hv), scale)
            o[b, rows, hv] = out
            heads.append(last)
            head_steps.append(states)
        finals.append(np.stack(heads))
        steps.append(head_steps)
    V_all = np.stack(finals) if finals else np.zeros((0, HV, K, V), kind)
    return o, V_all, steps


def delta_rule_fwd(x, opt, lengths, gate):
    zero = np.zeros((x["q"].shape[3], x["v"].shape[3]))
    initial = x.get("initial_state")
    o, final, _ = delta_rule(x, opt, lengths, lambda n, hv: zero if initial is None else initial[n, hv], gate)
    return {"o": o, "final_state": final}


def gdn_fwd(x, opt, lengths):
    return delta_rule_fwd(x, opt, lengths, head_gate)


def kda_fwd(x, opt, lengths):
    return delta_rule_fwd(x, opt, lengths, channel_gate)


def conv_window(x, weight, bias, state, silu):
    """One sequence: x [T D], weight [D W], state [D W] or zeros."""
    W = weight.shape[1]
    padded = np.concatenate([state.T, x])  # W rows of state, oldest first
    pre = np.stack([(padded[t + 1 : t + 1 + W].T * weight).sum(1) + bias for t in range(x.shape[0])]) if x.shape[0] else x + 0 * bias
    return (pre * sigmoid(pre) if silu else pre), padded[x.shape[0] :].T, padded


def conv_fwd(x, opt, lengths):
    xs, weight = x["x"], x["weight"]
    B, T, D = xs.shape
    bias = x.get("bias", np.zeros(D))
    kind = np.result_type(*x.values())
    y = np.zeros((B, T, D), kind)
    spans = [(b, 0, T) for b in range(B)]
    if lengths is not None:
        ends = np.cumsum(lengths)
        spans = [(0, int(e - n), int(e)) for e, n in zip(ends, lengths)]
    finals = []
    for n, (b, begin, end) in enumerate(spans):
        state = x["initial_state"][n] if "initial_state" in x else np.zeros((D, weight.shape[1]))
        y[b, begin:end], last, _ = conv_window(xs[b, begin:end], weight, bias, state, opt.get("activation") == "silu")
        finals.append(last)
    return {"y": y, "final_state": np.stack(finals)}


def norm_fwd(x, opt, lengths):
    xs = x["x"]
    rstd = 1 / np.sqrt((xs * xs).mean(1) + (opt.get("eps") or 1e-6))
    y = xs * rstd[:, None] * x.get("weight", np.ones(xs.shape[1]))
    if "gate" in x:
        gate = x["gate"]
        y = y * (sigmoid(gate) if opt.get("gate_activation") == "sigmoid" else gate * sigmoid(gate))
    return {"y": y, "rstd": rstd}


# ---- Records ----


class Writer:
    def __init__(self, generator):
        self.data, self.lines = [], ["generator " + generator]
        self.at = 0

    def tensor(self, role, name, values):
        values = np.ascontiguousarray(values, dtype=np.float64)
        self.lines.append(" ".join([role, name, str(self.at), *map(str, values.shape)]))
        self.data.append(values.ravel())
        self.at += values.size

    def case(self, text, ins, outs):
        self.lines.append("case " + text)
        for name, values in ins.items():
            self.tensor("in", name, values)
        for name, values in outs.items():
            self.tensor("out", name, values)

    def write(self, stem):
        (HERE / f"{stem}.bin").write_bytes(np.concatenate(self.data).astype("<f8").tobytes())
        (HERE / f"{stem}.txt").write_text("\n".join(self.lines) + "\n")


def tokens(pass_name, sizes, ins, outs, opt, lengths, required):
    parts = [f"{pass_name}:f64"] + [f"{k}{v}" for k, v in sizes.items()]
    parts += [n for n in list(ins) + list(outs) if n not in required]
    parts += [f"{k}={v}" for k, v in opt.items()]
    if lengths is not None:
        parts.append("varlen=" + "+".join(map(str, lengths)))
    return ",".join(parts)


def gradients(forward, ins, opt, lengths, weights):
    """d sum(weights * outputs) / d each input, by complex step."""

    def loss(x):
        out = forward(x, opt, lengths)
        return sum((weights[name] * out[name]).sum() for name in weights)

    result = {}
    for name, values in ins.items():
        grad = np.zeros(values.shape)
        for index in np.ndindex(values.shape):
            moved = values.astype(complex)
            moved[index] += 1j * STEP
            grad[index] = loss({**ins, name: moved}).imag / STEP
        result["d_" + name] = grad
    return result


def both(writer, op, forward, sizes, ins, opt, lengths, required, outputs, free_outputs=()):
    """A forward record, and a backward record with a gradient of every input."""
    out = forward(ins, opt, lengths)
    fwd = {name: out[name] for name in outputs}
    writer.case(tokens(f"{op}.fwd", sizes, ins, fwd, opt, lengths, required), ins, fwd)
    weights = {name: rng.normal(size=out[name].shape) for name in outputs if name not in free_outputs}
    grads = gradients(forward, ins, opt, lengths, weights)
    d_ins = {"d_" + name: values for name, values in weights.items()}
    writer.case(tokens(f"{op}.bwd", sizes, {**ins, **d_ins}, grads, opt, lengths, required | {"d_y"} if op == "gated_rms_norm" else required),
                {**ins, **d_ins}, grads)


def delta_rule_inputs(B, T, H, HV, K, V, names, N, channels=(), raw=None):
    """channels: (K,) with a decay per key channel. raw: g is what the fused gate takes; by default, with A_log."""
    shapes = {"q": (B, T, H, K), "k": (B, T, H, K), "v": (B, T, HV, V), "g": (B, T, HV, *channels), "beta": (B, T, HV), "A_log": (HV,),
              "dt_bias": (HV, *channels), "initial_state": (N, HV, K, V)}
    ins = {name: rng.normal(size=shapes[name]) for name in ["q", "k", "v", *names]}
    ins["k"] /= np.sqrt((ins["k"] ** 2).sum(-1, keepdims=True))
    if not ("A_log" in ins if raw is None else raw) and "g" in ins:
        ins["g"] = -np.abs(ins["g"])
    return ins


def gdn(writer):
    required = {"q", "k", "v", "o"}
    sets = [
        (dict(B=2, T=9, H=1, HV=2, K=4, V=3), ["g", "beta", "initial_state"], {}, None, ["o", "final_state"]),
        (dict(B=1, T=6, H=2, HV=2, K=3, V=5), [], {}, None, ["o"]),
        (dict(B=1, T=6, H=1, HV=3, K=3, V=2), ["beta"], {"scale": 0.7, "use_beta_sigmoid": 1, "allow_neg_eigval": 1}, None, ["o", "final_state"]),
        (dict(B=1, T=8, H=1, HV=2, K=4, V=3), ["g", "beta", "A_log", "dt_bias", "initial_state"],
         {"use_qk_l2norm": 1, "use_gate": 1, "use_beta_sigmoid": 1}, None, ["o", "final_state"]),
        (dict(B=1, T=10, H=1, HV=2, K=3, V=4), ["g", "beta", "initial_state"], {}, [3, 0, 1, 6], ["o", "final_state"]),
        (dict(B=1, T=70, H=1, HV=1, K=3, V=2), ["g", "beta"], {}, None, ["o", "final_state"]),
    ]
    for sizes, names, opt, lengths, outputs in sets:
        ins = delta_rule_inputs(*[sizes[s] for s in ("B", "T", "H", "HV", "K", "V")], names, len(lengths) if lengths else sizes["B"])
        both(writer, "gated_delta_rule", gdn_fwd, sizes, ins, opt, lengths, required, outputs)
    decode(writer, "gated_delta_rule", head_gate, ())


def kda(writer):
    required = {"q", "k", "v", "o"}
    fused = {"use_qk_l2norm": 1, "use_gate": 1, "use_beta_sigmoid": 1}
    sets = [
        (dict(B=2, T=9, H=1, HV=2, K=4, V=3), ["g", "beta", "initial_state"], {}, None, ["o", "final_state"]),
        (dict(B=1, T=6, H=2, HV=2, K=3, V=5), ["beta"], {"scale": 0.7}, None, ["o"]),
        (dict(B=1, T=7, H=1, HV=2, K=4, V=3), ["g", "beta", "A_log", "dt_bias", "initial_state"], fused, None, ["o", "final_state"]),
        (dict(B=1, T=7, H=1, HV=2, K=4, V=3), ["g", "beta", "A_log", "dt_bias", "initial_state"], {**fused, "lower_bound": -5}, None,
         ["o", "final_state"]),
        (dict(B=1, T=7, H=1, HV=2, K=3, V=2), ["g", "beta"], {"use_gate": 1, "lower_bound": -0.5}, None, ["o", "final_state"]),
        (dict(B=1, T=10, H=1, HV=2, K=3, V=4), ["g", "beta", "initial_state"], {}, [3, 0, 1, 6], ["o", "final_state"]),
        (dict(B=1, T=70, H=1, HV=1, K=3, V=2), ["g", "beta"], {}, None, ["o", "final_state"]),
    ]
    for sizes, names, opt, lengths, outputs in sets:
        ins = delta_rule_inputs(*[sizes[s] for s in ("B", "T", "H", "HV", "K", "V")], names, len(lengths) if lengths else sizes["B"],
                                (sizes["K"],), "use_gate" in opt)
        both(writer, "kimi_delta_attention", kda_fwd, sizes, ins, opt, lengths, required, outputs)
    decode(writer, "kimi_delta_attention", channel_gate, (4,))


def decode(writer, op, gate, channels):
    N, T, H, HV, K, V, M = 2, 3, 1, 2, 4, 3, 7
    ins = delta_rule_inputs(N, T, H, HV, K, V, ["g", "beta"], N, channels)
    state = rng.normal(size=(M, HV, K, V))
    read, write = np.array([4, 0]), np.array([[1, -1, 4], [2, 3, 6]])
    o, _, steps = delta_rule(ins, {}, None, lambda n, hv: state[read[n], hv], gate)
    after = state.copy()
    for n in range(N):
        for t in range(T):
            if write[n, t] >= 0:
                after[write[n, t]] = np.stack([steps[n][hv][t] for hv in range(HV)])
    ins.update(state=state, read_slots=read, write_slots=write)
    sizes = dict(N=N, T=T, H=H, HV=HV, K=K, V=V, M=M)
    writer.case(tokens(f"{op}.decode", sizes, ins, {}, {}, None, {"q", "k", "v", "state"}), ins, {"o": o, "state": after})


def conv(writer):
    required = {"x", "weight", "y"}
    for W, T, names, opt, lengths in [
        (4, 7, ["bias", "initial_state"], {"activation": "silu"}, None),
        (3, 2, ["initial_state"], {}, None),
        (8, 5, ["bias", "initial_state"], {"activation": "silu"}, None),
        (1, 4, [], {"activation": "silu"}, None),
        (4, 12, ["bias", "initial_state"], {"activation": "silu"}, [5, 0, 1, 6]),
    ]:
        B, D = (1 if lengths else 2), 3
        N = len(lengths) if lengths else B
        shapes = {"x": (B, T, D), "weight": (D, W), "bias": (D,), "initial_state": (N, D, W)}
        ins = {name: rng.normal(size=shapes[name]) for name in ["x", "weight", *names]}
        both(writer, "short_conv", conv_fwd, dict(B=B, T=T, D=D, W=W), ins, opt, lengths, required, ["y", "final_state"])
    N, T, D, W, M = 2, 3, 4, 4, 6
    ins = {"x": rng.normal(size=(N, T, D)), "weight": rng.normal(size=(D, W)), "bias": rng.normal(size=D)}
    state = rng.normal(size=(M, D, W))
    read, write = np.array([5, 1]), np.array([[0, 2, 5], [-1, 3, 1]])
    y, after = np.zeros((N, T, D)), state.copy()
    for n in range(N):
        y[n], _, padded = conv_window(ins["x"][n], ins["weight"], ins["bias"], state[read[n]], True)
        for t in range(T):
            if write[n, t] >= 0:
                after[write[n, t]] = padded[t + 1 : t + 1 + W].T
    ins.update(state=state, read_slots=read, write_slots=write)
    writer.case(tokens("short_conv.decode", dict(N=N, T=T, D=D, W=W, M=M), ins, {}, {"activation": "silu"}, None, {"x", "weight", "state"}), ins,
                {"y": y, "state": after})


def norm(writer):
    for names, opt in [(["gate", "weight"], {}), (["gate", "weight"], {"gate_activation": "sigmoid", "eps": 1e-3}), (["weight"], {}), (["gate"], {}), ([], {})]:
        shapes = {"x": (5, 7), "gate": (5, 7), "weight": (7,)}
        ins = {name: rng.normal(size=shapes[name]) for name in ["x", *names]}
        both(writer, "gated_rms_norm", norm_fwd, dict(M=5, D=7), ins, opt, None, {"x", "y"}, ["y", "rstd"], {"rstd"})


if __name__ == "__main__":
    out = Writer(f"NumPy {np.__version__}, Python {platform.python_version()}")
    gdn(out)
    conv(out)
    norm(out)
    kda(out)
    out.write("numpy")
    print(f"{out.at} numbers, {sum(line.startswith('case') for line in out.lines)} cases")
