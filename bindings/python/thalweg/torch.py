"""Thalweg's operators for PyTorch: differentiable functions over `torch.library` custom operators.

Each pass of the library is an operator `torch.ops.thalweg.<op>_<pass>`, made from the pass table, with a fake kernel
(so torch.compile and export see through shapes, not data) and, for passes that have a backward, an autograd formula.
The functions below give them the names and defaults that people call. Nothing of torch is needed to build the library:
the operators hand data pointers, sizes and strides to its C interface.

Rules of all functions:

- CPU tensors; CUDA tensors on a Hopper GPU where the library was built with CUDA (RuntimeError otherwise). All on one
  device; on any other: ValueError naming the argument and the device. On CUDA the call is issued on torch's current
  stream and its workspace comes from torch's allocator, so it can be captured in a CUDA graph; values inside tensors
  (cu_seqlens, slots, indices) are then checked on the device: wrong ones give NaN outputs, and no error here.
- Dtypes f64, f32, bf16, f16. q, k, v (x and gate are free) share one; gates, states and parameters may have any.
  States and statistics come back as float32, float64 where q is float64.
- Under torch.autocast the tensors that must share a dtype are cast to the autocast dtype (float64 is left alone);
  gates, states and parameters are not.
- Strides are passed on. An input whose strides the operator cannot take (last axis not contiguous; for states neither
  of the last two) is made contiguous inside the operator.
- Outputs are new, contiguous tensors and never share memory with inputs. The decode functions write `state` in place
  and declare it; they have no gradient.
- None means the default for scale, eps and lower_bound. As many threads as torch.get_num_threads() says are used, and
  results do not depend on the number.
- Wrong arguments: ValueError with the library's text, TypeError for a wrong keyword.
"""

from __future__ import annotations

import torch

from . import _native
from ._tables import ANY, CHOICE, COUNT, DTYPE_CODES, FLAG, IN, INOUT, PASSES, REAL, ROWS, STATE

__all__ = [
    "block_sparse_attention", "gated_delta_rule", "gated_delta_rule_decode", "gated_rms_norm", "kda_gate",
    "kimi_delta_attention", "kimi_delta_attention_decode", "lightning_indexer", "lightning_indexer_loss", "runs_on", "short_conv",
    "short_conv_decode", "sparse_flash_attention",
]  # fmt: skip

_DTYPES = {
    torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.int64: "i64",
    torch.int32: "i32", torch.int8: "i8", torch.uint8: "u8", torch.bool: "bool",
}  # fmt: skip
_TORCH_DTYPES = {name: dtype for dtype, name in _DTYPES.items()}
_CODES = {dtype: DTYPE_CODES[name] for dtype, name in _DTYPES.items()}
_DEVICES = {"cpu": 1, "cuda": 2}  # DLPack's device types
_LARGE = 1 << 22  # bytes from which the pages of an output matter
_UNKNOWN = 1  # a dtype code that the library does not have, so that it refuses the argument by name


