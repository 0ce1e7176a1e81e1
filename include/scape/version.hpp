#pragma once

// The only place of the version: the build and the CMake package read it from here.
#define SCAPE_VERSION_MAJOR 0
#define SCAPE_VERSION_MINOR 1
#define SCAPE_VERSION_PATCH 0
