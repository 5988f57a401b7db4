set(packages ${CMAKE_CURRENT_SOURCE_DIR}/packages)
set(made ${CMAKE_CURRENT_BINARY_DIR}/packages)
set(tools -DCXX=${CMAKE_CXX_COMPILER} -DGENERATOR=${CMAKE_GENERATOR} -DVERSION=${PROJECT_VERSION})

# ---- the single header -----------------------------------------------------------------------------------------------

# As strict as our own programs are compiled. Its behaviour: LINATTN_SINGLE_HEADER.
add_test(NAME consumer.single_header
         COMMAND ${CMAKE_CXX_COMPILER} -std=c++20 -fsyntax-only
                 $<TARGET_PROPERTY:linattn_strict,INTERFACE_COMPILE_OPTIONS> -I${prefix}/include
                 -isystem$<TARGET_PROPERTY:Eigen3::Eigen,INTERFACE_INCLUDE_DIRECTORIES>
                 ${packages}/single_header.cpp
         COMMAND_EXPAND_LISTS)
set_tests_properties(consumer.single_header PROPERTIES FIXTURES_REQUIRED linattn_installed LABELS package)
add_test(NAME package.single_header_is_fresh
         COMMAND ${CMAKE_COMMAND} ${tools} -DSCRATCH=${made}/fresh -P ${packages}/fresh.cmake)
set_tests_properties(package.single_header_is_fresh PROPERTIES LABELS package)
