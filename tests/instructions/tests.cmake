# instructions.baseline: without -m flags the library's verbs are compiled to nothing beyond x86-64's SSE2. A small
# program with -mavx2 shows that the search finds AVX. Skipped on other processors and without objdump.
get_target_property(instructions_includes Eigen3::Eigen INTERFACE_INCLUDE_DIRECTORIES)
add_test(NAME instructions.baseline
         COMMAND ${CMAKE_COMMAND} -DCOMPILER=${CMAKE_CXX_COMPILER} -DPROCESSOR=${CMAKE_SYSTEM_PROCESSOR}
                 -DLINATTN=${PROJECT_SOURCE_DIR} "-DINCLUDES=${instructions_includes}"
                 -DSCRATCH=${CMAKE_CURRENT_BINARY_DIR}/instructions -P ${CMAKE_CURRENT_LIST_DIR}/run.cmake)
set_tests_properties(instructions.baseline PROPERTIES LABELS compile TIMEOUT 300
                     SKIP_REGULAR_EXPRESSION "skipped: ")
