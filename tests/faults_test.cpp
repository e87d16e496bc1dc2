// Kinds of faults that users of such operators have met, for every pass they can touch. Those of one
// operator alone are in faults_<operator>_test.cpp; layouts in strides_test.cpp; causality, repeats,
// aliasing in properties_test.cpp; gradients in gradients_test.cpp.
#include <sys/mman.h>

#include <chrono>
#include <cmath>

#include "testing/case.h"
#include "tests/properties.h"

namespace thalweg::tests {
namespace {

namespace tt = thalweg::testing;

std::vector<const thalweg_pass*> passes_named(const std::string& name) {
  std::vector<const thalweg_pass*> list;
  for (const thalweg_pass* pass : all_passes())
    if (name == pass->name) list.push_back(pass);
  return list;
}

std::vector<const thalweg_pass*> passes_with(const std::string& field) {
  std::vector<const thalweg_pass*> list;
  for (const thalweg_pass* pass : all_passes())
    if (tt::find_field(*pass, field)) list.push_back(pass);
  return list;
}

// The smoke case with the most tensors, small, neither packed nor empty.
Case rich_case(const thalweg_pass& pass, thalweg_dtype dtype = THALWEG_F32) {
  std::vector<Case> cases = pass_cases(pass, {"smoke", "ci"}, 1e7);
  const Case* best = nullptr;
  for (const Case& c : cases) {
    if (c.dtype != dtype || is_packed(c) || tt::count(tt::shape_in(c, *tt::tensor_fields(pass)[0])) == 0) continue;
    if (!best || c.options.size() > best->options.size()) best = &c;
  }
  if (!best) throw std::logic_error(tt::pass_name(pass) + ": no smoke case");
  return with(*best, {{"-chunk_states", ""}, {"-q_lens", ""}, {"-k_lens", ""}});
}

void expect_verified(const Case& c) {
  for (const tt::Verdict& verdict : tt::verify_all_kernels(c))
    EXPECT_TRUE(verdict.passed() || verdict.status == "skipped") << verdict.reason << "\n  thalweg verify " << verdict.case_text;
}

// Expects an error of this argument before anything is written.
void expect_refused(Problem& problem, const std::string& name, const std::string& words) {
  const thalweg_pass& pass = *problem.spec_case().pass;
  ASSERT_EQ(problem.call(), THALWEG_INVALID_ARGUMENT) << "expected a refusal of " << name << ": " << words;
  std::string text = thalweg_last_error();
  EXPECT_TRUE(text.starts_with(tt::pass_name(pass) + ": " + name + ": ")) << text;
  for (const std::string& word : tt::split(words, '|')) EXPECT_NE(text.find(word), std::string::npos) << text;
  EXPECT_NE(text.find("got "), std::string::npos) << text;
  EXPECT_NE(text.find("expected "), std::string::npos) << text;
  EXPECT_EQ(problem.check_untouched(), "");
}

Values numbers(const std::vector<double>& list, std::vector<int64_t> shape = {}) {
  if (shape.empty()) shape = {int64_t(list.size())};
  return {shape, list};
}

// ---- Boundary tiles ----

TEST(Faults, BoundaryLengthsAgainstAnUnreadablePage) {
  for (const thalweg_pass* pass : all_passes()) {
    Case base = rich_case(*pass);
    const char* length = base.sizes.count("T") ? "T" : "M";
    if (std::string_view(pass->name) == "decode") continue;
    for (int64_t n : {1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 257})
      for (const char* guard : {"page", "front"}) expect_verified(with(with_sizes(base, {{length, n}, {"B", 1}, {"N", 1}}), {{"guard", guard}}));
  }
}

TEST(Faults, OddWidthsAgainstAnUnreadablePage) {
  for (const thalweg_pass* pass : all_passes())
    for (thalweg_dtype dtype : {THALWEG_F32, THALWEG_BF16})
      for (int64_t width : {1, 3, 17, 60, 100}) {
        Case c = rich_case(*pass);
        c.dtype = dtype;
        for (const char* size : {"K", "V", "D"})
          if (c.sizes.count(size)) c.sizes[size] = width + (size[0] == 'V' ? 4 : 0);
        if (c.sizes.count("T")) c.sizes["T"] = std::min<int64_t>(c.sizes["T"], 70);
        expect_verified(with(c, {{"guard", "page"}}));
      }
}

TEST(Faults, LengthsOfTwoLongSequences) {
  for (const thalweg_pass* pass : passes_with("cu_seqlens")) {
    Case c = with(rich_case(*pass), {{"varlen", "640+783"}});
    c = with_sizes(c, {{"B", 1}, {"N", 2}, {"T", 1423}});
    expect_verified(c);
  }
}

// ---- Many sequences, hang ----

std::string ones(int64_t n) {
  std::string text = "1";
  for (int64_t i = 1; i < n; ++i) text += "+1";
  return text;
}

TEST(Faults, ManyOneTokenSequences) {
  for (const thalweg_pass* pass : passes_with("cu_seqlens")) {
    Case c = with_sizes(with(rich_case(*pass), {{"varlen", ones(2050)}}), {{"B", 1}, {"N", 2050}, {"T", 2050}});
    if (c.sizes.count("HV")) c = with_sizes(c, {{"H", 16}, {"HV", 32}, {"K", 8}, {"V", 8}});
    expect_verified(c);
  }
}

TEST(Faults, OneLongManyShortAndEmptySequencesReturn) {
  auto start = std::chrono::steady_clock::now();
  for (const thalweg_pass* pass : passes_with("cu_seqlens")) {
    std::string lengths = "0+5000";
    for (int i = 0; i < 300; ++i) lengths += i % 3 ? "+1" : "+0";
    Case c = with_sizes(with(rich_case(*pass), {{"varlen", lengths}}), {{"B", 1}, {"N", 302}, {"T", 5200}});
    if (c.sizes.count("HV")) c = with_sizes(c, {{"H", 1}, {"HV", 2}, {"K", 16}, {"V", 16}});
    for (const std::string& row : kernel_rows(*pass)) {
      Case forced = with_kernel(c, row);
      if (!takes(forced)) continue;
      Problem problem(forced);
      if (problem.inputs().count("initial_state")) {
        Values zero = problem.inputs().at("initial_state");
        for (double& x : zero.data) x = 0;
        problem.set("initial_state", zero);
      }
      expect_oracle(problem);
    }
  }
  EXPECT_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), 120);
}