class _Operator:
    """The torch operator of one pass.

    Its arguments are the pass's inputs, its options, one bool for each output that may be left out (`want_o`), and
    sizes and dtypes of outputs that inputs do not tell. It returns every output; one that is not wanted has no
    elements.
    """

    def __init__(self, pass_):
        self.pass_ = pass_
        self.name = f"thalweg::{pass_.op}_{pass_.name}"
        self.optional_outputs = [f for f in pass_.outputs if f.optional]
        self.free_dtypes = [f for f in pass_.outputs if f.dtypes[0] == "f64" and "f16" in f.dtypes]
        inputs = [self._tensor(f, i) for i, f in enumerate(pass_.inputs)]
        rest = [f"{_SCHEMA_TYPES[f.kind]} {f.name}={_literal(_default(f))}" for f in pass_.options]
        rest += [f"SymInt {keyword}=0" for keyword in pass_.size_keywords]
        rest += [f"bool want_{f.name}=False" for f in self.optional_outputs]
        rest += [f"ScalarType? {f.name}_dtype=None" for f in self.free_dtypes]
        self.defaults = {f.name: _default(f) for f in pass_.options}
        self.defaults |= {keyword: 0 for keyword in pass_.size_keywords}
        self.defaults |= {f"want_{f.name}": False for f in self.optional_outputs}
        self.defaults |= {f"{f.name}_dtype": None for f in self.free_dtypes}
        returns = ", ".join("Tensor" for _ in pass_.outputs)
        schema = (
            f"({', '.join(inputs)}, *, {', '.join(rest)}) -> {returns if len(pass_.outputs) == 1 else f'({returns})'}"
        )
        mutated = [f.name for f in pass_.inputs if f.role == INOUT]
        self.op = torch.library.custom_op(self.name, self.run, mutates_args=mutated, schema=schema)
        self.op.register_fake(self.fake)

    @staticmethod
    def _tensor(field, i):
        kind = "Tensor(a!)" if field.role == INOUT else "Tensor"
        return f"{kind}? {field.name}" if field.optional else f"{kind} {field.name}"

    def __call__(self, **values):
        return self.op(*[values.pop(f.name, None) for f in self.pass_.inputs], **values)

    def wanted(self, field, values) -> bool:
        return not field.optional or values[f"want_{field.name}"]

    def outputs(self, values: dict) -> list:
        """New tensors for every output."""
        given = {f.name: values[f.name] for f in self.pass_.inputs if values[f.name] is not None}
        sizes = self.pass_.sizes(
            {name: tensor.shape for name, tensor in given.items()},
            values.get("every", 0),
            **{keyword: values[keyword] for keyword in self.pass_.size_keywords},
        )
        dtypes = {name: _DTYPES.get(tensor.dtype) for name, tensor in given.items()}
        first = given[self.pass_.inputs[0].name]
        results = []
        for field in self.pass_.outputs:
            dtype = values.get(f"{field.name}_dtype") or _TORCH_DTYPES[self.pass_.dtype(field, dtypes) or "f32"]
            shape = self.pass_.shape(field, sizes) if self.wanted(field, values) else (0,)
            results.append(torch.empty(shape, dtype=dtype, device=first.device))
        return results

    def values(self, args, kwargs) -> dict:
        return self.defaults | dict(zip((f.name for f in self.pass_.inputs), args)) | kwargs

    def fake(self, *args, **kwargs):
        results = self.outputs(self.values(args, kwargs))
        return results[0] if len(results) == 1 else tuple(results)

    def run(self, *args, **kwargs):
        pass_, values = self.pass_, self.values(args, kwargs)
        call = _native.Call(pass_.index)
        call.num_threads(torch.get_num_threads())
        for field in pass_.inputs:
            tensor = values[field.name]
            if tensor is not None:
                _bind(call, field, _fit(tensor, field) if field.role == IN else tensor, pass_.where)
        for field in pass_.options:
            number = field.number(values[field.name], pass_.where)
            if number:
                call.option(field.position, number)
        results = self.outputs(values)
        for field, tensor in zip(pass_.outputs, results):
            if self.wanted(field, values):
                if tensor.nbytes >= _LARGE and tensor.device.type == "cpu":
                    _native.prefer_large_pages(tensor.data_ptr(), tensor.nbytes)
                _bind(call, field, tensor, pass_.where)
        _place(call, values[pass_.inputs[0].name].device)
        call.run()
        return results[0] if len(results) == 1 else tuple(results)


_SCHEMA_TYPES = {FLAG: "bool", COUNT: "int", REAL: "float", CHOICE: "str"}


def _default(field):
    return {FLAG: False, COUNT: 0, REAL: 0.0, CHOICE: (field.choices or [""])[0]}[field.kind]


def _literal(value) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _fit(tensor, field):
    """The tensor, or a contiguous copy where the operator cannot take its strides."""
    axes = _CONTIGUOUS_AXES[field.layout]
    if not 0 < axes <= tensor.dim():
        return tensor
    stride, shape = tensor.stride(), tensor.shape
    for axis in range(-axes, 0):
        if stride[axis] == 1 or shape[axis] <= 1:
            return tensor
    return tensor.contiguous()


_CONTIGUOUS_AXES = {ROWS: 1, STATE: 2, ANY: 0}  # the last so many axes, one of which must be contiguous


def _bind(call, field, tensor, where):
    device = tensor.device
    if device.type not in _DEVICES:
        raise ValueError(f"{where}: {field.name}: device, got {device}, expected cpu or cuda")
    call.bind_pointer(field.position, tensor.data_ptr(), _CODES.get(tensor.dtype, _UNKNOWN), tensor.shape,
                      tensor.stride(), _DEVICES[device.type], device.index or 0, tensor)  # fmt: skip


