# Every folder of the library is an object library of its own, a room, that sees only the rooms it names.

add_library(fa_flags INTERFACE)
target_compile_features(fa_flags INTERFACE cxx_std_20)
target_compile_options(fa_flags INTERFACE -Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor -Wimplicit-fallthrough)
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  target_compile_options(fa_flags INTERFACE -Wno-restrict)  # false for std::string's operator+, GCC bug 105651
endif()
if(FA_WARNINGS_AS_ERRORS)
  target_compile_options(fa_flags INTERFACE -Werror)
endif()
if(FA_SANITIZE)
  target_compile_options(fa_flags INTERFACE -fsanitize=${FA_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_link_options(fa_flags INTERFACE -fsanitize=${FA_SANITIZE})
endif()

if(FA_BUILD_FUZZERS)
  if(NOT CMAKE_CXX_COMPILER_ID STREQUAL Clang)
    message(FATAL_ERROR "FA_BUILD_FUZZERS: ${CMAKE_CXX_COMPILER_ID} has no libFuzzer; accepted is Clang")
  endif()
  target_compile_options(fa_flags INTERFACE -fsanitize=fuzzer-no-link)
endif()

# fa_room(NAME SOURCES... [USES rooms...] [LINKS targets...] [SMALL])
# SMALL: nothing in it runs at every call, so that a release has it in few bytes.
function(fa_room name)
  cmake_parse_arguments(ROOM "SMALL" "" "SOURCES;USES;LINKS" ${ARGN})
  add_library(fa_${name} OBJECT ${ROOM_SOURCES})
  target_include_directories(fa_${name} PUBLIC ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src
                                               ${PROJECT_SOURCE_DIR})
  target_compile_definitions(fa_${name} PRIVATE FA_BUILDING)
  target_link_libraries(fa_${name} PRIVATE fa_flags Threads::Threads ${ROOM_LINKS})
  if(NOT fa_shared)
    target_compile_definitions(fa_${name} PUBLIC FA_STATIC)
  endif()
  if(ROOM_SMALL)  # without precompiled headers, which are of one level of optimisation
    target_compile_options(fa_${name} PRIVATE $<$<CONFIG:Release>:-Os>)
  else()
    fa_use_precompiled(fa_${name})
  endif()
  set_property(GLOBAL APPEND PROPERTY FA_ROOMS fa_${name})
endfunction()
