# Finds the CUDA toolkit, for the CUDA engine's module (kernels/cuda). Nothing else of the project needs it.
#
# Sets HEADWATER_CUDA_ENABLED, and then enables the language CUDA and defines the imported targets headwater_cudart (static) and
# headwater_cublaslt (shared; found at run time in the toolkit, or wherever that machine's loader looks). HEADWATER_CUDA decides:
# AUTO builds the module where nvcc 12.4 or newer, the static CUDA runtime and cuBLASLt are found at CUDA_HOME, on the PATH or in
# /usr/local/cuda; ON makes it an error that they are not; OFF does without. Sanitized builds always do without.
set(HEADWATER_CUDA AUTO CACHE STRING "Build the CUDA engine's module: AUTO, ON or OFF")
set_property(CACHE HEADWATER_CUDA PROPERTY STRINGS AUTO ON OFF)
set(HEADWATER_CUDA_ENABLED OFF)
set(HEADWATER_CUDA_OLDEST 12.4)

# Looks for the parts; sets HEADWATER_CUDA_MISSING to what is not there, in words.
macro(headwater_find_cuda)
  set(HEADWATER_CUDA_MISSING "")
  find_program(HEADWATER_NVCC nvcc HINTS $ENV{CUDA_HOME} PATH_SUFFIXES bin)
  find_program(HEADWATER_NVCC nvcc PATHS /usr/local/cuda PATH_SUFFIXES bin)
  if(NOT HEADWATER_NVCC)
    set(HEADWATER_CUDA_MISSING "nvcc was not found at CUDA_HOME, on the PATH or in /usr/local/cuda")
  else()
    execute_process(COMMAND ${HEADWATER_NVCC} --version OUTPUT_VARIABLE nvcc_text ERROR_QUIET)
    string(REGEX MATCH "release ([0-9]+\\.[0-9]+)" nvcc_text "${nvcc_text}")
    set(HEADWATER_CUDA_VERSION "${CMAKE_MATCH_1}")
    file(REAL_PATH ${HEADWATER_NVCC} nvcc_path)
    cmake_path(GET nvcc_path PARENT_PATH toolkit)
    cmake_path(GET toolkit PARENT_PATH toolkit)
    # A toolkit keeps them in include and lib64; a distribution's packages, where its compiler looks anyway.
    set(places HINTS ${toolkit} ${toolkit}/targets/${CMAKE_SYSTEM_PROCESSOR}-linux ${toolkit}/targets/sbsa-linux)
    find_path(HEADWATER_CUBLASLT_INCLUDE cublasLt.h ${places} PATH_SUFFIXES include)
    find_path(HEADWATER_CUDART_INCLUDE cuda_runtime_api.h ${places} PATH_SUFFIXES include)
    find_library(HEADWATER_CUBLASLT cublasLt ${places} PATH_SUFFIXES lib64 lib)
    find_library(HEADWATER_CUDART libcudart_static.a ${places} PATH_SUFFIXES lib64 lib)
    # Only its header: the library is looked for at run time, when GPUs are to work together.
    find_path(HEADWATER_NCCL_INCLUDE nccl.h HINTS $ENV{NCCL_HOME} ${toolkit} PATH_SUFFIXES include)
    if(HEADWATER_CUDA_VERSION VERSION_LESS HEADWATER_CUDA_OLDEST)
      set(HEADWATER_CUDA_MISSING "nvcc is of CUDA ${HEADWATER_CUDA_VERSION}, expected ${HEADWATER_CUDA_OLDEST} or newer")
    elseif(NOT HEADWATER_CUBLASLT OR NOT HEADWATER_CUBLASLT_INCLUDE)
      set(HEADWATER_CUDA_MISSING "the toolkit has no cuBLASLt")
    elseif(NOT HEADWATER_CUDART OR NOT HEADWATER_CUDART_INCLUDE)
      set(HEADWATER_CUDA_MISSING "the toolkit has no static CUDA runtime")
    endif()
  endif()
  if(NOT HEADWATER_CUDA_MISSING)
    # A compiler that is there but does not work with this host's must not stop a build that does not insist on it.
    include(CheckLanguage)
    if(NOT CMAKE_CUDA_COMPILER)
      set(ENV{CUDACXX} ${HEADWATER_NVCC})
      if(NOT DEFINED ENV{CUDAHOSTCXX})
        set(ENV{CUDAHOSTCXX} ${CMAKE_CXX_COMPILER})
      endif()
      check_language(CUDA)
    endif()
    if(NOT CMAKE_CUDA_COMPILER)
      set(HEADWATER_CUDA_MISSING "${HEADWATER_NVCC} does not compile with ${CMAKE_CXX_COMPILER}")
    endif()
  endif()
