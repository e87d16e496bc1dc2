"""The functions of flash-linear-attention (FLA), computed by Thalweg: same names, argument order, defaults, results.

    from thalweg.fla import chunk_gated_delta_rule        # instead of fla.ops.gated_delta_rule

Signatures follow fla-core 0.6.0. q, k [B T H K]; v, o [B T HV V]; beta and GDN's g [B T HV]; KDA's g [B T HV K]; states
[N HV K V], or [N HV V K] with state_v_first, returned in float32 (float64 for float64 inputs). cu_seqlens [N+1] packs N
sequences into a batch of one.

What differs from FLA:

- Everything is differentiable, also fused_recurrent_gated_delta_rule (whose backward raises there), fused_recurrent_kda
  (no gradient there) and causal_conv1d_update (there it has none).
- A misspelt keyword is a TypeError; there it is ignored. `chunk_size`, `chunk_indices`, `cu_seqlens_cpu`, `backend`,
  `disable_recompute` and `safe_gate` choose between FLA's kernels: their values are checked and change nothing.
- K is bounded by 512 instead of 256, and cu_seqlens may hold empty sequences everywhere.
- Not computed, and refused by name with NotImplementedError: gk, gv, a beta for each value channel, cp_context,
  use_graph, bias in the gated norm, a convolution without weight.

`register()` offers the same code to an installed `fla` as a backend for CPU tensors.
"""

from __future__ import annotations

import inspect
import warnings

import torch

from . import torch as ops

__all__ = [
    "FusedRMSNormGated",
    "causal_conv1d",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "chunk_kda",
    "fused_gdn_gate",
    "fused_kda_gate",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "fused_recurrent_kda",
    "register",
    "rms_norm_gated",
]

_DECODE_TOKENS = 8  # up to here the decode pass, token by token, is faster than the forward pass, chunk by chunk


def _refuse(function: str, **arguments) -> None:
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"{function}: {name} is not computed by Thalweg")


def _choice(function: str, name: str, value, choices: tuple) -> None:
    if value not in choices:
        raise ValueError(f"{function}: {name}: got {value!r}, expected one of {', '.join(map(repr, choices))}")


def _v_first(function: str, state_v_first: bool, transpose_state_layout) -> bool:
    """state_v_first, or its deprecated name."""
    if transpose_state_layout is None:
        return state_v_first
    if state_v_first:
        raise ValueError(f"{function}: give state_v_first or its deprecated name transpose_state_layout, not both")
    warnings.warn("transpose_state_layout is the deprecated name of state_v_first", DeprecationWarning, stacklevel=3)
    return transpose_state_layout


def _neg_eigval(function: str, allow_neg_eigval: bool, use_beta_sigmoid_in_kernel: bool) -> bool:
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError(f"{function}: allow_neg_eigval needs use_beta_sigmoid_in_kernel=True")
    return allow_neg_eigval


def _swapped(state):
    """A state with its last two axes exchanged: [K V] and [V K] hold the same numbers."""
    return None if state is None else state.transpose(-1, -2)


def _whole(rule, q, k, v, *, initial_state, state_v_first, **options):
    """A delta rule over whole sequences, its states in the layout that the caller uses."""
    if not state_v_first:
        return rule(q, k, v, initial_state=initial_state, **options)
    o, final_state, *rest = rule(q, k, v, initial_state=_swapped(initial_state), **options)
    states = [None if s is None else _swapped(s).contiguous() for s in (final_state, *rest)]
    return o, *states


def _recurrent(
    function,
    rule,
    decode,
    q,
    k,
    v,
    g,
    beta,
    *,
    initial_state,
    output_final_state,
    state_v_first,
    cu_seqlens,
    use_beta_sigmoid,
    **options,
):
    """A delta rule over few tokens. Like FLA's, it takes q, k and v of different dtypes and answers in v's."""
    if beta is not None and beta.dim() == v.dim():
        raise NotImplementedError(f"{function}: beta with a strength for each value channel is not computed by Thalweg")
    if beta is None and use_beta_sigmoid:
        beta = v.new_ones(v.shape[:-1])
    dtype = v.dtype
    if not q.dtype == k.dtype == dtype:
        q, k, v = (x.to(torch.promote_types(torch.promote_types(q.dtype, k.dtype), dtype)) for x in (q, k, v))
    options |= dict(g=g, beta=beta, use_beta_sigmoid=use_beta_sigmoid)
    inputs = (q, k, v, initial_state, *options.values())
    differentiable = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)
    if differentiable or cu_seqlens is not None or q.shape[1] > _DECODE_TOKENS:
        o, final_state = _whole(rule, q, k, v, initial_state=initial_state, output_final_state=output_final_state,
                                state_v_first=state_v_first, cu_seqlens=cu_seqlens, **options)  # fmt: skip
    else:
        state_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        if initial_state is None:
            sizes = (v.shape[3], k.shape[3]) if state_v_first else (k.shape[3], v.shape[3])
            final_state = v.new_zeros(v.shape[0], v.shape[2], *sizes, dtype=state_dtype)
        else:
            final_state = initial_state.to(state_dtype, copy=True, memory_format=torch.contiguous_format)
        o = decode(q, k, v, state=_swapped(final_state) if state_v_first else final_state, **options)
    return o.to(dtype), final_state if output_final_state else None