// ---- Malformed cu_seqlens ----

TEST(Faults, MalformedBorders) {
  for (const thalweg_pass* pass : passes_with("cu_seqlens"))
    for (const char* dtype : {"i32", "i64"}) {
      Case c = with_sizes(with(rich_case(*pass), {{"varlen", "3+5"}, {"cu_seqlens", dtype}}), {{"B", 1}, {"N", 2}, {"T", 8}});
      Problem problem(c);
      run(problem);
      struct Bad { std::vector<double> cu; const char* words; };
      for (const Bad& bad : {Bad{{0, 5, 3}, "5|3"}, {{1, 3, 8}, "1"}, {{0, 3, 9}, "9|8"}, {{0, -1, 8}, "-1"}, {{-1, 3, 8}, "-1"},
                             {{0, 2147483647, 8}, "2147483647"}, {{0, 3, -2147483648.0}, "-2147483648"}}) {
        problem.set("cu_seqlens", numbers(bad.cu));
        problem.poison_outputs();
        expect_refused(problem, "cu_seqlens", bad.words);
      }
      problem.set("cu_seqlens", numbers({0, 3, 6}));  // last < T: rows past it are zero
      problem.poison_outputs();
      expect_oracle(problem);
      problem.set("cu_seqlens", numbers({0, 0, 0}));
      problem.poison_outputs();
      expect_oracle(problem);
    }
}

TEST(Faults, PackedBatchOfTwoIsRefused) {
  for (const thalweg_pass* pass : passes_with("cu_seqlens")) {
    Case c = with_sizes(with(rich_case(*pass), {{"varlen", "3+5"}}), {{"B", 2}, {"N", 2}, {"T", 8}});
    Problem problem(c);
    expect_refused(problem, "cu_seqlens", "B|2|1");
  }
}

TEST(Faults, NumberOfSequencesOfTheStates) {
  for (const thalweg_pass* pass : passes_with("cu_seqlens")) {
    Case c = with_sizes(with(rich_case(*pass), {{"-varlen", ""}}), {{"B", 2}, {"N", 3}});
    bool any = false;  // a tensor that says how many there are
    for (const thalweg_field* field : tt::tensor_fields(*pass)) any = any || (tt::is_present(c, *field) && axis_of(*field, "N") == 0);
    if (!any) continue;
    Problem problem(c);
    ASSERT_EQ(problem.call(), THALWEG_INVALID_ARGUMENT) << c.text();
    std::string text = thalweg_last_error();
    EXPECT_NE(text.find("N, got 3"), std::string::npos) << text;
    EXPECT_EQ(problem.check_untouched(), "");
  }
}

// ---- Empty ----

