/* The digest for processors with AVX2, at twice the rate of SSE2. */
#include "digest.h"

#ifdef DIGEST_HAS_AVX2
#pragma GCC target("avx2")
#define DIGEST_NAME digest_avx2
#include "digest_body.h"
#endif
