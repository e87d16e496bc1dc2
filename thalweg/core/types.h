// The C types of Thalweg: tensors, status, context, and the tables that describe every pass.
// Usable from C11 and C++20. Tensors convert from and to DLPack's DLTensor (core/dlpack.h).
#ifndef THALWEG_CORE_TYPES_H
#define THALWEG_CORE_TYPES_H

#include <stddef.h>
#include <stdint.h>

#define THALWEG_VERSION_MAJOR 0
#define THALWEG_VERSION_MINOR 1
#define THALWEG_VERSION_PATCH 0
#define THALWEG_VERSION_TEXT "0.1.0"

#if defined(__GNUC__)
#define THALWEG_API __attribute__((visibility("default")))
#else
#define THALWEG_API
#endif

// In C++, members of public structs start as "absent" and "default"; in C, write = {.size = sizeof args, ...}.
#ifdef __cplusplus
#define THALWEG_INIT(value) = value
extern "C" {
#else
#define THALWEG_INIT(value)
#endif

// DLPack's triple in one word: code | bits << 8 | lanes << 16, byte for byte a DLDataType on
// little-endian machines. 0 marks an absent tensor.
typedef uint32_t thalweg_dtype;
enum {
  THALWEG_NONE = 0,
  THALWEG_I8 = 0x10800,
  THALWEG_I32 = 0x12000,
  THALWEG_I64 = 0x14000,
  THALWEG_U8 = 0x10801,
  THALWEG_F16 = 0x11002,
  THALWEG_F32 = 0x12002,
  THALWEG_F64 = 0x14002,
  THALWEG_BF16 = 0x11004,
  THALWEG_BOOL = 0x10806
};

// DLPack's device codes. In a zeroed tensor, 0 is read as THALWEG_CPU.
typedef enum thalweg_backend { THALWEG_CPU = 1, THALWEG_CUDA = 2 } thalweg_backend;

typedef enum thalweg_status {
  THALWEG_OK = 0,
  THALWEG_INVALID_ARGUMENT = 1,  // the caller can fix it
  THALWEG_UNSUPPORTED = 2,       // valid, but the kernel that was forced cannot take it
  THALWEG_OUT_OF_MEMORY = 3,
  THALWEG_DEVICE_ERROR = 4,
  THALWEG_INTERNAL = 5  // a fault of the library
} thalweg_status;

enum { THALWEG_MAX_RANK = 5 };

// A view of an array. `stride` counts elements. Absent when `dtype` is THALWEG_NONE; `data` may be
// NULL when there are no elements, and always in the workspace query and in explain.
typedef struct thalweg_tensor {
  void* data THALWEG_INIT(nullptr);
  thalweg_dtype dtype THALWEG_INIT(0);
  int32_t rank THALWEG_INIT(0);
  int32_t device_type THALWEG_INIT(0);
  int32_t device_id THALWEG_INIT(0);
  int64_t shape[THALWEG_MAX_RANK] THALWEG_INIT({});
  int64_t stride[THALWEG_MAX_RANK] THALWEG_INIT({});
} thalweg_tensor;

// Runs body(arg, 0) … body(arg, n-1), in any order, on any threads, also one after another, and
// returns when all have returned. Bodies never wait for each other.
typedef void (*thalweg_parallel_for)(void* pool, int64_t n, void (*body)(void* arg, int64_t i),
                                     void* arg);

// Where and how a call runs. All zero (but `size`) means defaults; NULL instead of a context too.
typedef struct thalweg_context {
  size_t size THALWEG_INIT(sizeof(thalweg_context));
  void* stream THALWEG_INIT(nullptr);  // cudaStream_t; not used on the CPU
  // CPU threads; 0: THALWEG_NUM_THREADS, OMP_NUM_THREADS, else the smaller of affinity and cgroup quota.
  // Results do not depend on it, bit for bit.
  int64_t num_threads THALWEG_INIT(0);
  thalweg_parallel_for parallel_for THALWEG_INIT(nullptr);  // a host's own threads; NULL: the library's pool
  void* pool THALWEG_INIT(nullptr);                         // handed to parallel_for
  // Forces a kernel by name, for tests and benchmarks; "name/block=4" decides a choice of that row (choices_at) too.
  const char* kernel THALWEG_INIT(nullptr);
  // 64-byte aligned, no tensor's memory, on the tensors' device. NULL: on the CPU the thread's arena, on CUDA an error
  // unless the size is 0.
  void* workspace THALWEG_INIT(nullptr);
  size_t workspace_bytes THALWEG_INIT(0);                   // at least what <op>_<pass>_workspace says
  int32_t* report THALWEG_INIT(nullptr);                    // CUDA: device i32[4], zeros at first: the first wrong value inside a tensor
} thalweg_context;

typedef enum thalweg_kind {
  THALWEG_TENSOR = 0,
  THALWEG_FLAG = 1,   // int32_t, 0 or 1
  THALWEG_COUNT = 2,  // int64_t
  THALWEG_REAL = 3,   // double
  THALWEG_CHOICE = 4  // int32_t, an index into the words of `choices`
} thalweg_kind;

typedef enum thalweg_role {
  THALWEG_IN = 0,
  THALWEG_OUT = 1,
  THALWEG_INOUT = 2,
  THALWEG_OPTION = 3
} thalweg_role;

// Which strides a tensor may have.
typedef enum thalweg_layout {
  THALWEG_ROWS = 0,   // the last axis is contiguous
  THALWEG_STATE = 1,  // one of the last two axes is contiguous
  THALWEG_ANY = 2     // any strides; an input's may be zero or negative
} thalweg_layout;

// One member of a pass's args struct. Checks, error texts, the tool, bindings and documents read it.
typedef struct thalweg_field {
  const char* name;
  thalweg_kind kind;
  thalweg_role role;
  uint32_t offset;      // of the member in the args struct
  int32_t optional;     // tensors: may be absent
  const char* dims;     // tensors: size names, "B T H K"; a name may carry "+1"
  const char* dtypes;   // tensors: accepted ("f64 f32 bf16 f16"), or "=q": the dtype of q
  thalweg_layout layout;
  const char* choices;  // choices: words separated by spaces, in order of value
  const char* doc;      // one line: what it is, units, and for options what zero means
} thalweg_field;

// One pass of an operator, as the tool and the bindings see it.
typedef struct thalweg_pass {
  const char* op;
  const char* name;  // "fwd", "bwd", "decode"
  const char* doc;
  const thalweg_field* fields;
  int64_t num_fields;
  size_t args_size;
  thalweg_status (*call)(const void* args, const thalweg_context* ctx);
  thalweg_status (*workspace)(const void* args, const thalweg_context* ctx, size_t* bytes);
  // Writes which kernel would run and why the rows above it would not, cut to `capacity`.
  thalweg_status (*explain)(const void* args, const thalweg_context* ctx, char* text, size_t capacity);
  // Name of kernel row i in order of preference, NULL past the end; `isa` gets what it needs.
  const char* (*kernel_at)(int64_t i, const char** isa);
  // What a caller may decide in that row's stead, with values worth trying: "block=4|16 stream=0|1", "" for nothing.
  const char* (*choices_at)(int64_t i);
  // What FLA accepts and this pass refuses: "name: reason; name: reason". Tools and bindings quote it.
  const char* refused;
} thalweg_pass;

// Pass i of the library, NULL past the end.
THALWEG_API const thalweg_pass* thalweg_pass_at(int64_t i);

// Text of the calling thread's last error: a fixed buffer, overwritten by its next failing call.
THALWEG_API const char* thalweg_last_error(void);

// Loads every CUDA kernel on device `id`, so that no later call does, in a graph's capture for one.
// A device error says why there is none.
THALWEG_API thalweg_status thalweg_prepare(int32_t id);
// The words for what a call's ctx.report holds after the caller's own synchronisation and copy to the host, cut to
// `capacity`; "" when it holds no fault.
THALWEG_API thalweg_status thalweg_report_text(const thalweg_pass* pass, const int32_t report[4], char* text,
                                               size_t capacity);

// Grows when a struct or a function of the C interface changes incompatibly.
THALWEG_API int32_t thalweg_abi_version(void);
// "0.1.0"
THALWEG_API const char* thalweg_version(void);
// The CPU instruction set in use: "portable", "avx2", "avx512", "amx" (lowered by THALWEG_ISA).
THALWEG_API const char* thalweg_cpu_isa(void);
// Threads a call uses by default.
THALWEG_API int64_t thalweg_default_threads(void);
// "f32" and so on; "none", or "unknown".
THALWEG_API const char* thalweg_dtype_name(thalweg_dtype dtype);
// Bytes of one element, 0 for an unknown dtype.
THALWEG_API size_t thalweg_dtype_bytes(thalweg_dtype dtype);

#ifdef __cplusplus
}
#endif
#endif
