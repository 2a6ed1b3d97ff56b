# fa_fmt: fmt's headers, with fmt's own functions compiled once (src/support/fmt_library.cpp) where this compiler and this
# version of fmt allow it, else header-only in every file.

set(fmt_library ${PROJECT_SOURCE_DIR}/src/support/fmt_library.cpp)
# Sections of their own, for the linker to drop those that nothing calls.
set(fmt_library_options -fkeep-inline-functions -fno-inline -ffunction-sections -fdata-sections)

add_library(fa_fmt INTERFACE)
target_include_directories(fa_fmt SYSTEM INTERFACE $<TARGET_PROPERTY:fmt::fmt-header-only,INTERFACE_INCLUDE_DIRECTORIES>)

if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)  # Clang knows no -fkeep-inline-functions
  get_target_property(fmt_include fmt::fmt-header-only INTERFACE_INCLUDE_DIRECTORIES)
  try_compile(FA_FMT_COMPILED_ONCE ${PROJECT_BINARY_DIR}/fmt_probe
              SOURCES ${fmt_library} ${CMAKE_CURRENT_LIST_DIR}/fmt_probe.cpp
              CMAKE_FLAGS "-DINCLUDE_DIRECTORIES=${fmt_include}"
              COMPILE_DEFINITIONS ${fmt_library_options}
              CXX_STANDARD 20 CXX_STANDARD_REQUIRED ON)
endif()
if(NOT FA_FMT_COMPILED_ONCE)
  target_compile_definitions(fa_fmt INTERFACE FMT_HEADER_ONLY=1)
endif()
