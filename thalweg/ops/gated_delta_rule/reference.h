// Float64 oracles of the gated delta rule, for tools and tests: token by token, and chunk by chunk.
#ifndef THALWEG_OPS_GATED_DELTA_RULE_REFERENCE_H
#define THALWEG_OPS_GATED_DELTA_RULE_REFERENCE_H

#include <cstdint>
#include <vector>

namespace thalweg::gated_delta_rule {

// Token by token from the mathematics. `args` is the pass's args struct, valid for the pass, whose float
// tensors are all f64 with any strides. A checkpoint of an empty sequence (chunk_states) is its
// initial state. The gradient of a gate of minus infinity is 0.
void reference_fwd(const void* args);
void reference_bwd(const void* args);
void reference_decode(const void* args);

// The chunkwise form, stage by stage, for one chunk of one value head. Stages that a backend computes
// in kernels of their own are functions of their own, so that each can be judged alone.
// Rows i, j are tokens of the chunk; G_i = g_0 + … + g_i; E_i = exp(G_i); D_ij = exp(G_i - G_j), i >= j.
namespace chunk {

using Matrix = std::vector<double>;  // row-major; the shape stands beside each

struct Inputs {
  int64_t C, K, V;  // tokens in this chunk, head dims
  double scale;
  const double* q;     // [C K] after l2norm
  const double* k;     // [C K] after l2norm
  const double* v;     // [C V]
  const double* g;     // [C] natural log; -inf allowed
  const double* beta;  // [C] effective
};

// What both directions share, from q, k, v, g, beta alone.
struct Local {
  Matrix E;   // [C]
  Matrix D;   // [C C], 0 above the diagonal
  Matrix A;   // [C C] (I + L)^-1, L_ij = beta_i (k_i . k_j) D_ij for i > j
  Matrix w;   // [C K] sum_j A_ij beta_j E_j k_j
  Matrix u;   // [C V] sum_j A_ij beta_j v_j
};
Local local(const Inputs& in);

// v_new = u - w S0 [C V]: the written deltas, ungated. S0 [K V] is the state that enters the chunk.
Matrix v_new(const Inputs& in, const Local& local, const Matrix& S0);
// The state that leaves the chunk [K V].
Matrix next_state(const Inputs& in, const Local& local, const Matrix& S0, const Matrix& v_new);
// o [C V].
Matrix output(const Inputs& in, const Local& local, const Matrix& S0, const Matrix& v_new);

// Backward. dS1 [K V] is the gradient of the state at the chunk's end, d_o [C V].

// Local part of the gradient of v_new [C V]: sum_{i >= j} scale (q_i . k_j) D_ij d_o_i.
Matrix dv_local(const Inputs& in, const Local& local, const Matrix& d_o);
// Whole gradient of v_new [C V]: dv_local plus what comes through the state.
Matrix dv_new(const Inputs& in, const Local& local, const Matrix& dv_local, const Matrix& dS1);
// Gradient of the state that enters the chunk [K V].
Matrix previous_state_gradient(const Inputs& in, const Local& local, const Matrix& d_o, const Matrix& dv_new,
                               const Matrix& dS1);

// The part of the gradients that does not go through the triangular system.
struct Dqkwg {
  Matrix dq;  // [C K], complete
  Matrix dk;  // [C K], without the part of wy()
  Matrix dw;  // [C K]
  Matrix dG;  // [C] of the cumulated gate, without the part of wy()
};
Dqkwg dqkwg(const Inputs& in, const Local& local, const Matrix& S0, const Matrix& v_new, const Matrix& d_o,
            const Matrix& dv_new, const Matrix& dS1);

// The part that does: from the gradients of w and u (= dv_new).
struct Wy {
  Matrix dk, dv, dbeta, dG;  // [C K], [C V], [C], [C]
};
Wy wy(const Inputs& in, const Local& local, const Matrix& dw, const Matrix& du);

// dg_t = sum of dG_i over i >= t in the chunk [C].
Matrix suffix_sum(const Matrix& dG);

// A whole sequence of one value head in chunks of C tokens; all pointers as in Inputs with T rows.
struct Forward {
  Matrix o, final_state;          // [T V], [K V]
  std::vector<Matrix> states;     // state before each chunk, [K V] each
};
Forward forward(const Inputs& whole, int64_t chunk, const Matrix& initial_state);
struct Backward {
  Matrix dq, dk, dv, dg, dbeta, d_initial_state;  // [T K] [T K] [T V] [T] [T] [K V]
};
Backward backward(const Inputs& whole, int64_t chunk, const Forward& forward, const Matrix& d_o,
                  const Matrix& d_final_state);

}  // namespace chunk
}  // namespace thalweg::gated_delta_rule
#endif
