# Runs the programs and fails unless they print the same.
foreach(program IN LISTS programs)
  execute_process(COMMAND ${program} OUTPUT_VARIABLE output COMMAND_ERROR_IS_FATAL ANY)
  message(STATUS "${program}: ${output}")
  if(DEFINED first AND NOT output STREQUAL first)
    message(FATAL_ERROR "not the same")
  endif()
  set(first "${output}")
endforeach()
