# Runs `command`, which must end in time, fail, and print what `text` matches.
execute_process(COMMAND ${command} TIMEOUT 60 RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
message("${output}\nended with: ${result}")
if(result EQUAL 0 OR result MATCHES "timeout")
  message(FATAL_ERROR "must fail, and in time")
elseif(NOT output MATCHES "${text}")
  message(FATAL_ERROR "does not say: ${text}")
endif()
