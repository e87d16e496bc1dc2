"""thalweg.fla against the mathematics, restated here in plain torch float64, and against the installed `fla` where
there is one: names, order and defaults of arguments, its naive functions, and itself with Thalweg as a backend."""

import ast
import importlib.util
import inspect
import pathlib

import pytest

torch = pytest.importorskip("torch")
from thalweg import fla  # noqa: E402


# ---- The mathematics ----


def l2norm(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def delta_rule(q, k, v, g, beta, scale=None, initial_state=None):
    """Token by token; g [B T HV] or [B T HV K]. Returns o and the last state."""
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    q, k = (x.repeat_interleave(HV // H, 2) for x in (q, k))
    S = q.new_zeros(B, HV, K, V) if initial_state is None else initial_state
    scale = K**-0.5 if scale is None else scale
    g = g[..., None] if g.dim() == 3 else g
    o = []
    for t in range(T):
        S = S * g[:, t, ..., None].exp()
        r = v[:, t] - (S * k[:, t, ..., None]).sum(-2)
        S = S + k[:, t, ..., None] * (beta[:, t, :, None] * r)[..., None, :]
        o.append(scale * (S * q[:, t, ..., None]).sum(-2))
    return torch.stack(o, 1) if o else v.new_zeros(v.shape), S


def packed(q, k, v, g, beta, cu_seqlens, scale=None, initial_state=None):
    pieces = [
        delta_rule(
            *(x[:, a:b] for x in (q, k, v, g, beta)), scale, None if initial_state is None else initial_state[n : n + 1]
        )
        for n, (a, b) in enumerate(zip(cu_seqlens, cu_seqlens[1:]))
    ]
    return torch.cat([o for o, _ in pieces], 1), torch.cat([S for _, S in pieces])


def softplus_gate(g, A_log, dt_bias):
    return -A_log.exp() * torch.nn.functional.softplus(g + dt_bias)


def conv(x, weight, bias, state, activation):
    W = weight.shape[1]
    xx = torch.cat([state.transpose(1, 2)[:, 1:], x], 1)
    y = sum(xx[:, j : j + x.shape[1]] * weight[:, j] for j in range(W)) + bias
    full = torch.cat([state.transpose(1, 2), x], 1)
    return (y * y.sigmoid() if activation else y), full[:, -W:].transpose(1, 2)


def rms_norm(x, g, weight, activation, eps):
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight
    return y * (g.sigmoid() if activation == "sigmoid" else g * g.sigmoid())


# ---- Inputs and comparison ----


def make(B=2, T=70, H=2, HV=4, K=24, V=16, N=None, kda=False, dtype=torch.float64, seed=0):
    r = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=r, dtype=torch.float64)

    x = dict(
        q=randn(B, T, H, K),
        k=l2norm(randn(B, T, H, K)),
        v=randn(B, T, HV, V),
        g=-torch.rand(B, T, HV, *([K] if kda else []), generator=r, dtype=torch.float64),
        beta=torch.rand(B, T, HV, generator=r, dtype=torch.float64),
        initial_state=randn(N or B, HV, K, V),
    )
    return {name: value.to(dtype) for name, value in x.items()}


def leaves(x):
    return {name: value.detach().clone().requires_grad_(value.is_floating_point()) for name, value in x.items()}


def gradients(results, inputs):
    """Of a fixed random combination of the results."""
    r = torch.Generator().manual_seed(1)
    loss = sum((y.double() * torch.randn(y.shape, generator=r, dtype=torch.float64)).sum() for y in results)
    return torch.autograd.grad(loss, list(inputs.values()))


def close(got, expected, tolerance, what=""):
    assert got.shape == expected.shape, what
    error = (got.double() - expected.double()).norm() / (expected.double().norm() + 1e-12)
    assert error < tolerance, f"{what}: {error:.2e}"


def compare(ours, theirs, x, tolerance=1e-10):
    """Results and all gradients of two functions of the same named inputs."""
    a, b = leaves(x), leaves(x)
    got, expected = ours(**a), theirs(**b)
    for i, (y, z) in enumerate(zip(got, expected)):
        close(y, z, tolerance, f"result {i}")
    for name, y, z in zip(x, gradients(got, a), gradients(expected, b)):
        close(y, z, tolerance, f"gradient of {name}")


RULES = {
    "chunk_gated_delta_rule": False,
    "fused_recurrent_gated_delta_rule": False,
    "chunk_kda": True,
    "fused_recurrent_kda": True,
}
rules = pytest.mark.parametrize("name", RULES)


@rules
@pytest.mark.parametrize("T", [1, 5, 70])
def test_results_and_gradients(name, T):
    rule = getattr(fla, name)
    compare(lambda **x: rule(**x, output_final_state=True), delta_rule, make(T=T, kda=RULES[name]))


@rules
def test_without_optional_arguments(name):
    x = make(T=9, kda=RULES[name])
    del x["initial_state"]
    o, state = getattr(fla, name)(**x, scale=0.5)
    assert state is None
    close(o, delta_rule(**x, scale=0.5)[0], 1e-10)


@rules
def test_packed_sequences(name):
    cu_seqlens = [0, 3, 3, 68, 70]
    x = make(B=1, N=4, kda=RULES[name])
    for dtype in (torch.int32, torch.int64):
        cu = torch.tensor(cu_seqlens, dtype=dtype)
        compare(lambda **x: getattr(fla, name)(**x, cu_seqlens=cu, output_final_state=True),
                lambda **x: packed(**x, cu_seqlens=cu_seqlens), x)  # fmt: skip


@rules
@pytest.mark.parametrize("T", [3, 70])
def test_value_first_states(name, T):
    rule, x = getattr(fla, name), make(T=T, kda=RULES[name])
    x["initial_state"] = x["initial_state"].transpose(-1, -2).contiguous()
    with torch.no_grad():
        o, state = rule(**x, output_final_state=True, state_v_first=True)
        assert state.is_contiguous() and state.shape == x["initial_state"].shape
    compare(lambda **x: rule(**x, output_final_state=True, state_v_first=True),
            lambda initial_state, **x: [y if y.dim() == 4 and y.shape[1] == T else y.transpose(-1, -2) for y in
                                        delta_rule(**x, initial_state=initial_state.transpose(-1, -2))], x)  # fmt: skip
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        again = rule(**x, output_final_state=True, transpose_state_layout=True)
    close(again[1], state, 1e-12)
    with pytest.raises(ValueError, match="transpose_state_layout"):
        rule(**x, state_v_first=True, transpose_state_layout=True)


@rules
@pytest.mark.parametrize("neg", [False, True])
def test_steps_inside_the_kernel(name, neg):
    """l2norm, gate with A_log and dt_bias, sigmoid of beta: the same as outside, with gradients of the raw inputs."""
    x = make(kda=RULES[name], T=20)
    r = torch.Generator().manual_seed(2)
    heads = x["g"].shape[2:]
    x |= dict(k=3 * x["k"], beta=4 * x["beta"] - 2, g=3 * x["g"] + 1, A_log=torch.rand(heads[:1], generator=r).double(),
              dt_bias=torch.randn(heads, generator=r).double())  # fmt: skip

    def ours(**x):
        return getattr(fla, name)(
            **x | dict(dt_bias=x["dt_bias"].reshape(-1)), output_final_state=True, use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=neg,
        )  # fmt: skip

    def theirs(q, k, g, beta, A_log, dt_bias, **x):
        A = A_log[:, None] if RULES[name] else A_log
        g = softplus_gate(g, A, dt_bias)
        return delta_rule(l2norm(q), l2norm(k), g=g, beta=(1 + neg) * beta.sigmoid(), **x)

    compare(ours, theirs, x)


@pytest.mark.parametrize("name", ["chunk_kda", "fused_recurrent_kda"])
@pytest.mark.parametrize("with_A", [False, True])
def test_lower_bound(name, with_A):
    x = make(kda=True, T=20)
    if with_A:
        x["A_log"] = torch.linspace(-1, 1, 4).double()

    def theirs(g, A_log=None, **x):
        a = 1 if A_log is None else A_log.reshape(-1, 1).exp()
        return delta_rule(g=-5 * (a * g).sigmoid(), **x)

    compare(
        lambda **x: getattr(fla, name)(**x, output_final_state=True, use_gate_in_kernel=True, lower_bound=-5.0),
        theirs,
        x,
    )


def test_arguments_that_only_choose_kernels_change_nothing():
    x, k = make(), make(kda=True)
    plain, kda = fla.chunk_gated_delta_rule(**x)[0], fla.chunk_kda(**k)[0]
    for chunk_size in (16, 32, 64):
        assert fla.chunk_gated_delta_rule(**x, chunk_size=chunk_size)[0].equal(plain)
    assert fla.chunk_kda(**k, chunk_size=32, safe_gate=True, disable_recompute=True)[0].equal(kda)
    # the gate's parameters are read with use_gate_in_kernel alone, as in FLA
    ignored = dict(A_log=torch.ones(4), dt_bias=torch.ones(4))
    assert fla.chunk_gated_delta_rule(**x, **ignored)[0].equal(plain)
    assert fla.chunk_kda(**k, A_log=torch.ones(4), dt_bias=torch.ones(4 * 24), lower_bound=-5)[0].equal(kda)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
@rules
def test_low_precision(name, dtype, tolerance):
    x = make(kda=RULES[name], K=64, V=64, T=40)
    small = {n: y.to(torch.float32 if n in ("g", "initial_state") else dtype) for n, y in x.items()}
    exact = delta_rule(**{n: y.double() for n, y in small.items()})
    o, state = getattr(fla, name)(**small, output_final_state=True)
    assert o.dtype == dtype and state.dtype == torch.float32
    close(o, exact[0], tolerance)
    close(state, exact[1], tolerance)


@pytest.mark.parametrize("name", ["fused_recurrent_gated_delta_rule", "fused_recurrent_kda"])
def test_decoding_continues_a_sequence(name):
    kda = RULES[name]
    x = make(T=20, kda=kda, dtype=torch.float32)
    exact = delta_rule(**x)
    whole = {"fused_recurrent_gated_delta_rule": fla.chunk_gated_delta_rule, "fused_recurrent_kda": fla.chunk_kda}[name]
    tokens = {n: y for n, y in x.items() if n != "initial_state"}
    o, state = whole(
        **{n: y[:, :17] for n, y in tokens.items()}, initial_state=x["initial_state"], output_final_state=True
    )
    outputs = [o]
    for t in range(17, 20):
        before = state.clone()
        o, after = getattr(fla, name)(
            **{n: y[:, t : t + 1] for n, y in tokens.items()}, initial_state=state, output_final_state=True
        )
        assert state.equal(before), "initial_state was written"
        outputs, state = outputs + [o], after
    close(torch.cat(outputs, 1), exact[0], 1e-5)
    close(state, exact[1], 1e-5)


def test_recurrent_takes_mixed_dtypes_and_no_beta():
    x = make(T=3, dtype=torch.float32)
    del x["beta"]
    mixed = x | dict(q=x["q"].bfloat16(), v=x["v"].half())
    o, _ = fla.fused_recurrent_gated_delta_rule(**mixed)
    assert o.dtype == torch.float16
    exact = {n: y.double() for n, y in mixed.items()}
    close(o, delta_rule(**exact, beta=torch.ones(2, 3, 4).double())[0], 1e-3)
    o, _ = fla.fused_recurrent_gated_delta_rule(**x, use_beta_sigmoid_in_kernel=True)
    close(o, delta_rule(**x, beta=torch.ones(2, 3, 4).sigmoid())[0], 1e-5)


def test_intermediate_states():
    for cu_seqlens in (None, [0, 40, 40, 70, 140]):
        x = make(
            B=2 if cu_seqlens is None else 1,
            T=70 if cu_seqlens is None else 140,
            N=None if cu_seqlens is None else 4,
            kda=True,
        )
        with torch.no_grad():
            o, final, h = fla.chunk_kda(
                **x,
                chunk_size=32,
                return_intermediate_states=True,
                output_final_state=True,
                cu_seqlens=None if cu_seqlens is None else torch.tensor(cu_seqlens),
            )
        expected = []
        tokens = {n: y for n, y in x.items() if n != "initial_state"}
        for n, (a, b) in enumerate([(0, 70), (0, 70)] if cu_seqlens is None else zip(cu_seqlens, cu_seqlens[1:])):
            row = n if cu_seqlens is None else 0
            for t in range(a, b, 32):
                part = {m: y[row : row + 1, a:t] for m, y in tokens.items()}
                expected.append(delta_rule(**part, initial_state=x["initial_state"][n : n + 1])[1])
        close(h, torch.stack([e[0] for e in expected]).reshape(o.shape[0], -1, *final.shape[1:]), 1e-10)
    with pytest.raises(ValueError, match="return_intermediate_states"):
        fla.chunk_kda(**x, return_intermediate_states=True)


# ---- Gates, convolution, norm ----


def test_gates():
    r = torch.Generator().manual_seed(0)
    g, A_log, dt_bias = (torch.randn(*s, generator=r).double() for s in ((2, 9, 4, 6), (4,), (24,)))
    x = dict(g=g, A_log=A_log.reshape(1, 1, 4, 1), dt_bias=dt_bias)
    double = dict(output_dtype=torch.float64)
    compare(lambda **x: [fla.fused_kda_gate(**x, **double)],
            lambda g, A_log, dt_bias: [softplus_gate(g, A_log, dt_bias.view(4, 6))], x)  # fmt: skip
    compare(lambda **x: [fla.fused_kda_gate(**x, lower_bound=-5.0, **double)],
            lambda g, A_log, dt_bias: [-5 * (A_log.exp() * (g + dt_bias.view(4, 6))).sigmoid()], x)  # fmt: skip
    compare(lambda **x: [fla.fused_gdn_gate(**x, **double)], lambda **x: [softplus_gate(**x)],
            dict(g=g[..., 0], A_log=A_log, dt_bias=dt_bias[:4]))  # fmt: skip
    assert fla.fused_kda_gate(g, A_log).dtype == torch.float32
    fourth = fla.fused_kda_gate(g, A_log, dt_bias, torch.bfloat16)
    assert fourth.dtype == torch.bfloat16
    close(fourth, softplus_gate(g, A_log.view(4, 1), dt_bias.view(4, 6)), 5e-3)
    with pytest.raises(ValueError, match="A_log"):
        fla.fused_kda_gate(g)


@pytest.mark.parametrize("activation", [None, "silu", "swish"])
def test_causal_conv1d(activation):
    r = torch.Generator().manual_seed(0)
    x = {n: torch.randn(*s, generator=r).double() for n, s in dict(
        x=(2, 11, 6), weight=(6, 4), bias=(6,), initial_state=(2, 6, 4), residual=(2, 11, 6)).items()}  # fmt: skip

    def theirs(x, weight, bias, initial_state, residual):
        y, state = conv(x, weight, bias, initial_state, activation)
        return y + residual, state

    compare(lambda **x: fla.causal_conv1d(**x, activation=activation, output_final_state=True), theirs, x)
    y, state = fla.causal_conv1d(x["x"].reshape(2, 11, 2, 3), x["weight"], activation=activation)
    assert state is None and y.shape == (2, 11, 2, 3)
    close(y.flatten(2), conv(x["x"], x["weight"], 0, torch.zeros(2, 6, 4).double(), activation)[0], 1e-12)
    packed_y, states = fla.causal_conv1d(x["x"].reshape(1, 22, 6), x["weight"], activation=activation,
                                         cu_seqlens=torch.tensor([0, 11, 22]), output_final_state=True)  # fmt: skip
    close(packed_y.flatten(0, 1), y.flatten(0, 1).flatten(1), 1e-12)
    assert states.shape == (2, 6, 4)
    assert fla.causal_conv1d(x["x"].bfloat16(), x["weight"], output_final_state=True)[1].dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(3, 1, 6), (1, 3, 6), (3, 6)])
