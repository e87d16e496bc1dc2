"""Every pass gives the right numbers through the binding: against the golden files, and against plain NumPy."""

import numpy as np
import pytest
from golden import assert_close, records

import thalweg

RECORDS = records()
random = np.random.default_rng(0)


def test_golden_files_are_there():
    assert len(RECORDS) >= 60
    assert {r.where for r in RECORDS} >= {"gated_delta_rule.fwd", "kimi_delta_attention.bwd", "short_conv.decode"}


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r.text)
def test_golden(record):
    inputs = {name: array.copy() for name, array in record.inputs.items()}
    state = inputs.get("state")
    outputs = {name: True for name in record.outputs if name != "state"}
    result = getattr(thalweg, f"{record.op}_{record.name}")(**inputs, **record.options, **outputs)
    for name, want in record.outputs.items():
        assert_close(state if name == "state" else getattr(result, name), want)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def kda_gate(x, A_log, dt_bias, lower_bound=0.0):
    y = x + dt_bias
    a = np.exp(A_log)[:, None]
    return lower_bound * sigmoid(a * y) if lower_bound else -a * np.log1p(np.exp(y))


@pytest.mark.parametrize("lower_bound", [0.0, -5.0])
def test_kda_gate(lower_bound):
    x, A_log, dt_bias = random.normal(size=(2, 3, 1, 4, 5)), random.normal(size=4), random.normal(size=(4, 5))
    g = thalweg.kda_gate_fwd(x, A_log, dt_bias, lower_bound=lower_bound).g
    assert_close(g, kda_gate(x, A_log, dt_bias, lower_bound))


