// cpu_vec_loss - lightning indexer, loss, vectors along the heads.
//
// Math     I[e] = sum_h scale w[h] relu(<q[h], k[s_e]>)    loss = sum_e p (ln p - (I - top - ln sum_e exp(I - top)))
// Shapes   q [B T H K]  k [B S K]  w [B T H]  indices,p,scores [B T E]  loss [B T]
// Takes    q, k of f32, bf16, f16; the other float tensors of any float dtype; fewer than 2^31 keys in all
// Threads  first one task per 256 keys (to float32 rows), then one per query row
// Vectors  along the heads for products, along the entries for the softmax
// Tile     kTileRows keys x 2 vectors of heads over all K; 24 entries a block
// Scratch  shared: the keys as float32. A slot: the query as rows and as panels (32 KiB each at 64 x 128), its
//          entries (32 bytes each)
// Numerics float32; the softmax's sum, sum p and the terms of the loss are added in float64, in order of entries. ln y
//          comes from the score, so it never underflows.
// Traps    entries that are not visible are left out of the list before any address is made of them.
// Measured see cpu_vec_fwd.cpp, whose products these are
#include "thalweg/ops/lightning_indexer/list.h"

namespace thalweg::lightning_indexer {
namespace {

struct Call {
  const Problem& p;
  const thalweg_lightning_indexer_loss_args& args;
  Mask mask;
  const float* keys;
  char* slots;
  int64_t slot_bytes;
};

// ln x to about 1.5e-8 of 1: where p and softmax(I) nearly agree, the loss is what their logarithms differ by.
double log_of(float x) {
  int exponent;
  float mantissa = __builtin_frexpf(x, &exponent);
  if (mantissa < 0.70710678f) mantissa *= 2, --exponent;
  return double(exponent) * 0.69314718055994531 + double(__builtin_logf(mantissa));
}

float divergence(const ListFacts& facts, const ListScratch& s) {
  const double log_sum = __builtin_log(facts.sum);
  double loss = 0;
  for (int64_t i = 0; i < facts.n; ++i) {
    if (s.p[i] == 0) continue;
    const double log_y = double(s.scores[i] - facts.top) - log_sum;
    loss += double(s.p[i]) * (log_of(s.p[i]) - log_y);
  }
  return float(loss);
}

void loss_task(void* arg, int64_t r, int64_t slot) {
  const Call& call = *static_cast<const Call*>(arg);
  const Problem& p = call.p;
  const auto& args = call.args;
  Cutter memory{call.slots + slot * call.slot_bytes};
  ListScratch s;
  lay_out_list(p, &memory, &s);
  const ListFacts facts = score_list(p, call.mask, args.q, args.w, args.indices, args.p, call.keys, r, s, nullptr);
  if (args.loss.dtype) {
    const float loss = facts.n ? divergence(facts, s) : 0;
    write_row(args.loss.dtype, element_at(args.loss, r / p.T, r % p.T), 1, &loss);
  }
  if (!args.scores.dtype) return;
  for (int64_t e = 0; e < p.E; ++e) s.line[e] = -infinity();
  for (int64_t i = 0; i < facts.n; ++i) s.line[s.entries[i]] = s.scores[i];
  write_row(args.scores.dtype, element_at(args.scores, r / p.T, r % p.T), p.E, s.line);
}

}  // namespace

namespace THALWEG_ISA {

int64_t cpu_vec_loss_slot_bytes(const Problem& p) {
  Cutter memory{nullptr};
  ListScratch s;
  lay_out_list(p, &memory, &s);
  return memory.at;
}

void cpu_vec_loss(const Problem& p, const Plan& plan, const thalweg_lightning_indexer_loss_args& args,
                  const Exec& exec) {
  float* keys = reinterpret_cast<float*>(exec.workspace);
  read_keys(p, plan, args.k, keys, exec);
  Call call{p, args, mask_of(args), keys, exec.workspace + plan.shared_bytes, plan.slot_bytes};
  parallel_tasks(exec, p.B * p.T, plan.num_slots, loss_task, &call);
}

}  // namespace THALWEG_ISA
}  // namespace thalweg::lightning_indexer
