# Installs to a folder and renames it: whoever finds the package there shows that it holds no absolute path.
file(REMOVE_RECURSE ${prefix} ${prefix}.before)
execute_process(COMMAND ${CMAKE_COMMAND} --install ${build} --prefix ${prefix}.before COMMAND_ERROR_IS_FATAL ANY)
file(RENAME ${prefix}.before ${prefix})
