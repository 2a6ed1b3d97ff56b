# The library that users link, and a static one with everything visible for the tests and tools of this project.

set(fa_system_libraries Threads::Threads ${CMAKE_DL_LIBS})
if(WIN32)
  list(APPEND fa_system_libraries ntdll advapi32)
endif()

get_property(rooms GLOBAL PROPERTY FA_ROOMS)
set(objects "")
foreach(room IN LISTS rooms)
  list(APPEND objects $<TARGET_OBJECTS:${room}>)
endforeach()

if(fa_shared)
  add_library(fa SHARED ${objects})
else()
  add_library(fa STATIC ${objects})
endif()
add_library(fa::fa ALIAS fa)
target_link_libraries(fa PRIVATE ${fa_system_libraries} $<BUILD_INTERFACE:fa_flags>)
target_include_directories(fa PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
                                     $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)

# A project of C alone knows neither C++20 nor how to link C++: what the C++ compiler would link by itself is named to it.
# Here for a project that has fa as a subdirectory, in faConfig.cmake for one that finds it.
set(fa_cxx_runtime ${CMAKE_CXX_IMPLICIT_LINK_LIBRARIES})
list(REMOVE_ITEM fa_cxx_runtime ${CMAKE_C_IMPLICIT_LINK_LIBRARIES})
list(REMOVE_DUPLICATES fa_cxx_runtime)
set(fa_link_language CXX)
if(PROJECT_IS_TOP_LEVEL OR fa_parent_has_cxx)
  target_compile_features(fa PUBLIC cxx_std_20)
elseif(NOT fa_shared)
  set(fa_link_language C)
  target_link_libraries(fa INTERFACE ${fa_cxx_runtime})
endif()

if(fa_shared)
  include(CheckLinkerFlag)
  set(exports ${CMAKE_CURRENT_LIST_DIR}/exports.map)
  check_linker_flag(CXX "-Wl,--gc-sections;-Wl,--version-script=${exports}" FA_LINKER_TAKES_EXPORTS)
  if(FA_LINKER_TAKES_EXPORTS)
    target_link_options(fa PRIVATE -Wl,--gc-sections -Wl,--version-script=${exports})
    set_target_properties(fa PROPERTIES LINK_DEPENDS ${exports})
  endif()
endif()
# The C++ API may change with every minor version until 1.0.
set(fa_soversion ${PROJECT_VERSION_MAJOR})
if(PROJECT_VERSION_MAJOR EQUAL 0)
  set(fa_soversion 0.${PROJECT_VERSION_MINOR})
endif()
set_target_properties(fa PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${fa_soversion} LINKER_LANGUAGE
                                                                                         ${fa_link_language})
if(NOT fa_shared)
  target_compile_definitions(fa PUBLIC FA_STATIC)
endif()

add_library(fa_internal STATIC EXCLUDE_FROM_ALL ${objects})
set_target_properties(fa_internal PROPERTIES LINKER_LANGUAGE CXX)
target_include_directories(fa_internal PUBLIC ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src
                                              ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/templates)
target_link_libraries(fa_internal PUBLIC ${fa_system_libraries} fa_flags CUDA::toolkit)
if(NOT fa_shared OR WIN32)  # else Windows looks for what libfa exports
  target_compile_definitions(fa_internal PUBLIC FA_STATIC)
endif()

# A wheel has one file, which brings the C++ runtime along: nothing but the C library and libgcc is asked of
# the user's machine.
if(FA_PYTHON_PACKAGE)
  set_property(TARGET fa PROPERTY VERSION)
  set_property(TARGET fa PROPERTY SOVERSION)
  target_link_options(fa PRIVATE -static-libstdc++)
  install(TARGETS fa LIBRARY DESTINATION fa_attention COMPONENT python)
  return()
endif()

install(TARGETS fa EXPORT fa-targets)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/fa DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT fa-targets NAMESPACE fa:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/fa)
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/faConfig.cmake.in ${PROJECT_BINARY_DIR}/faConfig.cmake
                              INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/fa)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/faConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/faConfig.cmake ${PROJECT_BINARY_DIR}/faConfigVersion.cmake
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/fa)

# For build systems other than CMake. Paths start from the file: an installation may be moved.
file(RELATIVE_PATH fa_prefix_from_pc "/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/")
string(REGEX REPLACE "/$" "" fa_prefix_from_pc "${fa_prefix_from_pc}")
set(fa_pc_cflags "")
set(fa_pc_libs "")
if(NOT fa_shared)
  set(fa_pc_cflags " -DFA_STATIC")
  set(fa_pc_libs " -lstdc++ -lm -ldl -pthread")
endif()
configure_file(${PROJECT_SOURCE_DIR}/cmake/fa.pc.in ${PROJECT_BINARY_DIR}/fa.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/fa.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
