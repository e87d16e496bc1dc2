// Gradients of keys j and values of top-k attention, one tile of keys, over the groups of queries that list it:
//   P[i,j] = exp(scale q_i . k_j + weight - lse_i);   dS = scale P (d_o v^T - delta);   d_v = P^T d_o;
//   d_k = dS^T q, 128 of the channels of both.
// BT 64 keys; BM 32 rows: 1 queries of H 32 heads; K 512, ND 4; full tiles, no mask code
module {
  func.func @topk_dkdv(%lock: memref<?xi8>, %ws: memref<?xi8>,  // head of every kernel
      %q: memref<?xbf16>, %k: memref<?xbf16>, %v: memref<?xbf16>, %d_o: memref<?xbf16>, %lse: memref<?xf32>,
      %delta: memref<?xf32>, %ranges: memref<?xi32>, %groups: memref<?xi32>, %weights: memref<?xf32>,
      %d_k: memref<?xbf16>, %d_v: memref<?xbf16>, %scale: f32, %B: i32, %T: i32, %S: i32, %first: i32, %count: i32,
      %nx: i32, %ny: i32, %nz: i32, %px: i32, %py: i32, %pz: i32)  // grid, program id
      attributes {SyncBlockLockArgIdx = 0 : i64, WorkspaceArgIdx = 1 : i64, global_kernel = "local"} {
    %c64 = arith.constant 64 : index
    %c63 = arith.constant 63 : index
    %c4 = arith.constant 4 : index
    %c128 = arith.constant 128 : index
    %c512 = arith.constant 512 : index
    %c2 = arith.constant 2 : index
    %c0 = arith.constant 0 : index
    %c1 = arith.constant 1 : index
    %f32_0 = arith.constant 0.0 : f32
    %c32 = arith.constant 32 : index
    %B_i = arith.index_cast %B : i32 to index
    %T_i = arith.index_cast %T : i32 to index
    %S_i = arith.index_cast %S : i32 to index
    %first_i = arith.index_cast %first : i32 to index
    %count_i = arith.index_cast %count : i32 to index
    %NK = arith.addi %S_i, %c63 : index
    %NK_1 = arith.divui %NK, %c64 : index
    %px_i = arith.index_cast %px : i32 to index
    %number = arith.addi %first_i, %px_i : index
    %py_i = arith.index_cast %py : i32 to index
    // the tile's first key, and the part's first channel
    %tile = arith.divui %number, %c4 : index
    %key = arith.muli %tile, %c64 : index
    %part = arith.remui %number, %c4 : index
    %channel = arith.muli %part, %c128 : index
    %k_at = arith.muli %py_i, %S_i : index
    %k_at_1 = arith.addi %k_at, %key : index
    %k_at_2 = arith.muli %k_at_1, %c512 : index
    %k_gm = memref.reinterpret_cast %k to offset: [%k_at_2], sizes: [64, 512], strides: [512, 1] : memref<?xbf16>
         to memref<64x512xbf16, strided<[512, 1], offset: ?>>
    %k_buf = memref.alloc() : memref<64x512xbf16>
    memref.copy %k_gm, %k_buf : memref<64x512xbf16, strided<[512, 1], offset: ?>> to memref<64x512xbf16>
    %k_1 = bufferization.to_tensor %k_buf restrict writable : memref<64x512xbf16>
    %v_gm = memref.reinterpret_cast %v to offset: [%k_at_2], sizes: [64, 512], strides: [512, 1] : memref<?xbf16>
         to memref<64x512xbf16, strided<[512, 1], offset: ?>>
    %v_buf = memref.alloc() : memref<64x512xbf16>
    memref.copy %v_gm, %v_buf : memref<64x512xbf16, strided<[512, 1], offset: ?>> to memref<64x512xbf16>
    %v_1 = bufferization.to_tensor %v_buf restrict writable : memref<64x512xbf16>
    %range = arith.muli %py_i, %NK_1 : index
    %range_1 = arith.addi %range, %tile : index
    %range_2 = arith.muli %range_1, %c2 : index
    %ranges_gm = memref.reinterpret_cast %ranges to offset: [%range_2], sizes: [1], strides: [1] : memref<?xi32>
         to memref<1xi32, strided<[1], offset: ?>>
    %from = memref.load %ranges_gm[%c0] : memref<1xi32, strided<[1], offset: ?>>
    %from_i = arith.index_cast %from : i32 to index
    %range_3 = arith.addi %range_2, %c1 : index
    %ranges_gm_1 = memref.reinterpret_cast %ranges to offset: [%range_3], sizes: [1], strides: [1] : memref<?xi32>
         to memref<1xi32, strided<[1], offset: ?>>
    %entries = memref.load %ranges_gm_1[%c0] : memref<1xi32, strided<[1], offset: ?>>
    %entries_i = arith.index_cast %entries : i32 to index
    %to = arith.addi %from_i, %entries_i : index
    %empty = tensor.empty() : tensor<64x128xf32>
    %zeros = linalg.fill ins(%f32_0 : f32) outs(%empty : tensor<64x128xf32>) -> tensor<64x128xf32>
    %zeros_1 = linalg.fill ins(%f32_0 : f32) outs(%empty : tensor<64x128xf32>) -> tensor<64x128xf32>
    %zeros_out, %zeros_1_out = scf.for %e = %from_i to %to step %c1 iter_args(%zeros_in = %zeros,
         %zeros_1_in = %zeros_1) -> (tensor<64x128xf32>, tensor<64x128xf32>) {
      %groups_gm = memref.reinterpret_cast %groups to offset: [%e], sizes: [1], strides: [1] : memref<?xi32>
           to memref<1xi32, strided<[1], offset: ?>>
      %group = memref.load %groups_gm[%c0] : memref<1xi32, strided<[1], offset: ?>>
      %group_i = arith.index_cast %group : i32 to index
      %row = arith.muli %py_i, %T_i : index
      %row_1 = arith.addi %row, %group_i : index
      %row_2 = arith.muli %row_1, %c32 : index
      %q_at = arith.muli %row_2, %c512 : index
      %part_at = arith.addi %q_at, %channel : index
      // P [i j]
      %q_gm = memref.reinterpret_cast %q to offset: [%q_at], sizes: [32, 512], strides: [512, 1] : memref<?xbf16>
           to memref<32x512xbf16, strided<[512, 1], offset: ?>>
      %q_buf = memref.alloc() : memref<32x512xbf16>
      memref.copy %q_gm, %q_buf : memref<32x512xbf16, strided<[512, 1], offset: ?>> to memref<32x512xbf16>
      %q_1 = bufferization.to_tensor %q_buf restrict writable : memref<32x512xbf16>
      %empty_1 = tensor.empty() : tensor<512x64xbf16>
      %kT = linalg.transpose ins(%k_1 : tensor<64x512xbf16>) outs(%empty_1 : tensor<512x64xbf16>) permutation = [1, 0]
      %lse_gm = memref.reinterpret_cast %lse to offset: [%row_2], sizes: [32], strides: [1] : memref<?xf32>
           to memref<32xf32, strided<[1], offset: ?>>
      %lse_buf = memref.alloc() : memref<32xf32>
      memref.copy %lse_gm, %lse_buf : memref<32xf32, strided<[1], offset: ?>> to memref<32xf32>
      %lse_1 = bufferization.to_tensor %lse_buf restrict writable : memref<32xf32>
      %empty_2 = tensor.empty() : tensor<32x64xf32>
      %zeros_2 = linalg.fill ins(%f32_0 : f32) outs(%empty_2 : tensor<32x64xf32>) -> tensor<32x64xf32>
      %P = linalg.matmul ins(%q_1, %kT : tensor<32x512xbf16>, tensor<512x64xbf16>) outs(%zeros_2 : tensor<32x64xf32>)
           -> tensor<32x64xf32>
      %scale_all = linalg.fill ins(%scale : f32) outs(%empty_2 : tensor<32x64xf32>) -> tensor<32x64xf32>
      %P_1 = arith.mulf %P, %scale_all : tensor<32x64xf32>
      %lse_i = linalg.broadcast ins(%lse_1 : tensor<32xf32>) outs(%empty_2 : tensor<32x64xf32>) dimensions = [1]
      %P_2 = arith.subf %P_1, %lse_i : tensor<32x64xf32>
      // how often the pair meets, for all heads of a query
      %weight_at = arith.muli %e, %c64 : index
      %weights_gm = memref.reinterpret_cast %weights to offset: [%weight_at], sizes: [1, 64], strides: [64, 1]
           : memref<?xf32> to memref<1x64xf32, strided<[64, 1], offset: ?>>
      %weight_buf = memref.alloc() : memref<1x64xf32>
      memref.copy %weights_gm, %weight_buf : memref<1x64xf32, strided<[64, 1], offset: ?>> to memref<1x64xf32>
      %weight = bufferization.to_tensor %weight_buf restrict writable : memref<1x64xf32>
      %empty_3 = tensor.empty() : tensor<1x32x64xf32>
      %weights_1 = linalg.broadcast ins(%weight : tensor<1x64xf32>) outs(%empty_3
           : tensor<1x32x64xf32>) dimensions = [1]
      %weights_2 = tensor.collapse_shape %weights_1 [[0, 1], [2]] : tensor<1x32x64xf32> into tensor<32x64xf32>
      %P_3 = arith.addf %P_2, %weights_2 : tensor<32x64xf32>
      %P_4 = math.exp %P_3 : tensor<32x64xf32>
      // dS [i j]
      %d_o_gm = memref.reinterpret_cast %d_o to offset: [%q_at], sizes: [32, 512], strides: [512, 1] : memref<?xbf16>
           to memref<32x512xbf16, strided<[512, 1], offset: ?>>
      %d_o_buf = memref.alloc() : memref<32x512xbf16>
      memref.copy %d_o_gm, %d_o_buf : memref<32x512xbf16, strided<[512, 1], offset: ?>> to memref<32x512xbf16>
      %d_o_1 = bufferization.to_tensor %d_o_buf restrict writable : memref<32x512xbf16>
      %vT = linalg.transpose ins(%v_1 : tensor<64x512xbf16>) outs(%empty_1 : tensor<512x64xbf16>) permutation = [1, 0]
      %delta_gm = memref.reinterpret_cast %delta to offset: [%row_2], sizes: [32], strides: [1] : memref<?xf32>
           to memref<32xf32, strided<[1], offset: ?>>
      %delta_buf = memref.alloc() : memref<32xf32>
      memref.copy %delta_gm, %delta_buf : memref<32xf32, strided<[1], offset: ?>> to memref<32xf32>
      %delta_1 = bufferization.to_tensor %delta_buf restrict writable : memref<32xf32>
      %dP = linalg.matmul ins(%d_o_1, %vT : tensor<32x512xbf16>, tensor<512x64xbf16>) outs(%zeros_2
           : tensor<32x64xf32>) -> tensor<32x64xf32>
      %delta_i = linalg.broadcast ins(%delta_1 : tensor<32xf32>) outs(%empty_2 : tensor<32x64xf32>) dimensions = [1]
      %dS = arith.subf %dP, %delta_i : tensor<32x64xf32>
      %dS_1 = arith.mulf %P_4, %dS : tensor<32x64xf32>
      %scale_all_1 = linalg.fill ins(%scale : f32) outs(%empty_2 : tensor<32x64xf32>) -> tensor<32x64xf32>
      %dS_2 = arith.mulf %dS_1, %scale_all_1 : tensor<32x64xf32>
      // both sums, of this part's channels
      %P_5 = arith.truncf %P_4 : tensor<32x64xf32> to tensor<32x64xbf16>
      %empty_4 = tensor.empty() : tensor<64x32xbf16>
      %PT = linalg.transpose ins(%P_5 : tensor<32x64xbf16>) outs(%empty_4 : tensor<64x32xbf16>) permutation = [1, 0]
      %dS_3 = arith.truncf %dS_2 : tensor<32x64xf32> to tensor<32x64xbf16>
      %dST = linalg.transpose ins(%dS_3 : tensor<32x64xbf16>) outs(%empty_4 : tensor<64x32xbf16>) permutation = [1, 0]
      %d_o_gm_1 = memref.reinterpret_cast %d_o to offset: [%part_at], sizes: [32, 128], strides: [512, 1]
           : memref<?xbf16> to memref<32x128xbf16, strided<[512, 1], offset: ?>>
      %d_o_buf_1 = memref.alloc() : memref<32x128xbf16>
      memref.copy %d_o_gm_1, %d_o_buf_1 : memref<32x128xbf16, strided<[512, 1], offset: ?>> to memref<32x128xbf16>
      %d_o_2 = bufferization.to_tensor %d_o_buf_1 restrict writable : memref<32x128xbf16>
      %d_v_1 = linalg.matmul ins(%PT, %d_o_2 : tensor<64x32xbf16>, tensor<32x128xbf16>) outs(%zeros_1_in
           : tensor<64x128xf32>) -> tensor<64x128xf32>
      %q_gm_1 = memref.reinterpret_cast %q to offset: [%part_at], sizes: [32, 128], strides: [512, 1] : memref<?xbf16>
           to memref<32x128xbf16, strided<[512, 1], offset: ?>>
      %q_buf_1 = memref.alloc() : memref<32x128xbf16>
      memref.copy %q_gm_1, %q_buf_1 : memref<32x128xbf16, strided<[512, 1], offset: ?>> to memref<32x128xbf16>
      %q_2 = bufferization.to_tensor %q_buf_1 restrict writable : memref<32x128xbf16>
      %d_k_1 = linalg.matmul ins(%dST, %q_2 : tensor<64x32xbf16>, tensor<32x128xbf16>) outs(%zeros_in
           : tensor<64x128xf32>) -> tensor<64x128xf32>
      scf.yield %d_k_1, %d_v_1 : tensor<64x128xf32>, tensor<64x128xf32>
    }
    %out = arith.addi %k_at_2, %channel : index
    %d_k_2 = arith.truncf %zeros_out : tensor<64x128xf32> to tensor<64x128xbf16>
    %d_k_gm = memref.reinterpret_cast %d_k to offset: [%out], sizes: [64, 128], strides: [512, 1] : memref<?xbf16>
         to memref<64x128xbf16, strided<[512, 1], offset: ?>>
    bufferization.materialize_in_destination %d_k_2 in writable %d_k_gm
         : (tensor<64x128xbf16>, memref<64x128xbf16, strided<[512, 1], offset: ?>>) -> ()
    %d_v_2 = arith.truncf %zeros_1_out : tensor<64x128xf32> to tensor<64x128xbf16>
    %d_v_gm = memref.reinterpret_cast %d_v to offset: [%out], sizes: [64, 128], strides: [512, 1] : memref<?xbf16>
         to memref<64x128xbf16, strided<[512, 1], offset: ?>>
    bufferization.materialize_in_destination %d_v_2 in writable %d_v_gm
         : (tensor<64x128xbf16>, memref<64x128xbf16, strided<[512, 1], offset: ?>>) -> ()
    return
  }
}
