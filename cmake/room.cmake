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
if(NOT FA_SANITIZE_ACCESSES AND FA_SANITIZE MATCHES "address" AND FA_SANITIZE MATCHES "undefined")
  # A third of the time of a file. Behind -fsanitize, which would turn them on again.
  target_compile_options(fa_flags INTERFACE $<$<NOT:$<BOOL:$<TARGET_PROPERTY:FA_READS_BYTES>>>:-fno-sanitize=null,alignment,vptr>)
endif()

if(FA_BUILD_FUZZERS)
  if(NOT CMAKE_CXX_COMPILER_ID STREQUAL Clang)
    message(FATAL_ERROR "FA_BUILD_FUZZERS: ${CMAKE_CXX_COMPILER_ID} has no libFuzzer; accepted is Clang")
  endif()
  target_compile_options(fa_flags INTERFACE -fsanitize=fuzzer-no-link)
endif()

# fa_foreign_text(FILES...): most of what they compile is of other libraries' headers, where this one's accesses are few.
function(fa_foreign_text)
  if(NOT FA_SANITIZE_ACCESSES AND FA_SANITIZE MATCHES "undefined")
    set_property(SOURCE ${ARGN} APPEND PROPERTY COMPILE_OPTIONS -fno-sanitize=undefined,float-cast-overflow)
  endif()
endfunction()

# fa_room(NAME SOURCES... [USES rooms...] [LINKS targets...] [SMALL | FAST] [BYTES])
# SMALL: nothing in it runs at every call, so that a release has it in few bytes. FAST: it computes.
# BYTES: it reads files or tensors, whose bytes may lie anywhere.
function(fa_room name)
  cmake_parse_arguments(ROOM "SMALL;FAST;BYTES" "" "SOURCES;USES;LINKS" ${ARGN})
  add_library(fa_${name} OBJECT ${ROOM_SOURCES})
  target_include_directories(fa_${name} PUBLIC ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src
                                               ${PROJECT_SOURCE_DIR})
  target_compile_definitions(fa_${name} PRIVATE FA_BUILDING)
  target_link_libraries(fa_${name} PRIVATE fa_flags Threads::Threads ${ROOM_LINKS})
  if(NOT fa_shared)
    target_compile_definitions(fa_${name} PUBLIC FA_STATIC)
  endif()
  set_target_properties(fa_${name} PROPERTIES FA_READS_BYTES "${ROOM_BYTES}")
  if(NOT (ROOM_SMALL OR ROOM_FAST) OR NOT fa_several_levels)
    fa_use_precompiled(fa_${name})
  endif()
  if(ROOM_SMALL)
    target_compile_options(fa_${name} PRIVATE $<$<CONFIG:Release>:-Os>)
  elseif(ROOM_FAST)
    target_compile_options(fa_${name} PRIVATE $<$<CONFIG:Release>:-O3>)
  endif()
  set_property(GLOBAL APPEND PROPERTY FA_ROOMS fa_${name})
endfunction()
