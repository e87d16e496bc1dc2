// Block-sparse attention's own properties: closed forms, what a query does not see, equal masks in other blocks,
// conventions of the statistics, offsets of the mask, what is refused. The numbered sharp edges of such operators that
// no case of cases.txt holds are named here.
#include <sys/mman.h>

#include <cmath>
#include <limits>

#include "tests/cuda_faults.h"
#include "tests/properties.h"
#include "thalweg/core/tensor.h"
#include "thalweg/ops/block_sparse_attention/block_sparse_attention.h"

namespace thalweg::tests {
namespace {

namespace tt = thalweg::testing;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
const char* const kFwd = "block_sparse_attention.fwd:";
const char* const kBwd = "block_sparse_attention.bwd:";

std::string d_o(const char* pass) { return pass == kBwd ? ",d_o" : ""; }

// Runs `body` for every row that takes the case here.
void each_row(const std::string& text, const std::function<void(const Case&)>& body) {
  const Case c = tt::parse_case(text);
  for (const std::string& row : kernel_rows(*c.pass)) {
    const Case forced = with_kernel(c, row);
    if (!takes(forced)) continue;
    SCOPED_TRACE("  " + forced.text() + ", inputs changed by the test");
    body(forced);
  }
}

// The same in float32 and in bf16, which rows of bf16 products take.
void each_row_and_dtype(std::string text, const std::function<void(const Case&)>& body) {
  each_row(text, body);
  each_row(text.replace(text.find(":f32,"), 5, ":bf16,"), body);
}

int64_t index_of(const Values& v, int64_t b, int64_t t, int64_t h, int64_t c = 0) {
  const int64_t last = v.shape.size() > 3 ? v.shape[3] : 1;
  return ((b * v.shape[1] + t) * v.shape[2] + h) * last + c;
}
double at(const Values& v, int64_t b, int64_t t, int64_t h, int64_t c = 0) {
  return v.data[size_t(index_of(v, b, t, h, c))];
}

// Rows [begin, end) of every head become x.
Values with_rows(Values v, int64_t begin, int64_t end, double x) {
  assign(&v, 1, begin, end, [=](double) { return x; });
  return v;
}
Values constant(Values v, double x) {
  for (double& y : v.data) y = x;
  return v;
}

// ---- Closed forms ----

TEST(BlockSparseAttention, OneKeyGivesItsValueAndItsScore) {
  each_row(std::string(kFwd) + "f32,T3,S1,H2,K4,V3,scale=0.5,lse,row_max,row_sum", [](const Case& c) {
    Problem problem(c);
    const Outputs got = run(problem);
    const auto& in = problem.inputs();
    for (int64_t t = 0; t < 3; ++t)
      for (int64_t h = 0; h < 2; ++h) {
        double s = 0;
        for (int64_t i = 0; i < 4; ++i) s += 0.5 * at(in.at("q"), 0, t, h, i) * at(in.at("k"), 0, 0, h, i);
        EXPECT_NEAR(at(got.at("lse"), 0, t, h), s, 1e-6);
        EXPECT_NEAR(at(got.at("row_max"), 0, t, h), s, 1e-6);
        EXPECT_NEAR(at(got.at("row_sum"), 0, t, h), 1, 1e-6);
        for (int64_t i = 0; i < 3; ++i) EXPECT_NEAR(at(got.at("o"), 0, t, h, i), at(in.at("v"), 0, 0, h, i), 1e-6);
      }
  });
}

// P = 1 whatever the score: <d_o, v> and delta are the same sum, bit for bit.
TEST(BlockSparseAttention, OneKeyGivesScoresNoGradient) {
  each_row_and_dtype(std::string(kBwd) + "f32,T20,S1,H2,K40,V70,lse,d_o", [](const Case& c) {
    const Outputs got = run(c);
    for (const char* name : {"d_q", "d_k"})
      for (double x : got.at(name).data) ASSERT_EQ(x, 0) << name;
  });
}

TEST(BlockSparseAttention, EqualScoresGiveTheMeanAndTheLogOfTheCount) {
  each_row(std::string(kFwd) + "f32,T4,S30,H1,K8,block_q=4,block_k=10,mask=none,sink,lse", [](const Case& c) {
    Problem problem(c);
    problem.set("q", constant(problem.inputs().at("q"), 0));
    problem.set("block_mask", {{1, 1, 1, 3}, {1, 0, 1}});
    problem.set("sink", {{1}, {std::log(5.0)}});  // counts as five more keys, whose values are 0
    const Outputs got = run(problem);
    for (int64_t i = 0; i < 8; ++i) {
      double sum = 0;
      for (int64_t j = 0; j < 30; ++j) sum += j / 10 != 1 ? at(problem.inputs().at("v"), 0, j, 0, i) : 0;
      EXPECT_NEAR(at(got.at("o"), 0, 2, 0, i), sum / 25, 1e-6);
    }
    EXPECT_NEAR(at(got.at("lse"), 0, 2, 0), std::log(25.0), 1e-6);
  });
}

// edge 15: a natural logarithm. Of two equal scores 0 it is log 2, not 1.
TEST(BlockSparseAttention, Edge15TheLogarithmIsNatural) {
  each_row(std::string(kFwd) + "f32,T1,S2,H1,K4,lse", [](const Case& c) {
    Problem problem(c);
    problem.set("q", constant(problem.inputs().at("q"), 0));
    EXPECT_NEAR(run(problem).at("lse").data[0], 0.69314718, 1e-6);
  });
}

// ---- What a query does not see ----

// edge 1, 2: exact zeros, written: of a query without keys, and of a key that no query sees.
TEST(BlockSparseAttention, Edge1And2UnseenIsExactlyZero) {
  const std::string tokens = "f32,T40,S40,H2,K16,block_q=8,block_k=8,mask=dense,holes,lse";
  each_row_and_dtype(kFwd + tokens, [](const Case& c) {
    const Outputs got = run(c);
    for (int64_t t = 8; t < 16; ++t)
      for (int64_t h = 0; h < 2; ++h) {
        EXPECT_EQ(at(got.at("lse"), 0, t, h), -std::numeric_limits<double>::infinity());
        for (int64_t i = 0; i < 16; ++i) EXPECT_EQ(at(got.at("o"), 0, t, h, i), 0);
      }
  });
  each_row_and_dtype(kBwd + tokens + ",d_o", [](const Case& c) {
    const Outputs got = run(c);
    for (int64_t h = 0; h < 2; ++h)
      for (int64_t i = 0; i < 16; ++i) {
        for (int64_t t = 8; t < 16; ++t) EXPECT_EQ(at(got.at("d_q"), 0, t, h, i), 0);
        for (int64_t j = 0; j < 8; ++j) {
          EXPECT_EQ(at(got.at("d_k"), 0, j, h, i), 0);
          EXPECT_EQ(at(got.at("d_v"), 0, j, h, i), 0);
        }
      }
  });
}

// edge 7: NaN and infinity in rows that nobody sees (a key column without a block, rows past the lengths, queries
// without a key) change no bit of anything else.
TEST(BlockSparseAttention, Edge7RowsThatNobodySeesMayHoldNan) {
  for (double bad : {kNan, std::numeric_limits<double>::infinity()})
    for (const char* pass : {kFwd, kBwd})
      each_row_and_dtype(
          std::string(pass) +
              "f32,T40,S40,H2,K16,block_q=8,block_k=8,mask=dense,holes,q_lens,k_lens,lens_q=33,lens_k=37,lse" +
              d_o(pass),
          [&](const Case& c) {
            Problem problem(c);
            const Outputs want = run(problem);
            for (const char* name : {"k", "v"}) {
              Values values = with_rows(problem.inputs().at(name), 0, 8, bad);
              problem.set(name, with_rows(values, 37, 40, bad));
            }
            for (const char* name : {"q", "d_o", "o"}) {
              if (!problem.inputs().count(name)) continue;
              Values values = with_rows(problem.inputs().at(name), 8, 16, bad);
              problem.set(name, with_rows(values, 33, 40, bad));
            }
            problem.poison_outputs();
            EXPECT_EQ(first_difference(run(problem), want), "");
          });
}

// edge 7: a key that causality hides may hold NaN; a query that a key's block does not let through too.
TEST(BlockSparseAttention, Edge7KeysThatCausalityHidesMayHoldNan) {
  each_row_and_dtype(
      std::string(kFwd) + "f32,T40,S40,H2,K16,block_q=32,block_k=8,mask=dense,causal,lse", [](const Case& c) {
        Problem problem(c);
        Outputs want = run(problem);
        for (const char* name : {"k", "v"}) problem.set(name, with_rows(problem.inputs().at(name), 13, 14, kNan));
        problem.poison_outputs();
        Outputs got = run(problem);
        for (auto& [name, values] : want)
          EXPECT_EQ(out_of_limit(c, {{name, cut(got.at(name), 1, 0, 13)}}, {{name, cut(values, 1, 0, 13)}}), "");
        EXPECT_TRUE(std::isnan(at(got.at("o"), 0, 13, 0)));
      });
  each_row_and_dtype(
      std::string(kBwd) + "f32,T40,S40,H2,K16,block_q=32,block_k=8,mask=dense,causal,lse,d_o", [](const Case& c) {
        Problem problem(c);
        const Outputs want = run(problem);
        const Values q = problem.inputs().at("q"), d_o = problem.inputs().at("d_o");
        problem.set("k", with_rows(problem.inputs().at("k"), 20, 21, kNan));  // reaches the queries from 20 on
        problem.poison_outputs();
        Outputs got = run(problem);
        EXPECT_EQ(out_of_limit(c, {{"d_q", cut(got.at("d_q"), 1, 0, 20)}}, {{"d_q", cut(want.at("d_q"), 1, 0, 20)}}),
                  "");
        problem.set("k", Problem(c).inputs().at("k"));
        problem.set("q", with_rows(q, 9, 10, kNan)),
            problem.set("d_o", with_rows(d_o, 9, 10, kNan));  // reaches keys to 9
        problem.poison_outputs();
        got = run(problem);
        for (const char* name : {"d_k", "d_v"})
          EXPECT_EQ(out_of_limit(c, {{name, cut(got.at(name), 1, 10, 40)}}, {{name, cut(want.at(name), 1, 10, 40)}}),
                    "")
              << name;
      });
}

// edge 27: every element of every output is written where no block is kept at all.
TEST(BlockSparseAttention, Edge27NothingKeptWritesZeros) {
  each_row_and_dtype(std::string(kBwd) + "f32,T20,S30,H4,HK2,K8,mask=none,sink,lse,d_o", [](const Case& c) {
    for (const auto& [name, values] : run(c))
      for (double x : values.data) ASSERT_EQ(x, 0) << name;
  });
}

// ---- Equal masks, written otherwise ----

// The same pairs of tokens in blocks of 24, 8 and 1 keys: the tiles are the same, so the bits are.
TEST(BlockSparseAttention, TheSameMaskInSmallerBlocksGivesTheSameBits) {
  for (const char* pass : {kFwd, kBwd})
    for (int64_t block_k : {8, 1})
      each_row_and_dtype(
          std::string(pass) + "f32,T50,S100,H2,K16,block_q=16,block_k=24,mask=random:0.5,lse" + d_o(pass),
          [&](const Case& c) {
            Problem coarse(c);
            const Outputs want = run(coarse);
            const int64_t NK = (100 + block_k - 1) / block_k;
            Problem fine(with_sizes(with(c, {{"block_k", std::to_string(block_k)}}), {{"NK", NK}}));
            for (const auto& [name, values] : coarse.inputs()) {
              if (name != "block_mask") fine.set(name, values);
              if (name != "block_mask") continue;
              Values mask{{1, 2, 4, NK}, {}};
              for (int64_t line = 0; line < 8; ++line)
                for (int64_t j = 0; j < NK; ++j) mask.data.push_back(values.data[size_t(line * 5 + j * block_k / 24)]);
              fine.set(name, mask);
            }
            fine.poison_outputs();
            EXPECT_EQ(first_difference(run(fine), want), "");
          });
}

// Query heads that share a key head equal query heads that have copies of it; their gradients add up.
TEST(BlockSparseAttention, GroupedHeadsEqualRepeatedKeysAndValues) {
  each_row(std::string(kBwd) + "f32,T50,S60,H4,HK2,K16,block_q=16,block_k=16,mask=random:0.6,lse,d_o",
           [](const Case& c) {
             Problem grouped(c);
             const Outputs got = run(grouped);
             Problem repeated(with_sizes(c, {{"HK", 4}}));
             for (const auto& [name, values] : grouped.inputs())
               repeated.set(name, name == "k" || name == "v" ? take(values, 2, {0, 0, 1, 1}) : values);
             repeated.poison_outputs();
             Outputs want = run(repeated);
             for (const char* name : {"d_k", "d_v"}) {
               Values sum = take(want.at(name), 2, {0, 2});
               const Values other = take(want.at(name), 2, {1, 3});
               for (size_t i = 0; i < sum.data.size(); ++i) sum.data[i] += other.data[i];
               want[name] = sum;
             }
             EXPECT_EQ(out_of_limit(c, got, want), "");
           });
}

// ---- Statistics ----

// edge 16: (max, sum) are those of scaled scores, and log sum + max is L.
TEST(BlockSparseAttention, Edge16MaxAndSumAreOfScaledScoresAndGiveL) {
  each_row(
      std::string(kFwd) + "f32,T40,S50,H2,K16,scale=0.7,mask=diagonal:0.5,block_q=8,block_k=8,sink,lse,row_max,row_sum",
      [](const Case& c) {
        const Outputs got = run(c);
        for (size_t i = 0; i < got.at("lse").data.size(); ++i)
          ASSERT_NEAR(got.at("row_max").data[i] + std::log(got.at("row_sum").data[i]), got.at("lse").data[i], 2e-6);
      });
}

// The backward from L, and from (max, sum).
TEST(BlockSparseAttention, BackwardFromEitherStatistic) {
  const std::string tokens = "f32,T40,S50,H2,K16,mask=random:0.6,block_q=8,block_k=8,sink,d_o";
  each_row(kBwd + tokens + ",lse", [&](const Case& c) {
    const Outputs want = run(c);
    EXPECT_EQ(out_of_limit(c, run(with_kernel(tt::parse_case(kBwd + tokens + ",row_max,row_sum"), c.kernel)), want),
              "");
  });
}

// edge 1: -inf, +inf and NaN as L, and 0 as the sum, mark a query that sees nothing, whatever its mask says.
TEST(BlockSparseAttention, Edge1EveryMarkOfAQueryThatSeesNothing) {
  const double infinity = std::numeric_limits<double>::infinity();
  each_row_and_dtype(std::string(kBwd) + "f32,T20,S30,H2,K8,mask=dense,sink,lse,d_o,d_lse", [&](const Case& c) {
    Outputs first;
    for (double mark : {-infinity, infinity, kNan}) {
      Problem problem(c);
      problem.set("lse", with_rows(problem.inputs().at("lse"), 3, 7, mark));
      const Outputs got = run(problem);
      for (double x : cut(got.at("d_q"), 1, 3, 7).data) EXPECT_EQ(x, 0);
      if (first.empty()) first = got;
      EXPECT_EQ(first_difference(got, first), "") << mark;
    }
    Problem sums(with(c, {{"-lse", ""}, {"row_max", ""}, {"row_sum", ""}}));
    sums.set("row_max", with_rows(sums.inputs().at("row_max"), 3, 7, 0));
    sums.set("row_sum", with_rows(sums.inputs().at("row_sum"), 3, 7, 0));
    EXPECT_EQ(out_of_limit(c, run(sums), first), "");
  });
}

// edge 6: rows of no sequence, packed and padded, have the statistics of a query that sees nothing, with a sink too.
TEST(BlockSparseAttention, Edge6RowsOfNoSequence) {
  for (const char* text : {"varlen=3+0,varlen_k=4+2,T7,S9", "T7,S9,q_lens,lens_q=3"})
    for (const char* sink : {"", ",sink"})
      each_row_and_dtype(std::string(kFwd) + "f32,H3,K8,mask=dense,lse,row_max,row_sum," + text + sink,
                         [](const Case& c) {
                           const Outputs got = run(c);
                           auto expect_all = [&](const char* name, double want) {
                             for (double x : cut(got.at(name), 1, 3, 7).data) EXPECT_EQ(x, want) << name;
                           };
                           expect_all("o", 0), expect_all("row_max", 0), expect_all("row_sum", 0);
                           expect_all("lse", -std::numeric_limits<double>::infinity());
                         });
}

// edge 21: the sink is part of L; a sink of -inf is none.
TEST(BlockSparseAttention, Edge21TheSinkJoinsTheSum) {
  each_row(std::string(kFwd) + "f32,T10,S20,H1,K8,mask=dense,sink,lse,row_sum", [](const Case& c) {
    Problem problem(c);
    problem.set("sink", {{1}, {-std::numeric_limits<double>::infinity()}});
    const Outputs without = run(problem);
    Problem plain(with(c, {{"-sink", ""}}));
    for (const auto& [name, values] : problem.inputs())
      if (name != "sink") plain.set(name, values);
    EXPECT_EQ(first_difference(run(plain), without), "");
    problem.set("sink", {{1}, {1.5}});
    problem.poison_outputs();
    const Outputs with_sink = run(problem);
    for (int64_t t = 0; t < 10; ++t) {
      const double L = at(without.at("lse"), 0, t, 0), joined = L + std::log1p(std::exp(1.5 - L));
      EXPECT_NEAR(at(with_sink.at("lse"), 0, t, 0), joined, 2e-6);
      EXPECT_NEAR(at(with_sink.at("o"), 0, t, 0), at(without.at("o"), 0, t, 0) * std::exp(L - joined), 2e-6);
    }
  });
}

// ---- Sizes ----

// edge 23: the mask's offsets are 64-bit: rows 2^31 bytes apart, of which only the touched pages exist.
TEST(BlockSparseAttention, Edge23MaskRowsBeyondTwoToTheThirtyFirst) {
  each_row(std::string(kFwd) + "f32,T48,S32,H1,K8,block_q=16,block_k=16,mask=random:0.5,lse", [](const Case& c) {
    if (tt::on_cuda(c)) return;  // the pages are the host's
    Problem problem(c);
    const Outputs want = run(problem);
    const size_t total = (size_t(2) << 31) + 4096;
    void* memory = mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    ASSERT_NE(memory, MAP_FAILED);
    thalweg_tensor& mask = problem.tensor("block_mask");
    mask.data = memory;
    mask.stride[2] = int64_t(1) << 31;
    mask.stride[0] = mask.stride[1] = 0;
    tt::write_values(mask, problem.inputs().at("block_mask"));
    problem.poison_outputs();
    ASSERT_EQ(problem.call(), THALWEG_OK) << thalweg_last_error();
    for (const auto& [name, values] : want) EXPECT_TRUE(same_bits(problem.read(name), values)) << name;
    munmap(memory, total);
  });
}

// The same bits when few key heads are shared out to several tasks, for any number of threads.
TEST(BlockSparseAttention, Edge30TheSameBitsForAnyThreadCountWithOneKeyHead) {
  each_row_and_dtype(std::string(kBwd) + "f32,T300,S300,H3,HK1,K16,block_q=32,block_k=32,mask=random:0.5,sink,lse,d_o",
                     [](Case c) {
                       c.threads = 1;
                       const Outputs want = run(c);
                       for (int64_t threads : {2, 5, 16}) {
                         c.threads = threads;
                         EXPECT_EQ(first_difference(run(c), want), "") << threads << " threads";
                       }
                     });
}

// ---- On the GPU ----

TEST(BlockSparseAttention, WrongValuesOnTheGpuAreContained) {
  if (!tt::why_no_device().empty()) GTEST_SKIP() << tt::why_no_device();
  const std::string packed =
      "f32,HK2,H4,K40,V33,block_q=16,block_k=16,mask=random:0.7,lse"
      ",varlen=20+30+14,varlen_k=30+30+30";
  expect_borders_contained(kFwd + packed);
  expect_borders_contained(kBwd + packed + ",d_o");
}

// ---- Refusals ----

void expect_refusal(const std::string& text, const std::string& error,
                    const std::function<void(Problem&)>& change = {}) {
  Problem problem(tt::parse_case(text));
  if (change) change(problem);
  EXPECT_EQ(problem.call(), THALWEG_INVALID_ARGUMENT) << error;
  EXPECT_EQ(std::string(thalweg_last_error()), error);
  EXPECT_EQ(problem.check_untouched(), "");
}

TEST(BlockSparseAttention, RefusalsByName) {
  const std::string op = "block_sparse_attention.fwd: ", bwd = "block_sparse_attention.bwd: ";
  const std::string base = std::string(kFwd) + "f32,T20,S20,H4,K8,block_q=8,block_k=8,lse";
  expect_refusal(base + ",HK3", op + "q: H, got 4, expected a multiple of HK = 3 (from k)");
  expect_refusal(base + ",HM2", op + "block_mask: HM, got 2, expected H = 4 (from q), HK = 4 (from k) or 1");
  expect_refusal(base + ",NQ2", op + "block_mask: NQ, got 2, expected at least 3 (20 queries in blocks of 8)");
  expect_refusal(base + ",NK1", op + "block_mask: NK, got 1, expected at least 3 (20 keys in blocks of 8)");
  expect_refusal(std::string(kFwd) + "f32,T20,S20,H4,K0,lse", op + "q: K, got 0, expected at least 1");
  expect_refusal(std::string(kFwd) + "f32,T20,S20,H0,HK1,K8,lse", op + "q: H, got 0, expected at least 1");
  expect_refusal(std::string(kFwd) + "f32,T20,S20,H4,K8,NQ9,NK9,block_q=-1,lse",
                 op + "block_q: got -1, expected 1 or more, or 0 for 128");
  expect_refusal(base + "=f64", op + "lse: dtype, got f64, expected f32 (from q)");
  expect_refusal(base + ",B2,N3", op + "block_mask: N, got 3, expected 2 (from q: B)");
  expect_refusal(base + ",varlen=8+12,varlen_k=8+12", op + "cu_seqlens_k: missing, expected [N+1] beside cu_seqlens",
                 [](Problem& p) { p.tensor("cu_seqlens_k") = thalweg_tensor{}; });
  expect_refusal(base + ",varlen=8+12,varlen_k=8+12",
                 op + "cu_seqlens_k: element 2, got 21, expected at most S = 20 (from k)", [](Problem& p) {
                   p.set("cu_seqlens_k", {{3}, {0, 8, 21}});
                 });
  expect_refusal(base + ",q_lens", op + "q_lens: element 0, got 21, expected 0 to 20 (tokens of the sequence)",
                 [](Problem& p) {
                   p.set("q_lens", {{1}, {21}});
                 });
  expect_refusal(base + ",k_lens=i64", op + "k_lens: element 0, got -1, expected 0 to 20 (tokens of the sequence)",
                 [](Problem& p) {
                   p.set("k_lens", {{1}, {-1}});
                 });
  const std::string back = std::string(kBwd) + "f32,T20,S20,H4,K8,d_o";
  expect_refusal(back, bwd + "lse: missing, expected [B T H], or row_max and row_sum");
  expect_refusal(back + ",row_max", bwd + "row_sum: missing, expected [B T H] beside row_max");
  expect_refusal(back + ",lse,row_sum", bwd + "row_max: missing, expected [B T H] beside row_sum");
  expect_refusal(back + ",lse,d_sink", bwd + "d_sink: needs sink, got d_sink without it");
}

}  // namespace
}  // namespace thalweg::tests
