// thalweg._native: the pass table as Python sees it, and Call, one args struct of a pass with what keeps its arrays
// alive. Everything that knows names of operators or arguments is made from the table, in Python.
//
// Arrays come in through DLPack or the buffer protocol (nanobind's ndarray), or, from thalweg.torch, as a pointer with
// sizes and strides. Nothing is copied: what a pass cannot take it refuses by name.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <sys/mman.h>

#include <cstddef>
#include <cstring>
#include <ctime>
#include <string>
#include <vector>

#include "thalweg/core/types.h"

namespace nb = nanobind;

namespace {

const thalweg_pass& pass_at(int64_t index) {
  const thalweg_pass* pass = index < 0 ? nullptr : thalweg_pass_at(index);
  if (!pass) throw nb::index_error("thalweg: no such pass");
  return *pass;
}

[[noreturn]] void raise(PyObject* type, const std::string& text) {
  PyErr_SetString(type, text.c_str());
  throw nb::python_error();
}

// The C interface's text under the exception that fits.
void raise_on_error(thalweg_status status) {
  if (status == THALWEG_OK) return;
  PyObject* type = status == THALWEG_INVALID_ARGUMENT ? PyExc_ValueError
                   : status == THALWEG_OUT_OF_MEMORY  ? PyExc_MemoryError
                                                      : PyExc_RuntimeError;
  raise(type, thalweg_last_error());
}

thalweg_dtype dtype_of(nb::dlpack::dtype dtype) {
  return uint32_t(dtype.code) | uint32_t(dtype.bits) << 8 | uint32_t(dtype.lanes) << 16;
}

nb::object text_or_none(const char* text) { return text ? nb::object(nb::str(text)) : nb::none(); }

nb::list passes() {
  nb::list all;
  for (int64_t index = 0; const thalweg_pass* pass = thalweg_pass_at(index); ++index) {
    nb::list fields, kernels;
    for (int64_t i = 0; i < pass->num_fields; ++i) {
      const thalweg_field& field = pass->fields[i];
      nb::dict row;
      row["name"] = field.name;
      row["kind"] = int(field.kind);
      row["role"] = int(field.role);
      row["optional"] = field.optional != 0;
      row["dims"] = text_or_none(field.dims);
      row["dtypes"] = text_or_none(field.dtypes);
      row["layout"] = int(field.layout);
      row["choices"] = text_or_none(field.choices);
      row["doc"] = field.doc;
      fields.append(row);
    }
    const char* isa = nullptr;
    for (int64_t i = 0; const char* kernel = pass->kernel_at(i, &isa); ++i) kernels.append(kernel);
    nb::dict entry;
    entry["index"] = index;
    entry["op"] = pass->op;
    entry["name"] = pass->name;
    entry["doc"] = pass->doc;
    entry["refused"] = text_or_none(pass->refused);
    entry["fields"] = fields;
    entry["kernels"] = kernels;
    all.append(entry);
  }
  return all;
}

// uint16 memory as DLPack's bfloat16.
nb::ndarray<> bfloat16_capsule(nb::ndarray<uint16_t, nb::c_contig, nb::device::cpu> memory) {
  std::vector<size_t> shape(memory.ndim());
  for (size_t i = 0; i < shape.size(); ++i) shape[i] = memory.shape(i);
  nb::dlpack::dtype bfloat16{uint8_t(nb::dlpack::dtype_code::Bfloat), 16, 1};
  return nb::ndarray<>(memory.data(), shape.size(), shape.data(), nb::cast(memory), nullptr, bfloat16);
}

// "" when CUDA rows can run on device `id`, which is made ready for captures; else why not.
std::string why_no_cuda(int32_t id) { return thalweg_prepare(id) == THALWEG_OK ? "" : thalweg_last_error(); }

// Asks for 2 MiB pages where whole ones fit in fresh memory, as NumPy does for its arrays: the first touch of a large
// output is then one fault for each of them, not 512. Only advice: where the system says no, nothing changes.
void prefer_large_pages(uintptr_t address, size_t bytes) {
  constexpr uintptr_t page = uintptr_t(2) << 20;
  uintptr_t begin = (address + page - 1) / page * page, end = (address + bytes) / page * page;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

double thread_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

// An args struct in memory of its own, and the context of its calls.
class Call {
  using View = nb::ndarray<nb::ro>;
  struct Owner {  // of one argument's memory: an object, or what DLPack or the buffer protocol lent
    nb::object object;
    View view;
  };

 public:
  explicit Call(int64_t index) : pass_(pass_at(index)), args_(pass_.args_size), owners_(size_t(pass_.num_fields)) {
    std::memcpy(args_.data(), &pass_.args_size, sizeof(size_t));
    ctx_.size = sizeof ctx_;
  }

  // `dtype` 0: what the array says; otherwise the array's elements are that (NumPy's bfloat16 comes as uint16).
  void bind(int64_t index, nb::handle array, thalweg_dtype dtype) {
    const thalweg_field& field = tensor_field(index);
    bool writes = field.role != THALWEG_IN;
    View view;
    if (!nb::try_cast(array, view)) {
      PyErr_Clear();
      raise(PyExc_TypeError, where(field) + "got " + nb::cast<std::string>(nb::str(array.type().attr("__name__"))) +
                                 ", expected an array (DLPack or the buffer protocol)");
    }
    thalweg_tensor tensor{};
    if (nb::ndarray<> writable; !writes || nb::try_cast(array, writable)) {
      tensor.data = const_cast<void*>(view.data());
    } else {
      PyErr_Clear();
      raise(PyExc_ValueError, where(field) + "got a read-only array, expected a writable one");
    }
    tensor.dtype = dtype ? dtype : dtype_of(view.dtype());
    set_rank(field, tensor, int64_t(view.ndim()));
    for (int i = 0; i < tensor.rank; ++i) {
      tensor.shape[i] = int64_t(view.shape(size_t(i)));
      tensor.stride[i] = view.stride(size_t(i));
    }
    tensor.device_type = view.device_type();
    tensor.device_id = view.device_id();
    store(index, tensor, nb::none(), view);
  }

  // As above, from a pointer; `owner` is kept alive.
  void bind_pointer(int64_t index, uintptr_t address, thalweg_dtype dtype, nb::tuple shape, nb::tuple stride,
                    int32_t device_type, int32_t device_id, nb::object owner) {
    const thalweg_field& field = tensor_field(index);
    thalweg_tensor tensor{};
    tensor.data = reinterpret_cast<void*>(address);
    tensor.dtype = dtype;
    set_rank(field, tensor, int64_t(shape.size()));
    for (size_t i = 0; i < shape.size(); ++i) {
      tensor.shape[i] = nb::cast<int64_t>(shape[i]);
      tensor.stride[i] = nb::cast<int64_t>(stride[i]);
    }
    tensor.device_type = device_type;
    tensor.device_id = device_id;
    store(index, tensor, std::move(owner));
  }

  void clear(int64_t index) {
    tensor_field(index);
    store(index, thalweg_tensor{}, nb::none());
  }

  // Flags, counts and choices are whole numbers.
  void option(int64_t index, double value) {
    const thalweg_field& field = field_at(index);
    refuse_while_running();
    std::byte* at = args_.data() + field.offset;
    if (field.kind == THALWEG_REAL) {
      std::memcpy(at, &value, sizeof value);
    } else if (field.kind == THALWEG_COUNT) {
      auto count = int64_t(value);
      std::memcpy(at, &count, sizeof count);
    } else {
      auto flag = int32_t(value);
      std::memcpy(at, &flag, sizeof flag);
    }
  }

  void num_threads(int64_t threads) {
    refuse_while_running();
    ctx_.num_threads = threads;
  }

  void kernel(nb::object name) {
    refuse_while_running();
    kernel_ = name.is_none() ? std::string() : nb::cast<std::string>(name);
    ctx_.kernel = name.is_none() ? nullptr : kernel_.c_str();
  }

  // CUDA: the stream, and memory on the tensors' device; `owner` is kept until the next call of this or the end.
  void place(uintptr_t stream, uintptr_t workspace, size_t bytes, nb::object owner) {
    refuse_while_running();
    ctx_.stream = reinterpret_cast<void*>(stream);
    ctx_.workspace = reinterpret_cast<void*>(workspace);
    ctx_.workspace_bytes = bytes;
    workspace_owner_ = std::move(owner);
  }

  // Other Python threads run meanwhile.
  void run() {
    ++running_;
    thalweg_status status;
    {
      nb::gil_scoped_release release;
      status = pass_.call(args_.data(), &ctx_);
    }
    --running_;
    raise_on_error(status);
  }

  // CPU seconds of this thread that `n` calls take without Python between them, for measuring what the binding adds.
  double seconds(int64_t n) {
    ++running_;
    thalweg_status status = THALWEG_OK;
    double start = thread_seconds();
    {
      nb::gil_scoped_release release;
      for (int64_t i = 0; i < n && status == THALWEG_OK; ++i) status = pass_.call(args_.data(), &ctx_);
    }
    double time = thread_seconds() - start;
    --running_;
    raise_on_error(status);
    return time;
  }

  std::string explain() {
    char text[4096] = "";
    raise_on_error(pass_.explain(args_.data(), &ctx_, text, sizeof text));
    return text;
  }

  size_t workspace_bytes() {
    size_t bytes = 0;
    raise_on_error(pass_.workspace(args_.data(), &ctx_, &bytes));
    return bytes;
  }

 private:
  std::string where(const thalweg_field& field) const {
    return std::string(pass_.op) + "." + pass_.name + ": " + field.name + ": ";
  }

  const thalweg_field& field_at(int64_t index) const {
    if (index < 0 || index >= pass_.num_fields) throw nb::index_error("thalweg: no such argument");
    return pass_.fields[index];
  }

  const thalweg_field& tensor_field(int64_t index) const {
    const thalweg_field& field = field_at(index);
    if (field.kind != THALWEG_TENSOR) throw nb::type_error("thalweg: not a tensor argument");
    return field;
  }

  void set_rank(const thalweg_field& field, thalweg_tensor& tensor, int64_t rank) const {
    if (rank > THALWEG_MAX_RANK)
      raise(PyExc_ValueError, where(field) + "rank, got " + std::to_string(rank) + ", expected [" + field.dims + "]");
    tensor.rank = int32_t(rank);
  }

  void refuse_while_running() const {
    if (running_)
      raise(PyExc_RuntimeError, std::string(pass_.op) + "." + pass_.name + ": arguments change while the call runs");
  }

  void store(int64_t index, const thalweg_tensor& tensor, nb::object owner, View view = {}) {
    refuse_while_running();
    std::memcpy(args_.data() + pass_.fields[index].offset, &tensor, sizeof tensor);
    owners_[size_t(index)] = {std::move(owner), std::move(view)};
  }

  const thalweg_pass& pass_;
  std::vector<std::byte> args_;  // operator new's alignment is enough for any member
  std::vector<Owner> owners_;
  thalweg_context ctx_{};
  nb::object workspace_owner_;
  std::string kernel_;
  int running_ = 0;  // under the GIL
};

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Thalweg's C interface: the table of passes and their calls.";
  m.def("passes", &passes, "Every pass with its fields, in the library's order.");
  m.def(
      "version", [] { return thalweg_version(); }, "The library's version.");
  m.def(
      "cpu_isa", [] { return thalweg_cpu_isa(); }, "The CPU instruction set in use.");
  m.def(
      "default_threads", [] { return thalweg_default_threads(); }, "Threads a call uses by default.");
  m.def("why_no_cuda", &why_no_cuda, "Empty when CUDA device `id` can be used, else the reason.");
  m.def("prefer_large_pages", &prefer_large_pages, "Advises 2 MiB pages inside `bytes` of memory at `address`.");
  m.def("bfloat16_capsule", &bfloat16_capsule, "DLPack capsule of bfloat16 over uint16 memory.");
  nb::class_<Call>(m, "Call")
      .def(nb::init<int64_t>())
      .def("bind", &Call::bind)
      .def("bind_pointer", &Call::bind_pointer, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
           nb::arg(), nb::arg().none())
      .def("clear", &Call::clear)
      .def("option", &Call::option)
      .def("num_threads", &Call::num_threads)
      .def("kernel", &Call::kernel, nb::arg().none())
      .def("place", &Call::place, nb::arg(), nb::arg(), nb::arg(), nb::arg().none())
      .def("run", &Call::run)
      .def("seconds", &Call::seconds)
      .def("explain", &Call::explain)
      .def("workspace_bytes", &Call::workspace_bytes);
}
