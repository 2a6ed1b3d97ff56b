# Makes a CMake prefix of the header-only packages of this machine, for a build for another one, whose compiler must not
# see the rest of /usr/include:  cmake -DPREFIX=... -P header_packages.cmake
cmake_minimum_required(VERSION 3.25)

set(roots /usr/include /usr/local/include)

# fa_header_package(NAME HEADER VERSION TARGETS...): links to what holds HEADER, and a package of that name.
function(fa_header_package name header version)
  find_path(root ${header} PATHS ${roots} NO_DEFAULT_PATH NO_CACHE REQUIRED)
  cmake_path(GET header PARENT_PATH folder)
  if(folder STREQUAL "")
    set(folder ${header})
  endif()
  file(MAKE_DIRECTORY ${PREFIX}/include)
  file(CREATE_LINK ${root}/${folder} ${PREFIX}/include/${folder} SYMBOLIC)
  fa_write_package(${name} ${version} include ${ARGN})
endfunction()

function(fa_write_package name version include)
  set(config "")
  foreach(target IN LISTS ARGN)
    string(APPEND config "if(NOT TARGET ${target})\n  add_library(${target} INTERFACE IMPORTED)\n"
                         "  target_include_directories(${target} INTERFACE \${CMAKE_CURRENT_LIST_DIR}/../../../${include})\nendif()\n")
  endforeach()
  set(folder ${PREFIX}/lib/cmake/${name})
  file(WRITE ${folder}/${name}Config.cmake "${config}")
  file(WRITE ${folder}/${name}ConfigVersion.cmake
       "set(PACKAGE_VERSION ${version})\nset(PACKAGE_VERSION_COMPATIBLE TRUE)\n")
endfunction()

fa_header_package(fmt fmt/format.h 9 fmt::fmt fmt::fmt-header-only)
fa_header_package(spdlog spdlog/spdlog.h 1 spdlog::spdlog spdlog::spdlog_header_only)
fa_header_package(nlohmann_json nlohmann/json.hpp 3 nlohmann_json::nlohmann_json)
fa_header_package(CLI11 CLI/CLI.hpp 2 CLI11::CLI11)
file(CREATE_LINK /usr/include/xxhash.h ${PREFIX}/include/xxhash.h SYMBOLIC)
if(EXISTS /usr/include/xxh3.h)
  file(CREATE_LINK /usr/include/xxh3.h ${PREFIX}/include/xxh3.h SYMBOLIC)
endif()

# The driver's and NVRTC's headers are the same for every machine.
file(GLOB toolkits /usr/local/cuda/include /usr/local/cuda-*/include)
find_path(cuda cuda.h PATHS ${toolkits} ${roots} NO_DEFAULT_PATH NO_CACHE REQUIRED)
file(MAKE_DIRECTORY ${PREFIX}/cuda)
foreach(header cuda.h cudaTypedefs.h nvrtc.h)
  if(EXISTS ${cuda}/${header})
    file(CREATE_LINK ${cuda}/${header} ${PREFIX}/cuda/${header} SYMBOLIC)
  endif()
endforeach()
fa_write_package(CUDAToolkit 12.0 cuda CUDA::toolkit)