def test_causal_conv1d_update(shape):
    r = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(*shape, generator=r).double() for _ in range(2))
    cache, weight, bias = (torch.randn(*s, generator=r).double() for s in ((3, 6, 4), (6, 4), (6,)))
    y, state = conv(x.reshape(3, 1, 6), weight, bias, cache, True)
    moved = cache.clone()
    got, same = fla.causal_conv1d_update(x, moved, residual, weight, bias, "silu")
    assert same is moved and got.shape == shape
    close(got, y.reshape(shape) + residual, 1e-12)
    assert moved.equal(state)
    inputs = dict(x=x, cache=cache, residual=residual, weight=weight, bias=bias)

    def ours(cache, **x):
        return fla.causal_conv1d_update(cache=cache.clone(), activation="silu", **x)

    def theirs(x, cache, residual, weight, bias):
        y, state = conv(x.reshape(3, 1, 6), weight, bias, cache, True)
        return y.reshape(shape) + residual, state

    compare(ours, theirs, inputs)


@pytest.mark.parametrize("activation", ["swish", "silu", "sigmoid"])
def test_gated_norm(activation):
    r = torch.Generator().manual_seed(0)
    x = {n: torch.randn(*s, generator=r).double() for n, s in dict(x=(2, 5, 3, 8), g=(2, 5, 3, 8), weight=(8,)).items()}
    compare(lambda **x: [fla.rms_norm_gated(**x, bias=None, activation=activation, eps=1e-3)],
            lambda **x: [rms_norm(**x, activation=activation, eps=1e-3)], x)  # fmt: skip
    x["residual"] = torch.randn(2, 5, 3, 8, generator=r).double()
    compare(
        lambda **x: fla.rms_norm_gated(**x, bias=None, activation=activation, prenorm=True, eps=1e-6),
        lambda x, residual, **y: (rms_norm(x + residual, **y, activation=activation, eps=1e-6), x + residual),
        x,
    )
    module = fla.FusedRMSNormGated(8, activation=activation)
    assert set(module.state_dict()) == {"weight"} and f"activation={activation}" in repr(module)
    y = module(x["x"].float(), x["g"].float())
    close(y, rms_norm(x["x"], x["g"], 1, activation, 1e-5), 1e-5)
    assert fla.FusedRMSNormGated(8, elementwise_affine=False)(x["x"].float(), x["g"].float()).dtype == torch.float32
    half = fla.rms_norm_gated(x["x"].half(), x["g"].half(), None, None, residual=x["residual"].half(), prenorm=True)
    assert [t.dtype for t in half] == [torch.float16, torch.float16]
    assert (
        fla.rms_norm_gated(x["x"].half(), x["g"].half(), None, None, prenorm=True, residual_in_fp32=True)[1].dtype
        == torch.float32
    )


