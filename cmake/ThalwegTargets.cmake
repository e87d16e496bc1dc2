# Functions shared by the build: warnings, sources compiled once per instruction set, operators.

# Warnings and sanitizers, for every target of the project and no one else's.
function(thalweg_options target)
  thalweg_warnings(${target})
  if(THALWEG_SANITIZE STREQUAL "address")
    target_compile_options(${target} PRIVATE -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer)
    target_link_options(${target} PUBLIC -fsanitize=address,undefined)
  elseif(THALWEG_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${THALWEG_SANITIZE} -fno-omit-frame-pointer)
    target_link_options(${target} PUBLIC -fsanitize=${THALWEG_SANITIZE})
  endif()
endfunction()

function(thalweg_warnings target)
  target_compile_features(${target} PUBLIC cxx_std_20 c_std_11)
  set_target_properties(${target} PROPERTIES CXX_EXTENSIONS OFF C_EXTENSIONS OFF)
  target_compile_options(${target} PRIVATE
    "$<$<COMPILE_LANGUAGE:C,CXX>:-Wall;-Wextra;-Wshadow>"
    $<$<COMPILE_LANGUAGE:CXX>:-Wno-missing-field-initializers>  # args structs are filled by designated initialisers
    $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>  # GCC 12 is wrong about "a" + std::string (its bug 105651)
    $<$<AND:$<BOOL:${THALWEG_WERROR}>,$<COMPILE_LANGUAGE:C,CXX>>:-Werror>)
endfunction()

# The instruction set whose rows a sanitizer watches: the widest of the building machine. The rows of all
# sets are one source, and watching both doubles the longest part of the build.
set(thalweg_watched_isa avx2)
if(THALWEG_SANITIZE AND EXISTS /proc/cpuinfo)
  file(STRINGS /proc/cpuinfo cpu_flags REGEX "^flags.* avx512f .*avx512bw .*avx512vl" LIMIT_COUNT 1)
  if(cpu_flags)
    set(thalweg_watched_isa avx512)
  endif()
endif()

set(thalweg_isa_flags_avx2 -mavx2 -mfma -mf16c)
set(thalweg_isa_flags_avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c -mprefer-vector-width=512)
set(thalweg_isa_flags_amx ${thalweg_isa_flags_avx512} -mavx512bf16 -mamx-tile -mamx-bf16)

# Compiles `file` once per instruction set, with THALWEG_ISA naming the namespace it exports into,
# and adds the objects to `target`. A file named *_tile_* is for amx alone, others for avx2 and avx512,
# whose rows run on AMX machines as well. Such a file defines nothing outside that namespace but in
# anonymous ones, so the linker cannot mix instruction sets. No contraction or other change of
# arithmetic that the source does not ask for.
function(thalweg_per_isa target file)
  get_filename_component(stem ${file} NAME_WE)
  get_filename_component(folder ${file} DIRECTORY)
  get_filename_component(folder ${folder} NAME)
  if(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    message(FATAL_ERROR "thalweg: got processor ${CMAKE_SYSTEM_PROCESSOR}, expected x86-64")
  endif()
  set(sets avx2 avx512)
  if(stem MATCHES "_tile_")
    set(sets amx)
  endif()
  foreach(isa IN LISTS sets)
    set(objects thalweg_${folder}_${stem}_${isa})
    add_library(${objects} OBJECT ${file})
    if(THALWEG_SANITIZE AND NOT isa STREQUAL thalweg_watched_isa AND NOT isa STREQUAL "amx")
      thalweg_warnings(${objects})
      target_compile_options(${objects} PRIVATE -O0)
    else()
      thalweg_options(${objects})
    endif()
    target_include_directories(${objects} PRIVATE ${PROJECT_SOURCE_DIR})
    target_compile_definitions(${objects} PRIVATE THALWEG_ISA=${isa})
    target_compile_options(${objects} PRIVATE ${thalweg_isa_flags_${isa}} -Wno-unused-function)
    set_target_properties(${objects} PROPERTIES POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden)
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:${objects}>)
    set_property(GLOBAL APPEND PROPERTY THALWEG_ISA_TARGETS ${objects})
  endforeach()
