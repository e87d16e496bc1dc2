// Sparse flash attention's own properties: closed forms, what lists mean, statistics of every convention, what is refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "tests/cuda_faults.h"
#include "tests/slopes.h"
#include "tests/support.h"
#include "thalweg/core/tensor.h"
#include "thalweg/ops/sparse_flash_attention/reference.h"
#include "thalweg/ops/sparse_flash_attention/sparse_flash_attention.h"

namespace thalweg::sparse_flash_attention {
namespace {

namespace tt = thalweg::testing;
using tests::Case;
using tests::Outputs;
using tests::Problem;
using tests::Values;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Every row that takes the case here.
void for_rows(const std::string& text, const std::function<void(const Case&)>& body) {
  const Case base = tt::parse_case(text);
  for (const std::string& row : tests::kernel_rows(*base.pass)) {
    const Case c = tests::with_kernel(base, row);
    if (!tests::takes(c)) continue;
    SCOPED_TRACE("  thalweg verify " + c.text());
    body(c);
  }
}

void set_lists(Problem& problem, const std::vector<double>& list) {
  Values indices = problem.inputs().at("indices");
  for (size_t i = 0; i < indices.data.size(); ++i) indices.data[i] = list[i % list.size()];
  problem.set("indices", indices);
  problem.poison_outputs();
}

Outputs with_lists(const Case& c, const std::vector<double>& list) {
  Problem problem(c);
  set_lists(problem, list);
  return tests::run(problem);
}

void expect_equal(const Outputs& got, const Outputs& want, const std::string& what) {
  EXPECT_EQ(tests::first_difference(got, want), "") << what;
}

// ---- Closed forms ----

// One key: its value, and a log sum that is its score.
TEST(SparseFlashAttention, OneKeyGivesItsValue) {
  for_rows("sparse_flash_attention.fwd:f32,T3,S7,H3,K8,V8,E1,v,lse,row_max,row_sum,p", [](const Case& c) {
    Problem problem(c);
    set_lists(problem, {4});
    const Outputs out = tests::run(problem);
    const Values &o = out.at("o"), &v = problem.inputs().at("v"), &q = problem.inputs().at("q"), &k = problem.inputs().at("k");
    for (int64_t i = 0; i < o.count(); ++i) EXPECT_NEAR(o.data[size_t(i)], v.data[size_t(4 * 8 + i % 8)], 1e-6);
    for (int64_t row = 0; row < 9; ++row) {
      double s = 0;
      for (int64_t i = 0; i < 8; ++i) s += q.data[size_t(row * 8 + i)] * k.data[size_t(4 * 8 + i)] / std::sqrt(8.0);
      EXPECT_NEAR(out.at("lse").data[size_t(row)], s, 1e-5);
      EXPECT_NEAR(out.at("row_max").data[size_t(row)], s, 1e-5);
      EXPECT_EQ(out.at("row_sum").data[size_t(row)], 1);
    }
    for (double p : out.at("p").data) EXPECT_NEAR(p, 1, 1e-6);
  });
}

// Equal scores: the mean of the values, a log sum of log n; natural, not base 2.
TEST(SparseFlashAttention, LogSumsAreNatural) {  // edge 15, 16
  for_rows("sparse_flash_attention.fwd:f32,T2,S5,H2,K4,E4,lse,row_max,row_sum", [](const Case& c) {
    Problem problem(c);
    Values q = problem.inputs().at("q");
    for (double& x : q.data) x = 0;
    problem.set("q", q);
    set_lists(problem, {0, 1, 2, 4});
    const Outputs out = tests::run(problem);
    for (double x : out.at("lse").data) EXPECT_NEAR(x, std::log(4.0), 1e-6);
    for (double x : out.at("row_max").data) EXPECT_EQ(x, 0);
    for (double x : out.at("row_sum").data) EXPECT_EQ(x, 4);
  });
}

// The scale's default is of the whole width, rope part included, and statistics are of scaled scores.
TEST(SparseFlashAttention, DefaultScaleIsOfTheWholeWidth) {  // edge 22
  for (const char* pass : {"fwd", "bwd"})
    for_rows(std::string("sparse_flash_attention.") + pass + ":f32,T5,S20,H4,K12,KR4,E8,q_rope,k_rope,causal", [](const Case& c) {
      expect_equal(tests::run(tests::with(c, {{"scale", "0.25"}})), tests::run(c), "1 / sqrt(12 + 4)");
    });
}

// ---- Lists ----

// The same keys in any order, with any entries between them that stand for nothing.
TEST(SparseFlashAttention, OrderOfAListChangesNoBit) {  // edge 13
  for (const char* text : {"sparse_flash_attention.fwd:bf16,T6,S40,H6,K24,E9,lse", "sparse_flash_attention.bwd:bf16,T6,S40,H6,K24,E9,v"})
    for_rows(text, [](const Case& c) {
      const Outputs want = with_lists(c, {1, 5, 7, 20, 21, 22, 33, 38, 39});
      expect_equal(with_lists(c, {39, 1, 22, 5, 38, 21, 7, 33, 20}), want, "shuffled");
    });
}

// Queries that list most keys go together; what one gets is its own affair, by bits.
constexpr const char* kDenseLists[] = {"sparse_flash_attention.fwd:f16,T40,S150,H4,K24,E130,lse",
                                       "sparse_flash_attention.fwd:f32,T40,S150,H1,K24,E90,v,sink,causal",
                                       "sparse_flash_attention.fwd:bf16,T40,S150,H16,K24,KR8,E140,q_rope,k_rope",
                                       "sparse_flash_attention.bwd:f16,T40,S150,H4,K24,E130,o,lse",
                                       "sparse_flash_attention.bwd:f32,T40,S150,H1,K24,E90,v,o,lse,sink,causal"};
constexpr int64_t kOne = 17;  // the query that is looked at

// Row kOne of a per-query output, and where it begins.
std::pair<const double*, const double*> row_of_one(const Values& values) {
  const int64_t row = values.count() / values.shape[1];
  return {values.data.data() + kOne * row, values.data.data() + (kOne + 1) * row};
}

TEST(SparseFlashAttention, CompanyChangesNoBit) {
  for (const char* text : kDenseLists)
    for_rows(text, [](const Case& c) {
      Problem problem(c);
      const std::string name = std::string(c.pass->name) == "fwd" ? "o" : "d_q";
      const Outputs want = tests::run(problem);
      Values indices = problem.inputs().at("indices");
      const int64_t E = indices.shape[2];
      for (int64_t i = 0; i < indices.count(); ++i)
        if (i / E != kOne) indices.data[size_t(i)] = i / E % 3 == 0 ? double(i % E) : i / E % 3 == 1 ? 3 : -1;
      problem.set("indices", indices);
      problem.poison_outputs();
      const Outputs got = tests::run(problem);
      const auto [begin, end] = row_of_one(got.at(name));
      EXPECT_TRUE(std::equal(begin, end, row_of_one(want.at(name)).first)) << name;
    });
}

// A key of NaN that one query alone lists, and a query of NaN that lists all keys but one.
TEST(SparseFlashAttention, NanOfAKeyReachesItsReadersAlone) {  // edge 7
  for (const char* text : kDenseLists)
    for_rows(text, [](const Case& c) {
      const bool forward = std::string(c.pass->name) == "fwd";
      for (const char* sick : {"k", "q"}) {
        Problem problem(c);
        Values indices = problem.inputs().at("indices"), values = problem.inputs().at(sick);
        const int64_t E = indices.shape[2], key = 2, row = values.count() / values.shape[1];
        const bool is_key = sick[0] == 'k';
        for (int64_t i = 0; i < indices.count(); ++i)  // kOne alone has the key, or alone has it not
          if ((i / E == kOne) != is_key && indices.data[size_t(i)] == key) indices.data[size_t(i)] = key + 1;
        if (is_key) indices.data[size_t(kOne * E)] = key;
        for (int64_t i = 0; i < row; ++i)
          values.data[size_t((is_key ? key : kOne) * row + i)] = i % 2 ? kInfinity : std::nan("");
        problem.set("indices", indices), problem.set(sick, values);
        problem.poison_outputs();
        const Outputs out = tests::run(problem);
        const Values& o = out.at(forward ? "o" : "d_q");
        const int64_t width = o.count() / o.shape[1];
        for (int64_t i = 0; i < o.count(); ++i) {
          if (i / width != kOne) {
            ASSERT_TRUE(std::isfinite(o.data[size_t(i)])) << sick << " reached query " << i / width;
          }
        }
        if (forward) {
          EXPECT_FALSE(std::isfinite(*row_of_one(o).first)) << sick;
        } else if (!is_key) {
          const Values& d_k = out.at("d_k");
          for (int64_t i = 0; i < 24; ++i) EXPECT_TRUE(std::isfinite(d_k.data[size_t(key * 24 + i)])) << "d_k";
        }
      }
    });
}

TEST(SparseFlashAttention, EntriesThatStandForNothingAreSkippedAnywhere) {  // edge 8
  const double low = std::numeric_limits<int32_t>::min(), high = std::numeric_limits<int32_t>::max();
  for (const char* text : {"sparse_flash_attention.fwd:f32,T6,S40,H6,K24,E12,lse", "sparse_flash_attention.bwd:f32,T6,S40,H6,K24,E12,v"})
    for_rows(text, [&](const Case& c) {
      const Outputs want = with_lists(c, {3, 9, 17, 39, -1, -1, -1, -1, -1, -1, -1, -1});
      expect_equal(with_lists(c, {-1, 3, low, 9, high, 40, 17, 41, -2, 39, -1, low}), want, "first, middle, last");
      Case wide = tests::with(c, {{"indices", "i64"}});
      expect_equal(with_lists(wide, {-1, 3, -4e18, 9, 4e18, 40, 17, 4294967299.0, -2, 39, 4294967305.0, low}), want, "64 bits");
    });
}

// Sixteen times -1, then keys; all -1.
TEST(SparseFlashAttention, EmptyRows) {  // edge 1
  for_rows("sparse_flash_attention.fwd:f32,T3,S40,H6,K24,E18,lse,row_max,row_sum,p", [](const Case& c) {
    std::vector<double> list(18, -1);
    list[16] = 3, list[17] = 5;
    Problem problem(c);
    set_lists(problem, list);
    tests::expect_oracle(problem);
    const Outputs out = with_lists(c, std::vector<double>(18, -1));
    for (const char* name : {"o", "row_max", "row_sum", "p"})
      for (double x : out.at(name).data) ASSERT_EQ(x, 0) << name;
    for (double x : out.at("lse").data) ASSERT_EQ(x, -kInfinity);
    Case sink = tests::with(c, {{"sink", ""}});
    Problem sunk(sink);
    set_lists(sunk, std::vector<double>(18, -1));
    const Outputs with_sink = tests::run(sunk);
    const Values& z = sunk.inputs().at("sink");
    for (int64_t row = 0; row < 18; ++row) {
      EXPECT_EQ(with_sink.at("lse").data[size_t(row)], z.data[size_t(row % 6)]);
      EXPECT_EQ(with_sink.at("row_max").data[size_t(row)], z.data[size_t(row % 6)]);
      EXPECT_EQ(with_sink.at("row_sum").data[size_t(row)], 1);
    }
    for (double x : with_sink.at("o").data) ASSERT_EQ(x, 0);
  });
}

// Rows of no sequence, packed and padded: statistics of an empty row, with a sink too.
TEST(SparseFlashAttention, RowsOfNoSequence) {  // edge 6
  for (const char* text : {"varlen=3+0,varlen_k=4+2,T7,S9,H3", "B2,T5,S9,H3,q_lens"})
    for (const char* sink : {"", ",sink"})
      for_rows(std::string("sparse_flash_attention.fwd:f32,") + text + ",K8,E6,lse,row_max,row_sum,p" + sink, [](const Case& c) {
        Problem problem(c);
        const bool packed = !problem.inputs().count("q_lens");
        if (!packed) problem.set("q_lens", {{2}, {3, 0}}), problem.poison_outputs();
        const Outputs out = tests::run(problem);
        const int64_t T = packed ? 7 : 5;
        for (int64_t row = 0; row < out.at("lse").count() / 3; ++row) {
          if (row < 3) continue;  // both texts have three queries in use, at first
          for (int64_t h = 0; h < 3; ++h) {
            EXPECT_EQ(out.at("lse").data[size_t(row * 3 + h)], -kInfinity) << row / T << " " << row % T;
            EXPECT_EQ(out.at("row_max").data[size_t(row * 3 + h)], 0);
            EXPECT_EQ(out.at("row_sum").data[size_t(row * 3 + h)], 0);
            for (int64_t i = 0; i < 8; ++i) EXPECT_EQ(out.at("o").data[size_t((row * 3 + h) * 8 + i)], 0);
          }
        }
      });
}

// A query that sees one key, however often, weighs it 1 whatever the score: no gradient of q, nor of k by the scores.
TEST(SparseFlashAttention, OneKeyHasNoSlope) {  // edge 9
  for (const char* kept : {"", ",o", ",lse", ",o,lse", ",o,row_max,row_sum"})
    for (int64_t H : {1, 3, 5, 20})
      for_rows("sparse_flash_attention.bwd:f32,T3,S7,K24,KR8,E49,v,q_rope,k_rope,H" + std::to_string(H) + kept, [&](const Case& c) {
        Problem problem(tests::with(c, {{"-d_lse", ""}}));
        set_lists(problem, {4});
        if (*kept) {  // what the forward keeps of these lists
          Problem forward(tt::parse_case("sparse_flash_attention.fwd:f32,T3,S7,K24,KR8,E49,v,q_rope,k_rope,lse,row_max,row_sum,H" +
                                         std::to_string(H)));
          for (const char* name : {"q", "k", "v", "q_rope", "k_rope", "indices"}) forward.set(name, problem.inputs().at(name));
          forward.poison_outputs();
          const Outputs made = tests::run(forward);
          for (const char* name : {"o", "lse", "row_max", "row_sum"})
            if (problem.inputs().count(name)) problem.set(name, made.at(name));
          problem.poison_outputs();
        }
        const Outputs out = tests::run(problem);
        for (const char* name : {"d_q", "d_q_rope", "d_k", "d_k_rope"})
          for (double x : out.at(name).data) ASSERT_EQ(x, 0) << name;
        double d_v = 0;
        for (double x : out.at("d_v").data) d_v += std::fabs(x);
        EXPECT_GT(d_v, 0);
      });
}

// A backward takes each public convention for the statistics of an empty row.
TEST(SparseFlashAttention, StatisticsOfDeadRows) {  // edge 1, 26
  for_rows("sparse_flash_attention.bwd:f32,T4,S40,H6,K24,E8,v,o,lse,d_lse,sink", [](const Case& c) {
    for (double dead : {-kInfinity, kInfinity, std::nan("")}) {
      Problem problem(c);
      Values lse = problem.inputs().at("lse"), d_o = problem.inputs().at("d_o");
      for (int64_t row : {3, 7, 8, 23}) {
        lse.data[size_t(row)] = dead;
        for (int64_t i = 0; i < 24; ++i) d_o.data[size_t(row * 24 + i)] = std::nan("");
      }
      problem.set("lse", lse), problem.set("d_o", d_o);
      problem.poison_outputs();
      tests::expect_oracle(problem);
      const Values d_q = problem.read("d_q");
      for (int64_t i = 0; i < 24; ++i) ASSERT_EQ(d_q.data[size_t(7 * 24 + i)], 0);
    }
  });
  for_rows("sparse_flash_attention.bwd:f32,T4,S40,H6,K24,E8,v,o,row_max,row_sum", [](const Case& c) {
    Problem problem(c);
    Values m = problem.inputs().at("row_max"), l = problem.inputs().at("row_sum");
    for (int64_t row : {3, 7, 8}) m.data[size_t(row)] = l.data[size_t(row)] = 0;
    problem.set("row_max", m), problem.set("row_sum", l);
    problem.poison_outputs();
    tests::expect_oracle(problem);
  });
}

// Statistics and outputs kept by the forward give the gradients that recomputing gives.
TEST(SparseFlashAttention, KeptStatisticsEqualRecomputing) {
  for_rows("sparse_flash_attention.bwd:f32,T20,S90,H6,K24,KR8,E40,q_rope,k_rope,sink,causal", [](const Case& c) {
    const Outputs want = tests::run(c);
    for (const auto& kept : {std::map<std::string, std::string>{{"o", ""}}, {{"lse", ""}}, {{"o", ""}, {"lse", ""}},
                             {{"row_max", ""}, {"row_sum", ""}}, {{"o", ""}, {"row_max", ""}, {"row_sum", ""}}})
      EXPECT_EQ(tests::out_of_limit(tests::with(c, kept), tests::run(tests::with(c, kept)), want, 2), "");
  });
}

// Repeats weigh: r times the same entry is one entry of weight r. Two keys of equal score, one listed 300 times.
TEST(SparseFlashAttention, RepeatedEntriesWeigh) {  // edge 9
  for_rows("sparse_flash_attention.fwd:f32,T2,S5,H5,K4,E301,v,p,lse", [](const Case& c) {
    Problem problem(c);
    Values q = problem.inputs().at("q");
    for (double& x : q.data) x = 0;
    problem.set("q", q);
    std::vector<double> list(301, 2);
    list[100] = 4;
    set_lists(problem, list);
    const Outputs out = tests::run(problem);
    const Values& v = problem.inputs().at("v");
    for (int64_t i = 0; i < out.at("o").count(); ++i)
      EXPECT_NEAR(out.at("o").data[size_t(i)], (300 * v.data[size_t(2 * 4 + i % 4)] + v.data[size_t(4 * 4 + i % 4)]) / 301, 1e-6);
    for (double p : out.at("p").data) EXPECT_NEAR(p, 1.0 / 301, 1e-8);
    for (double x : out.at("lse").data) EXPECT_NEAR(x, std::log(301.0), 1e-6);
  });
}

// One block of 4 positions is the list of its positions.
TEST(SparseFlashAttention, BlocksAreListsOfPositions) {  // edge 12
  for (const char* text : {"sparse_flash_attention.fwd:f32,T9,S18,H6,K24,E12,causal", "sparse_flash_attention.bwd:f32,T9,S18,H6,K24,E12,causal,v"})
    for_rows(text, [](const Case& c) {
      const Outputs want = with_lists(c, {16, 17, 18, 19, 4, 5, 6, 7, 4, 5, 6, 7});
      Problem blocks(tests::with(tests::with_sizes(c, {{"E", 3}}), {{"sparse_block_size", "4"}}));
      set_lists(blocks, {4, 1, 1});
      expect_equal(tests::run(blocks), want, "blocks of 4");
      set_lists(blocks, {1, 4, 1});
      expect_equal(tests::run(blocks), want, "in another order");
      Problem huge(tests::with(tests::with_sizes(c, {{"E", 3}}), {{"sparse_block_size", "128"}, {"indices", "i64"}}));
      set_lists(huge, {0, 72057594037927936.0, 16777216});  // times 128 this is 2^63 and 2^31
      expect_equal(tests::run(huge), with_lists(c, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}).empty() ? Outputs{} : [&] {
        Problem all(tests::with_sizes(c, {{"E", 18}}));
        std::vector<double> every;
        for (int i = 0; i < 18; ++i) every.push_back(i);
        set_lists(all, every);
        return tests::run(all);
      }(), "block 0 alone");
    });
}

// The last query sees the last key, whatever the two lengths.
TEST(SparseFlashAttention, CausalIsBottomRight) {  // edge 10, 17
  for (int64_t S : {3, 8, 13})
    for_rows("sparse_flash_attention.fwd:f32,T8,H6,K24,E16,causal,lse,S" + std::to_string(S), [&](const Case& c) {
      std::vector<double> every;
      for (int64_t i = 0; i < 16; ++i) every.push_back(double(i));
      const Outputs causal = with_lists(c, every);
      for (int64_t t = 0; t < 8; ++t) {
        std::vector<double> prefix(16, -1);
        for (int64_t j = 0; j < 16 && j <= t + S - 8; ++j) prefix[size_t(j)] = double(j);
        const Outputs want = with_lists(tests::with(c, {{"-causal", ""}}), prefix);
        for (const char* name : {"o", "lse"})
          EXPECT_TRUE(tests::same_bits(tests::cut(causal.at(name), 1, t, t + 1), tests::cut(want.at(name), 1, t, t + 1))) << name << " of query " << t;
      }
    });
}

// Entries count from the sequence's own first key, in packed sequences too.
TEST(SparseFlashAttention, PackedListsAreLocal) {  // edge 14
  for_rows("sparse_flash_attention.fwd:f32,H6,K24,E2,varlen=2+3,varlen_k=4+6", [](const Case& c) {
    Problem packed(c);
    set_lists(packed, {0, 3});
    const Outputs out = tests::run(packed);
    Problem second(tt::parse_case("sparse_flash_attention.fwd:f32,T3,S6,H6,K24,E2,kernel=" + c.kernel));
    for (const char* name : {"q", "k"}) second.set(name, tests::cut(packed.inputs().at(name), 1, name[0] == 'q' ? 2 : 4, name[0] == 'q' ? 5 : 10));
    set_lists(second, {0, 3});
    EXPECT_TRUE(tests::same_bits(tests::cut(out.at("o"), 1, 2, 5), tests::run(second).at("o")));
  });
}

// ---- Values ----

// v absent is v = the first V elements of k, and d_k then sums both uses.
TEST(SparseFlashAttention, LatentValuesEqualSeparateOnes) {  // edge 20
  for_rows("sparse_flash_attention.bwd:f32,T12,S40,H6,K24,V16,KR8,E20,q_rope,k_rope", [](const Case& c) {
    Problem merged(c);
    const Outputs one = tests::run(merged);
    Problem separate(tests::with(c, {{"v", ""}, {"d_v", ""}}));
    for (const auto& [name, values] : merged.inputs()) separate.set(name, values);
    Values v = separate.inputs().at("v");
    for (int64_t row = 0; row < 40; ++row)
      for (int64_t i = 0; i < 16; ++i) v.data[size_t(row * 16 + i)] = merged.inputs().at("k").data[size_t(row * 24 + i)];
    separate.set("v", v);
    separate.poison_outputs();
    Outputs two = tests::run(separate);
    for (int64_t row = 0; row < 40; ++row)
      for (int64_t i = 0; i < 16; ++i) two["d_k"].data[size_t(row * 24 + i)] += two["d_v"].data[size_t(row * 16 + i)];
    two.erase("d_v");
    EXPECT_EQ(tests::out_of_limit(c, two, one, 2), "");
    if (tt::on_cuda(c)) return;  // its tensors are mirrored one by one
    // The same memory given twice: still separate gradients.
    const thalweg_tensor k = separate.tensor("k");
    thalweg_tensor& alias = separate.tensor("v");
    alias.data = k.data;
    for (int axis = 0; axis < 3; ++axis) alias.stride[axis] = k.stride[axis];
    separate.poison_outputs();
    ASSERT_EQ(separate.call(), THALWEG_OK) << thalweg_last_error();
    Outputs again;
    for (const std::string& name : separate.outputs()) again[name] = separate.read(name);
    for (int64_t row = 0; row < 40; ++row)
      for (int64_t i = 0; i < 16; ++i) again["d_k"].data[size_t(row * 24 + i)] += again["d_v"].data[size_t(row * 16 + i)];
    again.erase("d_v");
    EXPECT_EQ(tests::out_of_limit(c, again, one, 2), "");
  });
}

// A concatenated row [latent, rope] as one tensor or as two views of it.
TEST(SparseFlashAttention, ConcatenatedRowsEqualTwoParts) {
  for_rows("sparse_flash_attention.fwd:f32,T7,S40,H6,K32,V24,E20,lse", [](const Case& c) {
    Problem one(c);
    const Outputs want = tests::run(one);
    Problem two(tests::with(tests::with_sizes(c, {{"K", 24}, {"KR", 8}}), {{"q_rope", ""}, {"k_rope", ""}}));
    for (const auto& [whole, part, rest] : {std::tuple{"q", "q", "q_rope"}, {"k", "k", "k_rope"}}) {
      const Values& x = one.inputs().at(whole);
      two.set(part, tests::cut(x, int(x.shape.size()) - 1, 0, 24));
      two.set(rest, tests::cut(x, int(x.shape.size()) - 1, 24, 32));
    }
    two.set("indices", one.inputs().at("indices"));
    two.poison_outputs();
    EXPECT_EQ(tests::out_of_limit(c, tests::run(two), want, 2), "");
  });
}

// Without a sink p sums to 1 over a list; the forward's and the backward's are the same numbers to rounding.
TEST(SparseFlashAttention, ProbabilitiesOfEntries) {  // edge 33
  for (const char* sink : {"", ",sink"}) {
    const std::string tokens = std::string("f32,T12,S40,H6,K24,E20,p") + sink;
    for_rows("sparse_flash_attention.fwd:" + tokens, [&](const Case& c) {
      Problem problem(c);
      const Values p = tests::run(problem).at("p");
      for (int64_t t = 0; t < 12; ++t) {
        double sum = 0;
        for (int64_t e = 0; e < 20; ++e) sum += p.data[size_t(t * 20 + e)];
        if (*sink) EXPECT_LT(sum, 1);
        else EXPECT_NEAR(sum, 1, 1e-5);
      }
      Problem backward(tt::parse_case("sparse_flash_attention.bwd:" + tokens));
      for (const auto& [name, values] : problem.inputs()) backward.set(name, values);
      backward.poison_outputs();
      EXPECT_LT(tt::compare(tests::run(backward).at("p"), p).ratio, 1e-5);
    });
  }
}

// ---- Sinks, sizes ----

TEST(SparseFlashAttention, SinksOfAnySize) {  // edge 21
  for (double z : {-1e30, -kInfinity, 80.0})
    for (const char* text : {"sparse_flash_attention.fwd:f32,T6,S40,H6,K24,E9,lse,sink", "sparse_flash_attention.bwd:f32,T6,S40,H6,K24,E9,sink,blank=3"})
      for_rows(text, [&](const Case& c) {
        Problem problem(c);
        Values sink = problem.inputs().at("sink");
        for (double& x : sink.data) x = z;
        problem.set("sink", sink);
        problem.poison_outputs();
        if (z == 80.0 && std::string_view(c.pass->name) == "bwd") return;  // P near 0: gradients of rounding size
        tests::expect_oracle(problem);
      });
}

// Offsets past 2^31 in the table of lists, by stride, on memory of which only the touched pages exist.
TEST(SparseFlashAttention, ListsFarApart) {  // edge 23
  for_rows("sparse_flash_attention.fwd:f32,T3,S20,H2,K8,E4", [](const Case& c) {
    const Outputs want = tests::run(c);
    Problem far(tests::with(c, {{"indices", "@s4294967296_1073741825_1"}}));
    Problem near(c);
    far.set("indices", near.inputs().at("indices"));
    far.poison_outputs();
    expect_equal(tests::run(far), want, "rows of lists 2^30 entries apart");
  });
}

// More queries than any grid of 65535.
TEST(SparseFlashAttention, ManyQueries) {  // edge 24
  for (const char* pass : {"fwd", "bwd"})
    for_rows(std::string("sparse_flash_attention.") + pass + ":f32,T66000,S9,H1,K4,E2", [](const Case& c) {
      const tt::Verdict verdict = tt::verify(c);
      EXPECT_TRUE(verdict.passed()) << verdict.reason;
    });
}

// ---- On the GPU ----

TEST(SparseFlashAttention, WrongValuesOnTheGpuAreContained) {
  if (!tt::why_no_device().empty()) GTEST_SKIP() << tt::why_no_device();
  const std::string packed = ":f32,H4,K40,V33,KR8,E12,q_rope,k_rope,p,varlen=20+30+14,varlen_k=30+30+30";
  tests::expect_borders_contained("sparse_flash_attention.fwd" + packed + ",lse,row_max,row_sum");
  tests::expect_borders_contained("sparse_flash_attention.bwd" + packed);
}

// ---- What is refused ----

void expect_refused(const std::string& text, const std::string& want) {
  Problem problem(tt::parse_case(text));
  ASSERT_EQ(problem.call(), THALWEG_INVALID_ARGUMENT) << text;
  EXPECT_EQ(std::string(thalweg_last_error()), want);
  EXPECT_EQ(problem.check_untouched(), "");
}

TEST(SparseFlashAttention, Refusals) {
  const std::string f = "sparse_flash_attention.fwd", b = "sparse_flash_attention.bwd", tokens = ":f32,T3,S9,H2,K8,E4";
  for (const char* size : {"3", "256", "130", "-1"})
    expect_refused(f + tokens + ",sparse_block_size=" + size,
                   f + ": sparse_block_size: got " + size + ", expected a power of two up to 128, or 0");
  expect_refused(f + ":f32,T3,S9,H2,K8,E0", f + ": indices: E, got 0, expected at least 1");
  expect_refused(f + ":f32,T3,S9,H0,K8,E4", f + ": q: H, got 0, expected at least 1");
  expect_refused(f + ":f32,T3,S9,H2,K0,E4", f + ": q: K, got 0, expected at least 1");
  expect_refused(f + tokens + ",V9", f + ": o: V, got 9, expected at most K = 8 without v (from q)");
  expect_refused(f + tokens + ",q_rope", f + ": q_rope: needs k_rope, got q_rope without it");
  expect_refused(f + tokens + ",k_rope", f + ": k_rope: needs q_rope, got k_rope without it");
  expect_refused(f + ":bf16,T3,S9,H2,K8,E4,lse=f64", f + ": lse: dtype, got f64, expected f32 (from q)");
  expect_refused(f + ":f64,T3,S9,H2,K8,E4,p=f32", f + ": p: dtype, got f32, expected f64 (from q)");
  expect_refused(b + tokens + ",row_max", b + ": row_max: needs row_sum, got row_max without it");
  expect_refused(b + tokens + ",row_sum", b + ": row_sum: needs row_max, got row_sum without it");
  expect_refused(b + tokens + ",lse,row_max,row_sum", b + ": row_max: got it beside lse, expected one of them");
  expect_refused(b + tokens + ",d_v", b + ": d_v: needs v, got d_v without it");
  expect_refused(b + tokens + ",d_q_rope", b + ": d_q_rope: needs q_rope, got d_q_rope without it");
  expect_refused(b + tokens + ",d_k_rope", b + ": d_k_rope: needs k_rope, got d_k_rope without it");
}

TEST(SparseFlashAttention, RefusedLengths) {  // edge 18
  const std::string f = "sparse_flash_attention.fwd";
  Problem packed(tt::parse_case(f + ":f32,H2,K8,E4,varlen=3+5,varlen_k=4+6"));
  struct Bad {
    std::vector<double> borders;
    std::string text;
  };
  for (const Bad& bad : {Bad{{1, 4, 10}, "element 0, got 1, expected 0"}, Bad{{0, 4, 3}, "element 2, got 3, expected at least 4 (element 1)"},
                         Bad{{0, 4, 11}, "element 2, got 11, expected at most S = 10 (from k)"}}) {
    packed.set("cu_seqlens_k", {{3}, bad.borders});
    packed.poison_outputs();
    ASSERT_EQ(packed.call(), THALWEG_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(thalweg_last_error()), f + ": cu_seqlens_k: " + bad.text);
    EXPECT_EQ(packed.check_untouched(), "");
  }
  Problem padded(tt::parse_case(f + ":f32,B2,T3,S9,H2,K8,E4,q_lens,k_lens"));
  for (double length : {-1.0, 10.0}) {
    padded.set("k_lens", {{2}, {9, length}});
    padded.poison_outputs();
    ASSERT_EQ(padded.call(), THALWEG_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(thalweg_last_error()),
              f + ": k_lens: element 1, got " + std::to_string(int(length)) + ", expected 0 to 9 (tokens of the sequence)");
  }
  thalweg_tensor& keys = packed.tensor("cu_seqlens_k");
  keys = thalweg_tensor{};
  ASSERT_EQ(packed.call(), THALWEG_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(thalweg_last_error()), f + ": cu_seqlens: needs cu_seqlens_k, got cu_seqlens without it");
}

}  // namespace
}  // namespace thalweg::sparse_flash_attention
