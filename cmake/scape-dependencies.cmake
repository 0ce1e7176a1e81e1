# Components of the package: what each links, and how to find it. Read by CMakeLists.txt and by the installed config.
# CUB needs no entry: nvcc brings its own, and a newer one that the project links comes first.
set(scape_components cuda nccl mpi)
set(scape_cuda_links CUDA::cudart)
set(scape_nccl_links CUDA::cudart NCCL::NCCL)
set(scape_mpi_links MPI::MPI_CXX)
set(scape_module_dir ${CMAKE_CURRENT_LIST_DIR})

# Sets scape_<component>_FOUND, and scape_<component>_missing to the targets that are not there. A macro, so that what it
# finds is the caller's.
macro(scape_find_component component)
  if("${component}" MATCHES "^(cuda|nccl)$")
    find_package(CUDAToolkit QUIET)
  endif()
  if("${component}" STREQUAL "nccl" AND NOT TARGET NCCL::NCCL)
    list(PREPEND CMAKE_MODULE_PATH ${scape_module_dir})
    find_package(NCCL QUIET MODULE)
    list(POP_FRONT CMAKE_MODULE_PATH)
  endif()
  if("${component}" STREQUAL "mpi" AND NOT TARGET MPI::MPI_CXX)
    find_package(MPI QUIET COMPONENTS CXX)  # without components it wants the C language
  endif()
  set(scape_${component}_missing)
  foreach(target IN LISTS scape_${component}_links)
    if(NOT TARGET ${target})
      list(APPEND scape_${component}_missing ${target})
    endif()
  endforeach()
  set(scape_${component}_FOUND FALSE)
  if("${component}" IN_LIST scape_components AND NOT scape_${component}_missing)
    set(scape_${component}_FOUND TRUE)
  endif()
endmacro()

# C++20 in nvcc. CMake before 3.25.2 does not know the flag: it ignores CMAKE_CUDA_STANDARD 20 without a word.
function(scape_require_cuda_20 target)
  if("cuda_std_20" IN_LIST CMAKE_CUDA_COMPILE_FEATURES)
    target_compile_features(${target} INTERFACE cuda_std_20)
  else()
    target_compile_options(${target} INTERFACE "$<$<COMPILE_LANG_AND_ID:CUDA,NVIDIA>:-std=c++20>")
  endif()
endfunction()
