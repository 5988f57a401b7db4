set(library_alone -DLINATTN_BUILD_TESTS=OFF -DLINATTN_BUILD_BENCHMARKS=OFF -DLINATTN_BUILD_EXAMPLES=OFF)

# copy_sources(folder): the files of this source tree, be it a checkout or not, without the data of its tests.
function(copy_sources folder)
  get_filename_component(top ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../.. ABSOLUTE)
  file(GLOB entries ${top}/*)
  list(FILTER entries EXCLUDE REGEX "/(\\.git|build)$")
  file(REMOVE_RECURSE ${folder})
  file(COPY ${entries} DESTINATION ${folder} PATTERN data EXCLUDE)
endfunction()
