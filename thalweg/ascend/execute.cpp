#include "thalweg/ascend/execute.h"

#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <memory>
#include <stdexcept>

#include "testing/buffer.h"
#include "thalweg/ascend/process.h"
#include "thalweg/core/tensor.h"

namespace thalweg::ascend {
namespace {

constexpr double kSeconds = 120;  // limit of one tool
constexpr double kMaxWork = 1e9;  // of a problem, in products of two numbers: tiles are scalar loops here
constexpr const char* kTools[] = {"mlir-opt-19", "mlir-translate-19", "llc-19", "g++"};

// Elementwise tensor code first becomes linalg; without the deallocation pipeline every tile would leak.
constexpr const char* kPasses[] = {"--llvm-request-c-wrappers",
                                   "--convert-elementwise-to-linalg",
                                   "--empty-tensor-to-alloc-tensor",
                                   "--one-shot-bufferize",
                                   "--buffer-deallocation-pipeline",
                                   "--convert-linalg-to-loops",
                                   "--convert-scf-to-cf",
                                   "--expand-strided-metadata",
                                   "--lower-affine",
                                   "--arith-expand=include-bf16=true",
                                   "--convert-math-to-llvm",
                                   "--convert-math-to-libm",
                                   "--convert-arith-to-llvm",
                                   "--convert-index-to-llvm",
                                   "--finalize-memref-to-llvm",
                                   "--convert-func-to-llvm",
                                   "--convert-cf-to-llvm",
                                   "--reconcile-unrealized-casts"};

std::string function_of(const std::string& text) {
  constexpr char kMark[] = "func.func @";
  const size_t at = text.find(kMark);
  if (at == std::string::npos) throw std::runtime_error("the text has no func.func");
  const size_t begin = at + sizeof kMark - 1;
  return text.substr(begin, text.find('(', begin) - begin);
}

// ---- Elements in memory ----

void encode(double x, Element element, char* to) {
  switch (element) {
    case kF32: {
      const float f = float(x);
      std::memcpy(to, &f, 4);
      return;
    }
    case kBF16: {
      const bf16 b = to_bf16(float(x));
      std::memcpy(to, &b, 2);
      return;
    }
    case kF16: {
      const f16 h = to_f16(float(x));
      std::memcpy(to, &h, 2);
      return;
    }
    case kI32: {
      const int32_t i = int32_t(x);
      std::memcpy(to, &i, 4);
      return;
    }
    default:
      throw std::runtime_error(std::string("no tensor of ") + text_of(element) + " can be executed");
  }
}

double decode(const char* from, Element element) {
  switch (element) {
    case kF32: {
      float f;
      std::memcpy(&f, from, 4);
      return f;
    }
    case kBF16: {
      bf16 b;
      std::memcpy(&b, from, 2);
      return to_float(b);
    }
    case kF16: {
      f16 h;
      std::memcpy(&h, from, 2);
      return to_float(h);
    }
    default: {
      int32_t i;
      std::memcpy(&i, from, 4);
      return i;
    }
  }
}

// ---- A text as machine code ----

struct Memref {  // MLIR's descriptor of rank 1
  void *base, *data;
  int64_t offset, size, stride;
};
union Scalar {
  float f;
  int32_t i;
};
using Launch = void (*)(Memref*, const Scalar*, const int32_t* grid);

// C++ that runs the grid, and the copy of strided tiles that the lowered text calls.
std::string launcher(const std::string& function, const Scene& scene) {
  std::string types = "Memref*, Memref*", values = "&none, &none";
  int memrefs = 0, scalars = 0;
  for (const Argument& a : scene.arguments) {
    if (a.kind == Argument::kScalar) {
      types += a.element == kF32 ? ", float" : ", int";
      values += ", s[" + std::to_string(scalars++) + (a.element == kF32 ? "].f" : "].i");
    } else {
      types += ", Memref*";
      values += ", m + " + std::to_string(memrefs++);
    }
  }
  for (int i = 0; i < 2; ++i) types += ", int", values += ", s[" + std::to_string(scalars++) + "].i";
  return R"(#include <cstdint>
#include <cstring>
struct Memref { void *base, *data; int64_t offset, size, stride; };
union Scalar { float f; int32_t i; };
struct Unranked { int64_t rank; void* memref; };
struct Ranked { char *base, *data; int64_t offset, rest[]; };  // sizes, then strides
static void copy(int64_t element, int64_t rank, const int64_t* sizes, const char* from, const int64_t* a, char* to,
                 const int64_t* b) {
  if (rank == 0 || (rank == 1 && a[0] == 1 && b[0] == 1)) {
    std::memcpy(to, from, element * (rank ? sizes[0] : 1));
    return;
  }
  for (int64_t i = 0; i < sizes[0]; ++i)
    copy(element, rank - 1, sizes + 1, from + i * a[0] * element, a + 1, to + i * b[0] * element, b + 1);
}
extern "C" void memrefCopy(int64_t element, Unranked* from, Unranked* to) {
  const Ranked *a = static_cast<Ranked*>(from->memref), *b = static_cast<Ranked*>(to->memref);
  const int64_t n = from->rank;
  copy(element, n, a->rest, a->data + a->offset * element, a->rest + n, b->data + b->offset * element, b->rest + n);
}
extern "C" void _mlir_ciface_)" +
         function + "(" + types + ", int, int, int, int, int, int);\n" +
         R"(extern "C" void thalweg_launch(Memref* m, const Scalar* s, const int32_t* grid) {
  Memref none{};
  for (int z = 0; z < grid[2]; ++z)
    for (int y = 0; y < grid[1]; ++y)
      for (int x = 0; x < grid[0]; ++x)
        _mlir_ciface_)" +
         function + "(" + values + ", grid[0], grid[1], grid[2], x, y, z);\n}\n";
}

