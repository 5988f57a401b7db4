# Poses as the Eigen package of version OTHER_EIGEN_VERSION; the headers are those of the real one.
add_library(Eigen3::Eigen INTERFACE IMPORTED)
target_include_directories(Eigen3::Eigen SYSTEM INTERFACE ${OTHER_EIGEN_HEADERS})
