// Conversion from and to DLPack's DLTensor, without DLPack's header: the struct below has its layout
// (DLPack 0.2 and later), so a DLTensor* may be passed where a thalweg_dltensor* is asked for.
#ifndef THALWEG_CORE_DLPACK_H
#define THALWEG_CORE_DLPACK_H

#include "thalweg/core/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct thalweg_dltensor {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  thalweg_dtype dtype;
  int64_t* shape;
  int64_t* strides;  // elements; NULL means row-major
  uint64_t byte_offset;
} thalweg_dltensor;

// Views `source` without copying. Errors: rank above THALWEG_MAX_RANK, a dtype of this library's
// list expected. Nothing keeps `source` alive: that stays the caller's task.
THALWEG_API thalweg_status thalweg_from_dlpack(const thalweg_dltensor* source, thalweg_tensor* out);

// Fills `out` to point into `source`, whose shape and stride arrays it borrows.
THALWEG_API thalweg_status thalweg_to_dlpack(thalweg_tensor* source, thalweg_dltensor* out);

#ifdef __cplusplus
}
#endif
#endif
