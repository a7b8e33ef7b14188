/* The body of a digest, for each file that compiles xxHash for another processor. DIGEST_NAME is the function's name. */
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <string.h>

void DIGEST_NAME(const unsigned char *context, uint64_t context_bytes, const void *data, uint64_t nbytes, unsigned char *out)
{
    XXH3_state_t state;
    XXH128_canonical_t canonical;
    XXH3_128bits_reset(&state);
    XXH3_128bits_update(&state, context, context_bytes);
    XXH3_128bits_update(&state, data, nbytes);
    XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(&state));
    memcpy(out, canonical.digest, DIGEST_BYTES);
}
