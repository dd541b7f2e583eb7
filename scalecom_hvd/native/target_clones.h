/* CLONES: a function is compiled for each of these processors, and the one at hand is called. */
#ifndef SCALECOM_TARGET_CLONES_H
#define SCALECOM_TARGET_CLONES_H

#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && defined(__GNUC__)
#define HAS_CLONES 1
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif

#endif
