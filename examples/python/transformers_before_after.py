"""A Qwen3-Next model, tiny and random, before and after patch_transformers(): the same tokens, less time."""

import time

import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM, logging

import thalweg

logging.set_verbosity_error()
torch.manual_seed(0)
model = Qwen3NextForCausalLM(
    Qwen3NextConfig(
        vocab_size=256,
        hidden_size=128,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
).eval()
prompt = torch.randint(1, 256, (1, 500))


def generate(what):
    start = time.perf_counter()
    tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False)
    print(f"{what}: {time.perf_counter() - start:.2f} s, last tokens {tokens[0, -5:].tolist()}")
    return tokens


with_torch = generate("torch path")
thalweg.patch_transformers(["qwen3_next"])  # models that exist already change too
with_thalweg = generate("thalweg")
thalweg.unpatch_transformers()
assert with_thalweg.equal(with_torch)
