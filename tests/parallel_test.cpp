// The thread pool, threads lent by a host, arenas, fork.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "tests/support.h"
#include "thalweg/core/exec.h"
#include "thalweg/cpu/parallel.h"

namespace thalweg::tests {
namespace {

struct Counts {
  std::vector<std::atomic<int>> hits;
  explicit Counts(int64_t n) : hits(size_t(n)) {}
};

void hit(void* arg, int64_t i) { ++static_cast<Counts*>(arg)->hits[size_t(i)]; }

void expect_each_once(const Counts& counts) {
  for (size_t i = 0; i < counts.hits.size(); ++i) ASSERT_EQ(counts.hits[i].load(), 1) << i;
}

// Bodies are as many as the threads of a call: the pool keeps a thread for each.
TEST(Pool, RunsEveryBodyOnce) {
  for (int64_t n : {0, 1, 2, 3, 7, 8}) {
    Counts counts(n);
    pool_parallel_for(nullptr, n, hit, &counts);
    expect_each_once(counts);
  }
}

TEST(Pool, NestedCallsRun) {
  static Counts counts(8 * 8);
  pool_parallel_for(nullptr, 8, [](void*, int64_t i) {
    struct Inner { int64_t base; } inner{i * 8};
    pool_parallel_for(nullptr, 8, [](void* arg, int64_t j) { hit(&counts, static_cast<Inner*>(arg)->base + j); }, &inner);
  }, nullptr);
  expect_each_once(counts);
}

TEST(Pool, SeveralCallersAtOnce) {
  std::vector<std::thread> callers;
  std::vector<std::unique_ptr<Counts>> all;
  for (int c = 0; c < 6; ++c) all.push_back(std::make_unique<Counts>(8));
  for (int c = 0; c < 6; ++c)
    callers.emplace_back([&, c] {
      for (int64_t round = 0; round < 20; ++round) {
        Counts counts(8);
        pool_parallel_for(nullptr, 8, hit, &counts);
        expect_each_once(counts);
      }
      pool_parallel_for(nullptr, 8, hit, all[size_t(c)].get());
    });
  for (std::thread& caller : callers) caller.join();
  for (auto& counts : all) expect_each_once(*counts);
}

TEST(Pool, WorksAfterFork) {
  Counts before(8);
  pool_parallel_for(nullptr, 8, hit, &before);
  pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(20);
    Counts counts(8);
    pool_parallel_for(nullptr, 8, hit, &counts);
    for (auto& n : counts.hits)
      if (n != 1) _exit(1);
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  Counts after(8);
  pool_parallel_for(nullptr, 8, hit, &after);
  expect_each_once(after);
}

TEST(Pool, ManyShortCalls) {
  for (int round = 0; round < 5000; ++round) {
    std::atomic<int> sum{0};
    pool_parallel_for(nullptr, 2, [](void* arg, int64_t i) { *static_cast<std::atomic<int>*>(arg) += int(i) + 1; }, &sum);
    ASSERT_EQ(sum, 3);
  }
}

void* arena_once(size_t bytes) { return ThreadArena(bytes).data(); }

TEST(Arena, AlignedKeptAndPerThread) {
  void* first = arena_once(1000);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(first) % 64, 0u);
  EXPECT_EQ(arena_once(500), first);
  void* grown = arena_once(10 << 20);
  EXPECT_EQ(arena_once(1000), grown);  // kept: steady state allocates nothing
  std::thread([&] { EXPECT_NE(arena_once(1000), grown); }).join();
  arena_once(0);
}

TEST(Arena, CallsInsideCallsHaveTheirOwn) {
  ThreadArena outer(1000);
  std::memset(outer.data(), 1, 1000);
  {
    ThreadArena inner(2 << 20);
    EXPECT_NE(inner.data(), outer.data());
    std::memset(inner.data(), 2, 2 << 20);
  }
  EXPECT_EQ(static_cast<char*>(outer.data())[999], 1);
}

// A host whose waiting threads run other work: each body is followed by another call of the library.
struct NestingHost {
  Problem* inner;
  bool busy = false;
};
void with_calls_between(void* pool, int64_t n, void (*body)(void*, int64_t), void* arg) {
  auto& host = *static_cast<NestingHost*>(pool);
  for (int64_t i = 0; i < n; ++i) {
    body(arg, i);
    if (host.busy) continue;
    host.busy = true;
    EXPECT_EQ(host.inner->spec_case().pass->call(host.inner->args(), nullptr), THALWEG_OK);
    host.busy = false;
  }
}

TEST(HostThreads, MayCallTheLibraryBetweenBodies) {
  for (const char* text : {"short_conv.bwd:f32,T300,D64,W4,bias", "gated_delta_rule.bwd:f32,T100,H2,HV4,K32,V32,g,beta"}) {
    Problem expected(testing::parse_case(text)), outer(testing::parse_case(text));
    Problem inner(testing::parse_case("gated_delta_rule.bwd:f32,T300,H2,HV4,K64,V64,g,beta,state"));
    NestingHost host{&inner};
    thalweg_context ctx;
    ctx.num_threads = 2;
    const thalweg_pass& pass = *outer.spec_case().pass;
    ASSERT_EQ(pass.call(expected.args(), &ctx), THALWEG_OK);
    ctx.parallel_for = with_calls_between;
    ctx.pool = &host;
    ASSERT_EQ(pass.call(outer.args(), &ctx), THALWEG_OK);
    for (const std::string& name : outer.outputs())
      EXPECT_EQ(outer.read(name).data, expected.read(name).data) << text << ": " << name;
  }
}

// A host's own threads, played by loops in unusual orders. `pool` counts the calls.
void one_after_another(void* pool, int64_t n, void (*body)(void*, int64_t), void* arg) {
  ++*static_cast<int64_t*>(pool);
  for (int64_t i = 0; i < n; ++i) body(arg, i);
}
void backwards(void* pool, int64_t n, void (*body)(void*, int64_t), void* arg) {
  ++*static_cast<int64_t*>(pool);
  for (int64_t i = n; i-- > 0;) body(arg, i);
}
void shuffled_threads(void* pool, int64_t n, void (*body)(void*, int64_t), void* arg) {
  ++*static_cast<int64_t*>(pool);
  std::vector<int64_t> order = iota(0, n);
  Random random(uint64_t(n) + 7);
  for (int64_t i = n - 1; i > 0; --i) std::swap(order[size_t(i)], order[size_t(random.below(i + 1))]);
  std::atomic<size_t> next{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t)
    threads.emplace_back([&] {
      for (size_t i = next++; i < order.size(); i = next++) body(arg, order[i]);
    });
  for (std::thread& thread : threads) thread.join();
}

TEST(HostThreads, SameBitsInAnyOrder) {
  for (const thalweg_pass* pass : all_passes())
    for (const Case& base : pass_cases(*pass, {"smoke"}, 5e8))
      for (const std::string& row : kernel_rows(*pass)) {
        Case c = with_kernel(base, row);
        c.threads = 4;
        bool taken = true;
        Outputs want = run(c, &taken);
        if (!taken) continue;
        for (thalweg_parallel_for lent : {one_after_another, backwards, shuffled_threads}) {
          Problem problem(c);
          int64_t calls = 0;
          problem.context().parallel_for = lent;
          problem.context().pool = &calls;
          EXPECT_EQ(first_difference(run(problem), want), "") << "  thalweg verify " << c.text();
        }
      }
}

// Bodies of parallel_tasks: each index once, slots in range and never shared by running bodies.
TEST(Tasks, SlotsArePrivate) {
  for (thalweg_parallel_for lent : {thalweg_parallel_for(pool_parallel_for), thalweg_parallel_for(shuffled_threads), thalweg_parallel_for(one_after_another)})
    for (int64_t tasks : {0, 1, 5, 1000}) {
      struct State {
        Counts counts;
        std::atomic<bool> busy[3] = {};
        std::atomic<int> faults{0};
      } state{Counts(tasks)};
      int64_t calls = 0;
      Exec exec{3, lent, &calls, nullptr};
      parallel_tasks(exec, tasks, 3, [](void* arg, int64_t i, int64_t slot) {
        State& s = *static_cast<State*>(arg);
        if (slot < 0 || slot >= 3 || s.busy[slot].exchange(true)) ++s.faults;
        hit(&s.counts, i);
        s.busy[slot] = false;
      }, &state);
      EXPECT_EQ(state.faults, 0);
      expect_each_once(state.counts);
    }
}

}  // namespace
}  // namespace thalweg::tests
