"""Makes models of Hugging Face transformers compute with Thalweg: `thalweg.patch_transformers()`, and its undo.

What is replaced, for tensors on the CPU and on a GPU that thalweg.torch runs on; anything else goes on to what was there before:

- the gated delta rule and Kimi delta attention, whole sequences and single tokens;
- the short convolution before them, and its single-token form;
- the gated RMSNorm behind them.

Models that exist when the patch is applied change too, and change back with the undo. Two layouts of transformers are
known. From 5.15 on a layer calls functions of its modeling module by name, so the names are replaced. Before, a layer
keeps functions as attributes that its constructor sets; there a descriptor on the class answers in their place.

Packed sequences: `cu_seq_lens_q` (and `seq_idx`) reach the recurrence and the convolution alike. transformers 5.15 and
later hand them on themselves; before, decoder layers are made to hand `cu_seq_lens_q` to their linear attention.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings

import torch
import torch.nn.functional as F

from . import fla
from . import torch as ops

__all__ = ["MODELS", "patch", "unpatch"]

MODELS = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "lara_mini", "kimi_linear", "bailing_hybrid")

_ABSENT = object()
_replaced: list = []  # (owner, attribute, what was there or _ABSENT), in order


def patch(models=None, verbose: bool = True) -> list[str]:
    """Replaces the torch paths of `models` (default: those of MODELS that this transformers has). Returns the full
    names of what was replaced, and prints them by model when verbose. A second call changes nothing and returns an
    empty list."""
    if _replaced:
        return []
    for model in MODELS if models is None else models:
        name = f"transformers.models.{model}"
        if importlib.util.find_spec(name) is None:
            if models is not None:
                unpatch()
                raise ValueError(f"patch_transformers: models: got {model!r}, expected names of transformers.models")
            continue
        module = importlib.import_module(f"{name}.modeling_{model}")
        before = len(_replaced)
        _patch_module(module)
        if len(_replaced) == before:
            warnings.warn(f"thalweg: {module.__name__} has nothing that can be replaced", stacklevel=2)
        elif verbose:
            print(f"thalweg: {model}: {', '.join(_label(*entry[:2]) for entry in _replaced[before:])}")
    return [f"{getattr(owner, '__module__', owner.__name__)}.{_label(owner, name)}" for owner, name, _ in _replaced]


def unpatch() -> list[str]:
    """Puts back everything that patch replaced, and returns its names."""
    names = [_label(owner, name) for owner, name, _ in _replaced]
    while _replaced:
        owner, name, old = _replaced.pop()
        if old is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, old)
    return names


def _label(owner, name) -> str:
    return f"{owner.__name__}.{name}" if isinstance(owner, type) else name


def _replace(owner, name: str, new) -> None:
    _replaced.append((owner, name, vars(owner).get(name, _ABSENT)))
    setattr(owner, name, new)


# ---- The replacements: each gets what was there before, then the arguments of the call ----


def _first(args, kwargs):
    return args[0] if args else next(iter(kwargs.values()))


def _usable(tensor) -> bool:
    return ops.runs_on(tensor.device) and not torch.compiler.is_exporting()


def _gated_delta_rule(original, *args, **kwargs):
    if not _usable(_first(args, kwargs)):
        return original(*args, **kwargs)
    return _chunk(ops.gated_delta_rule, *args, **kwargs)


def _kimi_delta_attention(original, *args, **kwargs):
    if not _usable(_first(args, kwargs)):
        return original(*args, **kwargs)
    return _chunk(ops.kimi_delta_attention, *args, **kwargs)


def _chunk(rule, query, key, value, g, beta, chunk_size=64, initial_state=None, output_final_state=False,
           use_qk_l2norm_in_kernel=False, cu_seqlens=None, cu_seq_lens_q=None, **_):  # fmt: skip
    return rule(query, key, value, g, beta, initial_state=initial_state, output_final_state=output_final_state,
                cu_seqlens=cu_seqlens if cu_seqlens is not None else cu_seq_lens_q,
                use_qk_l2norm=use_qk_l2norm_in_kernel)  # fmt: skip


def _recurrent_gated_delta_rule(original, *args, **kwargs):
    if not _usable(_first(args, kwargs)):
        return original(*args, **kwargs)
    return _recurrent(fla.fused_recurrent_gated_delta_rule, *args, **kwargs)


def _recurrent_kimi_delta_attention(original, *args, **kwargs):
    if not _usable(_first(args, kwargs)):
        return original(*args, **kwargs)
    return _recurrent(fla.fused_recurrent_kda, *args, **kwargs)


def _recurrent(rule, query, key, value, g, beta, initial_state=None, output_final_state=False,
               use_qk_l2norm_in_kernel=False, cu_seqlens=None, cu_seq_lens_q=None, **_):  # fmt: skip
    return rule(query, key, value, g=g, beta=beta, initial_state=initial_state, output_final_state=output_final_state,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                cu_seqlens=cu_seqlens if cu_seqlens is not None else cu_seq_lens_q)  # fmt: skip


def _conv(original, *args, **kwargs):
    """causal_conv1d_fn: x and the result are [B D T]."""
    x = _first(args, kwargs)
    if not _usable(x) or _activation(args, kwargs, 3) is _ABSENT:
        return (original or _torch_conv)(*args, **kwargs)
    return _short_conv(*args, **kwargs)


def _short_conv(x, weight, bias=None, activation=None, seq_idx=None, cu_seq_lens_q=None, **_):
    batch, channels, tokens = x.shape
    rows = x.transpose(1, 2)
    if cu_seq_lens_q is None and seq_idx is not None:
        rows, cu_seq_lens_q = rows.reshape(1, batch * tokens, channels), _borders(seq_idx)
    y, _ = ops.short_conv(rows, weight, bias, cu_seqlens=cu_seq_lens_q, activation=activation and "silu")
    return y.reshape(batch, tokens, channels).transpose(1, 2)


def _borders(seq_idx):
    """cu_seqlens of the flattened [B T] numbers that tell each token's sequence; a row of the batch ends one too."""
    numbers = seq_idx.to(torch.int64)
    starts = torch.ones_like(numbers, dtype=torch.bool)
    starts[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    starts = starts.flatten().nonzero().flatten()
    return torch.cat([starts, starts.new_tensor([numbers.numel()])])


def _torch_conv(x, weight, bias=None, activation=None, **_):
    """What older transformers compute inline where there is no causal_conv1d_fn."""
    y = F.conv1d(x, weight.unsqueeze(1), bias, padding=weight.shape[-1] - 1, groups=x.shape[1])[..., : x.shape[-1]]
    return F.silu(y) if activation else y


def _conv_update(original, *args, **kwargs):
    """causal_conv1d_update: x and the result are [B D T]; conv_state [B D W] moves on in place."""
    if not _usable(_first(args, kwargs)) or _activation(args, kwargs, 4) is _ABSENT:
        return original(*args, **kwargs)
    return _short_conv_update(original, *args, **kwargs)


def _short_conv_update(original, x, conv_state, weight, bias=None, activation=None):
    if conv_state.shape[-1] != weight.shape[-1]:
        return original(x, conv_state, weight, bias, activation)
    y = fla.short_conv_step(x.transpose(1, 2), weight, bias, conv_state, activation and "silu")
    return y.transpose(1, 2)


def _activation(args, kwargs, position):
    """The call's activation where the library has it, else _ABSENT."""
    activation = args[position] if len(args) > position else kwargs.get("activation")
    return activation if activation in (None, "silu", "swish") else _ABSENT


def _norm_forward(original):
    def forward(self, hidden_states, gate=None):
        activation = getattr(self, "activation", "silu")
        if not _usable(hidden_states) or gate is None or activation not in ("silu", "swish", "sigmoid"):
            return original(self, hidden_states, gate)
        return ops.gated_rms_norm(hidden_states, gate, self.weight, eps=self.variance_epsilon,
                                  gate_activation="sigmoid" if activation == "sigmoid" else "silu")  # fmt: skip

    return forward


def _short_convolution_forward(original):
    """OlmoHybridShortConvolution before 5.15: [B T D] in and out, and a state of the last W-1 inputs."""
    from transformers.activations import ACT2FN

    def forward(self, hidden_states, cache=None, use_precomputed=False, **kwargs):
        if not _usable(hidden_states) or type(self.act_fn) is not type(ACT2FN["silu"]):
            return original(self, hidden_states, cache=cache, use_precomputed=use_precomputed, **kwargs)
        state = F.pad(cache, (1, 0)) if use_precomputed else None
        y, state = ops.short_conv(hidden_states, self.weight.squeeze(1), self.bias, initial_state=state,
                                  cu_seqlens=getattr(self, "cu_seq_lens_q", None), output_final_state=True,
                                  activation="silu")  # fmt: skip
        return y, state[..., 1:].to(hidden_states.dtype)

    return forward


def _decoder_layer_forward(original):
    """Before 5.15 a decoder layer gets the borders of packed sequences and keeps them from its linear attention, which
    has no argument for them: during the call it, and the convolutions in it, have them as an attribute."""

    def forward(self, *args, **kwargs):
        attention, borders = getattr(self, "linear_attn", None), kwargs.get("cu_seq_lens_q")
        if attention is None or borders is None:
            return original(self, *args, **kwargs)
        modules = [attention, *attention.children()]
        for module in modules:
            module.cu_seq_lens_q = borders
        try:
            return original(self, *args, **kwargs)
        finally:
            for module in modules:
                del module.cu_seq_lens_q

    return forward


# ---- Where they go ----

_FUNCTIONS = {
    "torch_chunk_gated_delta_rule": _gated_delta_rule,
    "torch_recurrent_gated_delta_rule": _recurrent_gated_delta_rule,
    "chunk_kimi_delta_attention": _kimi_delta_attention,
    "recurrent_kimi_delta_attention": _recurrent_kimi_delta_attention,
    "causal_conv1d_fn": _conv,
    "causal_conv1d_update": _conv_update,
}

_ATTRIBUTES = {  # of the linear attention before 5.15
    "chunk_gated_delta_rule": _gated_delta_rule,
    "recurrent_gated_delta_rule": _recurrent_gated_delta_rule,
    "causal_conv1d_fn": _conv,
    "causal_conv1d_update": _conv_update,
}


_WHOLE_SEQUENCES = ("chunk_gated_delta_rule", "causal_conv1d_fn")


class _Override:
    """Answers for an attribute that instances set in their constructor: the replacement, knowing what they set, and the
    borders of packed sequences where the instance has them."""

    def __init__(self, name, replacement):
        self.name, self.replacement = name, replacement

    def __get__(self, instance, owner=None):
        if instance is None:
            return self
        if self.name not in instance.__dict__:
            raise AttributeError(self.name)
        borders = instance.__dict__.get("cu_seq_lens_q") if self.name in _WHOLE_SEQUENCES else None
        more = {} if borders is None else {"cu_seq_lens_q": borders}
        return _bound(self.replacement, instance.__dict__[self.name], **more)

    def __set__(self, instance, value):
        instance.__dict__[self.name] = value


def _bound(replacement, original, **more):
    def function(*args, **kwargs):
        return replacement(original, *args, **kwargs, **more)

    function.__name__ = getattr(original, "__name__", replacement.__name__)
    return function


def _patch_module(module) -> None:
    classes = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__]
    if hasattr(module, "is_fast_path_available"):  # before 5.15
        _replace(module, "is_fast_path_available", True)  # which a layer's constructor warns about
        for layer in classes:
            if layer.__name__.endswith("GatedDeltaNet"):
                for name, replacement in _ATTRIBUTES.items():
                    if name in layer.__init__.__code__.co_names:
                        _replace(layer, name, _Override(name, replacement))
            elif layer.__name__.endswith("DecoderLayer"):
                _replace(layer, "forward", _decoder_layer_forward(layer.forward))
            elif layer.__name__.endswith("ShortConvolution"):
                _replace(layer, "forward", _short_convolution_forward(layer.forward))
    else:
        for name, replacement in _FUNCTIONS.items():
            if name in vars(module):
                _replace(module, name, _bound(replacement, vars(module)[name]))
    for layer in classes:
        if layer.__name__.endswith("RMSNormGated"):
            _replace(layer, "forward", _norm_forward(layer.forward))
