# cmake -DNAME=clean|violations -DLINATTN=<source tree> -DINCLUDES=... -DSCRATCH=<folder of its own> -P run.cmake
cmake_minimum_required(VERSION 3.22)

file(REMOVE_RECURSE ${SCRATCH})
file(MAKE_DIRECTORY ${SCRATCH})
set(program ${SCRATCH}/${NAME})

# The compiler is looked for now, not when the build was configured.
file(WRITE ${SCRATCH}/empty.cpp "int main() {}\n")
set(compiler "")
foreach(candidate clang++-22 clang++-21 clang++-20 clang++)
  find_program(path ${candidate} NO_CACHE)
  if(path)
    execute_process(COMMAND ${path} -fsanitize=realtime ${SCRATCH}/empty.cpp -o ${program} RESULT_VARIABLE status
                    OUTPUT_QUIET ERROR_QUIET)
    if(status EQUAL 0)
      set(compiler ${path})
      break()
    endif()
  endif()
  unset(path)
endforeach()
if(compiler STREQUAL "")
  message("skipped: no clang++ with -fsanitize=realtime (Debian: clang-22, libclang-rt-22-dev)")
  return()
endif()

# Assertions are on: they are part of the paths.
set(flags -std=c++20 -O1 -Wall -Wextra -Wconversion -Wshadow -Werror -fsanitize=realtime -I${LINATTN}/include)
foreach(directory IN LISTS INCLUDES)
  list(APPEND flags -isystem ${directory})
endforeach()
set(source ${LINATTN}/tests/realtime/${NAME}.cpp)

if(NAME STREQUAL "clean")
  execute_process(COMMAND ${compiler} ${flags} -Wfunction-effects ${source} -o ${program} RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "-Wfunction-effects finds a call that may block")
  endif()
  execute_process(COMMAND ${program} RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "the program or the realtime sanitizer ended with ${status}")
  endif()
else()
  # The promise of `step` itself, inside the library, and that of a callback.
  execute_process(COMMAND ${compiler} ${flags} -Wfunction-effects -fsyntax-only ${source} ERROR_VARIABLE output
                  RESULT_VARIABLE status)
  foreach(found "_impl.hpp:[0-9:]+ error: function with 'nonblocking'"
                "violations.cpp:[0-9:]+ error: function with 'nonblocking'[^\n]*::forward_causal'")
    if(NOT output MATCHES "${found}")
      message(FATAL_ERROR "-Wfunction-effects does not find ${found}:\n${output}")
    endif()
  endforeach()

  execute_process(COMMAND ${compiler} ${flags} ${source} -o ${program} COMMAND_ERROR_IS_FATAL ANY)
  execute_process(COMMAND ${program} nothing COMMAND_ERROR_IS_FATAL ANY)
  foreach(mode step forward_causal refusal)
    execute_process(COMMAND ${program} ${mode} ERROR_VARIABLE output RESULT_VARIABLE status)
    if(status EQUAL 0 OR NOT output MATCHES "RealtimeSanitizer: unsafe-library-call")
      message(FATAL_ERROR "the sanitizer does not find '${mode}' (exit status ${status}):\n${output}")
    endif()
  endforeach()
endif()
file(REMOVE_RECURSE ${SCRATCH})
