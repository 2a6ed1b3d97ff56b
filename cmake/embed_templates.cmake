# Writes templates/ into a C++ file, as one array of {name, text}: the library carries its kernels with it.

set(FA_EMBED_SCRIPT ${CMAKE_CURRENT_LIST_DIR}/embed_templates_script.cmake)

function(fa_embed_templates output)
  file(GLOB_RECURSE templates CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/templates/*.cuh)
  # One that is gone is no newer file.
  file(GENERATE OUTPUT ${output}.list CONTENT "${templates}\n")
  add_custom_command(
    OUTPUT ${output}
    COMMAND ${CMAKE_COMMAND} -DOUTPUT=${output} -DROOT=${PROJECT_SOURCE_DIR}/templates -P ${FA_EMBED_SCRIPT}
    DEPENDS ${output}.list ${templates} ${FA_EMBED_SCRIPT}
    VERBATIM)
endfunction()
