# For Linux on 64-bit Arm (Grace, Jetson), with Debian's g++-aarch64-linux-gnu. Packages come from FA_CROSS_PREFIX, which
# tools/cross_packages.sh makes.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(triple aarch64-linux-gnu)
set(CMAKE_C_COMPILER ${triple}-gcc)
set(CMAKE_CXX_COMPILER ${triple}-g++)

list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES FA_CROSS_PREFIX)
set(CMAKE_FIND_ROOT_PATH ${FA_CROSS_PREFIX} /usr/${triple})
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
set(CMAKE_FIND_PACKAGE_PREFER_CONFIG ON)

find_program(qemu NAMES qemu-aarch64 qemu-aarch64-static)
if(qemu)
  set(CMAKE_CROSSCOMPILING_EMULATOR ${qemu} -L /usr/${triple})
endif()
set(CMAKE_GTEST_DISCOVER_TESTS_DISCOVERY_MODE PRE_TEST)