# ---- What is refused ----


def test_refusals():
    x, k = make(T=2), make(T=2, kda=True)
    cases = [
        (NotImplementedError, "gk", lambda: fla.fused_recurrent_gated_delta_rule(**x, gk=k["g"])),
        (NotImplementedError, "gv", lambda: fla.fused_recurrent_gated_delta_rule(**x, gv=x["v"])),
        (NotImplementedError, "beta", lambda: fla.fused_recurrent_gated_delta_rule(**x | dict(beta=x["v"]))),
        (NotImplementedError, "beta", lambda: fla.fused_recurrent_kda(**k | dict(beta=k["v"]))),
        (NotImplementedError, "cp_context", lambda: fla.chunk_gated_delta_rule(**x, cp_context=object())),
        (NotImplementedError, "cp_context", lambda: fla.chunk_kda(**k, cp_context=object())),
        (NotImplementedError, "cp_context", lambda: fla.causal_conv1d(x["v"], x["v"][0, 0], cp_context=object())),
        (NotImplementedError, "use_graph", lambda: fla.chunk_kda(**k, use_graph=True)),
        (NotImplementedError, "weight", lambda: fla.causal_conv1d(x["v"])),
        (NotImplementedError, "bias", lambda: fla.rms_norm_gated(x["v"], x["v"], None, torch.ones(16))),
        (ValueError, "chunk_size", lambda: fla.chunk_gated_delta_rule(**x, chunk_size=128)),
        (ValueError, "chunk_size", lambda: fla.chunk_kda(**k, chunk_size=16)),
        (ValueError, "allow_neg_eigval", lambda: fla.chunk_gated_delta_rule(**x, allow_neg_eigval=True)),
        (ValueError, "lower_bound", lambda: fla.chunk_kda(**k, use_gate_in_kernel=True, safe_gate=True)),
        (ValueError, "A_log", lambda: fla.chunk_gated_delta_rule(**x, use_gate_in_kernel=True)),
        (ValueError, "A_log", lambda: fla.fused_recurrent_gated_delta_rule(**x, use_gate_in_kernel=True)),
        (ValueError, "A_log", lambda: fla.fused_recurrent_kda(**k, use_gate_in_kernel=True)),
        (ValueError, "cu_seqlens", lambda: fla.chunk_gated_delta_rule(**x, cu_seqlens=torch.tensor([0, 2]))),
        (ValueError, "activation", lambda: fla.causal_conv1d(x["v"].flatten(2), torch.ones(64, 4), activation="relu")),
        (ValueError, "backend", lambda: fla.causal_conv1d(x["v"].flatten(2), torch.ones(64, 4), backend="cpu")),
        (ValueError, "activation", lambda: fla.FusedRMSNormGated(8, activation="relu")),
        (ValueError, "heads|H", lambda: fla.chunk_gated_delta_rule(**x | dict(v=x["v"][:, :, :3]))),
    ]  # fmt: skip
    for error, text, call in cases:
        with pytest.raises(error, match=text):
            call()


