"""Train one gated delta rule layer to recall what it has read, and plot what it learned.

    python examples/python/quick_start.py [PICTURE.png]

Sequences hold 6 pairs of a key and a value, some noise, then the keys once more: the model must answer with their
values. The picture shows the loss, and how long each head's state remembers: the number of tokens until half of it has
decayed.
"""

import math
import pathlib
import sys

import matplotlib
import torch
import torch.nn.functional as F
from torch import nn

from thalweg import fla

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

KEYS, VALUES, PAIRS, NOISE = 16, 8, 6, 8
D, H, K, V = 64, 4, 16, 32  # width, heads, sizes of a key and of a value
STEPS, BATCH = 150, 16


class Layer(nn.Module):
    """Short convolution, gated delta rule, gated RMSNorm: the linear-attention layer of Qwen3-Next."""

    def __init__(self):
        super().__init__()
        self.sizes = [H * K, H * K, H * V, H * V, H, H]
        self.project = nn.Linear(D, sum(self.sizes), bias=False)
        self.conv = nn.Parameter(torch.randn(2 * H * K + H * V, 4) / 2)
        self.A_log, self.dt_bias = nn.Parameter(torch.linspace(-4, 1, H)), nn.Parameter(torch.zeros(H))
        self.norm = fla.FusedRMSNormGated(V)
        self.out = nn.Linear(H * V, D, bias=False)

    def forward(self, x):
        *qkv, gate, a, b = self.project(x).split(self.sizes, -1)
        qkv, _ = fla.causal_conv1d(torch.cat(qkv, -1), self.conv, activation="silu")
        q, k, v = (y.unflatten(-1, (H, -1)) for y in qkv.split(self.sizes[:3], -1))
        self.decay = fla.fused_gdn_gate(a, self.A_log, self.dt_bias)
        o, _ = fla.chunk_gated_delta_rule(q, k, v, self.decay, b.sigmoid(), use_qk_l2norm_in_kernel=True)
        return x + self.out(self.norm(o, gate.unflatten(-1, (H, V))).flatten(-2))


def batch():
    """Token ids [B T], and the answers [B PAIRS] that the last PAIRS tokens ask for."""
    keys = torch.rand(BATCH, KEYS).argsort(-1)[:, :PAIRS]
    values = torch.randint(VALUES, (BATCH, PAIRS))
    pairs = torch.stack([keys, KEYS + values], -1).flatten(1)
    order = torch.rand(BATCH, PAIRS).argsort(-1)
    noise = torch.full((BATCH, NOISE), KEYS + VALUES)
    return torch.cat([pairs, noise, keys.gather(1, order)], 1), values.gather(1, order)


def main():
    picture = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "build/python/quick_start.png")
    torch.manual_seed(0)
    layer = Layer()
    model = nn.Sequential(nn.Embedding(KEYS + VALUES + 1, D), layer, nn.LayerNorm(D), nn.Linear(D, VALUES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        ids, answers = batch()
        logits = model(ids)[:, -PAIRS:]
        loss = F.cross_entropy(logits.flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 25 == 0 or step == STEPS - 1:
            right = (logits.argmax(-1) == answers).float().mean()
            print(f"step {step:3d}: loss {loss:.3f}, {right:.0%} of the answers right")

    half_life = math.log(0.5) / layer.decay.detach().mean((0, 1))
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    left.plot(losses)
    left.axhline(math.log(VALUES), color="grey", linestyle=":", label="guessing")
    left.set(xlabel="step", ylabel="loss", title="recall of 6 pairs")
    left.legend()
    right.bar([str(h) for h in range(H)], half_life)
    right.set(xlabel="head", ylabel="tokens", title="half-life of the state", yscale="log")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=120)
    print(f"picture: {picture}")
    assert losses[-1] < losses[0] / 4, "the layer did not learn to recall"


if __name__ == "__main__":
    main()
