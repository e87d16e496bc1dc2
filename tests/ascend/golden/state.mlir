// The states before each chunk, and the deltas, of BV channels of one value head, one chunk after another:
//   h = S;   v_new = u - w S;   S <- exp(g_L) S + k^T (exp(g_L - g) v_new), L the chunk's last token.
// BV 32
// BT 64, H 4, HV 4, K 64, V 64; g [HV T], stride 1; sequences of T tokens; full chunks, no mask code
module {
  func.func @state(%lock: memref<?xi8>, %ws: memref<?xi8>,  // head of every kernel
      %k: memref<?xbf16>, %w: memref<?xbf16>, %u: memref<?xbf16>, %g: memref<?xf32>, %initial_state: memref<?xf32>,
      %h: memref<?xbf16>, %v_new: memref<?xbf16>, %final_state: memref<?xf32>, %B: i32, %T: i32, %NT: i32,
      %first: i32, %count: i32,
      %nx: i32, %ny: i32, %nz: i32, %px: i32, %py: i32, %pz: i32)  // grid, program id
      attributes {SyncBlockLockArgIdx = 0 : i64, WorkspaceArgIdx = 1 : i64, global_kernel = "local"} {
    %c4 = arith.constant 4 : index
    %c32 = arith.constant 32 : index
    %c4096 = arith.constant 4096 : index
    %c0 = arith.constant 0 : index
    %c1 = arith.constant 1 : index
    %c64 = arith.constant 64 : index
    %f32_0 = arith.constant 0.0 : f32
    %c63 = arith.constant 63 : index
    %B_i = arith.index_cast %B : i32 to index
    %T_i = arith.index_cast %T : i32 to index
    %NT_i = arith.index_cast %NT : i32 to index
    %first_i = arith.index_cast %first : i32 to index
    %count_i = arith.index_cast %count : i32 to index
    %px_i = arith.index_cast %px : i32 to index
    %tile = arith.addi %first_i, %px_i : index
    %py_i = arith.index_cast %py : i32 to index
    %b = arith.divui %py_i, %c4 : index
    %hv = arith.remui %py_i, %c4 : index
    %column = arith.muli %tile, %c32 : index
    %state_at = arith.muli %b, %c4 : index
    %state_at_1 = arith.addi %state_at, %hv : index
    %state_at_2 = arith.muli %state_at_1, %c4096 : index
    %state_at_3 = arith.addi %state_at_2, %column : index
    %initial_state_gm = memref.reinterpret_cast %initial_state
         to offset: [%state_at_3], sizes: [64, 32], strides: [64, 1] : memref<?xf32>
         to memref<64x32xf32, strided<[64, 1], offset: ?>>
    %S_buf = memref.alloc() : memref<64x32xf32>
    memref.copy %initial_state_gm, %S_buf : memref<64x32xf32, strided<[64, 1], offset: ?>> to memref<64x32xf32>
    %S = bufferization.to_tensor %S_buf restrict writable : memref<64x32xf32>
    %S_out = scf.for %c = %c0 to %NT_i step %c1 iter_args(%S_in = %S) -> (tensor<64x32xf32>) {
      // where the chunk lies
      %token = arith.muli %c, %c64 : index
      %start = arith.muli %b, %T_i : index
      %row = arith.addi %start, %token : index
      %state = arith.muli %b, %NT_i : index
      %state_1 = arith.addi %state, %c : index
      %g_head = arith.muli %b, %c4 : index
      %g_head_1 = arith.addi %g_head, %hv : index
      %g_start = arith.muli %g_head_1, %T_i : index
      %g_at = arith.addi %g_start, %token : index
      // the state before the chunk
      %S_1 = arith.truncf %S_in : tensor<64x32xf32> to tensor<64x32xbf16>
      %at = arith.muli %state_1, %c4 : index
      %at_1 = arith.addi %at, %hv : index
      %at_2 = arith.muli %at_1, %c4096 : index
      %at_3 = arith.addi %at_2, %column : index
      %h_gm = memref.reinterpret_cast %h to offset: [%at_3], sizes: [64, 32], strides: [64, 1] : memref<?xbf16>
           to memref<64x32xbf16, strided<[64, 1], offset: ?>>
      bufferization.materialize_in_destination %S_1 in writable %h_gm
           : (tensor<64x32xbf16>, memref<64x32xbf16, strided<[64, 1], offset: ?>>) -> ()
      // v_new
      %at_4 = arith.muli %row, %c4 : index
      %at_5 = arith.addi %at_4, %hv : index
      %at_6 = arith.muli %at_5, %c64 : index
      %w_gm = memref.reinterpret_cast %w to offset: [%at_6], sizes: [64, 64], strides: [256, 1] : memref<?xbf16>
           to memref<64x64xbf16, strided<[256, 1], offset: ?>>
      %w_buf = memref.alloc() : memref<64x64xbf16>
      memref.copy %w_gm, %w_buf : memref<64x64xbf16, strided<[256, 1], offset: ?>> to memref<64x64xbf16>
      %w_1 = bufferization.to_tensor %w_buf restrict writable : memref<64x64xbf16>
      %empty = tensor.empty() : tensor<64x32xf32>
      %zeros = linalg.fill ins(%f32_0 : f32) outs(%empty : tensor<64x32xf32>) -> tensor<64x32xf32>
      %wS = linalg.matmul ins(%w_1, %S_1 : tensor<64x64xbf16>, tensor<64x32xbf16>) outs(%zeros : tensor<64x32xf32>)
           -> tensor<64x32xf32>
      %at_7 = arith.muli %row, %c4 : index
      %at_8 = arith.addi %at_7, %hv : index
      %at_9 = arith.muli %at_8, %c64 : index
      %at_10 = arith.addi %at_9, %column : index
      %u_gm = memref.reinterpret_cast %u to offset: [%at_10], sizes: [64, 32], strides: [256, 1] : memref<?xbf16>
           to memref<64x32xbf16, strided<[256, 1], offset: ?>>
      %u_buf = memref.alloc() : memref<64x32xbf16>
      memref.copy %u_gm, %u_buf : memref<64x32xbf16, strided<[256, 1], offset: ?>> to memref<64x32xbf16>
      %u_1 = bufferization.to_tensor %u_buf restrict writable : memref<64x32xbf16>
      %u_2 = arith.extf %u_1 : tensor<64x32xbf16> to tensor<64x32xf32>
      %v_new_1 = arith.subf %u_2, %wS : tensor<64x32xf32>
      %v_new_2 = arith.truncf %v_new_1 : tensor<64x32xf32> to tensor<64x32xbf16>
      %at_11 = arith.muli %row, %c4 : index
      %at_12 = arith.addi %at_11, %hv : index
      %at_13 = arith.muli %at_12, %c64 : index
      %at_14 = arith.addi %at_13, %column : index
      %v_new_gm = memref.reinterpret_cast %v_new to offset: [%at_14], sizes: [64, 32], strides: [256, 1]
           : memref<?xbf16> to memref<64x32xbf16, strided<[256, 1], offset: ?>>
      bufferization.materialize_in_destination %v_new_2 in writable %v_new_gm
           : (tensor<64x32xbf16>, memref<64x32xbf16, strided<[256, 1], offset: ?>>) -> ()
      // the state behind it
      %g_gm = memref.reinterpret_cast %g to offset: [%g_at], sizes: [64], strides: [1] : memref<?xf32>
           to memref<64xf32, strided<[1], offset: ?>>
      %gate_buf = memref.alloc() : memref<64xf32>
      memref.copy %g_gm, %gate_buf : memref<64xf32, strided<[1], offset: ?>> to memref<64xf32>
      %gate = bufferization.to_tensor %gate_buf restrict writable : memref<64xf32>
      %g_L = tensor.extract %gate[%c63] : tensor<64xf32>
      %empty_1 = tensor.empty() : tensor<64xf32>
      %g_L_all = linalg.fill ins(%g_L : f32) outs(%empty_1 : tensor<64xf32>) -> tensor<64xf32>
      %rest = arith.subf %g_L_all, %gate : tensor<64xf32>
      %decay = math.exp %rest : tensor<64xf32>
      %decay_i = linalg.broadcast ins(%decay : tensor<64xf32>) outs(%empty : tensor<64x32xf32>) dimensions = [1]
      %written = arith.mulf %v_new_1, %decay_i : tensor<64x32xf32>
      %written_1 = arith.truncf %written : tensor<64x32xf32> to tensor<64x32xbf16>
      %empty_2 = tensor.empty() : tensor<1xf32>
      %e_L_t = tensor.insert %g_L into %empty_2[%c0] : tensor<1xf32>
      %e_L_e = math.exp %e_L_t : tensor<1xf32>
      %e_L = tensor.extract %e_L_e[%c0] : tensor<1xf32>
      %e_L_all = linalg.fill ins(%e_L : f32) outs(%empty : tensor<64x32xf32>) -> tensor<64x32xf32>
      %decayed = arith.mulf %S_in, %e_L_all : tensor<64x32xf32>
      %k_gm = memref.reinterpret_cast %k to offset: [%at_6], sizes: [64, 64], strides: [256, 1] : memref<?xbf16>
           to memref<64x64xbf16, strided<[256, 1], offset: ?>>
      %k_buf = memref.alloc() : memref<64x64xbf16>
      memref.copy %k_gm, %k_buf : memref<64x64xbf16, strided<[256, 1], offset: ?>> to memref<64x64xbf16>
      %k_1 = bufferization.to_tensor %k_buf restrict writable : memref<64x64xbf16>
      %empty_3 = tensor.empty() : tensor<64x64xbf16>
      %kT = linalg.transpose ins(%k_1 : tensor<64x64xbf16>) outs(%empty_3 : tensor<64x64xbf16>) permutation = [1, 0]
      %zeros_1 = linalg.fill ins(%f32_0 : f32) outs(%empty : tensor<64x32xf32>) -> tensor<64x32xf32>
      %kv = linalg.matmul ins(%kT, %written_1 : tensor<64x64xbf16>, tensor<64x32xbf16>) outs(%zeros_1
           : tensor<64x32xf32>) -> tensor<64x32xf32>
      %S_2 = arith.addf %decayed, %kv : tensor<64x32xf32>
      scf.yield %S_2 : tensor<64x32xf32>
    }
    %final_state_gm = memref.reinterpret_cast %final_state to offset: [%state_at_3], sizes: [64, 32], strides: [64, 1]
         : memref<?xf32> to memref<64x32xf32, strided<[64, 1], offset: ?>>
    bufferization.materialize_in_destination %S_out in writable %final_state_gm
         : (tensor<64x32xf32>, memref<64x32xf32, strided<[64, 1], offset: ?>>) -> ()
    return
  }
}
