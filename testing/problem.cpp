// The memory and the call of one case.
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "testing/buffer.h"
#include "testing/case.h"
#include "testing/device.h"
#include "testing/fields.h"
#include "thalweg/core/fail.h"

namespace thalweg::testing {
namespace {

uint64_t hash_of(std::string_view text) {
  uint64_t h = 0xcbf29ce484222325u;
  for (char c : text) h = (h ^ uint8_t(c)) * 0x100000001b3u;
  return h;
}

// Packed lengths as offsets; the last stays below T (or S) where that is larger.
Values borders_of(const std::vector<int64_t>& lengths) {
  Values v;
  v.data.push_back(0);
  for (int64_t length : lengths) v.data.push_back(v.data.back() + double(length));
  v.shape = {v.count()};
  return v;
}

// Tokens in use of each sequence: about three quarters of it, of every fourth none.
void fill_lengths(const Case& c, bool queries, Random& random, Values* lengths) {
  const bool packed = is_present(c, *find_field(*c.pass, "cu_seqlens"));
  const std::vector<int64_t> tokens = !packed ? std::vector<int64_t>(lengths->data.size(), c.size(queries ? "T" : "S"))
                                      : queries ? lengths_of(c) : key_lengths_of(c);
  for (size_t n = 0; n < lengths->data.size(); ++n)
    lengths->data[n] = n % 4 == 3 || n >= tokens.size() ? 0 : double(tokens[n] - random.below(tokens[n] / 2 + 1));
}

// Distinct slots of the pool in random order: N to read, then the rest of N*T to write as far as they go.
// The last write of a sequence may take the slot it was read from, so M >= N + N*(T-1) serves.
void fill_slots(const Case& c, std::map<std::string, Values>* inputs, Random& random) {
  int64_t N = c.size("N"), T = c.size("T"), M = c.size("M");
  std::vector<int64_t> order(static_cast<size_t>(M));
  for (int64_t i = 0; i < M; ++i) order[size_t(i)] = i;
  for (int64_t i = M - 1; i > 0; --i) std::swap(order[size_t(i)], order[size_t(random.below(i + 1))]);
  auto read = inputs->find("read_slots"), write = inputs->find("write_slots");
  if (read == inputs->end())
    for (int64_t i = 0; i < M; ++i) order[size_t(i)] = i;
  if (N > M) throw std::invalid_argument(pass_name(*c.pass) + ": M, got " + std::to_string(M) + ", expected at least N = " + std::to_string(N));
  bool pad_reads = padded_slots(c, "read_slots"), pad_writes = padded_slots(c, "write_slots");
  std::vector<bool> skipped(static_cast<size_t>(N));
  for (int64_t n = 0; n < N; ++n) skipped[size_t(n)] = pad_reads && read != inputs->end() && (n % 3 == 1 || N == 1);
  if (read != inputs->end())
    for (int64_t n = 0; n < N; ++n) read->second.data[size_t(n)] = skipped[size_t(n)] ? -1 : double(order[size_t(n)]);
  if (write == inputs->end()) return;
  int64_t next = N;
  for (int64_t n = 0; n < N; ++n)
    for (int64_t t = 0; t < T; ++t) {
      double slot = -1;
      if (t == T - 1) slot = double(order[size_t(n)]);
      else if (next < M) slot = double(order[size_t(next++)]);
      if (skipped[size_t(n)] || (pad_writes && (n + t) % 3 == 0)) slot = -1;
      write->second.data[size_t(n * T + t)] = slot;
    }
}

Guard guard_of(const Case& c) {
  auto it = c.options.find("guard");
  if (it == c.options.end()) return Guard::kCanary;
  return it->second == "page" ? Guard::kPageAfter : Guard::kPageBefore;
}

struct Storage {
  const thalweg_field* field = nullptr;
  Buffer buffer;
  DeviceMemory mirror;        // CUDA: of the whole buffer, canaries included
  thalweg_tensor first;       // the view at creation: tests may tamper with the args struct's
  std::vector<char> expected; // bytes of the buffer before the call; empty when sparse
};

}  // namespace

struct Problem::Impl {
  Case c;
  std::vector<char> args;
  std::map<std::string, Storage> storage;
  std::map<std::string, Values> inputs;
  thalweg_context context{};
  Buffer workspace;
  std::vector<char> device_args;  // CUDA: args whose tensors point at the mirrors
  DeviceMemory device_workspace, device_report;
  int32_t report[4] = {};