TEST(Faults, EverySizeThatMayBeZero) {
  for (const thalweg_pass* pass : all_passes()) {
    Case base = rich_case(*pass);
    for (const char* size : {"B", "T", "N", "M"}) {
      if (!base.sizes.count(size)) continue;
      Case c = with_sizes(base, {{size, 0}});
      if (size[0] == 'B') c.sizes["N"] = 0;
      if (size[0] == 'N' && c.sizes.count("B")) continue;          // N goes with B
      if (size[0] == 'M' && std::string_view(pass->name) == "decode") c.sizes["N"] = 0;
      if (c.has("write_slots") || c.has("read_slots")) c = with(c, {{"-write_slots", ""}, {"-read_slots", ""}});
      expect_verified(c);
    }
    if (!tt::find_field(*pass, "cu_seqlens")) continue;
    expect_verified(with_sizes(with(base, {{"varlen", ""}}), {{"B", 1}, {"N", 0}, {"T", 5}}));
    expect_verified(with_sizes(with(base, {{"varlen", ""}}), {{"B", 1}, {"N", 0}, {"T", 0}}));
    expect_verified(with_sizes(with(base, {{"varlen", "0+0+0"}}), {{"B", 1}, {"N", 3}, {"T", 0}}));
    expect_verified(with_sizes(with(base, {{"varlen", "0+7+0+0+2+0"}}), {{"B", 1}, {"N", 6}, {"T", 9}}));
  }
}

// ---- State pool ----

// A decode of N sequences, T tokens, M slots, with slots given.
Case pool_case(const thalweg_pass& pass, int64_t N, int64_t T, int64_t M, bool write) {
  Case c = with(rich_case(pass), {{"read_slots", ""}, {"-write_slots", ""}});
  if (write) c = with(c, {{"write_slots", ""}});
  return with_sizes(c, {{"N", N}, {"T", T}, {"M", M}});
}

void set_slots(Problem& problem, const std::vector<double>& read, const std::vector<double>& write = {}) {
  problem.set("read_slots", numbers(read));
  if (!write.empty()) problem.set("write_slots", numbers(write, {int64_t(read.size()), int64_t(write.size() / read.size())}));
  problem.poison_outputs();
}

TEST(StatePool, RefusedSlots) {
  for (const thalweg_pass* pass : passes_named("decode")) {
    Problem problem(pool_case(*pass, 3, 1, 6, false));
    run(problem);
    set_slots(problem, {0, 6, 1}), expect_refused(problem, "read_slots", "6");
    set_slots(problem, {0, -2, 1}), expect_refused(problem, "read_slots", "-2");
    set_slots(problem, {0, 2147483647, 1}), expect_refused(problem, "read_slots", "2147483647");
    set_slots(problem, {4, 2, 4}), expect_refused(problem, "read_slots", "4");  // written twice
    Problem writing(pool_case(*pass, 2, 2, 6, true));
    run(writing);
    set_slots(writing, {0, 1}, {2, 0, 3, 6}), expect_refused(writing, "write_slots", "6");
    set_slots(writing, {0, 1}, {2, 0, 3, -2}), expect_refused(writing, "write_slots", "-2");
    set_slots(writing, {0, 1}, {2, 0, 2, 1}), expect_refused(writing, "write_slots", "2");  // written twice
    set_slots(writing, {0, 1}, {2, 2, 3, 1}), expect_refused(writing, "write_slots", "2");
    set_slots(writing, {0, 1}, {2, 1, 3, 4}), expect_refused(writing, "write_slots", "1");  // read by the other
  }
}

TEST(StatePool, OneSlotReadByTwoAndWrittenByNone) {
  for (const thalweg_pass* pass : passes_named("decode")) {
    Problem problem(pool_case(*pass, 2, 2, 6, true));
    set_slots(problem, {4, 4}, {2, 0, 3, 1});
    expect_oracle(problem);
  }
}

TEST(StatePool, PaddingRows) {
  for (const thalweg_pass* pass : passes_named("decode"))
    for (const std::string& row : kernel_rows(*pass)) {
      Case c = with_kernel(pool_case(*pass, 3, 1, 5, false), row);
      if (!takes(c)) continue;
      Problem problem(c);
      std::string output = problem.outputs().back();
      for (std::vector<double> slots : {std::vector<double>{-1, -1, -1}, {-1, 0, -1}, {3, -1, 0}}) {
        set_slots(problem, slots);
        expect_oracle(problem);
        Values state = problem.read("state"), o = problem.read(output);
        for (int64_t n = 0; n < 3; ++n) {
          if (slots[size_t(n)] >= 0) continue;
          Values padding = cut(o, 0, n, n + 1);
          for (double x : padding.data) ASSERT_EQ(x, 0);
        }
        for (int64_t m = 0; m < 5; ++m)
          if (std::find(slots.begin(), slots.end(), double(m)) == slots.end()) {
            EXPECT_TRUE(same_bits(cut(state, 0, m, m + 1), cut(problem.inputs().at("state"), 0, m, m + 1))) << "slot " << m;
          }
      }
      // NaN in a slot that nobody reads, and in the tokens of a padding row, stays there.
      Values state = problem.inputs().at("state");
      assign(&state, 0, 4, 5, [](double) { return std::nan(""); });
      problem.set("state", state);
      for (const auto& [name, values] : std::map<std::string, Values>(problem.inputs())) {
        if (!is_per_token(*tt::find_field(*pass, name))) continue;
        Values sick = values;
        assign(&sick, 0, 1, 2, [](double) { return std::nan(""); });
        problem.set(name, sick);
      }
      set_slots(problem, {3, -1, 0});
      expect_oracle(problem);
    }
}