@pytest.mark.parametrize("name", [*RULES, "causal_conv1d", "causal_conv1d_update", "rms_norm_gated", "fused_kda_gate"])
def test_misspelt_keywords_are_type_errors(name):
    with pytest.raises(TypeError, match="output_final_sate"):
        getattr(fla, name)(output_final_sate=True)


# ---- Against FLA itself ----

FILES = {  # of fla-core 0.6.0
    "ops/gated_delta_rule/chunk.py": ["chunk_gated_delta_rule"],
    "ops/gated_delta_rule/fused_recurrent.py": ["fused_recurrent_gated_delta_rule"],
    "ops/gated_delta_rule/gate.py": ["fused_gdn_gate"],
    "ops/kda/chunk.py": ["chunk_kda"],
    "ops/kda/fused_recurrent.py": ["fused_recurrent_kda"],
    "ops/kda/gate.py": ["fused_kda_gate"],
    "modules/causal_conv1d/ops.py": ["causal_conv1d", "causal_conv1d_update"],
    "modules/norm/fused_norm_gate.py": ["rms_norm_gated", "FusedRMSNormGated"],
}


@pytest.mark.parametrize("file, name", [(file, name) for file, names in FILES.items() for name in names])
def test_names_order_and_defaults_are_those_of_the_installed_fla(file, name):
    spec = importlib.util.find_spec("fla")
    if spec is None:
        pytest.skip("fla-core is not installed")
    tree = ast.parse((pathlib.Path(spec.origin).parent / file).read_text())
    node = next(n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name == name)
    if isinstance(node, ast.ClassDef):
        node = next(n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
    ours = getattr(fla, name)
    ours = inspect.signature(ours.__init__ if isinstance(ours, type) else ours).parameters.values()
    ours = [(p.name, p.default) for p in ours if p.kind is p.POSITIONAL_OR_KEYWORD]
    defaults = [eval(ast.unparse(d), {"torch": torch}) for d in node.args.defaults]
    names = [a.arg for a in node.args.args]
    theirs = list(zip(names, [inspect.Parameter.empty] * (len(names) - len(defaults)) + defaults))
    assert ours == theirs


@pytest.fixture(scope="module")
def installed():
    """The installed fla, with Triton and einops. scripts/python.sh keeps it apart: transformers would call it."""
    pytest.importorskip("triton")
    pytest.importorskip("einops")
    pytest.importorskip("fla", reason="fla-core is not installed")
    import fla.ops.gated_delta_rule
    import fla.ops.kda.gate
    import fla.ops.kda.naive

    return fla


def test_fla_s_naive_functions_agree(installed):
    x = make(H=4, HV=4, dtype=torch.float32)
    o, state = installed.ops.gated_delta_rule.naive_recurrent_gated_delta_rule(**x, output_final_state=True)
    got = fla.chunk_gated_delta_rule(**x, output_final_state=True)
    close(got[0], o, 1e-5)
    close(got[1], state, 1e-5)
    x = make(H=4, HV=4, dtype=torch.float32, kda=True)
    o, state = installed.ops.kda.naive.naive_recurrent_kda(**x, output_final_state=True)
    got = fla.chunk_kda(**x, output_final_state=True)
    close(got[0], o, 1e-5)
    close(got[1], state, 1e-5)


def test_fla_dispatches_to_thalweg_on_the_cpu(installed):
    """FLA's own functions, which have no CPU code, answer for CPU tensors, with gradients."""
    assert fla.register() == ["causal_conv1d_update", "chunk_gated_delta_rule", "chunk_kda", "fused_kda_gate"]
    x, k = make(), make(kda=True)
    compare(
        lambda **x: installed.ops.gated_delta_rule.chunk_gated_delta_rule(**x, output_final_state=True), delta_rule, x
    )
    compare(lambda **x: installed.ops.kda.chunk_kda(**x, output_final_state=True), delta_rule, k)
    gate = installed.ops.kda.gate.fused_kda_gate(k["g"], torch.zeros(4), output_dtype=torch.float64)
    close(gate, softplus_gate(k["g"], torch.zeros(1), 0), 1e-10)
