# The CUDA backend's compiler and flags. Included only with THALWEG_CUDA=ON.
# CMake 3.25 asks for the target as "90a-real": machine code for sm_90a and nothing else.
set(CMAKE_CUDA_ARCHITECTURES 90a-real)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 13.0)
  message(FATAL_ERROR "thalweg: nvcc, got ${CMAKE_CUDA_COMPILER_VERSION}, expected 13.0 or newer")
endif()
find_package(CUDAToolkit REQUIRED)

# The language level and warnings of .cu files; the host compiler's own warnings would be about nvcc's glue.
function(thalweg_cuda_options target)
  set_target_properties(${target} PROPERTIES CUDA_COMPILER_LAUNCHER ${PROJECT_SOURCE_DIR}/cmake/keep_ptxas.sh)
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:-std=c++20>  # by hand: CMake 3.25 does not know that nvcc 13 has it
    $<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-v>
    $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>
    $<$<COMPILE_LANGUAGE:CUDA>:--diag-suppress=177>)
endfunction()
