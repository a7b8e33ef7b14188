/* See moments.cdef.h. What has no table look-up is a plain loop that the compiler vectorises, for each width of registers. A
   quotient is never a product with an inverse, so each build gives the same bits. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "moments.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__)
#define CLONED __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONED
#endif
#define INLINE static inline __attribute__((always_inline))

enum { BLOCK8 = 256, BLOCK4 = 128, HALF4 = 64 };

INLINE float float_of(uint32_t bits)
{
    float found;
    memcpy(&found, &bits, sizeof found);
    return found;
}

/* Write the elements of a block, divided by its scale, to `shares`, and return the scale: the largest absolute value. Of whole
   numbers, because NaN is then larger than infinity. Shares of zeros, infinity and NaN are 0. */
INLINE float divided(const float *restrict values, size_t count, float *restrict shares)
{
    uint32_t most = 0;
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, values + i, sizeof bits);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    const float scale = float_of(most);
    if (most == 0 || most >= 0x7f800000) {
        memset(shares, 0, count * sizeof *shares);
        return scale;
    }
    for (size_t i = 0; i < count; i++)
        shares[i] = values[i] / scale;
    return scale;
}

INLINE uint32_t code_of(float share, const uint8_t *restrict starts, const float *restrict bounds)
{
    uint32_t bits;
    memcpy(&bits, &share, sizeof bits);
    const uint32_t code = starts[bits >> 16];
    return code + (share > bounds[code]);
}

/* Of `places`: where the codes of the first block are, and its scale; how far it is to those of the next block. */
struct places {
    uint8_t *codes, *scales;
    size_t codes_stride, scales_stride;
};

CLONED static void encode8(
    const float *restrict values, size_t count, struct places to, const uint8_t *restrict starts, const float *restrict bounds)
{
    float shares[BLOCK8];
    for (size_t begin = 0; begin < count; begin += BLOCK8) {
        const size_t size = count - begin < BLOCK8 ? count - begin : BLOCK8;
        const float scale = size == BLOCK8 ? divided(values + begin, BLOCK8, shares) : divided(values + begin, size, shares);
        uint8_t *restrict codes = to.codes + begin / BLOCK8 * to.codes_stride;
        for (size_t i = 0; i < size; i++)
            codes[i] = (uint8_t)code_of(shares[i], starts, bounds);
        memset(codes + size, 0, BLOCK8 - size);
        memcpy(to.scales + begin / BLOCK8 * to.scales_stride, &scale, sizeof scale);
    }
}

CLONED static void encode4(
    const float *restrict values, size_t count, struct places to, const uint8_t *restrict starts, const float *restrict bounds)
{
    float shares[BLOCK4];
    uint8_t found[BLOCK4];
    for (size_t begin = 0; begin < count; begin += BLOCK4) {
        const size_t size = count - begin < BLOCK4 ? count - begin : BLOCK4;
        const float scale = size == BLOCK4 ? divided(values + begin, BLOCK4, shares) : divided(values + begin, size, shares);
        uint8_t *restrict codes = to.codes + begin / BLOCK4 * to.codes_stride;
        for (size_t i = 0; i < size; i++)
            found[i] = (uint8_t)code_of(shares[i], starts, bounds);
        memset(found + size, 0, BLOCK4 - size);
        for (size_t i = 0; i < HALF4; i++)
            codes[i] = (uint8_t)(found[i] | found[HALF4 + i] << 4);
        memcpy(to.scales + begin / BLOCK4 * to.scales_stride, &scale, sizeof scale);
    }
}

CLONED static void decode8(struct places from, size_t count, float *restrict out, const float *restrict map)
{
    for (size_t begin = 0; begin < count; begin += BLOCK8) {
        const size_t size = count - begin < BLOCK8 ? count - begin : BLOCK8;
        const uint8_t *restrict codes = from.codes + begin / BLOCK8 * from.codes_stride;
        float scale;
        memcpy(&scale, from.scales + begin / BLOCK8 * from.scales_stride, sizeof scale);
        for (size_t i = 0; i < size; i++)
            out[begin + i] = map[codes[i]] * scale;
    }
}

CLONED static void decode4(struct places from, size_t count, float *restrict out, const float *restrict map)
{
    float found[BLOCK4];
    for (size_t begin = 0; begin < count; begin += BLOCK4) {
        const size_t size = count - begin < BLOCK4 ? count - begin : BLOCK4;
        const uint8_t *mine = from.codes + begin / BLOCK4 * from.codes_stride;
        float scale;
        memcpy(&scale, from.scales + begin / BLOCK4 * from.scales_stride, sizeof scale);
        for (size_t i = 0; i < HALF4; i++) {
            found[i] = map[mine[i] & 15] * scale;
            found[HALF4 + i] = map[mine[i] >> 4] * scale;
        }
        memcpy(out + begin, found, size * sizeof *found);
    }
}

/* The hash is a multiplication by an odd number and the finaliser of MurmurHash3 (Austin Appleby, public domain). Where chance
   would make infinity, the number is rounded towards zero. */
CLONED static void round_by_chance(
    const float *restrict values, size_t count, uint16_t *restrict out, uint32_t key, uint32_t first)
{
    for (size_t i = 0; i < count; i++) {
        uint32_t hash = (first + (uint32_t)i) * 0x9e3779b9u + key;
        hash ^= hash >> 16;
        hash *= 0x85ebca6bu;
        hash ^= hash >> 13;
        hash *= 0xc2b2ae35u;
        hash ^= hash >> 16;
        uint32_t bits;
        memcpy(&bits, values + i, sizeof bits);
        const uint32_t sum = bits + (hash >> 16);
        out[i] = (uint16_t)(((sum & 0x7f800000) == 0x7f800000 ? bits : sum) >> 16);
    }
}

void moments_round(uint64_t values, uint64_t count, uint64_t out, uint32_t key, uint32_t first)
{
    round_by_chance((const float *)(uintptr_t)values, (size_t)count, (uint16_t *)(uintptr_t)out, key, first);
}

static struct places places(uint64_t codes, uint64_t codes_stride, uint64_t scales, uint64_t scales_stride)
{
    const struct places found = {
        (uint8_t *)(uintptr_t)codes, (uint8_t *)(uintptr_t)scales, (size_t)codes_stride, (size_t)scales_stride
    };
    return found;
}

#define ENCODE(bits)                                                                                                  \
    void moments_encode##bits(                                                                                        \
        uint64_t values, uint64_t count, uint64_t codes, uint64_t codes_stride, uint64_t scales,                      \
        uint64_t scales_stride, uint64_t starts, uint64_t bounds)                                                     \
    {                                                                                                                 \
        encode##bits((const float *)(uintptr_t)values, (size_t)count,                                                 \
            places(codes, codes_stride, scales, scales_stride), (const uint8_t *)(uintptr_t)starts,                   \
            (const float *)(uintptr_t)bounds);                                                                        \
    }

#define DECODE(bits)                                                                                                  \
    void moments_decode##bits(                                                                                        \
        uint64_t codes, uint64_t codes_stride, uint64_t scales, uint64_t scales_stride, uint64_t count,               \
        uint64_t out, uint64_t map)                                                                                   \
    {                                                                                                                 \
        decode##bits(places(codes, codes_stride, scales, scales_stride), (size_t)count, (float *)(uintptr_t)out,      \
            (const float *)(uintptr_t)map);                                                                           \
    }

ENCODE(8)
ENCODE(4)
DECODE(8)
DECODE(4)
