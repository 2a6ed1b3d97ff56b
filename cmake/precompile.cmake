# FA_PRECOMPILE parses the headers that nearly every file includes once. Not the default: a file that forgets an #include
# of its own compiles with it.
option(FA_PRECOMPILE "Precompile common headers" OFF)

set(common_headers <algorithm> <atomic> <chrono> <cmath> <cstdint> <cstring> <filesystem> <functional> <map> <memory>
                   <mutex> <optional> <span> <sstream> <string> <thread> <vector> <fmt/format.h>)

if(FA_PRECOMPILE)
  # Behind precompiled headers GCC finds overflows in the standard library's own copies.
  target_compile_options(fa_flags INTERFACE -Wno-stringop-overflow -Wno-stringop-overread -Wno-array-bounds)
  file(WRITE ${PROJECT_BINARY_DIR}/precompiled/empty.cpp "")
  add_library(fa_precompiled OBJECT ${PROJECT_BINARY_DIR}/precompiled/empty.cpp)
  target_link_libraries(fa_precompiled PRIVATE fa_flags fa_fmt Threads::Threads)
  target_compile_options(fa_precompiled PRIVATE $<$<CONFIG:Release>:-O2>)
  target_precompile_headers(fa_precompiled PRIVATE ${common_headers})
endif()

# Precompiled headers are of one level of optimisation, and a release has several: of small and of fast rooms.
set(fa_several_levels ON)
if(CMAKE_BUILD_TYPE AND NOT CMAKE_BUILD_TYPE STREQUAL Release)
  set(fa_several_levels OFF)
endif()

# fa_use_precompiled(TARGET): of code of the library, or as it is compiled: with -O2 in a release, as the headers are.
function(fa_use_precompiled target)
  target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O2>)
  if(FA_PRECOMPILE)
    target_precompile_headers(${target} REUSE_FROM fa_precompiled)
  endif()
endfunction()

# fa_test_options(TARGET): a program of tests. Its own code runs once: it costs more to optimise than to execute. What it
# tests is optimised, being the library's.
function(fa_test_options target)
  target_compile_options(${target} PRIVATE -O0)
  if(NOT FA_PRECOMPILE)
    return()
  endif()
  if(NOT TARGET fa_precompiled_tests)
    # A program, because position-independent code of libraries is compiled differently.
    file(WRITE ${PROJECT_BINARY_DIR}/precompiled/main.cpp "int main() {}\n")
    add_executable(fa_precompiled_tests EXCLUDE_FROM_ALL ${PROJECT_BINARY_DIR}/precompiled/main.cpp)
    target_compile_options(fa_precompiled_tests PRIVATE -O0)
    target_link_libraries(fa_precompiled_tests PRIVATE fa_flags fa_fmt Threads::Threads GTest::gtest)
    target_precompile_headers(fa_precompiled_tests PRIVATE ${common_headers} <gtest/gtest.h>)
  endif()
  target_precompile_headers(${target} REUSE_FROM fa_precompiled_tests)
endfunction()
