include(CMakeFindDependencyMacro)
find_dependency(scape)
include(${CMAKE_CURRENT_LIST_DIR}/trainer-targets.cmake)
