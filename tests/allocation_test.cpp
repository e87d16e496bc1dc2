// No allocation in steady state: this program's operator new counts. Left out of sanitizer builds, which
// bring their own.
#include <atomic>
#include <cstdlib>
#include <new>

#include "tests/support.h"

namespace {

std::atomic<int64_t> allocations{0};

void* counted(size_t bytes, size_t alignment) {
  ++allocations;
  void* memory = alignment > 16 ? std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment) : std::malloc(bytes ? bytes : 1);
  if (!memory) throw std::bad_alloc();
  return memory;
}

}  // namespace

#pragma GCC diagnostic ignored "-Wmismatched-new-delete"  // both sides are replaced here, and match
void* operator new(size_t bytes) { return counted(bytes, 1); }
void* operator new(size_t bytes, std::align_val_t alignment) { return counted(bytes, size_t(alignment)); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }

namespace thalweg::tests {
namespace {

TEST(Allocation, NoneInSteadyState) {
  for (const thalweg_pass* pass : all_passes())
    for (const Case& base : pass_cases(*pass, {"smoke"}, 3e7))
      for (const std::string& row : kernel_rows(*pass)) {
        Case c = with_kernel(base, row);
        if (testing::is_cuda_row(*pass, row) || !takes(c)) continue;
        Problem problem(c);
        thalweg_context ctx{};
        ctx.kernel = row.c_str();
        ctx.num_threads = 2;
        for (int i = 0; i < 2; ++i) ASSERT_EQ(pass->call(problem.args(), &ctx), THALWEG_OK) << thalweg_last_error();
        int64_t before = allocations;
        for (int i = 0; i < 5; ++i) pass->call(problem.args(), &ctx);
        EXPECT_EQ(allocations - before, 0) << "  thalweg verify " << c.text();
      }
}

TEST(Allocation, ErrorTextsStayInTheirBuffer) {
  const thalweg_pass* pass = all_passes()[0];
  std::vector<char> args(pass->args_size, 0);
  *reinterpret_cast<size_t*>(args.data()) = pass->args_size;
  pass->call(args.data(), nullptr);
  const char* text = thalweg_last_error();
  std::string first = text;
  EXPECT_NE(first, "");
  pass->call(nullptr, nullptr);
  EXPECT_EQ(thalweg_last_error(), text);  // the same place, other words
  EXPECT_NE(first, text);
}

}  // namespace
}  // namespace thalweg::tests
