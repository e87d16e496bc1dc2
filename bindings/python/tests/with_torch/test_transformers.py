"""patch_transformers: tiny random models, made from configurations, answer and learn as they do without the patch.

Runs with any transformers from 5.3.0 on; models that the installed one lacks are skipped by name. Every model runs on the
CPU and, where thalweg.torch runs on one, on the GPU.
"""

import importlib

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
import thalweg  # noqa: E402
import thalweg.torch as ops  # noqa: E402
from thalweg.transformers import MODELS  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

VOCABULARY = 97
LAYERS = ["linear_attention", "full_attention"]
COMMON = dict(
    vocab_size=VOCABULARY,
    hidden_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    max_position_embeddings=256,
    initializer_range=0.2,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=None,
    layer_types=LAYERS,
)
GDN = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=24)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32)
MLA = dict(
    kv_lora_rank=16, q_lora_rank=None, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, num_key_value_heads=2
)
KIMI = dict(
    num_local_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    intermediate_size=64,
    mlp_layer_types=["dense", "sparse"],
)
CONFIGS = {
    "qwen3_next": ("Qwen3NextConfig", COMMON | GDN | MOE),
    "qwen3_5": ("Qwen3_5TextConfig", COMMON | GDN | dict(intermediate_size=64)),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", COMMON | GDN | MOE),
    "olmo_hybrid": ("OlmoHybridConfig", COMMON | GDN | dict(intermediate_size=64, linear_allow_neg_eigval=True)),
    "lara_mini": ("LaraMiniConfig", COMMON | GDN | MOE),
    "kimi_linear": ("KimiLinearConfig", COMMON | MLA | KIMI | dict(linear_num_heads=2, linear_head_dim=16)),
    "bailing_hybrid": ("BailingHybridConfig", COMMON | MLA | KIMI | dict(head_dim=16, num_mtp_layers=0)),
}


def modeling(name):
    return pytest.importorskip(
        f"transformers.models.{name}.modeling_{name}", reason=f"{transformers.__version__} has no {name}"
    )


PACKS = not hasattr(
    importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next"), "is_fast_path_available"
)


def build(name):
    module = modeling(name)
    configuration = importlib.import_module(f"transformers.models.{name}.configuration_{name}")
    config_name, values = CONFIGS[name]
    torch.manual_seed(0)
    causal = next(
        c
        for c in vars(module).values()
        if isinstance(c, type)
        and c.__name__ == config_name.replace("TextConfig", "Config").replace("Config", "ForCausalLM")
    )
    return causal(getattr(configuration, config_name)(**values)).eval()


GPU = torch.cuda.is_available() and ops.runs_on(torch.device("cuda", 0))
ON_CPU = [pytest.param((name, "cpu"), id=name) for name in CONFIGS]
ON_GPU = [pytest.param((name, "cuda"), id=f"{name}-cuda") for name in CONFIGS if GPU]


@pytest.fixture(scope="module", params=ON_CPU + ON_GPU)
def model(request):
    name, device = request.param
    return build(name).to(device)


@pytest.fixture(autouse=True)
def leave_no_patch():
    yield
    thalweg.unpatch_transformers()


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Models this small only wait for a second one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="module")
def float32_is_float32():
    """The torch path's convolution would round its inputs to TF32 on a GPU."""
    allowed = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = allowed


class patched:
    """The patch for a block of code, which must use at least the operators named."""

    def __init__(self, *operators):
        self.operators = operators

    def __enter__(self):
        self.names = thalweg.patch_transformers(verbose=False)
        assert self.names
        self.recorder = Recorder()
        self.recorder.__enter__()
        return self

    def __exit__(self, kind, *rest):
        self.recorder.__exit__(kind, *rest)
        thalweg.unpatch_transformers()
        if kind is None:
            missing = [o for o in self.operators if not any(o in used for used in self.recorder.used)]
            assert not missing, f"{missing} not among {sorted(self.recorder.used)}"


class Recorder(TorchDispatchMode):
    """Notes which of the library's operators are called."""

    def __init__(self):
        super().__init__()
        self.used = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "thalweg":
            self.used.add(function._schema.name.removeprefix("thalweg::"))
        return function(*args, **kwargs or {})


FORWARD = ("_fwd", "short_conv_fwd", "gated_rms_norm_fwd")
BACKWARD = ("short_conv_bwd", "gated_rms_norm_bwd")
DECODE = ("short_conv", "_decode")


def rule(model) -> str:
    return "gated_delta_rule" if hasattr(model.config, "linear_num_value_heads") else "kimi_delta_attention"


def tokens(model, batch, length):
    ids = torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(0))
    return ids.to(model.device)


