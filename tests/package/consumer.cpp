// The program of every consumer in this folder.
#include <scape/scape.hpp>

#include <cstdio>

static_assert(__cplusplus >= 202002L, "scape::scape asks for C++20");

int main() { std::printf("scape %d.%d.%d\n", SCAPE_VERSION_MAJOR, SCAPE_VERSION_MINOR, SCAPE_VERSION_PATCH); }
