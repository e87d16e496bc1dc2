import thalweg
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

thalweg.patch_transformers(["qwen3_next"])  # its layers now compute with Thalweg, also in models that exist already
config = Qwen3NextConfig(vocab_size=256, hidden_size=128, num_hidden_layers=4, num_experts=16, pad_token_id=0)
print(Qwen3NextForCausalLM(config).generate(bos_token_id=1, max_new_tokens=8))