def close(got, expected, tolerance=1e-4, what=""):
    assert got.shape == expected.shape, what
    assert got.isfinite().all(), what
    error = (got - expected).norm() / (expected.norm() + 1e-6)
    assert error < tolerance, f"{what}: {error:.2e}"


def learn(model, ids, **arguments):
    """Logits, loss and gradients of one training step."""
    model.zero_grad()
    out = model(ids, labels=ids, use_cache=False, **arguments)
    out.loss.backward()
    return (
        out.logits.detach(),
        out.loss.detach(),
        {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None},
    )


def same_step(got, expected):
    close(got[0], expected[0], what="logits")
    close(got[1], expected[1], what="loss")
    assert got[2].keys() == expected[2].keys()
    for name, gradient in expected[2].items():
        close(got[2][name], gradient, 1e-3, name)


def test_training_step(model):
    ids = tokens(model, 2, 70)
    expected = learn(model, ids)
    with patched(f"{rule(model)}_fwd", f"{rule(model)}_bwd", *FORWARD, *BACKWARD):
        got = learn(model, ids)
    same_step(got, expected)
    same_step(learn(model, ids), expected)


def test_padded_training_batch(model):
    ids = tokens(model, 2, 20)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    arguments = dict(attention_mask=mask)
    expected = learn(model, ids, **arguments)
    with patched(*FORWARD, *BACKWARD):
        got = learn(model, ids, **arguments)
    close(got[0][mask.bool()], expected[0][mask.bool()], what="logits")
    same_step(got, expected)


def test_generate_from_a_padded_batch(model):
    """Greedy decoding with a cache from left-padded prompts: the same tokens, and logits to rounding."""
    ids = tokens(model, 3, 9)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    mask[2, :8] = 0
    arguments = dict(
        attention_mask=mask, max_new_tokens=8, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    expected = model.generate(ids, **arguments)
    with patched(
        f"{rule(model)}_fwd", f"{rule(model)}_decode", "short_conv_fwd", "short_conv_decode" if PACKS else "short_conv"
    ):
        got = model.generate(ids, **arguments)
    assert got.sequences.equal(expected.sequences)
    close(torch.stack(got.logits), torch.stack(expected.logits))


def test_cache_in_pieces(model):
    """Prefill, three tokens at once where transformers can, then single ones, against one pass over everything."""
    ids = tokens(model, 2, 12)
    borders = [0, 6, 9, 10, 11, 12] if PACKS else [0, 9, 10, 11, 12]
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        with patched(*DECODE):
            pieces, cache = [], {}
            for start, end in zip(borders, borders[1:]):
                if start and not PACKS:
                    cache["cache_position"] = torch.arange(start, end, device=model.device)
                out = model(ids[:, start:end], use_cache=True, **cache)
                pieces.append(out.logits)
                cache = {"cache": out.cache} if hasattr(out, "cache") else {"past_key_values": out.past_key_values}
    close(torch.cat(pieces, 1), whole)


@pytest.mark.parametrize("lengths", [[17, 1, 30, 22]])
def test_packed_training(model, lengths):
    """Sequences packed into one row learn what they learn one by one."""
    ids = tokens(model, 1, sum(lengths))
    pieces = ids.split(lengths, 1)
    borders = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    told = dict(
        position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
        cu_seq_lens_q=borders, cu_seq_lens_k=borders, max_length_q=max(lengths), max_length_k=max(lengths),
        seq_idx=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None].to(torch.int32),
    )  # fmt: skip
    arguments = {n: x.to(model.device) if isinstance(x, torch.Tensor) else x for n, x in told.items()}
    model.zero_grad()
    weights = torch.randn(1, sum(lengths), VOCABULARY, generator=torch.Generator().manual_seed(1)).to(model.device)
    expected = torch.cat([model(piece, use_cache=False).logits for piece in pieces], 1)
    (expected * weights).sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    for left_out in ((), ("seq_idx",)):
        model.zero_grad()
        with patched(*FORWARD, *BACKWARD):
            got = model(ids, use_cache=False, **{n: x for n, x in arguments.items() if n not in left_out}).logits
            (got * weights).sum().backward()
        close(got.detach(), expected.detach(), what="logits")
        for name, gradient in gradients.items():
            close(dict(model.named_parameters())[name].grad, gradient, 1e-3, name)


def distance(step, exact):
    """Of the logits, the median over tokens: rounding sends single ones to another expert, which moves them far."""
    return ((step[0].float() - exact[0]).norm(dim=-1) / exact[0].norm(dim=-1)).median()


