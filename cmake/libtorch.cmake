# Finds LibTorch without its own CMake package, which wants a CUDA compiler: FA_LIBTORCH is the target to link, if any.
# FA_TORCH_DIR says where; otherwise it is looked for in Python's torch package and in the usual places.
set(FA_TORCH_DIR "" CACHE PATH "Folder of LibTorch: its include/ and lib/ lie there")

find_package(Python3 COMPONENTS Interpreter QUIET)
set(hint "${FA_TORCH_DIR}")
if(NOT hint AND Python3_FOUND)
  execute_process(
    COMMAND ${Python3_EXECUTABLE} -c
            "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
    OUTPUT_VARIABLE hint OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()

find_path(FA_TORCH_INCLUDE torch/csrc/autograd/custom_function.h PATHS "${hint}/include" NO_CACHE)
foreach(name torch_cpu c10 c10_cuda torch_cuda)
  find_library(FA_TORCH_LIB_${name} ${name} PATHS "${hint}/lib" "${hint}/lib/x86_64-linux-gnu" NO_CACHE)
endforeach()

if(FA_TORCH_INCLUDE AND FA_TORCH_LIB_torch_cpu AND FA_TORCH_LIB_c10)
  # A LibTorch of the old std::string cannot share one with a program of the new.
  file(STRINGS ${FA_TORCH_LIB_c10} new_strings REGEX "NSt7__cxx1112basic_string" LIMIT_COUNT 1)
  if(new_strings)
    add_library(fa_libtorch INTERFACE)
    target_include_directories(fa_libtorch SYSTEM INTERFACE ${FA_TORCH_INCLUDE}
                                                            ${FA_TORCH_INCLUDE}/torch/csrc/api/include)
    target_link_libraries(fa_libtorch INTERFACE ${FA_TORCH_LIB_torch_cpu} ${FA_TORCH_LIB_c10})
    if(FA_TORCH_LIB_c10_cuda AND FA_TORCH_LIB_torch_cuda AND EXISTS "${CUDAToolkit_INCLUDE_DIRS}/cuda_runtime_api.h")
      target_compile_definitions(fa_libtorch INTERFACE FA_TORCH_CUDA)
      target_include_directories(fa_libtorch SYSTEM INTERFACE ${CUDAToolkit_INCLUDE_DIRS})
      # Nothing names a symbol of torch_cuda, but the CUDA backend registers itself when it is loaded.
      target_link_libraries(fa_libtorch INTERFACE ${FA_TORCH_LIB_c10_cuda} -Wl,--no-as-needed
                                                  ${FA_TORCH_LIB_torch_cuda} -Wl,--as-needed)
    endif()
    set(FA_LIBTORCH fa_libtorch)
  endif()
endif()