endfunction()

# One operator folder: sorts its files by name. Called from thalweg/ops/CMakeLists.txt.
function(thalweg_add_operator op)
  set(folder ${PROJECT_SOURCE_DIR}/thalweg/ops/${op})
  set_property(GLOBAL APPEND PROPERTY THALWEG_OPERATORS ${op})
  file(GLOB files CONFIGURE_DEPENDS ${folder}/*.cpp)
  if(THALWEG_CUDA)
    file(GLOB cuda_files CONFIGURE_DEPENDS ${folder}/*.cu)
    set_property(GLOBAL APPEND PROPERTY THALWEG_CUDA_SOURCES ${cuda_files})
    list(REMOVE_ITEM files ${folder}/cuda_none.cpp)
  endif()
  foreach(file IN LISTS files)
    get_filename_component(name ${file} NAME)
    if(name MATCHES "^(.*_)?reference.*\\.cpp$" OR name STREQUAL "spec.cpp")
      set_property(GLOBAL APPEND PROPERTY THALWEG_REFERENCE_SOURCES ${file})
    elseif(name MATCHES "^ascend.*\\.cpp$")
      set_property(GLOBAL APPEND PROPERTY THALWEG_ASCEND_SOURCES ${file})
      if(name STREQUAL "ascend.cpp")
        set_property(GLOBAL APPEND PROPERTY THALWEG_ASCEND_OPERATORS ${op})
      endif()
    elseif(name MATCHES "^test.*\\.cpp$")
      set_property(GLOBAL APPEND PROPERTY THALWEG_TEST_SOURCES ${file})
    elseif(name MATCHES "^cpu_(chunk|vec|decode|flash|tile)")
      set_property(GLOBAL APPEND PROPERTY THALWEG_ISA_SOURCES ${file})
    else()
      set_property(GLOBAL APPEND PROPERTY THALWEG_OPERATOR_SOURCES ${file})
    endif()
  endforeach()
endfunction()

# Writes `file`: the pass table of the operators that follow.
function(thalweg_pass_table file)
  set(THALWEG_PASS_DECLARATIONS "")
  set(THALWEG_PASS_FUNCTIONS "")
  foreach(op IN LISTS ARGN)
    string(APPEND THALWEG_PASS_DECLARATIONS "const thalweg_pass* ${op}_pass_at(int i);\n")
    string(APPEND THALWEG_PASS_FUNCTIONS "    ${op}_pass_at,\n")
  endforeach()
  configure_file(${PROJECT_SOURCE_DIR}/thalweg/pass_table.cpp.in ${file} @ONLY)
endfunction()

# Writes `file`: the specs and the case files of the operators that follow.
function(thalweg_spec_table file)
  set(declarations "")
  set(spec_functions "")
  set(case_texts "")
  foreach(op IN LISTS ARGN)
    string(APPEND declarations "const testing::Spec* ${op}_spec_at(int i);\n")
    string(APPEND spec_functions "    ${op}_spec_at,\n")
    set(cases ${PROJECT_SOURCE_DIR}/thalweg/ops/${op}/cases.txt)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${cases})
    file(READ ${cases} text)
    string(APPEND case_texts "    {\"${op}\", R\"cases(${text})cases\"},\n")
  endforeach()
  file(CONFIGURE OUTPUT ${file} CONTENT
"// Generated by cmake/ThalwegTargets.cmake from the list of operators.
#include \"testing/tables.h\"

namespace thalweg {
@declarations@
namespace testing {

const std::vector<const Spec*>& specs() {
  static const std::vector<const Spec*> all = [] {
    std::vector<const Spec*> list;
    const Spec* (*const functions[])(int) = {
@spec_functions@    };
    for (auto* function : functions)
      for (int i = 0; const Spec* spec = function(i); ++i) list.push_back(spec);
    return list;
  }();
  return all;
}

const std::vector<CaseFile>& case_files() {
  static const std::vector<CaseFile> all = {
@case_texts@  };
  return all;
}

}  // namespace testing
}  // namespace thalweg
" @ONLY)
endfunction()
