# An overlay port of the sources in which it lies: vcpkg install linattn --overlay-ports=<sources>/tests/packages/vcpkg
set(VCPKG_BUILD_TYPE release)  # headers alone
get_filename_component(SOURCE_PATH "${CMAKE_CURRENT_LIST_DIR}/../../../.." ABSOLUTE)

vcpkg_cmake_configure(
    SOURCE_PATH "${SOURCE_PATH}"
    OPTIONS
        -DLINATTN_BUILD_TESTS=OFF
        -DLINATTN_BUILD_BENCHMARKS=OFF
        -DLINATTN_BUILD_EXAMPLES=OFF
)
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(CONFIG_PATH share/cmake/linattn)
vcpkg_fixup_pkgconfig()

file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/share/doc")  # the licence, which vcpkg keeps as share/linattn/copyright
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
file(INSTALL "${CMAKE_CURRENT_LIST_DIR}/usage" DESTINATION "${CURRENT_PACKAGES_DIR}/share/${PORT}")
