# cmake -DCOMPILER=... -DPROCESSOR=... -DLINATTN=<source tree> -DINCLUDES=... -DSCRATCH=<folder of its own> -P run.cmake
cmake_minimum_required(VERSION 3.22)

find_program(objdump objdump NO_CACHE)
if(NOT PROCESSOR MATCHES "x86_64|AMD64")
  message("skipped: the processor is ${PROCESSOR}, not x86-64")
  return()
elseif(NOT objdump)
  message("skipped: no objdump")
  return()
endif()
execute_process(COMMAND ${COMPILER} -dM -E -xc++ /dev/null OUTPUT_VARIABLE macros RESULT_VARIABLE status ERROR_QUIET)
if(NOT status EQUAL 0 OR macros MATCHES "#define __AVX__ ")
  message("skipped: not GCC or clang, or a compiler that uses AVX without being asked")
  return()
endif()

# result: the lines of the verbs' machine code with an AVX instruction: its name begins with v, as no other's does that
# a compiler emits, or it names a register of more than 128 bits.
set(flags -std=c++20 -O2 -DNDEBUG -I${LINATTN}/include)
foreach(directory IN LISTS INCLUDES)
  list(APPEND flags -isystem ${directory})
endforeach()
function(find_avx source object result)
  execute_process(COMMAND ${COMPILER} ${flags} ${ARGN} -c ${LINATTN}/${source} -o ${object}
                  COMMAND_ERROR_IS_FATAL ANY)
  execute_process(COMMAND ${objdump} --disassemble --no-show-raw-insn ${object} OUTPUT_VARIABLE code
                  COMMAND_ERROR_IS_FATAL ANY)
  if(NOT code MATCHES "\tmulps [^\n]*%xmm" AND NOT ARGN)
    message(FATAL_ERROR "the listing holds no SSE instruction: it is not the verbs' code")
  endif()
  string(REGEX MATCHALL "[^\n]*(\tv[a-z]|%[yz]mm)[^\n]*" lines "${code}")
  set(${result} "${lines}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE ${SCRATCH})
file(MAKE_DIRECTORY ${SCRATCH})
find_avx(tests/realtime/clean.cpp ${SCRATCH}/baseline.o found)  # which calls every verb, with every map
if(found)
  list(JOIN found "\n" found)
  message(FATAL_ERROR "AVX instructions without a flag that allows them:\n${found}")
endif()
find_avx(examples/01_hello.cpp ${SCRATCH}/avx2.o found -mavx2)
if(NOT found MATCHES "\tvmulps[^\n;]*%ymm")
  message(FATAL_ERROR "no AVX instruction is found with -mavx2: the search is broken")
endif()
list(LENGTH found count)
message("none without flags, ${count} with -mavx2")
file(REMOVE_RECURSE ${SCRATCH})
