// Gradients of q, k and w around the state, one chunk of one value head; L is its last token:
//   P[i,j] = scale (d_o_i . v_new_j) exp(g_i - g_j) for j <= i, else 0
//   d_q = scale exp(g) (d_o h^T) + P k;  d_k = exp(g_L - g) (v_new d_h^T) + P^T q;  d_w = -d_v h^T.
// BT 64, H 4, HV 4, K 64, V 64; g [T HV], stride HV; sequences of T tokens; full chunks, no mask code
module {
  func.func @dqkw(%lock: memref<?xi8>, %ws: memref<?xi8>,  // head of every kernel
      %q: memref<?xbf16>, %k: memref<?xbf16>, %v_new: memref<?xbf16>, %d_o: memref<?xbf16>, %d_v: memref<?xbf16>,
      %h: memref<?xbf16>, %d_h: memref<?xbf16>, %g: memref<?xf32>, %d_q: memref<?xbf16>, %d_k: memref<?xbf16>,
      %d_w: memref<?xbf16>, %scale: f32, %B: i32, %T: i32, %NT: i32, %first: i32, %count: i32,
      %nx: i32, %ny: i32, %nz: i32, %px: i32, %py: i32, %pz: i32)  // grid, program id
      attributes {SyncBlockLockArgIdx = 0 : i64, WorkspaceArgIdx = 1 : i64, global_kernel = "local"} {
    %c4 = arith.constant 4 : index
    %c64 = arith.constant 64 : index
    %f32_0 = arith.constant 0.0 : f32
    %c4096 = arith.constant 4096 : index
    %c1 = arith.constant 1 : index
    %c63 = arith.constant 63 : index
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
    %state = arith.muli %b, %NT_i : index
    %state_1 = arith.addi %state, %chunk : index
    %g_start = arith.muli %row, %c4 : index
    %g_at = arith.addi %g_start, %hv : index
    // P [i j]
    %g_gm = memref.reinterpret_cast %g to offset: [%g_at], sizes: [64], strides: [4] : memref<?xf32>
         to memref<64xf32, strided<[4], offset: ?>>
    %gate_buf = memref.alloc() : memref<64xf32>
    memref.copy %g_gm, %gate_buf : memref<64xf32, strided<[4], offset: ?>> to memref<64xf32>
    %gate = bufferization.to_tensor %gate_buf restrict writable : memref<64xf32>
    %at = arith.muli %row, %c4 : index
    %at_1 = arith.addi %at, %hv : index
    %at_2 = arith.muli %at_1, %c64 : index
    %d_o_gm = memref.reinterpret_cast %d_o to offset: [%at_2], sizes: [64, 64], strides: [256, 1] : memref<?xbf16>
         to memref<64x64xbf16, strided<[256, 1], offset: ?>>
    %d_o_buf = memref.alloc() : memref<64x64xbf16>
    memref.copy %d_o_gm, %d_o_buf : memref<64x64xbf16, strided<[256, 1], offset: ?>> to memref<64x64xbf16>
    %d_o_1 = bufferization.to_tensor %d_o_buf restrict writable : memref<64x64xbf16>
    %v_new_gm = memref.reinterpret_cast %v_new to offset: [%at_2], sizes: [64, 64], strides: [256, 1] : memref<?xbf16>
         to memref<64x64xbf16, strided<[256, 1], offset: ?>>
    %v_new_buf = memref.alloc() : memref<64x64xbf16>
    memref.copy %v_new_gm, %v_new_buf : memref<64x64xbf16, strided<[256, 1], offset: ?>> to memref<64x64xbf16>
    %v_new_1 = bufferization.to_tensor %v_new_buf restrict writable : memref<64x64xbf16>
    %empty = tensor.empty() : tensor<64x64xf32>
    %zeros = linalg.fill ins(%f32_0 : f32) outs(%empty : tensor<64x64xf32>) -> tensor<64x64xf32>
    %empty_1 = tensor.empty() : tensor<64x64xbf16>
    %vT = linalg.transpose ins(%v_new_1 : tensor<64x64xbf16>) outs(%empty_1 : tensor<64x64xbf16>) permutation = [1, 0]
    %P = linalg.matmul ins(%d_o_1, %vT : tensor<64x64xbf16>, tensor<64x64xbf16>) outs(%zeros : tensor<64x64xf32>)
         -> tensor<64x64xf32>
    %scale_all = linalg.fill ins(%scale : f32) outs(%empty : tensor<64x64xf32>) -> tensor<64x64xf32>
    %P_1 = arith.mulf %P, %scale_all : tensor<64x64xf32>
    %g_i = linalg.broadcast ins(%gate : tensor<64xf32>) outs(%empty : tensor<64x64xf32>) dimensions = [1]
    %g_j = linalg.broadcast ins(%gate : tensor<64xf32>) outs(%empty : tensor<64x64xf32>) dimensions = [0]
    %difference = arith.subf %g_i, %g_j : tensor<64x64xf32>
    %decay = math.exp %difference : tensor<64x64xf32>
    %P_2 = arith.mulf %P_1, %decay : tensor<64x64xf32>
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
    %keep = arith.cmpi sge, %row_1, %column : tensor<64x64xi32>
    %P_3 = arith.select %keep, %P_2, %zeros : tensor<64x64xi1>, tensor<64x64xf32>
    %P_4 = arith.truncf %P_3 : tensor<64x64xf32> to tensor<64x64xbf16>
    // d_q: through the state, then inside the chunk
    %at_4 = arith.muli %state_1, %c4 : index
    %at_5 = arith.addi %at_4, %hv : index
    %at_6 = arith.muli %at_5, %c4096 : index
    %h_gm = memref.reinterpret_cast %h to offset: [%at_6], sizes: [64, 64], strides: [64, 1] : memref<?xbf16>
         to memref<64x64xbf16, strided<[64, 1], offset: ?>>
    %h_buf = memref.alloc() : memref<64x64xbf16>
    memref.copy %h_gm, %h_buf : memref<64x64xbf16, strided<[64, 1], offset: ?>> to memref<64x64xbf16>
    %h_1 = bufferization.to_tensor %h_buf restrict writable : memref<64x64xbf16>
    %hT = linalg.transpose ins(%h_1 : tensor<64x64xbf16>) outs(%empty_1 : tensor<64x64xbf16>) permutation = [1, 0]
    %dq = linalg.matmul ins(%d_o_1, %hT : tensor<64x64xbf16>, tensor<64x64xbf16>) outs(%zeros : tensor<64x64xf32>)
         -> tensor<64x64xf32>
    %scale_all_1 = linalg.fill ins(%scale : f32) outs(%empty : tensor<64x64xf32>) -> tensor<64x64xf32>
    %dq_1 = arith.mulf %dq, %scale_all_1 : tensor<64x64xf32>
    %decay_1 = math.exp %gate : tensor<64xf32>
    %decay_i = linalg.broadcast ins(%decay_1 : tensor<64xf32>) outs(%empty : tensor<64x64xf32>) dimensions = [1]
    %dq_2 = arith.mulf %dq_1, %decay_i : tensor<64x64xf32>
    %k_gm = memref.reinterpret_cast %k to offset: [%at_2], sizes: [64, 64], strides: [256, 1] : memref<?xbf16>
         to memref<64x64xbf16, strided<[256, 1], offset: ?>>
    %k_buf = memref.alloc() : memref<64x64xbf16>
    memref.copy %k_gm, %k_buf : memref<64x64xbf16, strided<[256, 1], offset: ?>> to memref<64x64xbf16>
    %k_1 = bufferization.to_tensor %k_buf restrict writable : memref<64x64xbf16>
    %Pk = linalg.matmul ins(%P_4, %k_1 : tensor<64x64xbf16>, tensor<64x64xbf16>) outs(%zeros : tensor<64x64xf32>)
         -> tensor<64x64xf32>
    %dq_3 = arith.addf %dq_2, %Pk : tensor<64x64xf32>
    %dq_4 = arith.truncf %dq_3 : tensor<64x64xf32> to tensor<64x64xbf16>
    %d_q_gm = memref.reinterpret_cast %d_q to offset: [%at_2], sizes: [64, 64], strides: [256, 1] : memref<?xbf16>
         to memref<64x64xbf16, strided<[256, 1], offset: ?>>
    bufferization.materialize_in_destination %dq_4 in writable %d_q_gm
         : (tensor<64x64xbf16>, memref<64x64xbf16, strided<[256, 1], offset: ?>>) -> ()
    // d_k: through the state, then inside the chunk
    %d_h_gm = memref.reinterpret_cast %d_h to offset: [%at_6], sizes: [64, 64], strides: [64, 1] : memref<?xbf16>
         to memref<64x64xbf16, strided<[64, 1], offset: ?>>
    %d_h_buf = memref.alloc() : memref<64x64xbf16>
    memref.copy %d_h_gm, %d_h_buf : memref<64x64xbf16, strided<[64, 1], offset: ?>> to memref<64x64xbf16>
    %d_h_1 = bufferization.to_tensor %d_h_buf restrict writable : memref<64x64xbf16>
    %d_hT = linalg.transpose ins(%d_h_1 : tensor<64x64xbf16>) outs(%empty_1 : tensor<64x64xbf16>) permutation = [1, 0]
    %dk = linalg.matmul ins(%v_new_1, %d_hT : tensor<64x64xbf16>, tensor<64x64xbf16>) outs(%zeros : tensor<64x64xf32>)
         -> tensor<64x64xf32>
    %g_L = tensor.extract %gate[%c63] : tensor<64xf32>
    %empty_4 = tensor.empty() : tensor<64xf32>
    %g_L_all = linalg.fill ins(%g_L : f32) outs(%empty_4 : tensor<64xf32>) -> tensor<64xf32>
    %rest = arith.subf %g_L_all, %gate : tensor<64xf32>
    %decay_2 = math.exp %rest : tensor<64xf32>
    %decay_i_1 = linalg.broadcast ins(%decay_2 : tensor<64xf32>) outs(%empty : tensor<64x64xf32>) dimensions = [1]
    %dk_1 = arith.mulf %dk, %decay_i_1 : tensor<64x64xf32>
    %q_gm = memref.reinterpret_cast %q to offset: [%at_2], sizes: [64, 64], strides: [256, 1] : memref<?xbf16>
         to memref<64x64xbf16, strided<[256, 1], offset: ?>>
    %q_buf = memref.alloc() : memref<64x64xbf16>
    memref.copy %q_gm, %q_buf : memref<64x64xbf16, strided<[256, 1], offset: ?>> to memref<64x64xbf16>
    %q_1 = bufferization.to_tensor %q_buf restrict writable : memref<64x64xbf16>
    %PT = linalg.transpose ins(%P_4 : tensor<64x64xbf16>) outs(%empty_1 : tensor<64x64xbf16>) permutation = [1, 0]
    %Pq = linalg.matmul ins(%PT, %q_1 : tensor<64x64xbf16>, tensor<64x64xbf16>) outs(%zeros : tensor<64x64xf32>)
         -> tensor<64x64xf32>
    %dk_2 = arith.addf %dk_1, %Pq : tensor<64x64xf32>
    %dk_3 = arith.truncf %dk_2 : tensor<64x64xf32> to tensor<64x64xbf16>
    %d_k_gm = memref.reinterpret_cast %d_k to offset: [%at_2], sizes: [64, 64], strides: [256, 1] : memref<?xbf16>
         to memref<64x64xbf16, strided<[256, 1], offset: ?>>
    bufferization.materialize_in_destination %dk_3 in writable %d_k_gm
         : (tensor<64x64xbf16>, memref<64x64xbf16, strided<[256, 1], offset: ?>>) -> ()
    // d_w
    %d_v_gm = memref.reinterpret_cast %d_v to offset: [%at_2], sizes: [64, 64], strides: [256, 1] : memref<?xbf16>
         to memref<64x64xbf16, strided<[256, 1], offset: ?>>
    %d_v_buf = memref.alloc() : memref<64x64xbf16>
    memref.copy %d_v_gm, %d_v_buf : memref<64x64xbf16, strided<[256, 1], offset: ?>> to memref<64x64xbf16>
    %d_v_1 = bufferization.to_tensor %d_v_buf restrict writable : memref<64x64xbf16>
    %dw = linalg.matmul ins(%d_v_1, %hT : tensor<64x64xbf16>, tensor<64x64xbf16>) outs(%zeros : tensor<64x64xf32>)
         -> tensor<64x64xf32>
    %dw_1 = arith.negf %dw : tensor<64x64xf32>
    %dw_2 = arith.truncf %dw_1 : tensor<64x64xf32> to tensor<64x64xbf16>
    %d_w_gm = memref.reinterpret_cast %d_w to offset: [%at_2], sizes: [64, 64], strides: [256, 1] : memref<?xbf16>
         to memref<64x64xbf16, strided<[256, 1], offset: ?>>
    bufferization.materialize_in_destination %dw_2 in writable %d_w_gm
         : (tensor<64x64xbf16>, memref<64x64xbf16, strided<[256, 1], offset: ?>>) -> ()
    return
  }
}