def runs_on(device: torch.device) -> bool:
    """Whether tensors there can be given to these functions: the CPU, or a GPU that the library's CUDA rows run on."""
    if device.type == "cuda":
        return _native.why_no_cuda(device.index or 0) == ""
    return device.type == "cpu"


def _place(call, device):
    """On CUDA: torch's current stream, and a workspace whose memory torch keeps for that stream."""
    if device.type != "cuda":
        return
    size = call.workspace_bytes()
    memory = torch.empty(size, dtype=torch.uint8, device=device)
    call.place(torch.cuda.current_stream(device).cuda_stream, memory.data_ptr(), size, memory)


def _register_autograd(forward: _Operator, backward: _Operator) -> None:
    """The backward of `forward` is the pass `backward`: it takes the forward's inputs, of its outputs those that it has
    arguments for, and the gradients of outputs."""
    fwd, bwd = forward.pass_, backward.pass_
    fwd_inputs = {f.name for f in fwd.inputs}
    kept_outputs = [f.name for f in fwd.outputs if f.name in bwd.by_name and bwd.by_name[f.name].role == IN
                    and f.name not in fwd_inputs]  # fmt: skip
    options = [f.name for f in bwd.options]
    gradients = [f.name for f in bwd.outputs]

    def setup_context(ctx, inputs, keyword_only_inputs, output):
        values = forward.values(inputs, keyword_only_inputs)
        outputs = output if isinstance(output, tuple) else (output,)
        ctx.set_materialize_grads(False)
        has_gradient = [f"d_{f.name}" in bwd.by_name and forward.wanted(f, values) for f in fwd.outputs]
        ctx.mark_non_differentiable(*[tensor for tensor, yes in zip(outputs, has_gradient) if not yes])
        ctx.options = {name: values[name] for name in options}
        saved = {f.name: values[f.name] for f in fwd.inputs if f.name in bwd.by_name}
        for field, tensor in zip(fwd.outputs, outputs):
            if field.name in kept_outputs:
                saved[field.name] = tensor if forward.wanted(field, values) else None
        ctx.names = list(saved)
        ctx.save_for_backward(*saved.values())

    def backward_formula(ctx, *grads):
        values = dict(zip(ctx.names, ctx.saved_tensors))
        for field, grad in zip(fwd.outputs, grads):
            target = bwd.by_name.get(f"d_{field.name}")
            if target is not None:
                if grad is None and not target.optional:
                    output = values.get(field.name)
                    grad = torch.zeros_like(values[fwd.inputs[0].name] if output is None else output)
                values[target.name] = grad
        needed = dict(zip((f.name for f in fwd.inputs), ctx.needs_input_grad))
        wants = {f"want_d_{name}": need for name, need in needed.items() if f"d_{name}" in bwd.by_name}
        dtypes = {f"{f.name}_dtype": values[f.name[2:]].dtype for f in backward.free_dtypes if needed.get(f.name[2:])}
        results = dict(zip(gradients, backward(**values, **ctx.options, **wants, **dtypes)))
        return tuple(results.get(f"d_{name}") if need else None for name, need in needed.items())

    forward.op.register_autograd(backward_formula, setup_context=setup_context)


def _same_dtype(*tensors):
    """The autocast rule: tensors that must share a dtype get the autocast dtype, but for float64."""
    device = next(t for t in tensors if t is not None).device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        t if t is None or not t.is_floating_point() or t.dtype == torch.float64 else t.to(dtype) for t in tensors
    )


_OPERATORS = {p.where: _Operator(p) for p in PASSES.values()}
for _pass in PASSES.values():
    _backward = _OPERATORS.get(f"{_pass.op}.bwd")
    if _pass.name in ("fwd", "loss") and _backward:
        _register_autograd(_OPERATORS[_pass.where], _backward)


# ---- The delta rules ----


def _delta_rule(op, q, k, v, options, output_final_state, output_chunk_states):
    q, k, v = _same_dtype(q, k, v)
    o, final_state, chunk_states = _OPERATORS[f"{op}.fwd"](
        q=q, k=k, v=v, want_final_state=output_final_state, want_chunk_states=output_chunk_states, **options
    )
    final_state = final_state if output_final_state else None
    return (o, final_state, chunk_states) if output_chunk_states else (o, final_state)


