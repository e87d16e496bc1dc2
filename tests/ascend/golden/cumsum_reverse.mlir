// Sums of the gates of a chunk, one value head: g[i] = sum of x[j], j >= i.
// BT 64, H 2, HV 4, K 64, V 64; g [HV T], stride 1; packed sequences; chunks of 1 to BT tokens
module {
  func.func @cumsum(%lock: memref<?xi8>, %ws: memref<?xi8>,  // head of every kernel
      %x: memref<?xf32>, %g: memref<?xf32>, %chunks: memref<?xi32>, %B: i32, %T: i32, %NT: i32, %first: i32,
      %count: i32,
      %nx: i32, %ny: i32, %nz: i32, %px: i32, %py: i32, %pz: i32)  // grid, program id
      attributes {SyncBlockLockArgIdx = 0 : i64, WorkspaceArgIdx = 1 : i64, global_kernel = "local"} {
    %c3 = arith.constant 3 : index
    %c0 = arith.constant 0 : index
    %c1 = arith.constant 1 : index
    %c64 = arith.constant 64 : index
    %f32_0 = arith.constant 0.0 : f32
    %B_i = arith.index_cast %B : i32 to index
    %T_i = arith.index_cast %T : i32 to index
    %NT_i = arith.index_cast %NT : i32 to index
    %first_i = arith.index_cast %first : i32 to index
    %count_i = arith.index_cast %count : i32 to index
    %px_i = arith.index_cast %px : i32 to index
    %chunk = arith.addi %first_i, %px_i : index
    %py_i = arith.index_cast %py : i32 to index
    // where the chunk lies
    %chunk_at = arith.muli %chunk, %c3 : index
    %chunks_gm = memref.reinterpret_cast %chunks to offset: [%chunk_at], sizes: [1], strides: [1] : memref<?xi32>
         to memref<1xi32, strided<[1], offset: ?>>
    %token = memref.load %chunks_gm[%c0] : memref<1xi32, strided<[1], offset: ?>>
    %token_i = arith.index_cast %token : i32 to index
    %chunk_at_1 = arith.addi %chunk_at, %c1 : index
    %chunks_gm_1 = memref.reinterpret_cast %chunks to offset: [%chunk_at_1], sizes: [1], strides: [1] : memref<?xi32>
         to memref<1xi32, strided<[1], offset: ?>>
    %tokens = memref.load %chunks_gm_1[%c0] : memref<1xi32, strided<[1], offset: ?>>
    %tokens_i = arith.index_cast %tokens : i32 to index
    %tail = arith.cmpi slt, %tokens_i, %c64 : index
    %g_start = arith.muli %py_i, %T_i : index
    %g_at = arith.addi %g_start, %token_i : index
    %x_gm = memref.reinterpret_cast %x to offset: [%g_at], sizes: [64], strides: [1] : memref<?xf32>
         to memref<64xf32, strided<[1], offset: ?>>
    %x_buf = memref.alloc() : memref<64xf32>
    scf.if %tail { linalg.fill ins(%f32_0 : f32) outs(%x_buf : memref<64xf32>) }
    %x_gm_rows = memref.subview %x_gm[0] [%tokens_i] [1] : memref<64xf32, strided<[1], offset: ?>>
         to memref<?xf32, strided<[1], offset: ?>>
    %x_buf_rows = memref.subview %x_buf[0] [%tokens_i] [1] : memref<64xf32> to memref<?xf32, strided<[1]>>
    memref.copy %x_gm_rows, %x_buf_rows : memref<?xf32, strided<[1], offset: ?>> to memref<?xf32, strided<[1]>>
    %x_1 = bufferization.to_tensor %x_buf restrict writable : memref<64xf32>
    // [i j]: x[j] where it counts for i, then sums of rows
    %empty = tensor.empty() : tensor<64x64xf32>
    %x_j = linalg.broadcast ins(%x_1 : tensor<64xf32>) outs(%empty : tensor<64x64xf32>) dimensions = [0]
    %zeros = linalg.fill ins(%f32_0 : f32) outs(%empty : tensor<64x64xf32>) -> tensor<64x64xf32>
    %empty_1 = tensor.empty() : tensor<64xi32>
    %n = linalg.generic {indexing_maps = [affine_map<(a) -> (a)>], iterator_types = ["parallel"]} outs(%empty_1
         : tensor<64xi32>) {
    ^bb0(%old: i32):
      %at = linalg.index 0 : index
      %number = arith.index_cast %at : index to i32  // i32: compares of i64 are scalar code
      linalg.yield %number : i32
    } -> tensor<64xi32>
    %empty_2 = tensor.empty() : tensor<64x64xi32>
    %column = linalg.broadcast ins(%n : tensor<64xi32>) outs(%empty_2 : tensor<64x64xi32>) dimensions = [0]
    %row = linalg.broadcast ins(%n : tensor<64xi32>) outs(%empty_2 : tensor<64x64xi32>) dimensions = [1]
    %counts = arith.cmpi sle, %row, %column : tensor<64x64xi32>
    %terms = arith.select %counts, %x_j, %zeros : tensor<64x64xi1>, tensor<64x64xf32>
    %empty_3 = tensor.empty() : tensor<64xf32>
    %sums_0 = linalg.fill ins(%f32_0 : f32) outs(%empty_3 : tensor<64xf32>) -> tensor<64xf32>
    %sums = linalg.reduce { arith.addf } ins(%terms : tensor<64x64xf32>) outs(%sums_0 : tensor<64xf32>) dimensions = [1]
    %g_gm = memref.reinterpret_cast %g to offset: [%g_at], sizes: [64], strides: [1] : memref<?xf32>
         to memref<64xf32, strided<[1], offset: ?>>
    %sums_rows = tensor.extract_slice %sums[0] [%tokens_i] [1] : tensor<64xf32> to tensor<?xf32>
    %g_gm_rows = memref.subview %g_gm[0] [%tokens_i] [1] : memref<64xf32, strided<[1], offset: ?>>
         to memref<?xf32, strided<[1], offset: ?>>
    bufferization.materialize_in_destination %sums_rows in writable %g_gm_rows
         : (tensor<?xf32>, memref<?xf32, strided<[1], offset: ?>>) -> ()
    return
  }
}
