# realtime.clean: the documented paths under clang's -Wfunction-effects and -fsanitize=realtime. realtime.violations:
# both of them see what they are there to see. Skipped without clang 20 or newer and its runtime libraries, whichever
# compiler builds the rest.
set(realtime_dir ${CMAKE_CURRENT_LIST_DIR})
get_target_property(realtime_includes Eigen3::Eigen INTERFACE_INCLUDE_DIRECTORIES)

foreach(name clean violations)
  add_test(NAME realtime.${name}
           COMMAND ${CMAKE_COMMAND} -DNAME=${name} -DLINATTN=${PROJECT_SOURCE_DIR} "-DINCLUDES=${realtime_includes}"
                   -DSCRATCH=${CMAKE_CURRENT_BINARY_DIR}/realtime/${name} -P ${realtime_dir}/run.cmake)
  set_tests_properties(realtime.${name} PROPERTIES LABELS compile TIMEOUT 300
                       SKIP_REGULAR_EXPRESSION "skipped: no clang")
endforeach()
