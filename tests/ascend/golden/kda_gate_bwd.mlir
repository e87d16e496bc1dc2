// KDA gate backward, one tile of rows of one value head, y = x + dt_bias:
//   d_x = -exp(A_log) d_g sigmoid(y);   A_sums = sum -exp(A_log) d_g softplus(y);   bias_sums = sum d_x.
// BT 32, HV 16, K 128; full tiles, no mask code
module {
  func.func @kda_gate_bwd(%lock: memref<?xi8>, %ws: memref<?xi8>,  // head of every kernel
      %x: memref<?xbf16>, %A_log: memref<?xf32>, %dt_bias: memref<?xf32>, %d_g: memref<?xf32>, %d_x: memref<?xbf16>,
      %A_sums: memref<?xf32>, %bias_sums: memref<?xf32>, %T: i32, %first: i32, %count: i32,
      %nx: i32, %ny: i32, %nz: i32, %px: i32, %py: i32, %pz: i32)  // grid, program id
      attributes {SyncBlockLockArgIdx = 0 : i64, WorkspaceArgIdx = 1 : i64, global_kernel = "local"} {
    %c16 = arith.constant 16 : index
    %c32 = arith.constant 32 : index
    %c2048 = arith.constant 2048 : index
    %c128 = arith.constant 128 : index
    %c0 = arith.constant 0 : index
    %f32_20 = arith.constant 20.0 : f32
    %f32_1 = arith.constant 1.0 : f32
    %f32_0 = arith.constant 0.0 : f32
    %T_i = arith.index_cast %T : i32 to index
    %first_i = arith.index_cast %first : i32 to index
    %count_i = arith.index_cast %count : i32 to index
    %px_i = arith.index_cast %px : i32 to index
    %tasks = arith.muli %count_i, %c16 : index
    %nx_i = arith.index_cast %nx : i32 to index
    scf.for %task = %px_i to %tasks step %nx_i {
      %turn = arith.divui %task, %c16 : index
      %tile = arith.addi %first_i, %turn : index
      %hv = arith.remui %task, %c16 : index
      %row = arith.muli %tile, %c32 : index
      %start = arith.muli %row, %c2048 : index
      %head_at = arith.muli %hv, %c128 : index
      %at = arith.addi %start, %head_at : index
      %x_gm = memref.reinterpret_cast %x to offset: [%at], sizes: [32, 128], strides: [2048, 1] : memref<?xbf16>
           to memref<32x128xbf16, strided<[2048, 1], offset: ?>>
      %x_buf = memref.alloc() : memref<32x128xbf16>
      memref.copy %x_gm, %x_buf : memref<32x128xbf16, strided<[2048, 1], offset: ?>> to memref<32x128xbf16>
      %x_1 = bufferization.to_tensor %x_buf restrict writable : memref<32x128xbf16>
      %x_2 = arith.extf %x_1 : tensor<32x128xbf16> to tensor<32x128xf32>
      %bias_at = arith.muli %hv, %c128 : index
      %dt_bias_gm = memref.reinterpret_cast %dt_bias to offset: [%bias_at], sizes: [128], strides: [1] : memref<?xf32>
           to memref<128xf32, strided<[1], offset: ?>>
      %bias_buf = memref.alloc() : memref<128xf32>
      memref.copy %dt_bias_gm, %bias_buf : memref<128xf32, strided<[1], offset: ?>> to memref<128xf32>
      %bias = bufferization.to_tensor %bias_buf restrict writable : memref<128xf32>
      %empty = tensor.empty() : tensor<32x128xf32>
      %bias_all = linalg.broadcast ins(%bias : tensor<128xf32>) outs(%empty : tensor<32x128xf32>) dimensions = [0]
      %y = arith.addf %x_2, %bias_all : tensor<32x128xf32>
      %A_log_gm = memref.reinterpret_cast %A_log to offset: [%hv], sizes: [1], strides: [1] : memref<?xf32>
           to memref<1xf32, strided<[1], offset: ?>>
      %A = memref.load %A_log_gm[%c0] : memref<1xf32, strided<[1], offset: ?>>
      %empty_1 = tensor.empty() : tensor<1xf32>
      %a_t = tensor.insert %A into %empty_1[%c0] : tensor<1xf32>
      %a_e = math.exp %a_t : tensor<1xf32>
      %a = tensor.extract %a_e[%c0] : tensor<1xf32>
      %minus_a = arith.negf %a : f32
      // d_g; rows that are not there are 0 and add nothing to the sums
      %d_g_gm = memref.reinterpret_cast %d_g to offset: [%at], sizes: [32, 128], strides: [2048, 1] : memref<?xf32>
           to memref<32x128xf32, strided<[2048, 1], offset: ?>>
      %d_g_buf = memref.alloc() : memref<32x128xf32>
      memref.copy %d_g_gm, %d_g_buf : memref<32x128xf32, strided<[2048, 1], offset: ?>> to memref<32x128xf32>
      %d_g_1 = bufferization.to_tensor %d_g_buf restrict writable : memref<32x128xf32>
      %minus_a_all = linalg.fill ins(%minus_a : f32) outs(%empty : tensor<32x128xf32>) -> tensor<32x128xf32>
      %a_d_g = arith.mulf %d_g_1, %minus_a_all : tensor<32x128xf32>
      %sum_at = arith.muli %tile, %c16 : index
      %sum_at_1 = arith.addi %sum_at, %hv : index
      %limit = linalg.fill ins(%f32_20 : f32) outs(%empty : tensor<32x128xf32>) -> tensor<32x128xf32>
      %large = arith.cmpf ogt, %y, %limit : tensor<32x128xf32>
      %e = math.exp %y : tensor<32x128xf32>
      %ones = linalg.fill ins(%f32_1 : f32) outs(%empty : tensor<32x128xf32>) -> tensor<32x128xf32>
      %e1 = arith.addf %e, %ones : tensor<32x128xf32>
      %log = math.log %e1 : tensor<32x128xf32>
      %softplus = arith.select %large, %y, %log : tensor<32x128xi1>, tensor<32x128xf32>
      %terms = arith.mulf %a_d_g, %softplus : tensor<32x128xf32>
      %empty_2 = tensor.empty() : tensor<128xf32>
      %A_row_0 = linalg.fill ins(%f32_0 : f32) outs(%empty_2 : tensor<128xf32>) -> tensor<128xf32>
      %A_row = linalg.reduce { arith.addf } ins(%terms : tensor<32x128xf32>) outs(%A_row_0
           : tensor<128xf32>) dimensions = [0]
      %empty_3 = tensor.empty() : tensor<f32>
      %A_sum_0 = linalg.fill ins(%f32_0 : f32) outs(%empty_3 : tensor<f32>) -> tensor<f32>
      %A_sum = linalg.reduce { arith.addf } ins(%A_row : tensor<128xf32>) outs(%A_sum_0 : tensor<f32>) dimensions = [0]
      %A_sum_1 = tensor.extract %A_sum[] : tensor<f32>
      %A_sums_gm = memref.reinterpret_cast %A_sums to offset: [%sum_at_1], sizes: [1], strides: [1] : memref<?xf32>
           to memref<1xf32, strided<[1], offset: ?>>
      memref.store %A_sum_1, %A_sums_gm[%c0] : memref<1xf32, strided<[1], offset: ?>>
      // 1 / (1 + e^-y)
      %minus_y = arith.negf %y : tensor<32x128xf32>
      %e_1 = math.exp %minus_y : tensor<32x128xf32>
      %ones_1 = linalg.fill ins(%f32_1 : f32) outs(%empty : tensor<32x128xf32>) -> tensor<32x128xf32>
      %e1_1 = arith.addf %e_1, %ones_1 : tensor<32x128xf32>
      %sigmoid = arith.divf %ones_1, %e1_1 : tensor<32x128xf32>
      %d_x_1 = arith.mulf %a_d_g, %sigmoid : tensor<32x128xf32>
      %bias_sum_0 = linalg.fill ins(%f32_0 : f32) outs(%empty_2 : tensor<128xf32>) -> tensor<128xf32>
      %bias_sum = linalg.reduce { arith.addf } ins(%d_x_1 : tensor<32x128xf32>) outs(%bias_sum_0
           : tensor<128xf32>) dimensions = [0]
      %bias_at_1 = arith.muli %sum_at_1, %c128 : index
      %bias_sums_gm = memref.reinterpret_cast %bias_sums to offset: [%bias_at_1], sizes: [128], strides: [1]
           : memref<?xf32> to memref<128xf32, strided<[1], offset: ?>>
      bufferization.materialize_in_destination %bias_sum in writable %bias_sums_gm
           : (tensor<128xf32>, memref<128xf32, strided<[1], offset: ?>>) -> ()
      %d_x_2 = arith.truncf %d_x_1 : tensor<32x128xf32> to tensor<32x128xbf16>
      %d_x_gm = memref.reinterpret_cast %d_x to offset: [%at], sizes: [32, 128], strides: [2048, 1] : memref<?xbf16>
           to memref<32x128xbf16, strided<[2048, 1], offset: ?>>
      bufferization.materialize_in_destination %d_x_2 in writable %d_x_gm
           : (tensor<32x128xbf16>, memref<32x128xbf16, strided<[2048, 1], offset: ?>>) -> ()
    }
    return
  }
}
