# Writes linattn_all.hpp, the library in one file:
#
#   cmake -DOUTPUT=linattn_all.hpp -P tests/packages/single_header.cmake
#
# Every header stands where it is first included. What needs another library than Eigen (MPI, nlohmann_json) is left
# out, and so are lines of comment, a third of the text. With -DSHIMS=<folder>, that folder becomes an include directory
# with the names of all headers, each of which includes the folder's linattn_all.hpp: tests run on it unchanged.
cmake_minimum_required(VERSION 3.22)
get_filename_component(include_dir ${CMAKE_CURRENT_LIST_DIR}/../../include ABSOLUTE)
file(READ ${CMAKE_CURRENT_LIST_DIR}/../../LICENSE licence)
if(SHIMS)
  set(OUTPUT ${SHIMS}/linattn_all.hpp)
endif()

file(GLOB_RECURSE headers RELATIVE ${include_dir} ${include_dir}/linattn/*.hpp)
list(SORT headers)

# Left out: what includes another library, what includes that, and so on.
set(other_library "mpi.h|nlohmann/[^>]*")
set(count -1)
while(NOT count EQUAL 0)
  set(count 0)
  foreach(header IN LISTS headers)
    file(STRINGS ${include_dir}/${header} found REGEX "^#include <(${other_library})>" LIMIT_COUNT 1)
    if(found)
      string(APPEND other_library "|${header}")
      list(REMOVE_ITEM headers ${header})
      math(EXPR count "${count} + 1")
    endif()
  endforeach()
endwhile()

# append_header(name): the header's text behind that of the headers it includes, as a compiler would see it.
set_property(GLOBAL PROPERTY inlined "")
function(append_header name)
  get_property(inlined GLOBAL PROPERTY inlined)
  if(name IN_LIST inlined)
    return()
  endif()
  set_property(GLOBAL APPEND PROPERTY inlined ${name})
  file(READ ${include_dir}/${name} rest)
  string(REGEX REPLACE "\n+#pragma once" "" rest "\n${rest}")
  string(REGEX REPLACE "\n *//[^\n]*" "" rest "${rest}")
  while(rest MATCHES "\n#include <(linattn/[^>]+)>[^\n]*")
    set(line "${CMAKE_MATCH_0}")
    set(included ${CMAKE_MATCH_1})
    string(FIND "${rest}" "${line}" position)
    string(SUBSTRING "${rest}" 0 ${position} before)
    file(APPEND ${OUTPUT} "${before}")
    append_header(${included})
    string(LENGTH "${line}" length)
    math(EXPR position "${position} + ${length}")
    string(SUBSTRING "${rest}" ${position} -1 rest)
  endwhile()
  file(APPEND ${OUTPUT} "${rest}")
endfunction()

# An include guard: Compiler Explorer pastes the file into the one compiled, where #pragma once is a warning.
string(STRIP "${licence}" licence)
string(REPLACE "\n" "\n// " licence "// ${licence}")
string(REPLACE "// \n" "//\n" licence "${licence}")
file(WRITE ${OUTPUT} "// linattn: exact linear attention on CPUs, all headers in one, generated from them. They are
// where the documentation is.
//
${licence}
#ifndef LINATTN_ALL_HPP
#define LINATTN_ALL_HPP

#ifdef LINATTN_VERSION_MAJOR
#error \"linattn_all.hpp holds linattn/*.hpp: include the one or the others, not both\"
#endif
")
foreach(header IN LISTS headers)
  if(NOT header MATCHES "/detail/")
    append_header(${header})
  endif()
endforeach()
file(APPEND ${OUTPUT} "\n#endif\n")
file(READ ${OUTPUT} text)
string(REGEX REPLACE "\n\n\n+" "\n\n" text "${text}")  # where comments and includes were
file(WRITE ${OUTPUT} "${text}")

if(SHIMS)
  get_property(inlined GLOBAL PROPERTY inlined)
  file(GLOB_RECURSE headers RELATIVE ${include_dir} ${include_dir}/linattn/*.hpp)
  foreach(header IN LISTS headers)
    if(header IN_LIST inlined)
      file(WRITE ${SHIMS}/${header} "#pragma once\n#include <linattn_all.hpp>\n")
    else()
      configure_file(${include_dir}/${header} ${SHIMS}/${header} COPYONLY)
    endif()
  endforeach()
endif()