endmacro()

string(TOUPPER "${HEADWATER_CUDA}" HEADWATER_CUDA_CHOICE)
if(NOT HEADWATER_CUDA_CHOICE MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "HEADWATER_CUDA: expected AUTO, ON or OFF, got ${HEADWATER_CUDA}")
elseif(HEADWATER_SANITIZE)
  message(STATUS "CUDA engine: not built, because this build is sanitized")
elseif(HEADWATER_CUDA_CHOICE STREQUAL "OFF")
  message(STATUS "CUDA engine: not built, as HEADWATER_CUDA says")
else()
  headwater_find_cuda()
  if(NOT HEADWATER_CUDA_MISSING)
    set(HEADWATER_CUDA_ENABLED ON)
    message(STATUS "CUDA engine: built with CUDA ${HEADWATER_CUDA_VERSION}")
  elseif(HEADWATER_CUDA_CHOICE STREQUAL "ON")
    message(FATAL_ERROR "HEADWATER_CUDA=ON: ${HEADWATER_CUDA_MISSING}")
  else()
    message(STATUS "CUDA engine: not built: ${HEADWATER_CUDA_MISSING}")
  endif()
endif()

if(HEADWATER_CUDA_ENABLED)
  # Architectures are told to the compiler by hand: CMake has no way to ask for machine code of 8.0 and 9.0a and the portable form
  # of 8.0, which newer GPUs compile at the first start.
  set(CMAKE_CUDA_ARCHITECTURES OFF)
  enable_language(CUDA)
  # C++17: nvcc 13 with gcc 12 crashes on C++20's <functional>.
  set(CMAKE_CUDA_STANDARD 17)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  set(CMAKE_CUDA_EXTENSIONS OFF)
  # Each target links the runtime by itself, whatever language its linker is called with.
  set(CMAKE_CUDA_RUNTIME_LIBRARY None)

  add_library(headwater_cudart INTERFACE)
  target_include_directories(headwater_cudart SYSTEM INTERFACE ${HEADWATER_CUDART_INCLUDE})
  target_link_libraries(headwater_cudart INTERFACE ${HEADWATER_CUDART} Threads::Threads ${CMAKE_DL_LIBS} rt)
  add_library(headwater_cublaslt INTERFACE)
  target_include_directories(headwater_cublaslt SYSTEM INTERFACE ${HEADWATER_CUBLASLT_INCLUDE})
  target_link_libraries(headwater_cublaslt INTERFACE ${HEADWATER_CUBLASLT} headwater_cudart)

  # Options of every CUDA source.
  add_library(headwater_cuda_flags INTERFACE)
  target_compile_options(headwater_cuda_flags INTERFACE
    "$<$<COMPILE_LANGUAGE:CUDA>:SHELL:-gencode=arch=compute_80,code=[sm_80,compute_80] -gencode=arch=compute_90a,code=sm_90a>"
    "$<$<COMPILE_LANGUAGE:CUDA>:SHELL:-Xcompiler=-Wall,-Wextra -Werror=all-warnings -lineinfo>")
  if(HEADWATER_CUDA_VERSION VERSION_GREATER_EQUAL 12.8)
    # The machine code of three architectures, packed as small as it gets: about a fifth. The driver unpacks what it loads.
    target_compile_options(headwater_cuda_flags INTERFACE "$<$<COMPILE_LANGUAGE:CUDA>:SHELL:--compress-mode=size>")
  endif()
endif()