def softmax(s):
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def test_block_sparse_attention():
    B, T, S, H, HK, K, V, bq, bk = 2, 7, 10, 4, 2, 8, 6, 3, 4
    q, k, v = (random.normal(size=s) for s in ((B, T, H, K), (B, S, HK, K), (B, S, HK, V)))
    mask = random.random((B, H, 3, 3)) < 0.6
    mask[:, :, 2, 0] = True
    sink = random.normal(size=H)
    got = thalweg.block_sparse_attention_fwd(q, k, v, mask, sink, block_q=bq, block_k=bk, causal=True, lse=True)
    assert mask.dtype == bool and got.row_max is None
    for b in range(B):
        for h in range(H):
            s = q[b, :, h] @ k[b, :, h // 2].T / np.sqrt(K)
            seen = mask[b, h].repeat(bq, 0).repeat(bk, 1)[:T, :S] & (np.arange(S) <= np.arange(T)[:, None] + S - T)
            s = np.concatenate([np.where(seen, s, -np.inf), np.full((T, 1), sink[h])], 1)
            assert_close(got.o[b, :, h], softmax(s)[:, :S] @ v[b, :, h // 2])
            assert_close(got.lse[b, :, h], np.log(np.exp(s).sum(1)))


def test_sparse_flash_attention():
    B, T, S, H, K, KR, V, E = 1, 5, 9, 3, 8, 4, 6, 4
    q, k, qr, kr = (random.normal(size=s) for s in ((B, T, H, K), (B, S, K), (B, T, H, KR), (B, S, KR)))
    indices = np.stack([random.permutation(S)[:E] for _ in range(T)])[None]
    indices[0, 2, 1:3] = -1
    got = thalweg.sparse_flash_attention_fwd(q, k, indices=indices, q_rope=qr, k_rope=kr, v_dim=V, p=True)
    for t in range(T):
        keys = indices[0, t][indices[0, t] >= 0]
        s = (q[0, t] @ k[0, keys].T + qr[0, t] @ kr[0, keys].T) / np.sqrt(K + KR)
        assert_close(got.o[0, t], softmax(s) @ k[0, keys, :V])
        assert_close(got.p[0, t][indices[0, t] >= 0], softmax(s).mean(0))


def test_lightning_indexer():
    B, T, S, H, K, E = 2, 6, 11, 3, 8, 4
    q, k, w = random.normal(size=(B, T, H, K)), random.normal(size=(B, S, K)), random.normal(size=(B, T, H))
    scores = np.einsum("bth,bths->bts", w, np.maximum(np.einsum("bthk,bsk->bths", q, k), 0))
    got = thalweg.lightning_indexer_fwd(q, k, w, topk=E, scores=True)
    order = np.argsort(-scores, -1, kind="stable")[..., :E]
    assert got.indices.dtype == np.int32
    assert np.array_equal(got.indices, order)
    assert_close(got.scores, np.take_along_axis(scores, order, -1))
    p = softmax(random.normal(size=(B, T, E)))
    loss = thalweg.lightning_indexer_loss(q, k, w, got.indices, p, loss=True).loss
    assert_close(loss, (p * (np.log(p) - np.log(softmax(got.scores)))).sum(-1))


# Backward passes without golden files: along a random direction, the gradients give the change that central differences
# of the forward see.


def check_gradients(forward, gradients, inputs, step=1e-6):
    """`forward(**inputs)` is a number; `gradients` has its derivative by each input, by name."""
    direction = {name: random.normal(size=array.shape) for name, array in inputs.items()}
    moved = [forward(**{name: inputs[name] + sign * step * direction[name] for name in inputs}) for sign in (1, -1)]
    want = (moved[0] - moved[1]) / (2 * step)
    got = sum(float(np.sum(gradients[name] * direction[name])) for name in inputs)
    assert abs(want) > 1e-3, "a direction that tells nothing"
    assert abs(got - want) < 1e-6 * (1 + abs(want))


def test_kda_gate_backward():
    inputs = dict(
        x=random.normal(size=(2, 3, 1, 4, 5)), A_log=random.normal(size=4), dt_bias=random.normal(size=(4, 5))
    )
    d_g = random.normal(size=inputs["x"].shape)
    r = thalweg.kda_gate_bwd(**inputs, d_g=d_g)
    check_gradients(
        lambda **x: np.sum(d_g * thalweg.kda_gate_fwd(**x).g),
        dict(x=r.d_x, A_log=r.d_A_log, dt_bias=r.d_dt_bias),
        inputs,
    )


def test_block_sparse_attention_backward():
    B, T, S, H, HK, K = 2, 7, 10, 4, 2, 8
    inputs = dict(q=random.normal(size=(B, T, H, K)), k=random.normal(size=(B, S, HK, K)),
                  v=random.normal(size=(B, S, HK, K)), sink=random.normal(size=H))  # fmt: skip
    rest = dict(block_mask=random.random((B, HK, 3, 3)) < 0.6, block_q=3, block_k=4)
    d_o, d_lse = random.normal(size=(B, T, H, K)), random.normal(size=(B, T, H))
    f = thalweg.block_sparse_attention_fwd(**inputs, **rest, lse=True)

    def forward(**x):
        moved = thalweg.block_sparse_attention_fwd(**x, **rest, lse=True)
        return np.sum(d_o * moved.o) + np.sum(d_lse * moved.lse)

    r = thalweg.block_sparse_attention_bwd(**inputs, **rest, o=f.o, lse=f.lse, d_o=d_o, d_lse=d_lse)
    check_gradients(forward, dict(q=r.d_q, k=r.d_k, v=r.d_v, sink=r.d_sink), inputs)


def test_sparse_flash_attention_backward():
    B, T, S, H, K, KR, V, E = 1, 5, 9, 3, 8, 4, 6, 4
    inputs = dict(q=random.normal(size=(B, T, H, K)), k=random.normal(size=(B, S, K)),
                  q_rope=random.normal(size=(B, T, H, KR)), k_rope=random.normal(size=(B, S, KR)))  # fmt: skip
    indices = random.integers(-1, S, size=(B, T, E)).astype(np.int32)
    d_o = random.normal(size=(B, T, H, V))
    f = thalweg.sparse_flash_attention_fwd(**inputs, indices=indices, v_dim=V, lse=True)
    r = thalweg.sparse_flash_attention_bwd(**inputs, indices=indices, o=f.o, lse=f.lse, d_o=d_o)
    check_gradients(lambda **x: np.sum(d_o * thalweg.sparse_flash_attention_fwd(**x, indices=indices, v_dim=V).o),
                    dict(q=r.d_q, k=r.d_k, q_rope=r.d_q_rope, k_rope=r.d_k_rope), inputs)  # fmt: skip


def test_lightning_indexer_backward():
    B, T, S, H, K = 2, 4, 7, 3, 8
    inputs = dict(q=random.normal(size=(B, T, H, K)), k=random.normal(size=(B, S, K)), w=random.normal(size=(B, T, H)))
    p = softmax(random.normal(size=(B, T, S)))
    d_loss = random.normal(size=(B, T))
    r = thalweg.lightning_indexer_bwd(**inputs, p=p, d_loss=d_loss)
    check_gradients(lambda **x: np.sum(d_loss * thalweg.lightning_indexer_loss(**x, p=p, loss=True).loss),
                    dict(q=r.d_q, k=r.d_k, w=r.d_w), inputs)  # fmt: skip