def gated_delta_rule(
    q, k, v, g=None, beta=None, *, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None,
    A_log=None, dt_bias=None, use_qk_l2norm=False, use_gate=False, use_beta_sigmoid=False,
    allow_neg_eigval=False, output_chunk_states=False, every=64,
):  # fmt: skip
    """The gated delta rule over whole sequences: S <- exp(g) S; S <- S + beta k (v - S^T k)^T; o = scale S^T q.

    q, k [B T H K]; v, o [B T HV V] with HV a multiple of H; g (log decay), beta [B T HV]; initial_state [N HV K V], N
    the number of sequences; cu_seqlens [N+1] int32 or int64 packs sequences into a batch of one. use_qk_l2norm,
    use_gate (then A_log [HV] and dt_bias [HV]: g <- -exp(A_log) softplus(g + dt_bias)), use_beta_sigmoid and
    allow_neg_eigval prepare the inputs inside the operator.

    Returns (o, final_state or None); with output_chunk_states also the states before every `every`-th token, which
    carry no gradient. Gradients of q, k, v, g, beta, A_log, dt_bias and initial_state, from those of o and
    final_state.
    """
    options = dict(
        g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, initial_state=initial_state, cu_seqlens=cu_seqlens,
        scale=scale or 0.0, every=every, use_qk_l2norm=use_qk_l2norm, use_gate=use_gate,
        use_beta_sigmoid=use_beta_sigmoid, allow_neg_eigval=allow_neg_eigval,
    )  # fmt: skip
    return _delta_rule("gated_delta_rule", q, k, v, options, output_final_state, output_chunk_states)


def kimi_delta_attention(
    q, k, v, g=None, beta=None, *, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None,
    A_log=None, dt_bias=None, lower_bound=None, use_qk_l2norm=False, use_gate=False, use_beta_sigmoid=False,
    allow_neg_eigval=False, output_chunk_states=False, every=64,
):  # fmt: skip
    """Kimi delta attention over whole sequences: the gated delta rule with a decay for each key channel.

    As gated_delta_rule, with g [B T HV K] and dt_bias [HV K]. With use_gate and lower_bound (below 0) the gate is
    lower_bound sigmoid(exp(A_log) (g + dt_bias)), and A_log may be absent.
    """
    options = dict(
        g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, initial_state=initial_state, cu_seqlens=cu_seqlens,
        scale=scale or 0.0, every=every, lower_bound=lower_bound or 0.0, use_qk_l2norm=use_qk_l2norm, use_gate=use_gate,
        use_beta_sigmoid=use_beta_sigmoid, allow_neg_eigval=allow_neg_eigval,
    )  # fmt: skip
    return _delta_rule("kimi_delta_attention", q, k, v, options, output_final_state, output_chunk_states)


def gated_delta_rule_decode(
    q, k, v, g=None, beta=None, *, state, read_slots=None, write_slots=None, scale=None, A_log=None, dt_bias=None,
    use_qk_l2norm=False, use_gate=False, use_beta_sigmoid=False, allow_neg_eigval=False,
):  # fmt: skip
    """T more tokens for each of N sequences, states in a pool that is updated in place. Returns o; no gradient.

    q, k [N T H K]; v, o [N T HV V]; state [M HV K V], a transposed view of a value-first pool too. read_slots [N]:
    where each sequence starts from, -1 for a padding row; write_slots [N T]: where the state after each token goes, -1
    for nowhere; without them sequence n reads and writes slot n.
    """
    q, k, v = _same_dtype(q, k, v)
    return _OPERATORS["gated_delta_rule.decode"](
        q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, state=state, read_slots=read_slots,
        write_slots=write_slots, scale=scale or 0.0, use_qk_l2norm=use_qk_l2norm, use_gate=use_gate,
        use_beta_sigmoid=use_beta_sigmoid, allow_neg_eigval=allow_neg_eigval,
    )  # fmt: skip