  thalweg_tensor& tensor(const thalweg_field& field) { return *reinterpret_cast<thalweg_tensor*>(args.data() + field.offset); }
  void allocate(const thalweg_field& field);
  void set_options();
  void fill();
  void write(const std::string& name, const Values& values);
  void upload();
  void download();
};

// Where `data` of the host lies in the mirror; what points elsewhere (a test's doing) stays as it is.
char* mirrored(const Buffer& host, const DeviceMemory& mirror, void* data) {
  char* at = static_cast<char*>(data);
  return at >= host.low() && at <= host.low() + host.readable_bytes() ? mirror.data() + (at - host.low()) : at;
}

DeviceMemory mirror_of(const Buffer& host) {
  DeviceMemory mirror(host.readable_bytes());
  mirror.upload(host.low(), host.readable_bytes());
  return mirror;
}

void Problem::Impl::upload() {
  for (auto& [name, s] : storage) {
    if (!s.mirror.data()) s.mirror = DeviceMemory(s.buffer.readable_bytes());
    s.mirror.upload(s.buffer.low(), s.buffer.readable_bytes());
  }
  device_args = args;
  for (auto& [name, s] : storage) {
    auto& t = *reinterpret_cast<thalweg_tensor*>(device_args.data() + s.field->offset);
    t.data = t.data ? mirrored(s.buffer, s.mirror, t.data) : nullptr;
    if (t.device_type == 0 || t.device_type == THALWEG_CPU) t.device_type = THALWEG_CUDA;
  }
  std::fill_n(report, 4, 0);
  if (!device_report.data()) device_report = DeviceMemory(sizeof report);
  device_report.upload(report, sizeof report);
  context.report = reinterpret_cast<int32_t*>(device_report.data());
}

void Problem::Impl::download() {
  synchronize_device();
  for (auto& [name, s] : storage) s.mirror.download(s.buffer.low(), s.buffer.readable_bytes());
  if (device_workspace.data()) device_workspace.download(workspace.low(), workspace.readable_bytes());
  device_report.download(report, sizeof report);
}

void Problem::Impl::allocate(const thalweg_field& field) {
  int64_t offset = 0, low, high;
  thalweg_tensor t = layout_in(c, field, &offset);
  extent(t, &low, &high);
  size_t element = thalweg_dtype_bytes(t.dtype);
  Storage s;
  s.field = &field;
  s.buffer = Buffer(size_t(high - low) * element, size_t(offset) * element, guard_of(c));
  t.data = s.buffer.data() - low * int64_t(element);
  s.first = t;
  tensor(field) = t;
  storage.emplace(field.name, std::move(s));
}

void Problem::Impl::set_options() {
  size_t size = c.pass->args_size;
  std::memcpy(args.data(), &size, sizeof size);
  for (int64_t i = 0; i < c.pass->num_fields; ++i) {
    const thalweg_field& field = c.pass->fields[i];
    auto it = c.options.find(field.name);
    if (field.kind == THALWEG_TENSOR || it == c.options.end()) continue;
    char* at = args.data() + field.offset;
    int32_t flag = 0;
    double real = 0;
    int64_t number = 0;
    if (field.kind == THALWEG_CHOICE) {
      std::vector<std::string> choices = words(field.choices);
      for (size_t k = 0; k < choices.size(); ++k)
        if (choices[k] == it->second) flag = int32_t(k);
      if (it->second.find_first_not_of("-0123456789") == std::string::npos) flag = int32_t(std::stol(it->second));
      std::memcpy(at, &flag, sizeof flag);
    } else if (field.kind == THALWEG_FLAG) {
      flag = int32_t(c.number(field.name, 0));
      std::memcpy(at, &flag, sizeof flag);
    } else if (field.kind == THALWEG_COUNT) {
      number = int64_t(c.number(field.name, 0));
      std::memcpy(at, &number, sizeof number);
    } else {
      real = c.number(field.name, 0);
      std::memcpy(at, &real, sizeof real);
    }
  }
}

// Writes the values, then keeps them as the tensor holds them: rounded, and with broadcast axes agreeing.
void Problem::Impl::write(const std::string& name, const Values& values) {
  Storage& s = storage.at(name);
  write_values(s.first, values);
  inputs[name] = read_values(s.first);
  if (!s.buffer.sparse()) s.expected.assign(s.buffer.data(), s.buffer.data() + s.buffer.bytes());
}

void Problem::Impl::fill() {
  for (auto& [name, s] : storage) {
    if (!is_input(*s.field)) continue;
    Values v;
    v.shape.assign(s.first.shape, s.first.shape + s.first.rank);
    v.data.resize(size_t(count(s.first)));
    Random random(c.seed * 0x9e3779b97f4a7c15u ^ hash_of(name));
    if (name == "cu_seqlens") v = borders_of(lengths_of(c));
    else if (name == "cu_seqlens_k") v = borders_of(key_lengths_of(c));
    else if (name == "q_lens" || name == "k_lens") fill_lengths(c, name[0] == 'q', random, &v);
    else if (!is_integer(s.first.dtype))
      for (double& x : v.data) x = random.normal();
    inputs.emplace(name, std::move(v));
  }
  Random random(c.seed);
  if (find_field(*c.pass, "read_slots")) fill_slots(c, &inputs, random);
  try {
    spec_of(*c.pass).fill(c, inputs, random);
  } catch (const std::out_of_range&) {
  }
  std::map<std::string, Values> filled = std::move(inputs);
  for (const auto& [name, values] : filled) write(name, values);
}

namespace {

// Tensors as stored (and as they were before the call), in float64, and once more for the oracle. Counted by
// elements: the gaps of a layout take no memory.
void check_memory(const Case& c) {
  double need = 0;
  for (const thalweg_field* field : tensor_fields(*c.pass)) {
    if (!is_present(c, *field)) continue;
    double elements = 1;
    for (int64_t n : shape_in(c, *field)) elements *= double(n);
    need += elements * (2 * double(thalweg_dtype_bytes(dtype_in(c, *field))) + 2 * sizeof(double));
  }
  double have = double(sysconf(_SC_PHYS_PAGES)) * double(sysconf(_SC_PAGESIZE));
  if (need <= have) return;
  char text[120];
  std::snprintf(text, sizeof text, ": memory, got a case of %.4g GiB, expected at most %.4g GiB (what this machine has)", need / 0x1p30, have / 0x1p30);
  throw TooLarge(c.text() + text);
}

}  // namespace

Problem::Problem(const Case& c) : impl_(std::make_unique<Impl>()) {
  check_memory(c);
  impl_->c = c;
  impl_->args.assign(c.pass->args_size, 0);
  impl_->set_options();
  for (const thalweg_field* field : tensor_fields(*c.pass))
    if (is_present(c, *field)) impl_->allocate(*field);
  impl_->fill();
  poison_outputs();
  impl_->context.num_threads = c.threads;
}

Problem::~Problem() = default;
Problem::Problem(Problem&&) noexcept = default;

const Case& Problem::spec_case() const { return impl_->c; }
void* Problem::args() { return impl_->args.data(); }
const std::map<std::string, Values>& Problem::inputs() const { return impl_->inputs; }

thalweg_context& Problem::context() {
  impl_->context.kernel = impl_->c.kernel.empty() ? nullptr : impl_->c.kernel.c_str();
  return impl_->context;
}

thalweg_tensor& Problem::tensor(const std::string& field) {
  const thalweg_field* f = find_field(*impl_->c.pass, field);
  if (!f || f->kind != THALWEG_TENSOR) throw std::invalid_argument(pass_name(*impl_->c.pass) + ": no tensor " + field);
  return impl_->tensor(*f);
}

void Problem::set(const std::string& field, const Values& values) {
  if (!impl_->inputs.count(field)) throw std::invalid_argument(pass_name(*impl_->c.pass) + ": no input " + field);
  impl_->write(field, values);
}

thalweg_status Problem::call() {
  const thalweg_pass& pass = *impl_->c.pass;
  thalweg_context& ctx = context();
  ctx.workspace = nullptr;
  ctx.workspace_bytes = 0;
  const bool cuda = on_cuda(impl_->c);
  void* call_args = cuda ? device_args() : args();
  size_t bytes = 0;
  thalweg_status status = pass.workspace(call_args, &ctx, &bytes);
  if (status != THALWEG_OK) return status;
  if (bytes != impl_->workspace.bytes() || !impl_->workspace.data()) impl_->workspace = Buffer(bytes, 0, Guard::kCanary);
  poison(impl_->workspace.data(), bytes);
  ctx.workspace = impl_->workspace.data();
  ctx.workspace_bytes = bytes;
  if (!cuda) return pass.call(call_args, &ctx);
  impl_->device_workspace = mirror_of(impl_->workspace);
  ctx.workspace = mirrored(impl_->workspace, impl_->device_workspace, impl_->workspace.data());
  status = pass.call(call_args, &ctx);
  impl_->download();
  return status;
}

void* Problem::device_args() {
  impl_->upload();
  return impl_->device_args.data();
}

std::string Problem::report() const {
  char text[400] = "";
  throw_on_error(thalweg_report_text(impl_->c.pass, impl_->report, text, sizeof text));
  return text;
}

void Problem::poison_outputs() {
  for (auto& [name, s] : impl_->storage) {
    if (s.field->role == THALWEG_INOUT) impl_->write(name, Values(impl_->inputs.at(name)));
    if (s.field->role != THALWEG_OUT) continue;
    size_t element = thalweg_dtype_bytes(s.first.dtype);
    char* data = static_cast<char*>(s.first.data);
    if (s.buffer.sparse()) each_offset(s.first, [&](int64_t at) { poison(data + at * int64_t(element), element); });
    else if (s.buffer.bytes()) poison(s.buffer.data(), s.buffer.bytes());
    if (!s.buffer.sparse()) s.expected.assign(s.buffer.data(), s.buffer.data() + s.buffer.bytes());
  }
}

Values Problem::read(const std::string& field) const {
  auto it = impl_->storage.find(field);
  if (it == impl_->storage.end()) throw std::invalid_argument(pass_name(*impl_->c.pass) + ": " + field + " is not present");
  return read_values(it->second.first);
}

std::string Problem::check_guards() const {
  for (const auto& [name, s] : impl_->storage) {
    std::string outside = s.buffer.check_outside();
    if (!outside.empty()) return name + ": " + outside;
    if (s.buffer.sparse() || s.buffer.bytes() == 0) continue;
    const char* now = s.buffer.data();
    if (s.field->role == THALWEG_IN) {
      if (std::memcmp(now, s.expected.data(), s.expected.size()) != 0) return name + ": an input was changed";
      continue;
    }
    if (size_t(count(s.first)) * thalweg_dtype_bytes(s.first.dtype) == s.buffer.bytes()) continue;  // no gaps
    std::vector<char> masked(now, now + s.buffer.bytes());
    size_t element = thalweg_dtype_bytes(s.first.dtype);
    int64_t base = static_cast<char*>(s.first.data) - s.buffer.data();
    each_offset(s.first, [&](int64_t at) {
      size_t byte = size_t(base + at * int64_t(element));
      std::memcpy(&masked[byte], &s.expected[byte], element);
    });
    if (masked != s.expected) return name + ": a gap between its rows was written";
  }
  std::string outside = impl_->workspace.check_outside();
  return outside.empty() ? "" : "workspace: " + outside;
}

std::string Problem::check_untouched() const {
  for (const auto& [name, s] : impl_->storage)
    if (!s.buffer.sparse() && !s.expected.empty() && std::memcmp(s.buffer.data(), s.expected.data(), s.expected.size()) != 0) return name + ": was written";
  return check_guards();
}

std::vector<std::string> Problem::outputs() const {
  std::vector<std::string> names;
  for (const thalweg_field* field : tensor_fields(*impl_->c.pass))
    if (is_output(*field) && is_present(impl_->c, *field)) names.push_back(field->name);
  return names;
}

std::string Problem::kernel() const {
  std::vector<char> text(1 << 16);
  thalweg_context ctx = impl_->context;
  ctx.kernel = impl_->c.kernel.empty() ? nullptr : impl_->c.kernel.c_str();
  std::vector<char> args = impl_->args;
  if (on_cuda(impl_->c))
    for (const auto& [name, s] : impl_->storage)
      reinterpret_cast<thalweg_tensor*>(args.data() + s.field->offset)->device_type = THALWEG_CUDA;
  throw_on_error(impl_->c.pass->explain(args.data(), &ctx, text.data(), text.size()));
  for (const std::string& line : split(text.data(), '\n')) {
    size_t colon = line.find(": runs");
    if (colon != std::string::npos && line[0] != ' ') return line.substr(0, colon);
  }
  return "";
}

}  // namespace thalweg::testing