# ---- Gated delta rule ----


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    cp_context=None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    chunk_size: int = 64,
    transpose_state_layout: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gated delta rule over whole sequences. Returns (o, final_state or None), o in q's dtype.

    g is the log decay; with use_gate_in_kernel it is raw and becomes -exp(A_log) softplus(g + dt_bias). Gradients of q,
    k, v, g, beta, initial_state, A_log and dt_bias.
    """
    name = "chunk_gated_delta_rule"
    _refuse(name, cp_context=cp_context)
    _choice(name, "chunk_size", chunk_size, (16, 32, 64))
    return _whole(
        ops.gated_delta_rule, q, k, v, g=g, beta=beta, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, cu_seqlens=cu_seqlens, use_qk_l2norm=use_qk_l2norm_in_kernel,
        use_gate=use_gate_in_kernel, A_log=A_log if use_gate_in_kernel else None,
        dt_bias=dt_bias if use_gate_in_kernel else None, use_beta_sigmoid=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=_neg_eigval(name, allow_neg_eigval, use_beta_sigmoid_in_kernel),
        state_v_first=_v_first(name, state_v_first, transpose_state_layout),
    )  # fmt: skip


def fused_recurrent_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    gk: torch.Tensor | None = None,
    gv: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gated delta rule, meant for decoding. Returns (o, final_state or None), o in v's dtype; initial_state is left
    as it is. Without beta the write strength is 1."""
    name = "fused_recurrent_gated_delta_rule"
    _refuse(name, gk=gk, gv=gv)
    return _recurrent(
        name, ops.gated_delta_rule, ops.gated_delta_rule_decode, q, k, v, g, beta, scale=scale,
        initial_state=initial_state, output_final_state=output_final_state, use_qk_l2norm=use_qk_l2norm_in_kernel,
        use_gate=use_gate_in_kernel, A_log=A_log if use_gate_in_kernel else None,
        dt_bias=dt_bias if use_gate_in_kernel else None, use_beta_sigmoid=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=_neg_eigval(name, allow_neg_eigval, use_beta_sigmoid_in_kernel),
        state_v_first=_v_first(name, state_v_first, transpose_state_layout), cu_seqlens=cu_seqlens,
    )  # fmt: skip


def fused_gdn_gate(
    g: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """-exp(A_log) softplus(g + dt_bias): g [... HV], A_log and dt_bias with HV elements."""
    dt_bias = None if dt_bias is None else dt_bias.reshape(-1)
    return ops.kda_gate(g.unsqueeze(-1), A_log.reshape(-1), dt_bias, output_dtype=output_dtype).squeeze(-1)


# ---- Kimi delta attention ----


def _kda_gate_options(g, use_gate, A_log, dt_bias, lower_bound) -> dict:
    """FLA reads these with the gate alone, and takes them in any shape."""
    if not use_gate:
        return {}
    return dict(use_gate=True, lower_bound=lower_bound, A_log=None if A_log is None else A_log.reshape(-1),
                dt_bias=None if dt_bias is None else dt_bias.reshape(g.shape[-2:]))  # fmt: skip


def chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    cp_context=None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    chunk_size: int = 64,
    transpose_state_layout: bool | None = None,
) -> tuple[torch.Tensor, ...]:
    """Kimi delta attention over whole sequences. Returns (o, final_state or None), o in q's dtype.

    g is the log decay of each key channel; with use_gate_in_kernel it is raw and becomes -exp(A_log) softplus(g +
    dt_bias), or with lower_bound: lower_bound sigmoid(exp(A_log) (g + dt_bias)). With return_intermediate_states
    (without gradients only) a third result holds the state before every chunk_size-th token, [B NT HV K V] in k's
    dtype.
    """
    name = "chunk_kda"
    _refuse(name, cp_context=cp_context, use_graph=use_graph)
    _choice(name, "chunk_size", chunk_size, (32, 64))
    if safe_gate and use_gate_in_kernel and not (lower_bound is not None and -5 <= lower_bound < 0):
        raise ValueError(
            f"{name}: lower_bound: got {lower_bound}, expected a number in [-5, 0) with safe_gate and the gate"
        )
    if return_intermediate_states and (torch.is_grad_enabled() or disable_recompute):
        raise ValueError(f"{name}: return_intermediate_states needs torch.inference_mode() or no_grad(), without "
                         "disable_recompute: these states carry no gradient")  # fmt: skip
    o, final_state, *states = _whole(
        ops.kimi_delta_attention, q, k, v, g=g, beta=beta, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, cu_seqlens=cu_seqlens, use_qk_l2norm=use_qk_l2norm_in_kernel,
        use_beta_sigmoid=use_beta_sigmoid_in_kernel,
        **_kda_gate_options(g, use_gate_in_kernel, A_log, dt_bias, lower_bound),
        allow_neg_eigval=_neg_eigval(name, allow_neg_eigval, use_beta_sigmoid_in_kernel),
        state_v_first=_v_first(name, state_v_first, transpose_state_layout),
        output_chunk_states=return_intermediate_states, every=chunk_size,
    )  # fmt: skip
    if not return_intermediate_states:
        return o, final_state
    return o, final_state, _intermediate(states[0], q, cu_seqlens, chunk_size).to(k.dtype)