def kimi_delta_attention_decode(
    q, k, v, g=None, beta=None, *, state, read_slots=None, write_slots=None, scale=None, A_log=None, dt_bias=None,
    lower_bound=None, use_qk_l2norm=False, use_gate=False, use_beta_sigmoid=False, allow_neg_eigval=False,
):  # fmt: skip
    """As gated_delta_rule_decode, with g [N T HV K] and dt_bias [HV K]."""
    q, k, v = _same_dtype(q, k, v)
    return _OPERATORS["kimi_delta_attention.decode"](
        q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, state=state, read_slots=read_slots,
        write_slots=write_slots, scale=scale or 0.0, lower_bound=lower_bound or 0.0, use_qk_l2norm=use_qk_l2norm,
        use_gate=use_gate, use_beta_sigmoid=use_beta_sigmoid, allow_neg_eigval=allow_neg_eigval,
    )  # fmt: skip


# ---- Before and behind them ----


def kda_gate(x, A_log=None, dt_bias=None, *, lower_bound=None, output_dtype=None):
    """Kimi delta attention's decay from its raw gate: g = -exp(A_log) softplus(x + dt_bias), or, with lower_bound
    (below 0), lower_bound sigmoid(exp(A_log) (x + dt_bias)). x, g [... HV K]; A_log [HV]; dt_bias [HV K] or [HV*K]. g
    is output_dtype, else float32 (float64 for float64). Gradients of x, A_log and dt_bias."""
    heads, channels = x.shape[-2:]
    if dt_bias is not None and dt_bias.dim() == 1:
        dt_bias = dt_bias.reshape(heads, channels)
    leading = x.shape[:-2]
    if len(leading) > 3:
        x5 = x.flatten(0, len(leading) - 3)
    else:
        x5 = x.reshape(*(1,) * (3 - len(leading)), *leading, heads, channels)
    g = _OPERATORS["kda_gate.fwd"](
        x=x5, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound or 0.0, g_dtype=output_dtype
    )
    return g.reshape(x.shape)


def short_conv(x, weight, bias=None, *, initial_state=None, output_final_state=False, cu_seqlens=None, activation=None):
    """Depthwise causal convolution: x, y [B T D]; weight [D W], W up to 8; bias [D]; activation None or "silu"; states
    [N D W], the last W inputs, oldest first; cu_seqlens [N+1] packs sequences into a batch of one. Returns (y,
    final_state or None). Gradients of x, weight, bias and initial_state."""
    y, final_state = _OPERATORS["short_conv.fwd"](
        x=x, weight=weight, bias=bias, initial_state=initial_state, cu_seqlens=cu_seqlens,
        activation=activation or "none", want_final_state=output_final_state,
    )  # fmt: skip
    return y, final_state if output_final_state else None


def short_conv_decode(x, weight, bias=None, *, state, read_slots=None, write_slots=None, activation=None):
    """T more tokens for each of N sequences: x, y [N T D]; state [M D W], a pool updated in place; slots as in
    gated_delta_rule_decode. Returns y; no gradient."""
    return _OPERATORS["short_conv.decode"](
        x=x, weight=weight, bias=bias, state=state, read_slots=read_slots, write_slots=write_slots,
        activation=activation or "none",
    )  # fmt: skip


def gated_rms_norm(x, gate=None, weight=None, *, eps=1e-6, gate_activation="silu"):
    """x / sqrt(mean(x^2) + eps) * weight * act(gate) over the last axis; act is "silu" or "sigmoid". x, gate,
    y [... D]; weight [D]. Gradients of x, gate and weight."""
    rows = x.reshape(-1, x.shape[-1])
    y, _ = _OPERATORS["gated_rms_norm.fwd"](
        x=rows, gate=None if gate is None else gate.reshape(-1, gate.shape[-1]), weight=weight, eps=eps or 0.0,
        gate_activation=gate_activation,
    )  # fmt: skip
    return y.reshape(x.shape)


# ---- Sparse attention ----


def block_sparse_attention(
    q, k, v, block_mask, *, sink=None, cu_seqlens=None, cu_seqlens_k=None, q_lens=None, k_lens=None, scale=None,
    block_q=128, block_k=128, causal=False, output_lse=False,
):  # fmt: skip
    """Softmax attention over the blocks that a mask keeps: q [B T H K]; k [B S HK K]; v [B S HK V]; block_mask
    [N HM NQ NK], HM being H, HK or 1, over blocks of block_q x block_k tokens; sink [H], a logit in each softmax;
    cu_seqlens and cu_seqlens_k [N+1] pack sequences, q_lens and k_lens [N] tell tokens in use; causal aligns the last
    query with the last key. Returns (o [B T H V], lse [B T H] or None). Gradients of q, k, v and sink, from o and
    lse."""
    q, k, v = _same_dtype(q, k, v)
    o, lse, _, _ = _OPERATORS["block_sparse_attention.fwd"](
        q=q, k=k, v=v, block_mask=block_mask, sink=sink, cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k,
        q_lens=q_lens, k_lens=k_lens, scale=scale or 0.0, block_q=block_q, block_k=block_k, causal=causal,
        want_lse=True,
    )  # fmt: skip
    return o, lse if output_lse else None


