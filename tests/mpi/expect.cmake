# Runs `command`, which must end in time, fail, and print what `text` matches. Where `any_result` is set the text alone
# counts: a launcher need not pass on that a process has failed.
execute_process(COMMAND ${command} TIMEOUT 60 RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
message("${output}\nended with: ${result}")
if(result MATCHES "timeout" OR (result EQUAL 0 AND NOT any_result))
  message(FATAL_ERROR "must fail, and in time")
elseif(NOT output MATCHES "${text}")
  message(FATAL_ERROR "does not say: ${text}")
endif()
