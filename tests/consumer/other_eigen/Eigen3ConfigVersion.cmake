# As strict as Eigen's own version file: a request is met by the same major version alone.
set(PACKAGE_VERSION ${OTHER_EIGEN_VERSION})
string(REGEX MATCH "^[0-9]+" major ${PACKAGE_VERSION})
if(PACKAGE_FIND_VERSION_MAJOR EQUAL major AND PACKAGE_FIND_VERSION VERSION_LESS_EQUAL PACKAGE_VERSION)
  set(PACKAGE_VERSION_COMPATIBLE TRUE)
endif()