def _intermediate(states, q, cu_seqlens, chunk_size):
    """FLA's [B NT ...] of the library's rows: row start / chunk_size + n + c is chunk c of sequence n."""
    if cu_seqlens is None:
        starts = range(0, q.shape[0] * q.shape[1], q.shape[1] or 1)
        lengths = [q.shape[1]] * q.shape[0]
    else:
        starts = cu_seqlens.tolist()[:-1]
        lengths = cu_seqlens.diff().tolist()
    rows = [
        s // chunk_size + n + c
        for n, (s, length) in enumerate(zip(starts, lengths))
        for c in range(-(-length // chunk_size))
    ]
    return states[rows].reshape(q.shape[0], -1, *states.shape[1:])


def fused_recurrent_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Kimi delta attention, meant for decoding. Returns (o, final_state or None), o in v's dtype; initial_state is left
    as it is."""
    name = "fused_recurrent_kda"
    return _recurrent(
        name, ops.kimi_delta_attention, ops.kimi_delta_attention_decode, q, k, v, g, beta, scale=scale,
        initial_state=initial_state, output_final_state=output_final_state, use_qk_l2norm=use_qk_l2norm_in_kernel,
        use_beta_sigmoid=use_beta_sigmoid_in_kernel,
        **_kda_gate_options(g, use_gate_in_kernel, A_log, dt_bias, lower_bound),
        allow_neg_eigval=_neg_eigval(name, allow_neg_eigval, use_beta_sigmoid_in_kernel),
        state_v_first=_v_first(name, state_v_first, transpose_state_layout), cu_seqlens=cu_seqlens,
    )  # fmt: skip


def fused_kda_gate(
    g: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """KDA's log decay: g [... HV K], A_log with HV elements in any shape, dt_bias with HV*K.

    -exp(A_log) softplus(g + dt_bias), or lower_bound sigmoid(exp(A_log) (g + dt_bias)). Older callers give the output's
    dtype in the fourth place; that is understood.
    """
    if isinstance(lower_bound, torch.dtype):
        lower_bound, output_dtype = None, lower_bound
    if A_log is None and lower_bound is None:
        raise ValueError("fused_kda_gate: A_log: missing, expected it without lower_bound")
    A_log = None if A_log is None else A_log.reshape(-1)
    dt_bias = None if dt_bias is None else dt_bias.reshape(-1)
    return ops.kda_gate(g, A_log, dt_bias, lower_bound=lower_bound, output_dtype=output_dtype)


# ---- Convolution and norm ----


def _conv_activation(function: str, activation: str | None) -> str | None:
    _choice(function, "activation", activation, (None, "silu", "swish"))
    return activation and "silu"


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    backend: str | None = "triton",
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    cp_context=None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Depthwise causal convolution: x [B T D] (more axes behind T are one D), weight [D W], bias [D], residual as x,
    added behind the activation. States [N D W] are the last W inputs, oldest first. Returns (y, final_state or None),
    both in x's dtype. Gradients of x, weight, bias, residual and initial_state."""
    name = "causal_conv1d"
    _refuse(name, cp_context=cp_context)
    _choice(name, "backend", backend, ("triton", "cuda", "mix"))
    if weight is None:
        raise NotImplementedError(f"{name}: without weight: not computed by Thalweg")
    y, final_state = ops.short_conv(
        x.flatten(2), weight, bias, initial_state=initial_state, output_final_state=bool(output_final_state),
        cu_seqlens=cu_seqlens, activation=_conv_activation(name, activation),
    )  # fmt: skip
    y = y.reshape(x.shape)
    if residual is not None:
        y = y + residual
    return y, None if final_state is None else final_state.to(x.dtype)


def short_conv_step(x, weight, bias, state, activation):
    """The short convolution of x [N T D], going on from state [N D W], which moves on in place: by a differentiable copy
    where a gradient is asked for."""
    if not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, state, weight, bias))):
        return ops.short_conv_decode(x, weight, bias, state=state, activation=activation)
    y, moved = ops.short_conv(x, weight, bias, initial_state=state.clone(), output_final_state=True,
                              activation=activation)  # fmt: skip
    state.copy_(moved)
    return y


