import numpy as np
import thalweg

q, k, v = np.random.default_rng(0).normal(size=(3, 1, 128, 2, 64)).astype(np.float32)  # each [B T H K]
r = thalweg.gated_delta_rule_fwd(q, k, v, use_qk_l2norm=True, final_state=True)
print("o", r.o.shape, "state", r.final_state.shape)
