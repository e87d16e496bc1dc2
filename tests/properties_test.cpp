// Properties that every pass has, whatever it computes. One test per property and pass.
#include <bit>
#include <cmath>
#include <limits>
#include <thread>

#include "testing/case.h"
#include "tests/properties.h"

namespace thalweg::tests {
namespace {

namespace tt = thalweg::testing;

const std::vector<std::string> kSets = {"smoke", "ci", "edge"};
constexpr double kSmall = 4e7;

// ---- Bits ----

void thread_counts(const thalweg_pass& pass) {
  for_each_row(pass, {"smoke", "ci"}, kSmall, [](Case c) {
    c.threads = 1;
    Outputs want = run(c);
    for (int64_t threads : {2, 3, 7}) {
      c.threads = threads;
      EXPECT_EQ(first_difference(run(c), want), "") << threads << " threads";
    }
  });
}

// Repeats, on memory that other calls have used: nothing depends on what outputs or workspace held.
void repeats(const thalweg_pass& pass) {
  for_each_row(pass, kSets, kSmall, [](const Case& c) {
    Problem problem(c);
    Outputs want = run(problem);
    for (int i = 0; i < 2; ++i) {
      problem.poison_outputs();
      EXPECT_EQ(first_difference(run(problem), want), "");
    }
  });
}

void hundred_repeats(const thalweg_pass& pass) {
  std::vector<Case> cases = pass_cases(pass, {"smoke"}, 1e7);
  cases.resize(std::min<size_t>(cases.size(), 4));
  for (const std::string& row : kernel_rows(pass))
    for (const Case& base : cases) {
      Case c = with_kernel(base, row);
      if (!takes(c)) continue;
      c.threads = 3;
      Problem problem(c);
      Outputs want = run(problem);
      for (int i = 0; i < 100; ++i) {
        problem.poison_outputs();
        ASSERT_EQ(first_difference(run(problem), want), "") << "repeat " << i << ": thalweg verify " << c.text();
      }
    }
}

// The library's own arena instead of a workspace, and no context at all.
void arena(const thalweg_pass& pass) {
  for_each_row(pass, {"smoke"}, kSmall, [&](const Case& c) {
    Problem problem(c);
    Outputs want = run(problem);
    problem.poison_outputs();
    thalweg_context ctx{};
    ctx.kernel = c.kernel.c_str();
    ASSERT_EQ(pass.call(problem.args(), &ctx), THALWEG_OK) << thalweg_last_error();
    Outputs got;
    for (const std::string& name : problem.outputs()) got[name] = problem.read(name);
    EXPECT_EQ(first_difference(got, want), "");
  });
}

// Two calls in flight with workspaces of their own; and the first result stays after a second call.
void two_at_once(const thalweg_pass& pass) {
  for_each_row(pass, {"smoke", "ci"}, kSmall, [](const Case& c) {
    Case other = c;
    other.seed = c.seed + 1;
    Outputs want_a = run(c), want_b = run(other);
    Problem a(c), b(other);
    Outputs got_a, got_b;
    std::thread thread([&] { got_b = run(b); });
    got_a = run(a);
    thread.join();
    EXPECT_EQ(first_difference(got_a, want_a), "");
    EXPECT_EQ(first_difference(got_b, want_b), "");
    run(b);
    for (const auto& [name, values] : want_a) EXPECT_TRUE(same_bits(a.read(name), values)) << name << " after a second call";
  });
}

// Nothing is remembered by address: 200 calls a case on the same memory with other values of the same shape.
void reused_memory(const thalweg_pass& pass) {
  std::vector<Case> cases = pass_cases(pass, {"smoke"}, 1e7);
  for (Case& c : cases) {
    c.threads = 1;
    Problem problem(c);
    std::map<std::string, Values> first = problem.inputs();
    Outputs want = run(problem);
    Case other = c;
    other.seed = 1234;
    Problem second(other);
    std::map<std::string, Values> changed = second.inputs();
    if (is_packed(c) && !c.has("q_lens") && !c.has("k_lens")) {  // other borders of equal count
      Values& cu = changed.at("cu_seqlens");
      for (size_t i = 1; i + 1 < cu.data.size(); ++i) cu.data[i] = std::floor(cu.data[i] / 2);
      second.set("cu_seqlens", cu);
    }
    Outputs want_other = run(second);
    for (int i = 0; i < 200; ++i) {
      for (const auto& [name, values] : i % 2 ? first : changed) problem.set(name, values);
      problem.poison_outputs();
      ASSERT_EQ(first_difference(run(problem), i % 2 ? want : want_other), "") << i << ": " << c.text();
    }
  }
}

// ---- Batch ----

Values permuted(const thalweg_field& field, const Values& v, const std::vector<int64_t>& order) {
  int axis = std::max(axis_of(field, "B"), axis_of(field, "N"));
  return axis == 0 ? take(v, 0, order) : v;
}

void batch_order(const thalweg_pass& pass) {
  if (axis_of(*tt::tensor_fields(pass)[0], "B") < 0) return;
  for_each_row(pass, kSets, kSmall, [&](const Case& c) {
    int64_t B = c.size("B");
    if (is_packed(c) || B < 2 || B > 16 || c.has("chunk_states")) return;
    Problem problem(c);
    Outputs want = run(problem);
    std::vector<int64_t> order;
    for (int64_t b = 0; b < B; ++b) order.push_back(B - 1 - b);
    std::map<std::string, Values> inputs;
    for (const auto& [name, values] : problem.inputs()) inputs[name] = permuted(*tt::find_field(pass, name), values, order);
    Outputs got = run_with(c, inputs);
    for (const auto& [name, values] : want) {
      const thalweg_field& field = *tt::find_field(pass, name);
      if (is_summed(field)) continue;
      EXPECT_TRUE(same_bits(got[name], permuted(field, values, order))) << name;
    }
  });
}

// Sequence 0 alone gives what it gives in the batch, and a copy of it beside it gives the same bits.
void identical_sequences(const thalweg_pass& pass) {
  if (axis_of(*tt::tensor_fields(pass)[0], "B") < 0) return;
  for_each_row(pass, {"smoke", "ci"}, kSmall, [&](const Case& c) {
    if (is_packed(c) || c.size("B") != 1 || c.has("chunk_states")) return;
    Problem problem(c);
    Outputs want = run(problem);
    Case three = with_sizes(c, {{"B", 3}, {"N", 3}});
    std::map<std::string, Values> inputs;
    for (const auto& [name, values] : problem.inputs()) inputs[name] = permuted(*tt::find_field(pass, name), values, {0, 0, 0});
    Outputs got = run_with(three, inputs);
    for (const auto& [name, values] : want) {
      const thalweg_field& field = *tt::find_field(pass, name);
      if (is_summed(field)) continue;
      EXPECT_TRUE(same_bits(got[name], permuted(field, values, {0, 0, 0}))) << name;
    }
  });
}

// NaN in one sequence (values, gates, states) leaves every other sequence as it was.
void nan_stays(const thalweg_pass& pass) {
  for_each_row(pass, {"smoke", "ci"}, kSmall, [&](const Case& c) {
    const int64_t sequences = c.size("N") > 0 ? c.size("N") : c.size("M");
    if (sequences < 2 || sequences > 16 || c.has("chunk_states") || c.has("read_slots") || c.has("write_slots")) return;
    Problem problem(c);
    Outputs want = run(problem);
    std::vector<double> cu;
    if (is_packed(c)) cu = problem.inputs().at("cu_seqlens").data;
    int64_t sick = 0;
    if (!cu.empty())
      while (sick + 1 < sequences && cu[size_t(sick)] == cu[size_t(sick + 1)]) ++sick;
    std::map<std::string, Values> inputs = problem.inputs();
    Part part;
    for (auto& [name, values] : inputs) {
      const thalweg_field& field = *tt::find_field(pass, name);
      if (!tt::is_integer(tt::dtype_in(c, field)) && sequence_part(problem, field, sick, &part))
        assign(&values, part.axis, part.begin, part.end, [](double) { return std::nan(""); });
    }
    Outputs got = run_with(c, inputs);
    for (auto& [name, values] : want) {
      const thalweg_field& field = *tt::find_field(pass, name);
      if (is_summed(field) || !sequence_part(problem, field, sick, &part)) continue;
      assign(&values, part.axis, part.begin, part.end, [](double) { return 0.0; });
      assign(&got[name], part.axis, part.begin, part.end, [](double) { return 0.0; });
      EXPECT_TRUE(same_bits(got[name], values)) << name << ": " << first_difference({{name, got[name]}}, {{name, values}});
    }
  });
}

// NaN is NaN whatever its bits: an input of NaN with every bit set does what an input of the usual NaN does.
void nan_of_any_bits(const thalweg_pass& pass) {
  const double every_bit = std::bit_cast<double>(uint64_t(-1) >> 1);
  for_each_row(pass, {"smoke"}, kSmall, [&](const Case& c) {
    Problem problem(c);
    for (const auto& [name, values] : problem.inputs()) {
      if (tt::is_integer(tt::dtype_in(c, *tt::find_field(pass, name)))) continue;
      auto run_on = [&](double nan) {
        std::map<std::string, Values> inputs = problem.inputs();
        for (double& x : inputs[name].data) x = nan;
        return run_with(c, inputs);
      };
      Outputs usual = run_on(std::nan("")), full = run_on(every_bit);
      for (auto& [output, wanted] : usual)
        for (size_t i = 0; i < wanted.data.size(); ++i)
          ASSERT_EQ(std::isnan(full[output].data[i]), std::isnan(wanted.data[i])) << output << "[" << i << "] of NaN in " << name;
    }
  });
}

// ---- Sequences ----

void packed_is_separate(const thalweg_pass& pass) {
  if (!tt::find_field(pass, "cu_seqlens")) return;
  int tried = 0;
  for_each_row(pass, kSets, kSmall, [&](const Case& c) {
    if (!is_packed(c) || c.size("N") > 20) return;
    Problem packed(c);
    Outputs whole = run(packed);
    std::vector<double> cu = packed.inputs().at("cu_seqlens").data;
    for (int64_t n = 0; n + 1 < int64_t(cu.size()); ++n) {
      Case one = sequence_case(packed, n);
      bool taken = true;
      Outputs alone = run_with(one, sequence_inputs(packed, n), &taken);
      if (!taken) continue;
      ++tried;
      for (const auto& [name, values] : alone) {
        const thalweg_field& field = *tt::find_field(pass, name);
        Part part;
        if (is_summed(field) || !sequence_part(packed, field, n, &part)) continue;
        EXPECT_EQ(out_of_limit(one, {{name, cut(whole.at(name), part.axis, part.begin, part.end)}}, {{name, values}}), "") << "sequence " << n;
      }
    }
    // Rows that belong to no sequence: 0; of a list of keys, its scores and a log of a sum, what an empty list has.
    for (const auto& [name, values] : whole) {
      const thalweg_field& field = *tt::find_field(pass, name);
      int64_t end = cu.empty() ? 0 : int64_t(cu.back());
      if (axis_of(field, "T") != 1) continue;
      Values rest = cut(values, 1, end, values.shape[1]);
      const bool log = name == "scores" || name == "lse";
      const double empty = tt::is_integer(tt::dtype_in(c, field)) ? -1 : log ? -INFINITY : 0;
      for (double x : rest.data) ASSERT_EQ(x, empty) << name;
    }
  });
  EXPECT_GT(tried, 0);
}

// Every split point, the state carried by final_state -> initial_state.
void split_and_carry(const thalweg_pass& pass) {
  const thalweg_field* out = tt::find_field(pass, "final_state");
  if (!out || out->role != THALWEG_OUT) return;
  int tried = 0;
  for_each_row(pass, {"smoke", "ci"}, 2e7, [&](const Case& c) {
    int64_t T = c.size("T");
    if (is_packed(c) || T < 2 || !c.has("final_state") || !c.has("initial_state") || c.size("B") == 0) return;
    if (tt::dtype_in(c, *out) != tt::dtype_in(c, *tt::find_field(pass, "initial_state"))) return;
    Case whole_case = with(c, {{"-chunk_states", ""}});
    Problem problem(whole_case);
    Outputs whole = run(problem);
    for (int64_t at = 1; at < T; at += T > 160 ? 7 : 1) {
      Outputs parts[2];
      bool taken = true;
      for (int half = 0; half < 2 && taken; ++half) {
        int64_t begin = half ? at : 0, end = half ? T : at;
        std::map<std::string, Values> inputs;
        for (const auto& [name, values] : problem.inputs()) {
          const thalweg_field& field = *tt::find_field(pass, name);
          inputs[name] = axis_of(field, "T") == 1 ? cut(values, 1, begin, end) : values;
        }
        if (half) inputs["initial_state"] = parts[0].at("final_state");
        parts[half] = run_with(with_sizes(whole_case, {{"T", end - begin}}), inputs, &taken);
      }
      if (!taken) continue;
      ++tried;
      // A state rounded on the way costs as much as one more rounding of an output.
      double times = tt::dtype_in(c, *out) == THALWEG_F32 || tt::dtype_in(c, *out) == THALWEG_F64 ? 1 : 2;
      Outputs joined;
      for (const auto& [name, values] : parts[0])
        joined[name] = name == "final_state" ? parts[1].at(name) : join(values, parts[1].at(name), 1);
      ASSERT_EQ(out_of_limit(c, joined, whole, times), "") << "split before token " << at;
    }
  });
  EXPECT_GT(tried, 0);
}

// ---- Causality, by bits ----

bool flows_back(const thalweg_field& field) { return std::string_view(field.name).starts_with("d_"); }

// Outputs that later tokens must not reach: all of a forward; d_q of a backward.
bool causal_output(const thalweg_pass& pass, const thalweg_field& field) {
  if (!is_per_token(field) || !tt::is_output(field)) return false;
  return std::string_view(pass.name) != "bwd" || std::string_view(field.name) == "d_q";
}

void causality(const thalweg_pass& pass) {
  for_each_row(pass, {"smoke", "ci"}, 2e7, [&](const Case& c) {
    int64_t T = c.size("T");
    if (is_packed(c) || T < 2 || c.size("B") > 2 || c.has("write_slots")) return;
    Problem problem(c);
    Outputs want = run(problem);
    std::map<std::string, Values> inputs = problem.inputs();
    for (const auto& [changed, original] : inputs) {
      const thalweg_field& field = *tt::find_field(pass, changed);
      if (!is_per_token(field) || tt::is_integer(tt::dtype_in(c, field))) continue;
      bool back = flows_back(field);
      for (int64_t t : {int64_t(0), T / 3, T / 2 + 1, T - 1}) {
        if (t >= T) continue;
        Values other = original;
        assign(&other, 1, t, t + 1, [&](double x) { return changed == "g" ? x - 3 : 1.5 * x + 0.25; });
        problem.set(changed, other);
        problem.poison_outputs();
        Outputs got = run(problem);
        for (const auto& [name, values] : want) {
          const thalweg_field& output = *tt::find_field(pass, name);
          bool later = back && is_per_token(output), earlier = !back && causal_output(pass, output);
          if (!later && !earlier) continue;
          int64_t begin = later ? t + 1 : 0, end = later ? T : t;
          EXPECT_TRUE(same_bits(cut(got.at(name), 1, begin, end), cut(values, 1, begin, end)))
              << changed << " of token " << t << " reached " << name << (later ? " of a later token" : " of an earlier token");
        }
      }
      problem.set(changed, original);
    }
  });
}

// Tokens behind the end change nothing before it.
void appended_tokens(const thalweg_pass& pass) {
  for_each_row(pass, {"smoke", "ci"}, 2e7, [&](const Case& c) {
    int64_t T = c.size("T");
    if (is_packed(c) || T < 1 || c.size("B") > 2 || c.has("write_slots")) return;
    if (c.has("causal") || c.has("q_lens")) return;  // the last query sees the last key: more queries move the diagonal
    Case base = with(c, {{"-chunk_states", ""}});
    for (int64_t more : {1, 5, 64}) {
      Problem longer(with_sizes(base, {{"T", T + more}}));
      size_t bytes;
      if (pass.workspace(longer.args(), &longer.context(), &bytes) != THALWEG_OK) continue;
      std::map<std::string, Values> inputs;
      for (const auto& [name, values] : longer.inputs()) inputs[name] = axis_of(*tt::find_field(pass, name), "T") == 1 ? cut(values, 1, 0, T) : values;
      Outputs got = run(longer), want = run_with(base, inputs);
      for (const auto& [name, values] : want)
        if (causal_output(pass, *tt::find_field(pass, name))) {
          EXPECT_TRUE(same_bits(cut(got.at(name), 1, 0, T), values)) << name << " with " << more << " tokens more";
        }
    }
  });
}

// ---- Optional tensors, absent one by one and in pairs ----

// Verified, or refused by an argument's name; `verified` counts the former.
void check_absent(const Case& c, int* verified) {
  tt::Verdict verdict = tt::verify(c);
  if (verdict.passed()) {
    ++*verified;
    return;
  }
  bool refusal = verdict.reason.starts_with(tt::pass_name(*c.pass) + ": ") && verdict.reason.find("got ") != std::string::npos;
  bool missing = verdict.reason.find(": missing, expected") != std::string::npos || verdict.reason.find(": needs ") != std::string::npos;
  EXPECT_TRUE(refusal || missing || verdict.status == "skipped") << verdict.reason << "\n  thalweg verify " << c.text();
}

void optional_tensors(const thalweg_pass& pass) {
  int verified = 0;
  std::vector<Case> cases = pass_cases(pass, {"smoke", "ci"}, 1e7);
  std::stable_sort(cases.begin(), cases.end(), [](const Case& a, const Case& b) { return a.options.size() > b.options.size(); });
  for (size_t i = 0; i < cases.size() && i < 3; ++i)
    for (const std::string& row : kernel_rows(pass)) {
      Case c = with_kernel(cases[i], row);
      if (!takes(c)) continue;
      std::vector<std::string> names;
      for (const thalweg_field* field : tt::tensor_fields(pass))
        if (field->optional && c.has(field->name)) names.push_back(field->name);
      for (size_t a = 0; a < names.size(); ++a)
        for (size_t b = a; b < names.size(); ++b) check_absent(with(c, {{"-" + names[a], ""}, {"-" + names[b], ""}}), &verified);
    }
  EXPECT_GT(verified, 0);
}

}  // namespace

void register_property_tests() {
  struct Property {
    const char* name;
    void (*body)(const thalweg_pass&);
  };
  for (Property p : {Property{"thread_counts", thread_counts}, {"repeats", repeats}, {"hundred_repeats", hundred_repeats}, {"arena", arena},
                     {"two_at_once", two_at_once}, {"reused_memory", reused_memory}, {"batch_order", batch_order},
                     {"identical_sequences", identical_sequences}, {"nan_stays", nan_stays}, {"nan_of_any_bits", nan_of_any_bits}, {"packed_is_separate", packed_is_separate},
                     {"split_and_carry", split_and_carry}, {"causality", causality}, {"appended_tokens", appended_tokens},
                     {"optional_tensors", optional_tensors}})
    register_per_pass("properties", p.name, p.body);
}

}  // namespace thalweg::tests
