# linattn_add_isa_library(<name> SOURCES <file>... [LEVELS <level>...])
#
# The same sources as one shared object per x86-64 level (default: x86-64 x86-64-v3 x86-64-v4; from the lowest up), and
# <name>, a small library that opens the best of them when the program asks: see include/linattn/isa.hpp.
#
#   <name>                     to link against; defines  linattn::isa_choice <name>_isa(const char* level)
#   <name>_<level>             the object of a level (attention_x86_64_v3), for flags and libraries of your own
#   ${<name>_ISA_TARGETS}      all of them, for install(TARGETS ...): they stay in one directory
#
# For another processor, or with a compiler that has no -march=x86-64, there is one level, `baseline`, without flags.
#
# Why not object files of several -march in one program: Eigen's functions are templates and inline functions, weak
# symbols of the same name in every object file. The linker keeps one of each, built for whichever level came first, and
# all the others call it. An older processor dies of its instructions; a newer one, of a vector whose memory was asked
# for by one level, with its alignment, and given back by another. Nor are shared objects enough: the dynamic linker
# merges weak symbols, too. So each object shows one function and keeps the rest to itself:
#   -fvisibility=hidden, -fvisibility-inlines-hidden   what is compiled here, and calls of it need no table
#   a version script                                   what these do not reach: templates of namespace std, which
#                                                      libstdc++ declares visible, and static libraries linked in
function(linattn_add_isa_library name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;LEVELS")
  if(NOT arg_SOURCES OR arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "linattn_add_isa_library(<name> SOURCES <file>... [LEVELS <level>...]), "
                        "but: linattn_add_isa_library(${ARGV})")
  endif()
  if(WIN32)
    message(FATAL_ERROR "linattn_add_isa_library needs dlopen, which Windows does not have")
  endif()
  string(MAKE_C_IDENTIFIER "${name}" identifier)
  if(NOT name STREQUAL identifier)
    message(FATAL_ERROR "linattn_add_isa_library: ${name}_isa is to be a function, but ${name} is no C identifier")
  endif()
  if(NOT arg_LEVELS)
    set(arg_LEVELS x86-64 x86-64-v3 x86-64-v4)
  endif()
  foreach(level IN LISTS arg_LEVELS)
    if(NOT level MATCHES "^x86-64(-v[234])?$")
      message(FATAL_ERROR "linattn_add_isa_library: the level ${level} is none of x86-64, x86-64-v2, -v3, -v4")
    endif()
  endforeach()
  list(SORT arg_LEVELS)  # from the lowest up, which is how they are looked through
  include(CheckCXXCompilerFlag)
  check_cxx_compiler_flag(-march=x86-64 LINATTN_HAS_ISA_LEVELS)
  if(NOT LINATTN_HAS_ISA_LEVELS)
    set(arg_LEVELS baseline)
  endif()

  set(objects "")
  set(targets ${name})
  foreach(level IN LISTS arg_LEVELS)
    string(MAKE_C_IDENTIFIER ${name}_${level} target)
    add_library(${target} SHARED ${arg_SOURCES})
    target_link_libraries(${target} PRIVATE linattn::linattn)
    target_compile_definitions(${target} PRIVATE LINATTN_ISA_ENTRY=${target})
    if(LINATTN_HAS_ISA_LEVELS)
      target_compile_options(${target} PRIVATE -march=${level})
    endif()
    _linattn_show_only(${target} ${target})
    list(APPEND targets ${target})
    string(APPEND objects "      {\"${level}\", \"$<TARGET_FILE_NAME:${target}>\", \"${target}\"},\n")
  endforeach()

  set(source ${CMAKE_CURRENT_BINARY_DIR}/${name}_isa_$<CONFIG>.cpp)
  file(GENERATE OUTPUT ${source} CONTENT "\
#include <linattn/isa.hpp>

extern \"C\" LINATTN_EXPORT linattn::isa_choice ${name}_isa(const char* level) noexcept {
  static constexpr linattn::isa_object objects[] = {
${objects}  };
  return linattn::choose_isa(objects, level);
}
")
  add_library(${name} SHARED ${source})
  target_link_libraries(${name} PUBLIC linattn::linattn PRIVATE ${CMAKE_DL_LIBS})
  _linattn_show_only(${name} ${name}_isa)
  list(REMOVE_ITEM targets ${name})
  add_dependencies(${name} ${targets})
  # Where it looks for them: beside itself.
  set(here $ORIGIN)
  if(APPLE)
    set(here @loader_path)
  endif()
  set_target_properties(${name} PROPERTIES BUILD_RPATH ${here} INSTALL_RPATH ${here})
  set(${name}_ISA_TARGETS ${name} ${targets} PARENT_SCOPE)
endfunction()

# The shared object shows this function alone.
function(_linattn_show_only target symbol)
  set_target_properties(${target} PROPERTIES CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
  if(APPLE)
    target_link_options(${target} PRIVATE "LINKER:-exported_symbol,_${symbol}")
  elseif(UNIX)
    set(script ${CMAKE_CURRENT_BINARY_DIR}/${target}.map)
    file(CONFIGURE OUTPUT ${script} CONTENT "{ global: ${symbol}; local: *; };\n")
    target_link_options(${target} PRIVATE "LINKER:--version-script,${script}")
    set_target_properties(${target} PROPERTIES LINK_DEPENDS ${script})
  endif()
endfunction()
