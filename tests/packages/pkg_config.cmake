# Compiles and runs the consumer with what pkg-config says of the library in PREFIX, which is not the prefix that was
# configured: the file has to find its own.
cmake_minimum_required(VERSION 3.22)
set(ENV{PKG_CONFIG_PATH} ${PREFIX}/share/pkgconfig)

execute_process(COMMAND ${PKG_CONFIG} --validate linattn COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${PKG_CONFIG} --modversion linattn OUTPUT_VARIABLE version OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT version STREQUAL VERSION)
  message(FATAL_ERROR "pkg-config has version ${version}, not ${VERSION}")
endif()
execute_process(COMMAND ${PKG_CONFIG} --print-requires linattn OUTPUT_VARIABLE requires
                OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT requires STREQUAL "eigen3 >= 3.4")
  message(FATAL_ERROR "requires '${requires}'")
endif()
execute_process(COMMAND ${PKG_CONFIG} --exists "linattn >= 99" RESULT_VARIABLE refused)
if(NOT refused)
  message(FATAL_ERROR "pkg-config finds a version 99")
endif()

execute_process(COMMAND ${PKG_CONFIG} --cflags linattn OUTPUT_VARIABLE flags COMMAND_ERROR_IS_FATAL ANY)
separate_arguments(flags UNIX_COMMAND "${flags}")
file(MAKE_DIRECTORY ${SCRATCH})
execute_process(COMMAND ${CXX} -std=c++20 ${flags} ${CONSUMER}/main.cpp -o ${SCRATCH}/consumer
                COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${SCRATCH}/consumer COMMAND_ERROR_IS_FATAL ANY)
