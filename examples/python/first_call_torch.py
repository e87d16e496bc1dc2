import torch
import thalweg.torch as ops

q, k, v = torch.randn(3, 1, 128, 2, 64, requires_grad=True).unbind()  # each [B T H K]
o, _ = ops.gated_delta_rule(q, k, v, g=torch.full((1, 128, 2), -0.1), use_qk_l2norm=True)
print("o", tuple(o.shape), "gradient of v", torch.autograd.grad(o.square().sum(), v)[0].norm().item())
