#pragma once

// SCAPE_HOST_LOOP marks the host's hot functions. With GCC on x86-64 it compiles each for several instruction sets, at
// -O3 whatever the caller's level, with all that it calls inlined, and without fused multiply-add, so that every CPU
// computes the same bits; the best one is picked when the program starts. Sanitizers cannot run that pick. Clang never
// contracts across functions, and vectorises the plain code.
#if defined(__GNUC__) && !defined(__clang__)
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define SCAPE_HOST_LOOP                                                              \
  [[gnu::target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"), gnu::flatten, \
    gnu::optimize("O3", "fp-contract=off")]]
#else
#define SCAPE_HOST_LOOP [[gnu::flatten, gnu::optimize("O3", "fp-contract=off")]]
#endif
#define SCAPE_INDEPENDENT_ITERATIONS _Pragma("GCC ivdep")
#elif defined(__clang__)
#define SCAPE_HOST_LOOP
#define SCAPE_INDEPENDENT_ITERATIONS
#else
#define SCAPE_HOST_LOOP
#define SCAPE_INDEPENDENT_ITERATIONS
#endif