def test_bfloat16(model):
    """No farther from float32 than the torch path is, to a factor."""
    ids = tokens(model, 2, 40)
    exact = learn(model, ids)
    try:
        model.to(torch.bfloat16)
        torch_path = learn(model, ids)
        with patched(*FORWARD, *BACKWARD):
            got = learn(model, ids)
    finally:
        model.float()
        model.load_state_dict(build(model.config.model_type.removesuffix("_text")).state_dict())
    assert distance(got, exact) < 2 * distance(torch_path, exact)
    assert abs(got[1].float() - exact[1]) < 1.5 * abs(torch_path[1].float() - exact[1]) + 2e-2


def test_autocast(model):
    """Under autocast to bfloat16, no farther from float32 than the torch path is, to a factor."""
    ids = tokens(model, 2, 40)
    exact = learn(model, ids)
    with torch.autocast(model.device.type, torch.bfloat16):
        torch_path = learn(model, ids)
        with patched(*FORWARD, *BACKWARD):
            got = learn(model, ids)
    assert distance(got, exact) < 2 * distance(torch_path, exact)
    assert got[2].keys() == exact[2].keys()


def test_gradient_checkpointing(model):
    ids = tokens(model, 2, 20)
    with patched(*FORWARD, *BACKWARD):
        expected = learn(model, ids)
        try:
            model.train()
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            got = learn(model, ids)
        finally:
            model.gradient_checkpointing_disable()
            model.eval()
    same_step(got, expected)


def test_other_devices_go_to_what_was_there(model):
    """Tensors on neither, here without data, never reach the library."""
    with patched() as state:
        name = model.config.model_type.removesuffix("_text")
        layer = next(
            m for m in build(name).modules() if type(m).__name__.endswith(("GatedDeltaNet", "DeltaAttention"))
        ).to("meta")
        out = layer(torch.empty(2, 10, COMMON["hidden_size"], device="meta"))
    assert out.device.type == "meta" and out.shape == (2, 10, COMMON["hidden_size"])
    assert not state.recorder.used


def test_convolution_told_of_sequences_by_seq_idx():
    """Rows of a batch that hold several sequences each, numbered token by token."""
    from thalweg.transformers import _conv

    r = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 6, 20, generator=r), torch.randn(6, 4, generator=r)
    seq_idx = torch.tensor([[0] * 5 + [1] * 15, [2] + [3] * 19])
    got = _conv(None, x=x, weight=weight, activation="silu", seq_idx=seq_idx)
    for row, borders in ((0, (0, 5, 20)), (1, (0, 1, 20))):
        for start, end in zip(borders, borders[1:]):
            close(
                got[row : row + 1, :, start:end],
                _conv(None, x[row : row + 1, :, start:end], weight, None, "silu"),
                1e-6,
            )
    meta = _conv(
        None, x.to("meta"), weight.to("meta"), activation="silu", seq_idx=None
    )  # where transformers has no function
    assert meta.shape == x.shape and meta.device.type == "meta"


# ---- The patch itself ----


def snapshot():
    """Every attribute that a patch could touch."""
    result = {}
    for name in MODELS:
        try:
            module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        except ImportError:
            continue
        for key, value in vars(module).items():
            result[name, key] = value
            if isinstance(value, type) and value.__module__ == module.__name__:
                result |= {(name, key, attribute): x for attribute, x in vars(value).items() if attribute != "__doc__"}
    return result


def test_the_undo_restores_every_attribute(capsys):
    before = snapshot()
    names = thalweg.patch_transformers()
    printed = capsys.readouterr().out
    for model in MODELS:
        has = importlib.util.find_spec(f"transformers.models.{model}") is not None
        assert has == (f"thalweg: {model}: " in printed) == any(f".{model}." in n for n in names)
    during = snapshot()
    assert sum(before.get(key) is not value for key, value in during.items()) == len(names)
    assert thalweg.patch_transformers() == [] and capsys.readouterr().out == ""
    assert len(thalweg.unpatch_transformers()) == len(names)
    after = snapshot()
    assert before.keys() == after.keys()
    assert all(after[key] is value for key, value in before.items())
    assert thalweg.unpatch_transformers() == []


def test_models_made_under_the_patch_work_without_it():
    before = build("qwen3_next")
    with patched():
        model = build("qwen3_next")
    ids = tokens(model, 1, 20)
    recorder = Recorder()
    with torch.no_grad(), recorder:
        assert model(ids).logits.equal(before(ids).logits)
    assert not recorder.used


def test_a_choice_of_models():
    names = thalweg.patch_transformers(["olmo_hybrid"], verbose=False)
    assert names and all("olmo_hybrid" in n for n in names)
    thalweg.unpatch_transformers()
    before = snapshot()
    with pytest.raises(ValueError, match="no_such_model"):
        thalweg.patch_transformers(["qwen3_next", "no_such_model"], verbose=False)
    assert all(snapshot()[key] is value for key, value in before.items())
