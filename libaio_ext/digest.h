#ifndef TIERED_DIGEST_H
#define TIERED_DIGEST_H

#include <stdint.h>

#define DIGEST_BYTES 16

/* Write xxh3-128 of the context and of `nbytes` at `data`, as bytes of the canonical form. */
void digest(const unsigned char *context, uint64_t context_bytes, const void *data, uint64_t nbytes, unsigned char *out);

/* The same by AVX2, where DIGEST_HAS_AVX2; the processor must have it. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define DIGEST_HAS_AVX2 1
void digest_avx2(const unsigned char *context, uint64_t context_bytes, const void *data, uint64_t nbytes, unsigned char *out);
#endif

#endif
