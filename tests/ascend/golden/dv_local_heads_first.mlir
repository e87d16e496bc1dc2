// Local part of the gradient of the deltas, one chunk of one value head:
//   A[j,i] = scale (k_j . q_i) exp(g_i - g_j) for j <= i, else 0;   d_v = A d_o.
// BT 64, H 4, HV 4, K 64, V 64; g [HV T], stride 1; sequences of T tokens; full chunks, no mask code
module {
  func.func @dv_local(%lock: memref<?xi8>, %ws: memref<?xi8>,  // head of every kernel
      %q: memref<?xbf16>, %k: memref<?xbf16>, %d_o: memref<?xbf16>, %g: memref<?xf32>, %d_v: memref<?xbf16>,
      %scale: f32, %B: i32, %T: i32, %NT: i32, %first: i32, %count: i32,
      %nx: i32, %ny: i32, %nz: i32, %px: i32, %py: i32, %pz: i32)  // grid, program id
      attributes {SyncBlockLockArgIdx = 0 : i64, WorkspaceArgIdx = 1 : i64, global_kernel = "local"} {
    %c4 = arith.constant 4 : index
    %c64 = arith.constant 64 : index
    %c1 = arith.constant 1 : index
    %f32_0 = arith.constant 0.0 : f32
    %B_i = arith.index_cast %B : i32 to index
    %T_i = arith.index_cast %T : i32 to index
    %NT_i = arith.index_cast %NT : i32 to index
    %first_i = arith.index_cast %first : i32 to index
    %count_i = arith.index_cast %count : i32 to index
    %px_i = arith.index_cast %px : i32 to index
    %chunk = arith.addi %first_i, %px_i : index
    %py_i = arith.index_cast %py : i32 to index
    // sequence and value head
    %b = arith.divui %py_i, %c4 : index
    %hv = arith.remui %py_i, %c4 : index
    // where the chunk lies
    %token = arith.muli %chunk, %c64 : index
    %start = arith.muli %b, %T_i : index
    %row = arith.addi %start, %token : index
    %g_head = arith.muli %b, %c4 : index
    %g_head_1 = arith.addi %g_head, %hv : index
    %g_start = arith.muli %g_head_1, %T_i : index
    %g_at = arith.addi %g_start, %token : index
    // scores [j i]
    %g_gm = memref.reinterpret_cast %g to offset: [%g_at], sizes: [64], strides: [1] : memref<?xf32>
         to memref<64xf32, strided<[1], offset: ?>>
    %gate_buf = memref.alloc() : memref<64xf32>
    memref.copy %g_gm, %gate_buf : memref<64xf32, strided<[1], offset: ?>> to memref<64xf32>
    %gate = bufferization.to_tensor %gate_buf restrict writable : memref<64xf32>
    %at = arith.muli %row, %c4 : index
    %at_1 = arith.addi %at, %hv : index
    %at_2 = arith.muli %at_1, %c64 : index
    %q_gm = memref.reinterpret_cast %q to offset: [%at_2], sizes: [64, 64], strides: [256, 1] : memref<?xbf16>
         to memref<64x64xbf16, strided<[256, 1], offset: ?>>
    %q_buf = memref.alloc() : memref<64x64xbf16>
    memref.copy %q_gm, %q_buf : memref<64x64xbf16, strided<[256, 1], offset: ?>> to memref<64x64xbf16>
    %q_1 = bufferization.to_tensor %q_buf restrict writable : memref<64x64xbf16>
    %k_gm = memref.reinterpret_cast %k to offset: [%at_2], sizes: [64, 64], strides: [256, 1] : memref<?xbf16>
         to memref<64x64xbf16, strided<[256, 1], offset: ?>>
    %k_buf = memref.alloc() : memref<64x64xbf16>
    memref.copy %k_gm, %k_buf : memref<64x64xbf16, strided<[256, 1], offset: ?>> to memref<64x64xbf16>
    %k_1 = bufferization.to_tensor %k_buf restrict writable : memref<64x64xbf16>
    %empty = tensor.empty() : tensor<64x64xf32>
    %zeros = linalg.fill ins(%f32_0 : f32) outs(%empty : tensor<64x64xf32>) -> tensor<64x64xf32>
    %empty_1 = tensor.empty() : tensor<64x64xbf16>
    %qT = linalg.transpose ins(%q_1 : tensor<64x64xbf16>) outs(%empty_1 : tensor<64x64xbf16>) permutation = [1, 0]
    %S = linalg.matmul ins(%k_1, %qT : tensor<64x64xbf16>, tensor<64x64xbf16>) outs(%zeros : tensor<64x64xf32>)
         -> tensor<64x64xf32>
    %scale_all = linalg.fill ins(%scale : f32) outs(%empty : tensor<64x64xf32>) -> tensor<64x64xf32>
    %A = arith.mulf %S, %scale_all : tensor<64x64xf32>
    // times the decay from j to i
    %g_i = linalg.broadcast ins(%gate : tensor<64xf32>) outs(%empty : tensor<64x64xf32>) dimensions = [0]
    %g_j = linalg.broadcast ins(%gate : tensor<64xf32>) outs(%empty : tensor<64x64xf32>) dimensions = [1]
    %difference = arith.subf %g_i, %g_j : tensor<64x64xf32>
    %decay = math.exp %difference : tensor<64x64xf32>
    %A_1 = arith.mulf %A, %decay : tensor<64x64xf32>
    // of j <= i
    %empty_2 = tensor.empty() : tensor<64xi32>
    %n = linalg.generic {indexing_maps = [affine_map<(a) -> (a)>], iterator_types = ["parallel"]} outs(%empty_2
         : tensor<64xi32>) {
    ^bb0(%old: i32):
      %at_3 = linalg.index 0 : index
      %number = arith.index_cast %at_3 : index to i32  // i32: compares of i64 are scalar code
      linalg.yield %number : i32
    } -> tensor<64xi32>
    %empty_3 = tensor.empty() : tensor<64x64xi32>
    %column = linalg.broadcast ins(%n : tensor<64xi32>) outs(%empty_3 : tensor<64x64xi32>) dimensions = [0]
    %row_1 = linalg.broadcast ins(%n : tensor<64xi32>) outs(%empty_3 : tensor<64x64xi32>) dimensions = [1]
    %keep = arith.cmpi sle, %row_1, %column : tensor<64x64xi32>
    %A_2 = arith.select %keep, %A_1, %zeros : tensor<64x64xi1>, tensor<64x64xf32>
    %A_3 = arith.truncf %A_2 : tensor<64x64xf32> to tensor<64x64xbf16>
    // d_v = A d_o
    %d_o_gm = memref.reinterpret_cast %d_o to offset: [%at_2], sizes: [64, 64], strides: [256, 1] : memref<?xbf16>
         to memref<64x64xbf16, strided<[256, 1], offset: ?>>
    %d_o_buf = memref.alloc() : memref<64x64xbf16>
    memref.copy %d_o_gm, %d_o_buf : memref<64x64xbf16, strided<[256, 1], offset: ?>> to memref<64x64xbf16>
    %d_o_1 = bufferization.to_tensor %d_o_buf restrict writable : memref<64x64xbf16>
    %d_v_1 = linalg.matmul ins(%A_3, %d_o_1 : tensor<64x64xbf16>, tensor<64x64xbf16>) outs(%zeros : tensor<64x64xf32>)
         -> tensor<64x64xf32>
    %d_v_2 = arith.truncf %d_v_1 : tensor<64x64xf32> to tensor<64x64xbf16>
    %d_v_gm = memref.reinterpret_cast %d_v to offset: [%at_2], sizes: [64, 64], strides: [256, 1] : memref<?xbf16>
         to memref<64x64xbf16, strided<[256, 1], offset: ?>>
    bufferization.materialize_in_destination %d_v_2 in writable %d_v_gm
         : (tensor<64x64xbf16>, memref<64x64xbf16, strided<[256, 1], offset: ?>>) -> ()
    return
  }
}
