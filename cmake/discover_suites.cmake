# fa_discover_suites(TARGET LABELS labels...): like gtest_discover_tests, but one test of ctest is a whole suite, named as
# --gtest_filter has it, `Suite.*`. A process for each of thousands of tests costs more than most of them take.

set(FA_DISCOVER_SUITES_SCRIPT ${CMAKE_CURRENT_LIST_DIR}/discover_suites_script.cmake)

function(fa_discover_suites target)
  cmake_parse_arguments(SUITES "" "" "LABELS" ${ARGN})
  set(suites ${CMAKE_CURRENT_BINARY_DIR}/${target}_suites.cmake)
  get_target_property(runner ${target} CROSSCOMPILING_EMULATOR)
  if(NOT runner)
    set(runner "")
  endif()
  add_custom_command(
    TARGET ${target}
    POST_BUILD
    BYPRODUCTS ${suites}
    COMMAND ${CMAKE_COMMAND} "-DPROGRAM=$<TARGET_FILE:${target}>" "-DRUNNER=${runner}" "-DLABELS=${SUITES_LABELS}"
            "-DOUTPUT=${suites}" -P ${FA_DISCOVER_SUITES_SCRIPT}
    VERBATIM)
  set(include ${CMAKE_CURRENT_BINARY_DIR}/${target}_include.cmake)
  file(WRITE ${include} "if(EXISTS \"${suites}\")\n  include(\"${suites}\")\nelse()\n"
                        "  add_test(${target}_NOT_BUILT ${target}_NOT_BUILT)\nendif()\n")
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES ${include})
endfunction()
