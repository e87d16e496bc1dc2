"""Prefill a prompt and decode a few tokens with NumPy arrays."""

import numpy as np

import thalweg

T, H, HV, K, V = 128, 2, 4, 64, 64  # tokens, key heads, value heads, sizes of a key and of a value
random = np.random.default_rng(0)
q, k = (random.standard_normal((1, T, H, K), dtype=np.float32) for _ in range(2))
v = random.standard_normal((1, T, HV, V), dtype=np.float32)
g = -0.1 * random.random((1, T, HV), dtype=np.float32)  # log decay
beta = random.random((1, T, HV), dtype=np.float32)  # write strength

prompt = thalweg.gated_delta_rule_fwd(q, k, v, g=g, beta=beta, final_state=True, use_qk_l2norm=True)
print(f"o {prompt.o.shape}, state {prompt.final_state.shape}")

# One token at a time: bind the arrays once, write the next token into them, call again. The state moves on in place.
state = prompt.final_state
token = [np.ascontiguousarray(x[:, :1]) for x in (q, k, v, g, beta)]
step = thalweg.prepare(
    thalweg.gated_delta_rule_decode, *token[:3], g=token[3], beta=token[4], state=state, use_qk_l2norm=True
)
for t in range(4):
    for array, sequence in zip(token, (q, k, v, g, beta)):
        array[:] = sequence[:, t : t + 1]
    print(f"token {t}: |o| = {np.linalg.norm(step().o):.4f}")
