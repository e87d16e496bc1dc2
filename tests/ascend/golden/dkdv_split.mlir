// Gradients of k and v of block-sparse attention, one sub-block of keys j of one head, over listed queries i:
//   P[i,j] = exp(scale q_i . k_j - lse_i);   dS = scale P (d_o v^T - delta);   d_v = P^T d_o;   d_k = dS^T q.
// Tiles of 32 queries and 32 keys, blocks of 64 and 64; H 4, HK 2, K 64
// full tiles, no mask code; P and dS as high and low halves
module {
  func.func @dkdv(%lock: memref<?xi8>, %ws: memref<?xi8>,  // head of every kernel
      %q: memref<?xbf16>, %k: memref<?xbf16>, %v: memref<?xbf16>, %d_o: memref<?xbf16>, %lse: memref<?xf32>,
      %delta: memref<?xf32>, %counts: memref<?xi32>, %lists: memref<?xi32>, %d_k: memref<?xbf16>,
      %d_v: memref<?xbf16>, %scale: f32, %B: i32, %T: i32, %S: i32, %first: i32, %count: i32,
      %nx: i32, %ny: i32, %nz: i32, %px: i32, %py: i32, %pz: i32)  // grid, program id
      attributes {SyncBlockLockArgIdx = 0 : i64, WorkspaceArgIdx = 1 : i64, global_kernel = "local"} {
    %c64 = arith.constant 64 : index
    %c63 = arith.constant 63 : index
    %c32 = arith.constant 32 : index
    %c31 = arith.constant 31 : index
    %c2 = arith.constant 2 : index
    %f32_0 = arith.constant 0.0 : f32
    %c0 = arith.constant 0 : index
    %c1 = arith.constant 1 : index
    %c4 = arith.constant 4 : index
    %B_i = arith.index_cast %B : i32 to index
    %T_i = arith.index_cast %T : i32 to index
    %S_i = arith.index_cast %S : i32 to index
    %first_i = arith.index_cast %first : i32 to index
    %count_i = arith.index_cast %count : i32 to index
    %NK = arith.addi %S_i, %c63 : index
    %NK_1 = arith.divui %NK, %c64 : index
    %NT = arith.addi %T_i, %c31 : index
    %NT_1 = arith.divui %NT, %c32 : index
    %px_i = arith.index_cast %px : i32 to index
    %sub_block = arith.addi %first_i, %px_i : index
    %py_i = arith.index_cast %py : i32 to index
    // sequence, key head, and the sub-block's first key
    %b = arith.divui %py_i, %c2 : index
    %hk = arith.remui %py_i, %c2 : index
    %key = arith.muli %sub_block, %c32 : index
    %block = arith.divui %sub_block, %c2 : index
    %key_row = arith.muli %b, %S_i : index
    %key_row_1 = arith.addi %key_row, %key : index
    %k_at = arith.muli %key_row_1, %c2 : index
    %k_at_1 = arith.addi %k_at, %hk : index
    %k_at_2 = arith.muli %k_at_1, %c64 : index
    %k_gm = memref.reinterpret_cast %k to offset: [%k_at_2], sizes: [32, 64], strides: [128, 1] : memref<?xbf16>
         to memref<32x64xbf16, strided<[128, 1], offset: ?>>
    %k_buf = memref.alloc() : memref<32x64xbf16>
    memref.copy %k_gm, %k_buf : memref<32x64xbf16, strided<[128, 1], offset: ?>> to memref<32x64xbf16>
    %k_1 = bufferization.to_tensor %k_buf restrict writable : memref<32x64xbf16>
    %v_gm = memref.reinterpret_cast %v to offset: [%k_at_2], sizes: [32, 64], strides: [128, 1] : memref<?xbf16>
         to memref<32x64xbf16, strided<[128, 1], offset: ?>>
    %v_buf = memref.alloc() : memref<32x64xbf16>
    memref.copy %v_gm, %v_buf : memref<32x64xbf16, strided<[128, 1], offset: ?>> to memref<32x64xbf16>
    %v_1 = bufferization.to_tensor %v_buf restrict writable : memref<32x64xbf16>
    %empty = tensor.empty() : tensor<32x64xf32>
    %zeros = linalg.fill ins(%f32_0 : f32) outs(%empty : tensor<32x64xf32>) -> tensor<32x64xf32>
    %zeros_1 = linalg.fill ins(%f32_0 : f32) outs(%empty : tensor<32x64xf32>) -> tensor<32x64xf32>
    // over the query heads that read this key head
    %zeros_out, %zeros_1_out = scf.for %g = %c0 to %c2 step %c1 iter_args(%zeros_in = %zeros, %zeros_1_in = %zeros_1)
         -> (tensor<32x64xf32>, tensor<32x64xf32>) {
      %h = arith.muli %hk, %c2 : index
      %h_1 = arith.addi %h, %g : index
      %head = arith.muli %b, %c4 : index
      %head_1 = arith.addi %head, %h_1 : index
      %column = arith.muli %head_1, %NK_1 : index
      %column_1 = arith.addi %column, %block : index
      %list = arith.muli %column_1, %NT_1 : index
      %counts_gm = memref.reinterpret_cast %counts to offset: [%column_1], sizes: [1], strides: [1] : memref<?xi32>
           to memref<1xi32, strided<[1], offset: ?>>
      %tiles = memref.load %counts_gm[%c0] : memref<1xi32, strided<[1], offset: ?>>
      %tiles_i = arith.index_cast %tiles : i32 to index
      %zeros_in_out, %zeros_1_in_out = scf.for %i = %c0 to %tiles_i step %c1 iter_args(%zeros_in_in = %zeros_in,
           %zeros_1_in_in = %zeros_1_in) -> (tensor<32x64xf32>, tensor<32x64xf32>) {
        %entry = arith.addi %list, %i : index
        %lists_gm = memref.reinterpret_cast %lists to offset: [%entry], sizes: [1], strides: [1] : memref<?xi32>
             to memref<1xi32, strided<[1], offset: ?>>
        %tile = memref.load %lists_gm[%c0] : memref<1xi32, strided<[1], offset: ?>>
        %tile_i = arith.index_cast %tile : i32 to index
        %token = arith.muli %tile_i, %c32 : index
        %row = arith.muli %b, %T_i : index
        %row_1 = arith.addi %row, %token : index
        %q_at = arith.muli %row_1, %c4 : index
        %q_at_1 = arith.addi %q_at, %h_1 : index
        %q_at_2 = arith.muli %q_at_1, %c64 : index
        %head_2 = arith.muli %b, %c4 : index
        %head_3 = arith.addi %head_2, %h_1 : index
        %stat_at = arith.muli %head_3, %T_i : index
        %stat_at_1 = arith.addi %stat_at, %token : index
        // P [i j]
        %q_gm = memref.reinterpret_cast %q to offset: [%q_at_2], sizes: [32, 64], strides: [256, 1] : memref<?xbf16>
             to memref<32x64xbf16, strided<[256, 1], offset: ?>>
        %q_buf = memref.alloc() : memref<32x64xbf16>
        memref.copy %q_gm, %q_buf : memref<32x64xbf16, strided<[256, 1], offset: ?>> to memref<32x64xbf16>
        %q_1 = bufferization.to_tensor %q_buf restrict writable : memref<32x64xbf16>
        %empty_1 = tensor.empty() : tensor<64x32xbf16>
        %kT = linalg.transpose ins(%k_1 : tensor<32x64xbf16>) outs(%empty_1 : tensor<64x32xbf16>) permutation = [1, 0]
        %lse_gm = memref.reinterpret_cast %lse to offset: [%stat_at_1], sizes: [32], strides: [1] : memref<?xf32>
             to memref<32xf32, strided<[1], offset: ?>>
        %lse_buf = memref.alloc() : memref<32xf32>
        memref.copy %lse_gm, %lse_buf : memref<32xf32, strided<[1], offset: ?>> to memref<32xf32>
        %lse_1 = bufferization.to_tensor %lse_buf restrict writable : memref<32xf32>
        %empty_2 = tensor.empty() : tensor<32x32xf32>
        %zeros_2 = linalg.fill ins(%f32_0 : f32) outs(%empty_2 : tensor<32x32xf32>) -> tensor<32x32xf32>
        %P = linalg.matmul ins(%q_1, %kT : tensor<32x64xbf16>, tensor<64x32xbf16>) outs(%zeros_2 : tensor<32x32xf32>)
             -> tensor<32x32xf32>
        %scale_all = linalg.fill ins(%scale : f32) outs(%empty_2 : tensor<32x32xf32>) -> tensor<32x32xf32>
        %P_1 = arith.mulf %P, %scale_all : tensor<32x32xf32>
        %lse_i = linalg.broadcast ins(%lse_1 : tensor<32xf32>) outs(%empty_2 : tensor<32x32xf32>) dimensions = [1]
        %P_2 = arith.subf %P_1, %lse_i : tensor<32x32xf32>
        %P_3 = math.exp %P_2 : tensor<32x32xf32>
        // dS [i j]
        %d_o_gm = memref.reinterpret_cast %d_o to offset: [%q_at_2], sizes: [32, 64], strides: [256, 1]
             : memref<?xbf16> to memref<32x64xbf16, strided<[256, 1], offset: ?>>
        %d_o_buf = memref.alloc() : memref<32x64xbf16>
        memref.copy %d_o_gm, %d_o_buf : memref<32x64xbf16, strided<[256, 1], offset: ?>> to memref<32x64xbf16>
        %d_o_1 = bufferization.to_tensor %d_o_buf restrict writable : memref<32x64xbf16>
        %vT = linalg.transpose ins(%v_1 : tensor<32x64xbf16>) outs(%empty_1 : tensor<64x32xbf16>) permutation = [1, 0]
        %delta_gm = memref.reinterpret_cast %delta to offset: [%stat_at_1], sizes: [32], strides: [1] : memref<?xf32>
             to memref<32xf32, strided<[1], offset: ?>>
        %delta_buf = memref.alloc() : memref<32xf32>
        memref.copy %delta_gm, %delta_buf : memref<32xf32, strided<[1], offset: ?>> to memref<32xf32>
        %delta_1 = bufferization.to_tensor %delta_buf restrict writable : memref<32xf32>
        %dP = linalg.matmul ins(%d_o_1, %vT : tensor<32x64xbf16>, tensor<64x32xbf16>) outs(%zeros_2
             : tensor<32x32xf32>) -> tensor<32x32xf32>
        %delta_i = linalg.broadcast ins(%delta_1 : tensor<32xf32>) outs(%empty_2 : tensor<32x32xf32>) dimensions = [1]
        %dS = arith.subf %dP, %delta_i : tensor<32x32xf32>
        %dS_1 = arith.mulf %P_3, %dS : tensor<32x32xf32>
        %scale_all_1 = linalg.fill ins(%scale : f32) outs(%empty_2 : tensor<32x32xf32>) -> tensor<32x32xf32>
        %dS_2 = arith.mulf %dS_1, %scale_all_1 : tensor<32x32xf32>
        // both sums
        %P_4 = arith.truncf %P_3 : tensor<32x32xf32> to tensor<32x32xbf16>
        %P_high = arith.extf %P_4 : tensor<32x32xbf16> to tensor<32x32xf32>
        %P_rest = arith.subf %P_3, %P_high : tensor<32x32xf32>
        %P_low = arith.truncf %P_rest : tensor<32x32xf32> to tensor<32x32xbf16>
        %empty_3 = tensor.empty() : tensor<32x32xbf16>
        %PT = linalg.transpose ins(%P_4 : tensor<32x32xbf16>) outs(%empty_3 : tensor<32x32xbf16>) permutation = [1, 0]
        %d_v_1 = linalg.matmul ins(%PT, %d_o_1 : tensor<32x32xbf16>, tensor<32x64xbf16>) outs(%zeros_1_in_in
             : tensor<32x64xf32>) -> tensor<32x64xf32>
        %PT_1 = linalg.transpose ins(%P_low : tensor<32x32xbf16>) outs(%empty_3
             : tensor<32x32xbf16>) permutation = [1, 0]
        %d_v_2 = linalg.matmul ins(%PT_1, %d_o_1 : tensor<32x32xbf16>, tensor<32x64xbf16>) outs(%d_v_1
             : tensor<32x64xf32>) -> tensor<32x64xf32>
        %dS_3 = arith.truncf %dS_2 : tensor<32x32xf32> to tensor<32x32xbf16>
        %dS_high = arith.extf %dS_3 : tensor<32x32xbf16> to tensor<32x32xf32>
        %dS_rest = arith.subf %dS_2, %dS_high : tensor<32x32xf32>
        %dS_low = arith.truncf %dS_rest : tensor<32x32xf32> to tensor<32x32xbf16>
        %dST = linalg.transpose ins(%dS_3 : tensor<32x32xbf16>) outs(%empty_3 : tensor<32x32xbf16>) permutation = [1, 0]
        %d_k_1 = linalg.matmul ins(%dST, %q_1 : tensor<32x32xbf16>, tensor<32x64xbf16>) outs(%zeros_in_in
             : tensor<32x64xf32>) -> tensor<32x64xf32>
        %dST_1 = linalg.transpose ins(%dS_low : tensor<32x32xbf16>) outs(%empty_3
             : tensor<32x32xbf16>) permutation = [1, 0]
        %d_k_2 = linalg.matmul ins(%dST_1, %q_1 : tensor<32x32xbf16>, tensor<32x64xbf16>) outs(%d_k_1
             : tensor<32x64xf32>) -> tensor<32x64xf32>
        scf.yield %d_k_2, %d_v_2 : tensor<32x64xf32>, tensor<32x64xf32>
      }
      scf.yield %zeros_in_out, %zeros_1_in_out : tensor<32x64xf32>, tensor<32x64xf32>
    }
    %d_k_3 = arith.truncf %zeros_out : tensor<32x64xf32> to tensor<32x64xbf16>
    %d_k_gm = memref.reinterpret_cast %d_k to offset: [%k_at_2], sizes: [32, 64], strides: [128, 1] : memref<?xbf16>
         to memref<32x64xbf16, strided<[128, 1], offset: ?>>
    bufferization.materialize_in_destination %d_k_3 in writable %d_k_gm
         : (tensor<32x64xbf16>, memref<32x64xbf16, strided<[128, 1], offset: ?>>) -> ()
    %d_v_3 = arith.truncf %zeros_1_out : tensor<32x64xf32> to tensor<32x64xbf16>
    %d_v_gm = memref.reinterpret_cast %d_v to offset: [%k_at_2], sizes: [32, 64], strides: [128, 1] : memref<?xbf16>
         to memref<32x64xbf16, strided<[128, 1], offset: ?>>
    bufferization.materialize_in_destination %d_v_3 in writable %d_v_gm
         : (tensor<32x64xbf16>, memref<32x64xbf16, strided<[128, 1], offset: ?>>) -> ()
    return
  }
}