def sparse_flash_attention(
    q, k, v=None, *, indices, q_rope=None, k_rope=None, v_dim=None, sink=None, cu_seqlens=None, cu_seqlens_k=None,
    q_lens=None, k_lens=None, scale=None, sparse_block_size=1, causal=False, output_lse=False, output_p=False,
):  # fmt: skip
    """Attention of each query over its own list of keys (DeepSeek's sparse attention, absorbed): q [B T H K];
    k [B S K]; v [B S V], or absent: the first v_dim elements of k; q_rope [B T H KR] and k_rope [B S KR], a second part
    of both; indices [B T E] int32 or int64, positions or blocks of sparse_block_size of them, -1 skips; sink [H].
    Returns (o, lse or None), with output_p also p [B T E], the probabilities averaged over heads, which carry no
    gradient. Gradients of q, k, v, q_rope, k_rope and sink, from o and lse."""
    q, k, v, q_rope, k_rope = _same_dtype(q, k, v, q_rope, k_rope)
    if v is None and not v_dim:
        raise ValueError(
            "sparse_flash_attention: v_dim: missing, expected how many elements of k are the value, without v"
        )
    o, lse, _, _, p = _OPERATORS["sparse_flash_attention.fwd"](
        q=q, k=k, v=v, q_rope=q_rope, k_rope=k_rope, indices=indices, sink=sink, cu_seqlens=cu_seqlens,
        cu_seqlens_k=cu_seqlens_k, q_lens=q_lens, k_lens=k_lens, scale=scale or 0.0,
        sparse_block_size=sparse_block_size, causal=causal, v_dim=0 if v is not None else v_dim, want_lse=True,
        want_p=output_p,
    )  # fmt: skip
    lse = lse if output_lse else None
    return (o, lse, p) if output_p else (o, lse)


def lightning_indexer(
    q, k, w, *, topk, start=None, end=None, q_lens=None, k_lens=None, cu_seqlens=None, cu_seqlens_k=None, scale=None,
    causal=False, order="score",
):  # fmt: skip
    """The topk best keys of each query by sum_h w relu(scale <q_h, k>): q [B T H K]; k [B S K]; w [B T H]; start and
    end [B T] bound the keys that a query sees. order: "score" (descending, at equal scores by index) or "index"
    (ascending). Returns (indices [B T topk] int32, -1 behind the last visible key, and their scores, -inf there).
    Gradients of q, k and w, from the scores."""
    q, k = _same_dtype(q, k)
    return _OPERATORS["lightning_indexer.fwd"](
        q=q, k=k, w=w, start=start, end=end, q_lens=q_lens, k_lens=k_lens, cu_seqlens=cu_seqlens,
        cu_seqlens_k=cu_seqlens_k, scale=scale or 0.0, causal=causal, order=order, topk=topk, want_scores=True,
    )  # fmt: skip


def lightning_indexer_loss(
    q, k, w, p, *, indices=None, start=None, end=None, q_lens=None, k_lens=None, cu_seqlens=None, cu_seqlens_k=None,
    scale=None, causal=False,
):  # fmt: skip
    """KL(p || softmax(scores)) of each query [B T], over the keys of its list (indices and p [B T E]), or over all
    visible ones (indices None, p [B T S]). Gradients of q, k and w; p is a target and gets none."""
    q, k = _same_dtype(q, k)
    loss, _ = _OPERATORS["lightning_indexer.loss"](
        q=q, k=k, w=w, indices=indices, p=p, start=start, end=end, q_lens=q_lens, k_lens=k_lens, cu_seqlens=cu_seqlens,
        cu_seqlens_k=cu_seqlens_k, scale=scale or 0.0, causal=causal, want_loss=True,
    )  # fmt: skip
    return loss
