// cuda_generic - lightning indexer, loss, any dtype and strides.
//
// Math     I of the visible entries of a list (or of all visible keys), loss = sum_e p (ln p - ln y), y = softmax_e(I)
// Shapes   q [B T H K]  k [B S K]  w [B T H]  indices, p, scores [B T E]  loss [B T]
// Takes    anything valid
// Grid     values[0] blocks of 256 threads, each of which takes every so manieth query
// Tile     32 heads x 32 entries; tiles without a visible entry are skipped
// Smem     28 KiB static
// Regs     a thread has 4 products
// Order    channels, heads; entries as 256 sums of every 256th, as a tree
// Numerics float32, float64 where q is; sums of the softmax and of the loss in float64. ln y comes from the score
// Traps    an entry that is not visible is never read through, and its p is not read either
// Measured not tuned: it is the judge of the fast rows
#include "thalweg/ops/lightning_indexer/cuda_generic.cuh"

namespace thalweg::lightning_indexer {
namespace {

using Args = thalweg_lightning_indexer_loss_args;

template <class A>
__global__ void __launch_bounds__(kThreads) loss_kernel(Problem p, Args a, Sequences sequences, A* all_scores) {
  __shared__ Scorer<A> scorer;
  __shared__ double scratch[kThreads];
  A* scores = all_scores + blockIdx.x * p.E;
  for (int64_t r = blockIdx.x; r < p.B * p.T; r += gridDim.x) {
    const int64_t b = r / p.T, t = r % p.T;
    const VisibleKeys keys = visible_keys(p, a, sequences, b, t);
    score_entries(p, a, keys, scorer, b, t, scores);
    if (is_there(a.scores))
      for (int64_t e = threadIdx.x; e < p.E; e += kThreads) {
        const bool visible = entry_row(p, a, keys, b, t, e) != kNoRow;
        const A lowest = keys.valid ? -A(INFINITY) : nan_of<A>();
        store_at(a.scores, offset_of(a.scores, b, t, e), visible ? scores[e] : lowest);
      }
    if (!is_there(a.loss)) continue;
    const Softmax<A> softmax = softmax_of(p, a, keys, b, t, scores);
    double loss = 0;
    for (int64_t e = threadIdx.x; e < p.E; e += kThreads) {
      if (entry_row(p, a, keys, b, t, e) == kNoRow) continue;
      const double teacher = double(load_at<A>(a.p, offset_of(a.p, b, t, e)));
      if (teacher == 0) continue;
      loss += teacher * (log(teacher) - (double(scores[e] - softmax.top) - log(softmax.sum)));
    }
    loss = block_sum(loss, scratch);
    if (threadIdx.x == 0) store_at(a.loss, offset_of(a.loss, b, t), keys.valid ? A(loss) : nan_of<A>());
  }
}

template <class A>
void loss(const Problem& p, const Args& args, const Exec& exec, const CudaWorkspace& w) {
  launch(exec, "lightning_indexer.loss cuda_generic", loss_kernel<A>, {w.slots}, kThreads, 0, p, args, w.sequences,
         static_cast<A*>(w.scores));
}

}  // namespace

void cuda_generic_loss(const Problem& p, const Plan& plan, const Args& args, const Exec& exec) {
  const CudaWorkspace w = lay_out_cuda(p, CudaPass::kLoss, plan.values[0], exec.workspace);
  prepare(p, args, exec, w.sequences);
  if (p.B * p.T == 0) return;
  p.dtype == THALWEG_F64 ? loss<double>(p, args, exec, w) : loss<float>(p, args, exec, w);
}

}  // namespace thalweg::lightning_indexer
