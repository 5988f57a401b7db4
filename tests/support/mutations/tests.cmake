# mutation.<name>: the library with one wrong edit does not pass the test that list.cmake names. mutation.none: without
# any edit every one of these tests passes.
if(CMAKE_CXX_COMPILER_ID MATCHES "GNU|Clang" AND NOT MSVC)
  set(mutations_dir ${CMAKE_CURRENT_LIST_DIR})
  set(mutation_includes "")
  foreach(library Eigen3::Eigen GTest::gtest)
    get_target_property(directories ${library} INTERFACE_INCLUDE_DIRECTORIES)
    if(directories)
      list(APPEND mutation_includes ${directories})
    endif()
  endforeach()
  list(REMOVE_ITEM mutation_includes /usr/include)  # as a system folder of its own it hides the compiler's order

  function(linattn_add_mutation_test name)
    add_test(NAME mutation.${name}
             COMMAND ${CMAKE_COMMAND} -DNAME=${name} -DLINATTN=${PROJECT_SOURCE_DIR}
                     -DSCRATCH=${CMAKE_CURRENT_BINARY_DIR}/mutations/${name} -DCOMPILER=${CMAKE_CXX_COMPILER}
                     "-DINCLUDES=${mutation_includes}"
                     "-DLIBRARIES=$<TARGET_FILE:GTest::gtest_main>;$<TARGET_FILE:GTest::gtest>"
                     -P ${mutations_dir}/run.cmake)
    set_tests_properties(mutation.${name} PROPERTIES LABELS compile TIMEOUT 300)
  endfunction()

  linattn_add_mutation_test(none)
  function(mutation name)
    linattn_add_mutation_test(${name})
  endfunction()
  include(${mutations_dir}/list.cmake)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${mutations_dir}/list.cmake)
endif()
