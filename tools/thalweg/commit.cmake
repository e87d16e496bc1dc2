# Writes OUT, a header that says which commit the tree TREE is at. Left as it is when nothing changed.
execute_process(COMMAND git -C ${TREE} rev-parse --short=12 HEAD OUTPUT_VARIABLE commit
                OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
if(failed)
  set(commit "unknown")
else()
  execute_process(COMMAND git -C ${TREE} status --porcelain --untracked-files=no -- thalweg testing tools
                  OUTPUT_VARIABLE changes OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(changes)
    string(APPEND commit "+changes")
  endif()
endif()
set(text "// Written by tools/thalweg/commit.cmake.\nnamespace thalweg::tool {\ninline constexpr char kCommit[] = \"${commit}\";\n}\n")
if(EXISTS ${OUT})
  file(READ ${OUT} old)
endif()
if(NOT "${old}" STREQUAL "${text}")
  file(WRITE ${OUT} "${text}")
endif()