Executed::Output judge(const Argument& a, const testing::Buffer& buffer) {
  Executed::Output out;
  out.name = a.name, out.limit = a.limit;
  out.guards_intact = buffer.check_outside().empty();
  for (size_t i = 0; i < a.values.size(); ++i) {
    const double got = decode(buffer.data() + int64_t(i) * bytes_of(a.element), a.element), want = a.values[i];
    double error = std::fabs(got - want) / (a.absolute + a.relative * std::fabs(want));
    if (got == want) error = 0;
    if (std::isnan(error)) error = std::numeric_limits<double>::infinity();
    if (error > out.worst || out.worst_at < 0) out.worst = error, out.worst_at = int64_t(i);
  }
  return out;
}

}  // namespace

bool Executed::ok() const {
  return ran && inputs_intact && std::all_of(outputs.begin(), outputs.end(), [](const Output& o) { return o.ok(); });
}

Argument& Scene::operator[](const std::string& name) {
  for (Argument& a : arguments)
    if (a.name == name) return a;
  throw std::out_of_range("a scene has no argument " + name);
}

double rounded(double x, Element element) {
  char memory[8];
  encode(x, element, memory);
  return decode(memory, element);
}

Argument input(const std::string& name, Element element, std::vector<double> values) {
  for (double& x : values) x = rounded(x, element);
  return {name, Argument::kInput, element, std::move(values)};
}

Argument scalar(const std::string& name, Element element, double value) {
  return {name, Argument::kScalar, element, {value}};
}

double product_limit(Element element) { return element == kF16 ? 1.9e-3 : 1.5e-2; }

Argument output_of_largest(const std::string& name, Element element, std::vector<double> want, double limit) {
  double largest = 0;
  for (double x : want) largest = std::max(largest, std::fabs(x));
  return {name, Argument::kOutput, element, std::move(want), largest, 0, limit};
}

std::string missing_host_tool() {
  for (const char* tool : kTools)
    if (find_on_path(tool).empty())
      return std::string(tool) + " not found (PATH); it comes with the Debian packages mlir-19-tools, llvm-19 and g++";
  return "";
}

struct HostProgram::Impl {
  Folder folder;
  void* library = nullptr;
  Launch launch = nullptr;

  Impl(const std::string& text, const Scene& scene) {
    if (std::string missing = missing_host_tool(); !missing.empty()) throw std::runtime_error(missing);
    write("k.mlir", text);
    write("launch.cpp", launcher(function_of(text), scene));
    std::vector<std::string> lower = {"mlir-opt-19", "k.mlir", "-o", "lowered.mlir"};
    lower.insert(lower.end(), std::begin(kPasses), std::end(kPasses));
    call(lower);
    call({"mlir-translate-19", "--mlir-to-llvmir", "lowered.mlir", "-o", "k.ll"});
    call({"llc-19", "-O1", "-relocation-model=pic", "-filetype=obj", "k.ll", "-o", "k.o"});
    call({"g++", "-std=c++20", "-O1", "-fPIC", "-shared", "launch.cpp", "k.o", "-o", "k.so", "-lm"});
    library = ::dlopen((folder / "k.so").c_str(), RTLD_NOW | RTLD_LOCAL);  // now: missing symbols show here
    if (!library) throw std::runtime_error(std::string("dlopen: ") + ::dlerror());
    launch = reinterpret_cast<Launch>(::dlsym(library, "thalweg_launch"));
  }
  ~Impl() {
    if (library) ::dlclose(library);
  }

  void write(const char* name, const std::string& text) {
    std::ofstream file(folder / name, std::ios::binary);
    if (!(file << text).flush()) throw std::runtime_error((folder / name).string() + ": cannot be written");
  }
  void call(std::vector<std::string> args) {
    const std::string name = args[0];
    args[0] = find_on_path(name);
    const Ran ran = run(args, folder, kSeconds);
    if (!ran.error.empty()) throw std::runtime_error(ran.error);
    if (ran.timed_out)
      throw std::runtime_error(name + ": ended after the limit of " + std::to_string(int(kSeconds)) + " s");
    if (ran.signal) throw std::runtime_error(name + ": died of signal " + std::to_string(ran.signal));
    if (ran.code) throw std::runtime_error(name + ": exit " + std::to_string(ran.code) + ": " + first_error(ran.err));
  }
};

