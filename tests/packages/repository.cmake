# Makes the git repository REPOSITORY of the source tree, which need not be one itself, and removes CLONES of an older
# one, with which it shares no commit.
cmake_minimum_required(VERSION 3.22)
include(${CMAKE_CURRENT_LIST_DIR}/sources.cmake)
copy_sources(${REPOSITORY})
file(REMOVE_RECURSE ${CLONES})

function(git)
  execute_process(COMMAND ${GIT} -C ${REPOSITORY} -c user.name=consumer -c user.email=consumer@localhost
                          -c commit.gpgsign=false ${ARGN}
                  COMMAND_ERROR_IS_FATAL ANY)
endfunction()
git(init -q)
git(checkout -q -b main)
git(add .)
git(commit -q -m "The sources as they are")
