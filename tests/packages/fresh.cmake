# The single header that is installed is that of the headers installed beside it, not an older one: without configuring
# or building again, an edit arrives in both.
cmake_minimum_required(VERSION 3.22)
include(${CMAKE_CURRENT_LIST_DIR}/sources.cmake)
set(sources ${SCRATCH}/sources)
set(build ${SCRATCH}/build)
set(prefix ${SCRATCH}/prefix)
copy_sources(${sources})
file(REMOVE_RECURSE ${build})

execute_process(COMMAND ${CMAKE_COMMAND} -G ${GENERATOR} -S ${sources} -B ${build} -DCMAKE_CXX_COMPILER=${CXX}
                        ${library_alone}
                COMMAND_ERROR_IS_FATAL ANY)
foreach(edit "" "#define LINATTN_EDITED")
  file(APPEND ${sources}/include/linattn/reference.hpp "${edit}\n")
  file(REMOVE_RECURSE ${prefix})
  execute_process(COMMAND ${CMAKE_COMMAND} --install ${build} --prefix ${prefix}
                  OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
  foreach(header linattn/reference.hpp linattn_all.hpp)
    file(STRINGS ${prefix}/include/${header} edited REGEX "^#define LINATTN_EDITED")
    if(NOT "${edited}" STREQUAL "${edit}")
      message(FATAL_ERROR "${header} is not the one of these sources")
    endif()
  endforeach()
endforeach()

# It needs Eigen, the standard library and the system alone.
file(STRINGS ${prefix}/include/linattn_all.hpp others REGEX "^ *#include <.*[./]")
list(FILTER others EXCLUDE REGEX "<((unsupported/)?Eigen/|cpuid\\.h|dlfcn\\.h)")
if(others)
  message(FATAL_ERROR "linattn_all.hpp has ${others}")
endif()
