# mutation.<name>: the library with one wrong edit does not pass the test that list.cmake names. mutation.none: without
# any edit every one of these tests passes. One program has them all, each behind a condition: compiling one for each
# takes minutes.
if(CMAKE_CXX_COMPILER_ID MATCHES "GNU|Clang")
  set(mutations_dir ${CMAKE_CURRENT_LIST_DIR})
  set(mutated ${CMAKE_CURRENT_BINARY_DIR}/mutated)
  list(TRANSFORM headers PREPEND ${PROJECT_SOURCE_DIR}/include/ OUTPUT_VARIABLE mutation_sources)
  add_custom_command(
    OUTPUT ${mutated}/mutations.hpp
    COMMAND ${CMAKE_COMMAND} -DINCLUDE=${PROJECT_SOURCE_DIR}/include -DOUT=${mutated} -P ${mutations_dir}/edit.cmake
    DEPENDS ${mutation_sources} ${mutations_dir}/edit.cmake ${mutations_dir}/list.cmake)

  # Not linked to linattn::linattn, whose headers are the right ones.
  add_executable(mutant_tests ${mutations_dir}/mutant_tests.cpp ${mutated}/mutations.hpp)
  target_compile_features(mutant_tests PRIVATE cxx_std_20)
  target_compile_options(mutant_tests PRIVATE -O0 -UNDEBUG -include ${mutated}/mutations.hpp)
  target_include_directories(mutant_tests PRIVATE ${mutated} ${PROJECT_SOURCE_DIR}/tests)
  target_link_libraries(mutant_tests PRIVATE Eigen3::Eigen GTest::gtest_main)

  add_test(NAME mutation.none COMMAND mutant_tests --gtest_brief=1)
  set_tests_properties(mutation.none PROPERTIES LABELS compile TIMEOUT 60)
  function(mutation name file test)
    add_test(NAME mutation.${name} COMMAND mutant_tests --gtest_filter=Mutant*.${test})
    # The last lines of a program that ran to its end: a crash is no failed test.
    set_tests_properties(mutation.${name} PROPERTIES
      LABELS compile TIMEOUT 60 ENVIRONMENT LINATTN_MUTATION=${name}
      PASS_REGULAR_EXPRESSION "\\[  FAILED  \\] Mutant[A-Za-z]*\\.${test}\n\n 1 FAILED TEST\n")
  endfunction()
  include(${mutations_dir}/list.cmake)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${mutations_dir}/list.cmake)
endif()
