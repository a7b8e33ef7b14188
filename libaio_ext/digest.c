/* The digest for what the compiler takes for the least processor, and the choice between this and others. */
#include "digest.h"

#define DIGEST_NAME digest_plain
static void digest_plain(const unsigned char *context, uint64_t context_bytes, const void *data, uint64_t nbytes, unsigned char *out);
#include "digest_body.h"

void digest(const unsigned char *context, uint64_t context_bytes, const void *data, uint64_t nbytes, unsigned char *out)
{
#ifdef DIGEST_HAS_AVX2
    if (__builtin_cpu_supports("avx2")) {
        digest_avx2(context, context_bytes, data, nbytes, out);
        return;
    }
#endif
    digest_plain(context, context_bytes, data, nbytes, out);
}