HostProgram::HostProgram(const std::string& text, const Scene& scene) : impl_(new Impl(text, scene)) {}
HostProgram::~HostProgram() = default;

// The memory of one execution.
struct Run {
  const Scene& scene;
  std::vector<testing::Buffer> buffers;
  std::vector<const Argument*> tensors;
  std::vector<Memref> memrefs;
  std::vector<Scalar> scalars;

  explicit Run(const Scene& s) : scene(s) {
    for (const Argument& a : scene.arguments) {
      if (a.kind == Argument::kScalar) {
        Scalar x;
        if (a.element == kF32) {
          x.f = float(a.values[0]);
        } else {
          x.i = int32_t(a.values[0]);
        }
        scalars.push_back(x);
        continue;
      }
      const int64_t bytes = bytes_of(a.element), count = int64_t(a.values.size());
      buffers.emplace_back(size_t(bytes * count), 0, testing::Guard::kCanary);  // poisoned: NaN
      char* data = buffers.back().data();
      if (a.kind == Argument::kInput)
        for (int64_t i = 0; i < count; ++i) encode(a.values[size_t(i)], a.element, data + i * bytes);
      tensors.push_back(&a);
      memrefs.push_back({data, data, 0, count, 1});
    }
  }

  void launch(const Part& part, const Plan& plan) {
    if (part.count == 0) return;
    std::vector<Scalar> all = scalars;
    all.resize(scalars.size() + 2);
    all[scalars.size()].i = int32_t(part.first), all[scalars.size() + 1].i = int32_t(part.count);
    int32_t grid[3] = {int32_t(part.count), int32_t(scene.heads), 1};
    if (plan.mode == Mode::kPersistent) {
      const int64_t cores = plan.mixed ? plan.target.aic : plan.target.aiv;
      grid[0] = int32_t(std::min(ceil_div(part.count * scene.heads, 2), cores)), grid[1] = 1;  // a loop turns twice
    }
    part.program->impl_->launch(memrefs.data(), all.data(), grid);
  }

  void judge_all(Executed* result) const {
    for (size_t i = 0; i < tensors.size(); ++i) {
      const Argument& a = *tensors[i];
      if (a.kind == Argument::kOutput) {
        result->outputs.push_back(judge(a, buffers[i]));
        continue;
      }
      bool& intact = result->inputs_intact;
      intact = intact && buffers[i].check_outside().empty();
      for (size_t j = 0; j < a.values.size(); ++j)
        intact = intact && decode(buffers[i].data() + int64_t(j) * bytes_of(a.element), a.element) == a.values[j];
    }
  }
};

Executed execute(const Plan& plan, const Scene& scene, const std::vector<Part>& parts) {
  Executed result;
  Run run(scene);
  for (const Part& part : parts) run.launch(part, plan);
  run.judge_all(&result);
  result.ran = true;
  return result;
}

namespace {

double work(const Plan& plan) {
  const Problem& p = plan.problem;
  double tokens = 0;
  for (int64_t length : p.sequences()) tokens += double(length);
  const double width = double(plan.tile.K + plan.tile.V + 1);
  return plan.tile.BM ? tokens * double(p.S * p.H) * width : tokens * double(p.HV * plan.tile.BT) * width;
}

// The same with three whole tiles along T and S, and a cut one where the text takes those.
Plan shortened(Plan plan) {
  Problem& p = plan.problem;
  const Tile& tile = plan.tile;
  const auto cut = [&](int64_t length, int64_t side) {
    return std::min(length, 3 * side + (plan.boundary ? length % side : 0));
  };
  const int64_t queries = p.E ? tile.BM / p.H : tile.BM;
  p.B = 1;
  p.T = cut(p.T, tile.BM ? queries : tile.BT), p.S = cut(p.S, tile.BT);
  for (int64_t& length : p.lengths) length = cut(length, tile.BT);
  return plan;
}

}  // namespace

Executed execute(const Plan& plan, const std::string& text) {
  Executed result;
  const Kernel* kernel = find_kernel(plan.problem.kernel);
  if (!kernel || !kernel->scene) {
    result.error = "execute: " + plan.problem.kernel + " has no reference to be compared with";
    return result;
  }
  try {
    Plan host = plan;
    if (work(plan) > kMaxWork) {
      host = shortened(plan);
      if (kernel->emit(host) != text) throw std::runtime_error("a shorter problem has another text: take fewer tokens");
      const Problem& p = host.problem;
      result.sizes = p.is_packed ? "sequences of at most 4 tiles" : "T " + std::to_string(p.T);
      if (plan.tile.BM) result.sizes += ", S " + std::to_string(p.S);
    }
    const Scene scene = kernel->scene(host);
    const HostProgram program(text, scene);
    const std::string sizes = result.sizes;
    result = execute(host, scene, {{&program, 0, scene.tiles}});
    result.sizes = sizes;
  } catch (const std::exception& e) {
    result.error = std::string("execute: ") + e.what();
  }
  return result;
}

}  // namespace thalweg::ascend
