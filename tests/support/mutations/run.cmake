# cmake -DNAME=<mutation, or none> -DLINATTN=<source tree> -DSCRATCH=<folder of its own> -DCOMPILER=... -DINCLUDES=...
#       -DLIBRARIES=... -P run.cmake
#
# Copies the headers, makes the one edit, compiles mutant_tests.cpp against the copy, and succeeds if the test named
# beside the mutation fails (none: if every test passes).
cmake_minimum_required(VERSION 3.22)

set(file "")
function(mutation name file test text replacement)
  if(name STREQUAL NAME)
    set(file ${file} PARENT_SCOPE)
    set(test ${test} PARENT_SCOPE)
    set(text "${text}" PARENT_SCOPE)
    set(replacement "${replacement}" PARENT_SCOPE)
  endif()
endfunction()
include(${CMAKE_CURRENT_LIST_DIR}/list.cmake)

file(REMOVE_RECURSE ${SCRATCH})
file(COPY ${LINATTN}/include DESTINATION ${SCRATCH})

if(NOT NAME STREQUAL "none")
  if(file STREQUAL "")
    message(FATAL_ERROR "list.cmake has no mutation '${NAME}'")
  endif()
  set(path ${SCRATCH}/include/linattn/${file})
  file(READ ${path} before)
  string(REPLACE "${text}" "" without "${before}")
  string(LENGTH "${before}" length)
  string(LENGTH "${without}" length_without)
  string(LENGTH "${text}" length_text)
  math(EXPR occurrences "(${length} - ${length_without}) / ${length_text}")
  if(NOT occurrences EQUAL 1)
    message(FATAL_ERROR "${file} holds the text to be replaced ${occurrences} times, not once; "
                        "bring mutation '${NAME}' in list.cmake up to date:\n${text}")
  endif()
  string(REPLACE "${text}" "${replacement}" after "${before}")
  file(WRITE ${path} "${after}")
endif()

set(include_flags "")
foreach(directory IN LISTS INCLUDES)
  list(APPEND include_flags -isystem ${directory})
endforeach()
set(program ${SCRATCH}/mutant_tests)
execute_process(
  COMMAND ${COMPILER} -std=c++20 -O0 -I${SCRATCH}/include -I${LINATTN}/tests ${include_flags}
          ${CMAKE_CURRENT_LIST_DIR}/mutant_tests.cpp -o ${program} ${LIBRARIES} -pthread
  RESULT_VARIABLE status)
if(NOT status EQUAL 0)
  message(FATAL_ERROR "mutation '${NAME}' does not compile")
endif()

if(NAME STREQUAL "none")
  execute_process(COMMAND ${program} --gtest_brief=1 RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "the tests fail without any mutation")
  endif()
else()
  execute_process(COMMAND ${program} --gtest_filter=Mutant*.${test} RESULT_VARIABLE status OUTPUT_VARIABLE output
                  ERROR_VARIABLE output TIMEOUT 60)
  if(NOT status EQUAL 1 OR NOT output MATCHES "\\[  FAILED  \\] Mutant[A-Za-z]*\\.${test}\n")
    message(FATAL_ERROR "mutation '${NAME}' survives Mutant.${test} (exit status ${status}):\n${output}")
  endif()
  message("mutation '${NAME}' makes Mutant.${test} fail")
endif()
file(REMOVE_RECURSE ${SCRATCH})
