# Compilers differ in their builtins, so the headers use <bit> and the like instead. Two are everywhere: the ones that
# give a caller's file and line. A header that guards another builtin by compiler goes into the list.
set(may_use_builtins
    scape/host/bytes.hpp scape/host/join.hpp scape/host/mark_range.hpp scape/host/set_bits.hpp
    scape/host/square_roots.hpp scape/prefetch.hpp)

file(GLOB_RECURSE headers RELATIVE ${include_dir} ${include_dir}/*.hpp ${include_dir}/*.cuh)
list(REMOVE_ITEM headers ${may_use_builtins})
foreach(header IN LISTS headers)
  file(READ ${include_dir}/${header} text)
  string(REGEX MATCHALL "__builtin_[A-Za-z0-9_]+" builtins "${text}")
  list(FILTER builtins EXCLUDE REGEX "^__builtin_(FILE|LINE)$")
  if(builtins)
    message(SEND_ERROR "${header}: ${builtins}")
  endif()
endforeach()
