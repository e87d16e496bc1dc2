// What only the lightning indexer has: its order of equal scores, which keys and entries count, and what its list,
// its loss and its scores have to do with each other.
#include "thalweg/ops/lightning_indexer/lightning_indexer.h"

#include <cmath>
#include <limits>

#include "tests/cuda_faults.h"
#include "tests/properties.h"
#include "thalweg/core/tensor.h"
#include "thalweg/ops/lightning_indexer/reference.h"

namespace thalweg::tests {
namespace {

namespace tt = thalweg::testing;

const double kNan = std::nan("");
const double kLowest = -std::numeric_limits<double>::infinity();

// The case on every row that takes it here.
void on_every_row(const std::string& text, const std::function<void(const Case&)>& body) {
  const Case c = tt::parse_case(text);
  int taken = 0;
  for (const std::string& row : kernel_rows(*c.pass)) {
    const Case forced = with_kernel(c, row);
    if (!takes(forced)) continue;
    SCOPED_TRACE("thalweg verify " + forced.text());
    ++taken;
    body(forced);
  }
  EXPECT_GT(taken, 0) << text;
}

Values numbers(std::vector<int64_t> shape, std::vector<double> data) { return {std::move(shape), std::move(data)}; }

// One head, one channel, q = w = 1: the scores of a query are relu(keys).
Problem plain_scores(const Case& c, const std::vector<double>& keys) {
  Problem problem(c);
  for (const char* one : {"q", "w"}) {
    Values ones = problem.inputs().at(one);
    for (double& x : ones.data) x = 1;
    problem.set(one, ones);
  }
  problem.set("k", numbers({1, int64_t(keys.size()), 1}, keys));
  problem.poison_outputs();
  return problem;
}

std::string plain_case(size_t keys, int64_t entries, const std::string& rest = "") {
  return "lightning_indexer.fwd:f32,T1,H1,K1,S" + std::to_string(keys) + ",E" + std::to_string(entries) + ",scores" +
         rest;
}

// ---- order ------------------------------------------------------------------------------------------

TEST(LightningIndexer, ScoresDescendAndEqualOnesGoByIndex) {
  const std::vector<double> keys = {1, 3, -2, 3, 2, 0, 3, -1};
  on_every_row(plain_case(keys.size(), 8), [&](const Case& c) {
    Problem problem = plain_scores(c, keys);
    const Outputs got = run(problem);
    EXPECT_EQ(got.at("indices").data, (std::vector<double>{1, 3, 6, 4, 0, 2, 5, 7}));
    EXPECT_EQ(got.at("scores").data, (std::vector<double>{3, 3, 3, 2, 1, 0, 0, 0}));
  });
  on_every_row(plain_case(keys.size(), 4, ",order=index"), [&](const Case& c) {
    Problem problem = plain_scores(c, keys);
    EXPECT_EQ(run(problem).at("indices").data, (std::vector<double>{1, 3, 4, 6}));
  });
}

// The relu's plateau: the tie reaches over the end of the list, and over any buffer of candidates.
TEST(LightningIndexer, APlateauOfZerosGoesByIndex) {
  std::vector<double> keys(9000, -1);
  keys[7] = keys[8999] = 1;
  on_every_row(plain_case(keys.size(), 100), [&](const Case& c) {
    Problem problem = plain_scores(c, keys);
    const Values indices = run(problem).at("indices");
    EXPECT_EQ(indices.data[0], 7);
    EXPECT_EQ(indices.data[1], 8999);
    for (int64_t e = 2; e < 100; ++e) EXPECT_EQ(indices.data[size_t(e)], e < 9 ? e - 2 : e - 1);
  });
}

TEST(LightningIndexer, NegativeZeroEqualsZero) {
  on_every_row("lightning_indexer.fwd:f32,T1,H1,K1,S4,E4", [](const Case& c) {
    Problem problem = plain_scores(c, {1, -1, 1, -1});
    problem.set("w", numbers({1, 1, 1}, {-1}));  // -1, -0, -1, -0
    problem.poison_outputs();
    EXPECT_EQ(run(problem).at("indices").data, (std::vector<double>{1, 3, 0, 2}));
  });
}

TEST(LightningIndexer, NanScoresAreChosenLast) {
  const std::vector<double> keys = {kNan, 1, kNan, -5, 2};
  on_every_row(plain_case(keys.size(), 6), [&](const Case& c) {
    Problem problem = plain_scores(c, keys);
    const Outputs got = run(problem);
    EXPECT_EQ(got.at("indices").data, (std::vector<double>{4, 1, 3, 0, 2, -1}));
    EXPECT_EQ(got.at("scores").data, (std::vector<double>{2, 1, 0, kLowest, kLowest, kLowest}));
  });
}

// ---- what counts ------------------------------------------------------------------------------------

// NaN in keys that nobody sees, in queries that are padding, and beside entries that are not visible, stays there;
// and their gradients are 0.
TEST(LightningIndexer, WhatIsNotVisibleIsNotRead) {
  for (const char* text : {"lightning_indexer.fwd:f32,B2,T6,S20,H4,K16,E5,scores,q_lens,k_lens,causal",
                           "lightning_indexer.loss:f32,B2,T6,S20,H4,K16,E5,indices,p,loss,scores,q_lens,k_lens,wild",
                           "lightning_indexer.bwd:f32,B2,T6,S20,H4,K16,E5,indices,p,q_lens,k_lens,wild",
                           "lightning_indexer.bwd:f32,B2,T6,S20,H4,K16,p,q_lens,k_lens,causal"})
    on_every_row(text, [](const Case& c) {
      Problem problem(c);
      const double q_len = 4, k_len = 13;
      problem.set("q_lens", numbers({2}, {q_len, q_len}));
      problem.set("k_lens", numbers({2}, {k_len, k_len}));
      problem.poison_outputs();
      const Outputs want = run(problem);
      auto spoil = [&](const char* name, int64_t begin, int64_t end) {
        if (!problem.inputs().count(name)) return;
        Values values = problem.inputs().at(name);
        assign(&values, 1, begin, end, [](double) { return kNan; });
        problem.set(name, values);
      };
      spoil("k", 13, 20);
      for (const char* name : {"q", "w", "p", "d_loss", "d_scores"}) spoil(name, 4, 6);
      for (const char* name : {"p", "d_scores"}) {
        if (!problem.inputs().count(name)) continue;
        Values values = problem.inputs().at(name);
        const bool listed = problem.inputs().count("indices");
        const int64_t E = c.size("E");
        for (int64_t i = 0; i < values.count(); ++i) {
          const double s = listed ? problem.inputs().at("indices").data[size_t(i)] : double(i % E);
          const double t = double(i / E % 6);
          const double end = c.has("causal") ? std::min(k_len, t + k_len - q_len + 1) : k_len;
          if (s < 0 || s >= end) values.data[size_t(i)] = kNan;
        }
        problem.set(name, values);
      }
      problem.poison_outputs();
      const Outputs got = run(problem);
      EXPECT_EQ(first_difference(got, want), "");
      for (const char* name : {"d_q", "d_w", "d_k"}) {
        if (!got.count(name)) continue;
        const Values padding = name[2] == 'k' ? cut(got.at(name), 1, 13, 20) : cut(got.at(name), 1, 4, 6);
        for (double x : padding.data) EXPECT_EQ(x, 0) << name;
      }
    });
}

TEST(LightningIndexer, QueriesWithoutVisibleKeysGiveNothing) {
  on_every_row("lightning_indexer.fwd:f32,T5,S3,H2,K8,E2,scores,causal", [](const Case& c) {
    const Outputs got = run(c);
    for (double x : cut(got.at("indices"), 1, 0, 2).data) EXPECT_EQ(x, -1);
    for (double x : cut(got.at("scores"), 1, 0, 2).data) EXPECT_EQ(x, kLowest);
    EXPECT_EQ(got.at("indices").data[4], 0);  // the third query sees the first key
  });
  on_every_row("lightning_indexer.loss:f32,T5,S3,H2,K8,E2,indices,p,loss,causal", [](const Case& c) {
    const Values loss = run(c).at("loss");
    EXPECT_EQ(loss.data[0], 0);
    EXPECT_EQ(loss.data[1], 0);
  });
  on_every_row("lightning_indexer.bwd:f32,T5,S3,H2,K8,E2,indices,p,causal", [](const Case& c) {
    const Outputs got = run(c);
    for (const char* name : {"d_q", "d_w"})
      for (double x : cut(got.at(name), 1, 0, 2).data) EXPECT_EQ(x, 0) << name;
  });
}

// At exactly 0 the relu's derivative is 0: orthogonal queries and keys have no gradient at all.
TEST(LightningIndexer, ReluHasNoSlopeAtZero) {
  on_every_row("lightning_indexer.bwd:f32,T3,S6,H2,K8,E4,indices,p", [](const Case& c) {
    Problem problem(c);
    Values q = problem.inputs().at("q"), k = problem.inputs().at("k");
    for (int64_t i = 0; i < q.count(); ++i) q.data[size_t(i)] *= i % 2;
    for (int64_t i = 0; i < k.count(); ++i) k.data[size_t(i)] *= 1 - i % 2;
    problem.set("q", q);
    problem.set("k", k);
    problem.poison_outputs();
    for (const auto& [name, values] : run(problem))
      for (double x : values.data) EXPECT_EQ(x, 0) << name;
  });
}

// ---- the passes and each other ----------------------------------------------------------------------

// The loss over the list that fwd chose has the scores that fwd gave, bit for bit.
TEST(LightningIndexer, TheLossSeesTheScoresOfTheList) {
  const Case c = tt::parse_case("lightning_indexer.fwd:bf16,T9,S130,H20,K72,E24,scores,causal");
  const Case listed = tt::parse_case("lightning_indexer.loss:bf16,T9,S130,H20,K72,E24,indices,scores,causal");
  const std::vector<std::string> rows = kernel_rows(*c.pass), loss_rows = kernel_rows(*listed.pass);
  ASSERT_EQ(rows.size(), loss_rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    if (!takes(with_kernel(c, rows[i]))) continue;
    Problem fwd(with_kernel(c, rows[i])), loss(with_kernel(listed, loss_rows[i]));
    const Outputs chosen = run(fwd);
    for (const char* name : {"q", "k", "w"}) loss.set(name, fwd.inputs().at(name));
    loss.set("indices", chosen.at("indices"));
    loss.poison_outputs();
    EXPECT_TRUE(same_bits(run(loss).at("scores"), chosen.at("scores"))) << rows[i];
  }
}

// Without a list the entries are the keys.
TEST(LightningIndexer, WarmUpEqualsAListOfAllKeys) {
  for (const char* pass : {"loss:f32,T7,S50,H8,K24,p,loss,scores,causal", "bwd:f32,T7,S50,H8,K24,p,causal"})
    on_every_row(std::string("lightning_indexer.") + pass, [](const Case& c) {
      Problem dense(c), listed(with(c, {{"indices", ""}}));
      Values all = listed.inputs().at("indices");
      for (int64_t i = 0; i < all.count(); ++i) all.data[size_t(i)] = double(i % 50);
      for (const auto& [name, values] : dense.inputs()) listed.set(name, values);
      listed.set("indices", all);
      listed.poison_outputs();
      EXPECT_EQ(first_difference(run(dense), run(listed)), "");
    });
}

// Entries of 64 bits are the entries of 32.
TEST(LightningIndexer, IndicesOfBothWidths) {
  for (const char* pass : {"fwd:f32,T5,S40,H4,K16,E8,indices=i64", "loss:f32,T5,S40,H4,K16,E8,indices=i64,p,loss,wild",
                           "bwd:f32,T5,S40,H4,K16,E8,indices=i64,p,wild"})
    on_every_row(std::string("lightning_indexer.") + pass, [](const Case& c) {
      EXPECT_EQ(first_difference(run(c), run(with(c, {{"indices", "i32"}}))), "");
    });
}

// A teacher of any sum: with p and softmax(I) equal but for a factor, the gradient of the scores is 0.
TEST(LightningIndexer, TheTeachersSumIsAFactor) {
  on_every_row("lightning_indexer.bwd:f32,T3,S8,H2,K8,E8,indices,p,d_loss,d_q,p_sum=2.5,equal", [](const Case& c) {
    Problem problem(c);
    Values p = problem.inputs().at("p");
    for (double& x : p.data) x = 0.75;  // equal scores: softmax is 1 / 8, sum p is 6
    problem.set("p", p);
    problem.poison_outputs();
    const Values d_q = run(problem).at("d_q");
    for (double x : d_q.data) EXPECT_NEAR(x, 0, 1e-5);
  });
}

// ---- on the GPU --------------------------------------------------------------------------------------

TEST(LightningIndexer, WrongValuesOnTheGpuAreContained) {
  if (!tt::why_no_device().empty()) GTEST_SKIP() << tt::why_no_device();
  const std::string packed = ":f32,H4,K16,E12,varlen=20+30+14,varlen_k=30+30+30";
  expect_borders_contained("lightning_indexer.fwd" + packed + ",scores");
  expect_borders_contained("lightning_indexer.loss" + packed + ",indices,p,loss,scores");
  expect_borders_contained("lightning_indexer.bwd" + packed + ",indices,p");
}

// ---- memory, refusals -------------------------------------------------------------------------------

size_t workspace(const std::string& text) {
  const Case c = tt::parse_case(text);
  Problem problem(c);
  size_t bytes = 0;
  EXPECT_EQ(c.pass->workspace(problem.args(), &problem.context(), &bytes), THALWEG_OK) << thalweg_last_error();
  return bytes;
}

// No pass keeps scores for all pairs: memory does not grow with the queries (but for the generic backward's).
TEST(LightningIndexer, WorkspaceDoesNotGrowWithTheQueries) {
  for (const char* row : {"cpu_generic", "cpu_vec_fwd_avx2"}) {
    const std::string rest = std::string(",S512,H4,K16,E32,threads=2,kernel=") + row;
    if (!takes(tt::parse_case("lightning_indexer.fwd:f32,T64" + rest))) continue;
    EXPECT_EQ(workspace("lightning_indexer.fwd:f32,T4096" + rest), workspace("lightning_indexer.fwd:f32,T64" + rest));
  }
  const Case loss = tt::parse_case("lightning_indexer.loss:f32,T64,S512,H4,K16,p,loss,threads=2");
  EXPECT_EQ(workspace(with_sizes(loss, {{"T", 4096}}).text()), workspace(loss.text()));
}

void expect_refused(const std::string& text, const std::string& want) {
  Problem problem(tt::parse_case(text));
  EXPECT_EQ(problem.call(), THALWEG_INVALID_ARGUMENT) << text;
  EXPECT_EQ(std::string(thalweg_last_error()), want);
  EXPECT_EQ(problem.check_untouched(), "");
}

TEST(LightningIndexer, RefusesByName) {
  expect_refused("lightning_indexer.loss:f32,T4,S8,H2,K4,E6,p,loss",
                 "lightning_indexer.loss: p: E, got 6, expected at least S = 8 without indices (from k)");
  expect_refused("lightning_indexer.loss:f32,T4,S8,H2,K4,E6,indices,loss",
                 "lightning_indexer.loss: loss: needs p, got loss without it");
  expect_refused("lightning_indexer.bwd:f32,T4,S8,H2,K4,E6,indices,d_loss,d_q",
                 "lightning_indexer.bwd: d_loss: needs p, got d_loss without it");
  expect_refused("lightning_indexer.fwd:f32,T4,S8,H2,K4,E6,scale=-1",
                 "lightning_indexer.fwd: scale: got -1, expected 0 or more");
  for (const char* name : {"q_lens", "k_lens"}) {
    Problem problem(tt::parse_case(std::string("lightning_indexer.fwd:f32,B2,T4,S8,H2,K4,E6,") + name));
    for (double wrong : {-1.0, 9.0}) {
      problem.set(name, numbers({2}, {2, wrong}));
      EXPECT_EQ(problem.call(), THALWEG_INVALID_ARGUMENT);
      EXPECT_EQ(std::string(thalweg_last_error())
                    .rfind(std::string("lightning_indexer.fwd: ") + name + ": element 1, got", 0),
                0u)
          << thalweg_last_error();
    }
  }
}

TEST(LightningIndexer, RefusesBordersOfKeys) {
  Problem problem(tt::parse_case("lightning_indexer.fwd:f32,varlen=3+5,varlen_k=6+4,S12,H2,K4,E6"));
  run(problem);
  for (const std::vector<double>& wrong : {std::vector<double>{0, 6, 5}, {0, 6, 13}, {1, 6, 10}, {0, -1, 10}}) {
    problem.set("cu_seqlens_k", numbers({3}, wrong));
    problem.poison_outputs();
    EXPECT_EQ(problem.call(), THALWEG_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(thalweg_last_error()).rfind("lightning_indexer.fwd: cu_seqlens_k: element ", 0), 0u)
        << thalweg_last_error();
    EXPECT_EQ(problem.check_untouched(), "");
  }
  problem.tensor("cu_seqlens_k") = thalweg_tensor{};
  EXPECT_EQ(problem.call(), THALWEG_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(thalweg_last_error()),
            "lightning_indexer.fwd: cu_seqlens: needs cu_seqlens_k, got cu_seqlens without it");
  expect_refused("lightning_indexer.loss:f32,varlen=3+5,varlen_k=6+4,H2,K4,E5,p,loss",
                 "lightning_indexer.loss: p: E, got 5, expected at least 6 without indices (the keys of sequence 0)");
}

}  // namespace
}  // namespace thalweg::tests
