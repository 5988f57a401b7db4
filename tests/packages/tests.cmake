# What package managers make of the library, each consumed from outside, and the single header. Conan and vcpkg are
# stood in for by scripts: see conan/dry_run.py and vcpkg/dry_run.cmake.
set(packages ${CMAKE_CURRENT_SOURCE_DIR}/packages)
set(made ${CMAKE_CURRENT_BINARY_DIR}/packages)
set(tools -DCXX=${CMAKE_CXX_COMPILER} -DGENERATOR=${CMAKE_GENERATOR} -DVERSION=${PROJECT_VERSION})

# linattn_add_package(name command...): makes a package for the test consumer.<name>.
function(linattn_add_package name)
  add_test(NAME package.${name} COMMAND ${ARGN})
  set_tests_properties(package.${name} PROPERTIES LABELS package FIXTURES_SETUP linattn_package_${name})
endfunction()

# linattn_add_package_consumer(name project [configure arguments...]): the project finds the package of that name.
function(linattn_add_package_consumer name consumer)
  linattn_add_consumer(${name} ${ARGN})
  set_tests_properties(consumer.${name} PROPERTIES FIXTURES_REQUIRED linattn_package_${name})
endfunction()

find_program(git git)
if(git)
  linattn_add_package(fetch_content ${CMAKE_COMMAND} -DGIT=${git} -DREPOSITORY=${made}/repository
                                    -DCLONES=${scratch}/fetch_content -P ${packages}/repository.cmake)
  linattn_add_package_consumer(fetch_content ${consumer} -DLINATTN_GIT_REPOSITORY=file://${made}/repository)
else()
  message(STATUS "consumer.fetch_content is left out: it needs git")
endif()

find_program(pkg_config NAMES pkg-config pkgconf)
if(pkg_config)
  add_test(NAME consumer.pkg_config
           COMMAND ${CMAKE_COMMAND} ${tools} -DPKG_CONFIG=${pkg_config} -DPREFIX=${prefix} -DCONSUMER=${consumer}
                                    -DSCRATCH=${made}/pkg_config -P ${packages}/pkg_config.cmake)
  set_tests_properties(consumer.pkg_config PROPERTIES FIXTURES_REQUIRED linattn_installed LABELS package)
else()
  message(STATUS "consumer.pkg_config is left out: it needs pkg-config")
endif()

find_program(dpkg_deb dpkg-deb)
if(dpkg_deb)
  linattn_add_package(deb ${CMAKE_COMMAND} ${tools} -DDPKG_DEB=${dpkg_deb} -DSCRATCH=${made}/deb
                          -P ${packages}/deb.cmake)
  linattn_add_package_consumer(deb ${consumer} -DCMAKE_PREFIX_PATH=${made}/deb/root/usr)
else()
  message(STATUS "consumer.deb is left out: it needs dpkg-deb (dpkg)")
endif()

linattn_add_package(vcpkg ${CMAKE_COMMAND} ${tools} -DPACKAGES=${made}/vcpkg -P ${packages}/vcpkg/dry_run.cmake)
linattn_add_package_consumer(vcpkg ${consumer} -DCMAKE_PREFIX_PATH=${made}/vcpkg/linattn_any)

find_package(Python3 COMPONENTS Interpreter)
if(Python3_FOUND)
  linattn_add_package(conan ${Python3_EXECUTABLE} ${packages}/conan/dry_run.py ${made}/conan ${PROJECT_VERSION})
  linattn_add_package_consumer(conan ${packages}/conan/test_package -Dlinattn_DIR=${made}/conan/generators)
  execute_process(COMMAND ${Python3_EXECUTABLE} -c "import jsonschema" RESULT_VARIABLE no_jsonschema ERROR_QUIET)
  if(no_jsonschema)
    message(STATUS "package.vcpkg_manifest is left out: it needs python3-jsonschema")
  else()
    add_test(NAME package.vcpkg_manifest
             COMMAND ${Python3_EXECUTABLE} ${packages}/vcpkg/check_manifest.py ${PROJECT_VERSION})
    set_tests_properties(package.vcpkg_manifest PROPERTIES LABELS package)
  endif()
else()
  message(STATUS "consumer.conan and package.vcpkg_manifest are left out: they need Python")
endif()

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
