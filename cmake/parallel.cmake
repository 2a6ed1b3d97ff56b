# fa_parallel: context parallelism, a library beside fa (src/parallel). NCCL and the CUDA driver are opened at run time.

if(fa_shared)
  add_library(fa_parallel SHARED $<TARGET_OBJECTS:fa_parallel_room>)
else()
  add_library(fa_parallel STATIC $<TARGET_OBJECTS:fa_parallel_room>)
endif()
add_library(fa::parallel ALIAS fa_parallel)
target_link_libraries(fa_parallel PUBLIC fa PRIVATE Threads::Threads ${CMAKE_DL_LIBS} $<BUILD_INTERFACE:fa_flags>)
set_target_properties(fa_parallel PROPERTIES EXPORT_NAME parallel VERSION ${PROJECT_VERSION} SOVERSION ${fa_soversion}
                                             LINKER_LANGUAGE ${fa_link_language})
if(fa_shared AND FA_LINKER_TAKES_EXPORTS)
  target_link_options(fa_parallel PRIVATE -Wl,--gc-sections -Wl,--version-script=${exports})
  set_target_properties(fa_parallel PROPERTIES LINK_DEPENDS ${exports})
endif()
install(TARGETS fa_parallel EXPORT fa-targets)

set(fa_parallel_pc_libs "")
if(NOT fa_shared)
  set(fa_parallel_pc_libs "${fa_pc_libs}")
endif()
configure_file(${PROJECT_SOURCE_DIR}/cmake/fa_parallel.pc.in ${PROJECT_BINARY_DIR}/fa_parallel.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/fa_parallel.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