// Three draft tokens with the state kept after each; going on from any of them equals never having drafted.
TEST(StatePool, RollBackEqualsNeverHavingDrafted) {
  for (const thalweg_pass* pass : passes_named("decode"))
    for (const std::string& row : kernel_rows(*pass)) {
      Case c = with_kernel(pool_case(*pass, 1, 3, 4, true), row);
      if (!takes(c)) continue;
      Problem draft(c);
      set_slots(draft, {0}, {1, 2, 3});
      Outputs drafted = run(draft);
      for (int64_t accepted = 1; accepted <= 3; ++accepted) {
        Problem plain(with_kernel(pool_case(*pass, 1, accepted, 4, false), row));
        for (const auto& [name, values] : draft.inputs()) {
          const thalweg_field& field = *tt::find_field(*pass, name);
          if (name != "read_slots" && name != "write_slots") plain.set(name, is_per_token(field) ? cut(values, 1, 0, accepted) : values);
        }
        set_slots(plain, {0});
        Outputs stepped = run(plain);
        EXPECT_TRUE(same_bits(cut(drafted.at("state"), 0, accepted, accepted + 1), cut(stepped.at("state"), 0, 0, 1)))
            << row << ", " << accepted << " tokens: " << c.text();
        EXPECT_TRUE(same_bits(cut(drafted.at("state"), 0, 0, 1), cut(draft.inputs().at("state"), 0, 0, 1))) << "the slot read was written";
      }
    }
}

// Slot 4096 of a pool of 2^31 elements and more, of which only the touched pages exist.
TEST(StatePool, SlotBeyondTwoToTheThirtyFirst) {
  for (const thalweg_pass* pass : passes_named("decode"))
    for (const std::string& row : kernel_rows(*pass)) {
      Case c = with_kernel(pool_case(*pass, 1, 1, 1, false), row);
      if (tt::is_cuda_row(*pass, row) || !takes(c)) continue;  // the pool here is the host's alone; the edge cases have one
      Problem problem(c);
      set_slots(problem, {0});
      Outputs want = run(problem);
      thalweg_tensor small = problem.tensor("state");
      thalweg_tensor& pool = problem.tensor("state");
      size_t bytes = thalweg_dtype_bytes(pool.dtype);
      pool.shape[0] = 4097;
      pool.stride[0] = int64_t(1) << 19;  // slot 4096 starts at 2^31
      size_t total = (size_t(4096) << 19) * bytes + size_t(tt::count(small)) * bytes;
      void* memory = mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      ASSERT_NE(memory, MAP_FAILED);
      pool.data = memory;
      thalweg_tensor slot = small;
      slot.data = static_cast<char*>(memory) + (size_t(4096) << 19) * bytes;
      tt::write_values(slot, problem.inputs().at("state"));
      set_slots(problem, {4096});
      ASSERT_EQ(problem.call(), THALWEG_OK) << thalweg_last_error();
      EXPECT_TRUE(same_bits(tt::read_values(slot), want.at("state"))) << row;
      EXPECT_TRUE(same_bits(problem.read(problem.outputs().back()), want.at(problem.outputs().back()))) << row;
      munmap(memory, total);
    }
}

// ---- Unsupported input ----

TEST(Faults, MisspeltTokensOfACase) {
  for (const thalweg_pass* pass : all_passes()) {
    std::string text = rich_case(*pass).text();
    for (const char* token : {"sclae=1", "B2x", "initial_stat", "Q5", "f8", "kernel", "varlen=3+x", "seed=-1", "threads=z", "use_gate=2"}) {
      std::string spoiled = text + "," + token;
      if (std::string_view(token) == "kernel") continue;
      try {
        Case c = tt::parse_case(spoiled);
        ADD_FAILURE() << spoiled << " was taken as " << c.text();
      } catch (const std::invalid_argument& e) {
        std::string what = e.what();
        EXPECT_NE(what.find(std::string(token).substr(0, 3)), std::string::npos) << what;
        EXPECT_NE(what.find("expected"), std::string::npos) << what;
      }
    }
  }
  EXPECT_THROW(tt::parse_case("no_such.pass:f32"), std::invalid_argument);
  EXPECT_THROW(tt::parse_case(""), std::invalid_argument);
}

}  // namespace
}  // namespace thalweg::tests
