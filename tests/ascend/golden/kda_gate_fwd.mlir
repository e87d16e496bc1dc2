// KDA gate, one tile of rows of one value head: g = -exp(A_log) softplus(x + dt_bias).
// BT 64, HV 16, K 128; the last tile has 1 to BT rows
module {
  func.func @kda_gate_fwd(%lock: memref<?xi8>, %ws: memref<?xi8>,  // head of every kernel
      %x: memref<?xbf16>, %A_log: memref<?xf32>, %dt_bias: memref<?xf32>, %g: memref<?xf32>, %T: i32, %first: i32,
      %count: i32,
      %nx: i32, %ny: i32, %nz: i32, %px: i32, %py: i32, %pz: i32)  // grid, program id
      attributes {SyncBlockLockArgIdx = 0 : i64, WorkspaceArgIdx = 1 : i64, global_kernel = "local"} {
    %c64 = arith.constant 64 : index
    %c2048 = arith.constant 2048 : index
    %c128 = arith.constant 128 : index
    %bf16_0 = arith.constant 0.0 : bf16
    %f32_20 = arith.constant 20.0 : f32
    %f32_1 = arith.constant 1.0 : f32
    %c0 = arith.constant 0 : index
    %T_i = arith.index_cast %T : i32 to index
    %first_i = arith.index_cast %first : i32 to index
    %count_i = arith.index_cast %count : i32 to index
    %px_i = arith.index_cast %px : i32 to index
    %tile = arith.addi %first_i, %px_i : index
    %py_i = arith.index_cast %py : i32 to index
    %row = arith.muli %tile, %c64 : index
    %start = arith.muli %row, %c2048 : index
    %head_at = arith.muli %py_i, %c128 : index
    %at = arith.addi %start, %head_at : index
    %left = arith.subi %T_i, %row : index
    %n = arith.minsi %left, %c64 : index
    %tail = arith.cmpi slt, %n, %c64 : index
    %x_gm = memref.reinterpret_cast %x to offset: [%at], sizes: [64, 128], strides: [2048, 1] : memref<?xbf16>
         to memref<64x128xbf16, strided<[2048, 1], offset: ?>>
    %x_buf = memref.alloc() : memref<64x128xbf16>
    scf.if %tail { linalg.fill ins(%bf16_0 : bf16) outs(%x_buf : memref<64x128xbf16>) }
    %x_gm_rows = memref.subview %x_gm[0, 0] [%n, 128] [1, 1] : memref<64x128xbf16, strided<[2048, 1], offset: ?>>
         to memref<?x128xbf16, strided<[2048, 1], offset: ?>>
    %x_buf_rows = memref.subview %x_buf[0, 0] [%n, 128] [1, 1] : memref<64x128xbf16>
         to memref<?x128xbf16, strided<[128, 1]>>
    memref.copy %x_gm_rows, %x_buf_rows : memref<?x128xbf16, strided<[2048, 1], offset: ?>>
         to memref<?x128xbf16, strided<[128, 1]>>
    %x_1 = bufferization.to_tensor %x_buf restrict writable : memref<64x128xbf16>
    %x_2 = arith.extf %x_1 : tensor<64x128xbf16> to tensor<64x128xf32>
    %bias_at = arith.muli %py_i, %c128 : index
    %dt_bias_gm = memref.reinterpret_cast %dt_bias to offset: [%bias_at], sizes: [128], strides: [1] : memref<?xf32>
         to memref<128xf32, strided<[1], offset: ?>>
    %bias_buf = memref.alloc() : memref<128xf32>
    memref.copy %dt_bias_gm, %bias_buf : memref<128xf32, strided<[1], offset: ?>> to memref<128xf32>
    %bias = bufferization.to_tensor %bias_buf restrict writable : memref<128xf32>
    %empty = tensor.empty() : tensor<64x128xf32>
    %bias_all = linalg.broadcast ins(%bias : tensor<128xf32>) outs(%empty : tensor<64x128xf32>) dimensions = [0]
    %y = arith.addf %x_2, %bias_all : tensor<64x128xf32>
    %limit = linalg.fill ins(%f32_20 : f32) outs(%empty : tensor<64x128xf32>) -> tensor<64x128xf32>
    %large = arith.cmpf ogt, %y, %limit : tensor<64x128xf32>
    %e = math.exp %y : tensor<64x128xf32>
    %ones = linalg.fill ins(%f32_1 : f32) outs(%empty : tensor<64x128xf32>) -> tensor<64x128xf32>
    %e1 = arith.addf %e, %ones : tensor<64x128xf32>
    %log = math.log %e1 : tensor<64x128xf32>
    %softplus = arith.select %large, %y, %log : tensor<64x128xi1>, tensor<64x128xf32>
    %A_log_gm = memref.reinterpret_cast %A_log to offset: [%py_i], sizes: [1], strides: [1] : memref<?xf32>
         to memref<1xf32, strided<[1], offset: ?>>
    %A = memref.load %A_log_gm[%c0] : memref<1xf32, strided<[1], offset: ?>>
    %empty_1 = tensor.empty() : tensor<1xf32>
    %a_t = tensor.insert %A into %empty_1[%c0] : tensor<1xf32>
    %a_e = math.exp %a_t : tensor<1xf32>
    %a = tensor.extract %a_e[%c0] : tensor<1xf32>
    %minus_a = arith.negf %a : f32
    %minus_a_all = linalg.fill ins(%minus_a : f32) outs(%empty : tensor<64x128xf32>) -> tensor<64x128xf32>
    %g_1 = arith.mulf %softplus, %minus_a_all : tensor<64x128xf32>
    %g_gm = memref.reinterpret_cast %g to offset: [%at], sizes: [64, 128], strides: [2048, 1] : memref<?xf32>
         to memref<64x128xf32, strided<[2048, 1], offset: ?>>
    %g_1_rows = tensor.extract_slice %g_1[0, 0] [%n, 128] [1, 1] : tensor<64x128xf32> to tensor<?x128xf32>
    %g_gm_rows = memref.subview %g_gm[0, 0] [%n, 128] [1, 1] : memref<64x128xf32, strided<[2048, 1], offset: ?>>
         to memref<?x128xf32, strided<[2048, 1], offset: ?>>
    bufferization.materialize_in_destination %g_1_rows in writable %g_gm_rows
         : (tensor<?x128xf32>, memref<?x128xf32, strided<[2048, 1], offset: ?>>) -> ()
    return
  }
}
