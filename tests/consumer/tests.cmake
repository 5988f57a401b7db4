# The package as its users meet it: installed and found, as a subdirectory, and refused.
set(consumer ${CMAKE_CURRENT_SOURCE_DIR}/consumer)
set(scratch ${CMAKE_CURRENT_BINARY_DIR}/consumer)
set(prefix ${scratch}/prefix)

add_test(NAME consumer.install COMMAND ${CMAKE_COMMAND} --install ${PROJECT_BINARY_DIR} --prefix ${prefix})
set_tests_properties(consumer.install PROPERTIES FIXTURES_SETUP linattn_installed LABELS package)

# linattn_add_consumer(name [configure arguments...]): configures, builds and runs the consumer.
function(linattn_add_consumer name)
  add_test(NAME consumer.${name}
           COMMAND ${CMAKE_CTEST_COMMAND} --build-and-test ${consumer} ${scratch}/${name}
                   --build-generator ${CMAKE_GENERATOR}
                   --build-options -DCMAKE_CXX_COMPILER=${CMAKE_CXX_COMPILER} ${ARGN}
                   --test-command consumer)
  set_tests_properties(consumer.${name} PROPERTIES FIXTURES_REQUIRED linattn_installed LABELS package)
endfunction()

# linattn_add_refusal(name sentence [configure arguments...]): configuring the consumer fails, and says this.
function(linattn_add_refusal name sentence)
  add_test(NAME consumer.${name}
           COMMAND ${CMAKE_COMMAND} -G ${CMAKE_GENERATOR} -S ${consumer} -B ${scratch}/${name}
                   -DCMAKE_CXX_COMPILER=${CMAKE_CXX_COMPILER} -DCMAKE_PREFIX_PATH=${prefix} ${ARGN})
  string(REPLACE " " "[ \n]+" pattern "${sentence}")  # CMake wraps its messages
  set_tests_properties(consumer.${name} PROPERTIES PASS_REGULAR_EXPRESSION "${pattern}"
                       FIXTURES_REQUIRED linattn_installed LABELS package)
endfunction()

get_target_property(eigen_headers Eigen3::Eigen INTERFACE_INCLUDE_DIRECTORIES)
function(linattn_other_eigen version result)
  set(${result} -DEigen3_DIR=${consumer}/other_eigen -DOTHER_EIGEN_VERSION=${version}
                -DOTHER_EIGEN_HEADERS=${eigen_headers} PARENT_SCOPE)
endfunction()
linattn_other_eigen(3.3.9 eigen_3_3)
linattn_other_eigen(5.0.1 eigen_5)
set(too_old "linattn needs Eigen 3.4 or newer, found 3.3.9")
math(EXPR next_minor "${PROJECT_VERSION_MINOR} + 1")

linattn_add_consumer(find_package -DCMAKE_PREFIX_PATH=${prefix} -DLINATTN_VERSION=${PROJECT_VERSION})
linattn_add_consumer(find_package_eigen_5 -DCMAKE_PREFIX_PATH=${prefix} ${eigen_5})
linattn_add_consumer(add_subdirectory -DLINATTN_SOURCE_DIR=${PROJECT_SOURCE_DIR})
linattn_add_consumer(add_subdirectory_eigen_5 -DLINATTN_SOURCE_DIR=${PROJECT_SOURCE_DIR} ${eigen_5})
linattn_add_consumer(eigen_source -DLINATTN_SOURCE_DIR=${PROJECT_SOURCE_DIR} -DLINATTN_EIGEN_SOURCE=${eigen_headers})
linattn_add_refusal(no_eigen_source_refused "which is no source tree of Eigen"
                    -DLINATTN_SOURCE_DIR=${PROJECT_SOURCE_DIR} -DLINATTN_EIGEN_SOURCE=${consumer})
linattn_add_refusal(version_99_refused "compatible with requested version \"99\"" -DLINATTN_VERSION=99)
linattn_add_refusal(next_minor_refused "compatible with requested version \"${PROJECT_VERSION_MAJOR}.${next_minor}\""
                    -DLINATTN_VERSION=${PROJECT_VERSION_MAJOR}.${next_minor})
linattn_add_refusal(old_eigen_refused "${too_old}" ${eigen_3_3})
linattn_add_refusal(old_eigen_refused_in_subdirectory "${too_old}" -DLINATTN_SOURCE_DIR=${PROJECT_SOURCE_DIR}
                    ${eigen_3_3})
linattn_add_refusal(isa_name_refused "my-attention is no C identifier" -DLINATTN_ISA_NAME=my-attention
                    -DLINATTN_ISA_LEVEL=x86-64)
linattn_add_refusal(isa_level_refused "the level haswell is none of" -DLINATTN_ISA_NAME=attention
                    -DLINATTN_ISA_LEVEL=haswell)
