# Writes cache/tuned/*.json into a C++ file, as one array of {name, text}: the library carries its tuned tables with it.

set(FA_EMBED_TABLES_SCRIPT ${CMAKE_CURRENT_LIST_DIR}/embed_tables_script.cmake)

function(fa_embed_tables output)
  file(GLOB tables CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/cache/tuned/*.json)
  # One that is gone is no newer file.
  file(GENERATE OUTPUT ${output}.list CONTENT "${tables}\n")
  add_custom_command(
    OUTPUT ${output}
    COMMAND ${CMAKE_COMMAND} -DOUTPUT=${output} -DROOT=${PROJECT_SOURCE_DIR}/cache/tuned -P ${FA_EMBED_TABLES_SCRIPT}
    DEPENDS ${output}.list ${tables} ${FA_EMBED_TABLES_SCRIPT}
    VERBATIM)
endfunction()