def causal_conv1d_update(
    x: torch.Tensor,
    cache: torch.Tensor,
    residual: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One more token for each of N sequences: x [N 1 D], [1 N D] or [N D]; cache [N D W], moved on in place. Returns
    (y, cache). Where a gradient is asked for, cache is written by a differentiable copy."""
    name = "causal_conv1d_update"
    if weight is None:
        raise NotImplementedError(f"{name}: without weight: not computed by Thalweg")
    activation = _conv_activation(name, activation)
    tokens = x.reshape(-1, 1, weight.shape[0])
    y = short_conv_step(tokens, weight, bias, cache, activation)
    y = y.reshape(x.shape)
    return (y if residual is None else y + residual), cache


def rms_norm_gated(
    x: torch.Tensor,
    g: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str = "swish",
    residual: torch.Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
):
    """x / sqrt(mean(x^2) + eps) * weight * act(g) over the last axis; act is "swish" (or "silu") or "sigmoid".

    residual is added to x first. With prenorm the result is (y, that sum), the sum in the residual's dtype, in float32
    with residual_in_fp32 where there is no residual, else in x's.
    """
    name = "rms_norm_gated"
    _refuse(name, bias=bias)
    _choice(name, "activation", activation, ("swish", "silu", "sigmoid"))
    summed = x if residual is None else x.float() + residual.float() if x.dtype != torch.float64 else x + residual
    y = ops.gated_rms_norm(summed, g, weight, eps=eps, gate_activation="sigmoid" if activation == "sigmoid" else "silu")
    y = y.to(x.dtype)
    if not prenorm:
        return y
    if residual is not None:
        return y, summed.to(residual.dtype)
    return y, x.float() if residual_in_fp32 and x.dtype != torch.float64 else x


class FusedRMSNormGated(torch.nn.Module):
    """rms_norm_gated as a module, with FLA's constructor and state_dict."""

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        activation: str = "swish",
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _choice("FusedRMSNormGated", "activation", activation, ("swish", "silu", "sigmoid"))
        self.hidden_size, self.elementwise_affine, self.eps, self.activation = (
            hidden_size,
            elementwise_affine,
            eps,
            activation,
        )
        weight = (
            torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype)) if elementwise_affine else None
        )
        self.register_parameter("weight", weight)
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self):
        if self.elementwise_affine:
            torch.nn.init.ones_(self.weight)

    def extra_repr(self) -> str:
        affine = "" if self.elementwise_affine else ", elementwise_affine=False"
        return f"{self.hidden_size}{affine}, eps={self.eps}, activation={self.activation}"

    def forward(
        self,
        x: torch.Tensor,
        g: torch.Tensor,
        residual: torch.Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ):
        return rms_norm_gated(
            x, g, self.weight, self.bias, self.activation, residual, prenorm, residual_in_fp32, self.eps
        )


chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule


# ---- As a backend of FLA itself ----


def register() -> list[str]:
    """Offers these functions to an installed `fla` (0.6) as a backend for tensors on the CPU; returns the names of
    those that it dispatches, or an empty list where `fla` cannot be imported. FLA_THALWEG=0 in the environment turns it
    off."""
    try:
        from fla.backends import BaseBackend
        from fla.backends import register as register_backend
        from fla.modules.causal_conv1d import ops as conv
        from fla.ops import kda
    except ImportError:
        return []

    functions = {f.__name__: f for f in (chunk_gated_delta_rule, chunk_kda, fused_kda_gate, causal_conv1d_update)}

    class ThalwegBackend(BaseBackend):
        backend_type = "thalweg"
        env_var = "FLA_THALWEG"
        priority = 4

        def get_implementation(self, function_name):
            return functions.get(function_name)

        def verify(self, function_name, *args, **kwargs):
            if function_name not in functions:
                return False, "not one of Thalweg's functions"
            try:
                arguments = inspect.signature(functions[function_name]).bind(*args, **kwargs).arguments
            except TypeError as error:
                return False, str(error)
            tensors = [x for x in arguments.values() if isinstance(x, torch.Tensor)]
            return all(x.device.type == "cpu" for x in tensors), "Thalweg's tensors are on the CPU"

    for entry_point in ("gated_delta_rule", "kda", kda.chunk_kda, conv.causal_conv1d_update):
        register_backend(entry_point)(ThalwegBackend)
    return sorted(functions)
