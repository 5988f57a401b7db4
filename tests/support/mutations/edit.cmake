# cmake -DINCLUDE=<source tree's include> -DOUT=<folder> -P edit.cmake
#
# Copies the headers to OUT and makes every edit of list.cmake in the copy, each behind a condition of its own, so that
# one program has all the mutations and makes the one that LINATTN_MUTATION names, or none.
cmake_minimum_required(VERSION 3.22)

file(REMOVE_RECURSE ${OUT})
file(COPY ${INCLUDE}/linattn DESTINATION ${OUT})

set(conditions "")
function(mutation name file test text replacement)
  set(path ${OUT}/linattn/${file})
  file(READ ${path} before)
  string(REPLACE "${text}" "" without "${before}")
  string(LENGTH "${before}" length)
  string(LENGTH "${without}" length_without)
  string(LENGTH "${text}" length_text)
  math(EXPR occurrences "(${length} - ${length_without}) / ${length_text}")
  if(NOT occurrences EQUAL 1)
    message(FATAL_ERROR "${file} holds the text to be replaced ${occurrences} times, not once; "
                        "bring mutation '${name}' in list.cmake up to date:\n${text}")
  endif()
  set(condition ::linattn_mutations::${name})
  if(replacement MATCHES "MUTATED")
    string(REPLACE "MUTATED" "${condition}" edited "${replacement}")
  else()
    set(edited "{ if (${condition}) { ${replacement} } else { ${text} } }")
  endif()
  string(REPLACE "${text}" "${edited}" after "${before}")
  file(WRITE ${path} "${after}")
  set(conditions "${conditions}inline const bool ${name} = is_asked_for(\"${name}\");\n" PARENT_SCOPE)
endfunction()
include(${CMAKE_CURRENT_LIST_DIR}/list.cmake)

file(WRITE ${OUT}/mutations.hpp "#pragma once
#include <cstdlib>
#include <cstring>
namespace linattn_mutations {
inline bool is_asked_for(const char* name) {
  const char* const asked = std::getenv(\"LINATTN_MUTATION\");
  return asked != nullptr && std::strcmp(asked, name) == 0;
}
${conditions}}  // namespace linattn_mutations
")
