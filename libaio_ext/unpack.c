/* See unpack.cdef.h. Plain loops that the compiler vectorises, once for each width of registers that processors have: the loader
   chooses (GNU ifunc). Multiplications are never fused with additions, so each build gives the same bits. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "unpack.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__)
#define CLONED __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONED /* aarch64: the baseline has vectors already */
#endif
#define INLINE static inline __attribute__((always_inline))

enum { GROUP = 32, TABLE = 16 };
typedef float floats __attribute__((vector_size(32)));
typedef int32_t places __attribute__((vector_size(32)));

INLINE uint16_t to_bfloat16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

INLINE float from_bfloat16(uint16_t value)
{
    uint32_t bits = (uint32_t)value << 16;
    float found;
    memcpy(&found, &bits, sizeof found);
    return found;
}

/* Write `count` float32 values to `out` at element `at`. */
INLINE void store(const float *restrict values, size_t count, void *restrict out, size_t at, int type)
{
    if (type == UNPACK_FLOAT32)
        memcpy((float *)out + at, values, count * sizeof *values);
    else
        for (size_t i = 0; i < count; i++)
            ((uint16_t *)out)[at + i] = to_bfloat16(values[i]);
}

/* Each code times its scale times `share`, rounded after each. */
INLINE void scaled_rows(
    const int8_t *restrict codes, const float *restrict scales, size_t rows, size_t columns, void *restrict out, int type,
    const float share)
{
    enum { BLOCK = 256 };
    float values[BLOCK];
    for (size_t row = 0; row < rows; row++) {
        const int8_t *mine = codes + row * columns;
        const float scale = scales[row];
        size_t column = 0;
        for (; column + BLOCK <= columns; column += BLOCK) {
            if (type == UNPACK_FLOAT32) {
                float *target = (float *)out + row * columns + column;
                for (size_t i = 0; i < BLOCK; i++)
                    target[i] = (float)mine[column + i] * scale * share;
            } else {
                for (size_t i = 0; i < BLOCK; i++)
                    values[i] = (float)mine[column + i] * scale * share;
                store(values, BLOCK, out, row * columns + column, type);
            }
        }
        const size_t left = columns - column;
        for (size_t i = 0; i < left; i++)
            values[i] = (float)mine[column + i] * scale * share;
        store(values, left, out, row * columns + column, type);
    }
}

INLINE void int8_rows(
    const int8_t *restrict codes, const float *restrict scales, size_t rows, size_t columns, void *restrict out, int type)
{
    scaled_rows(codes, scales, rows, columns, out, type, 1);
}

INLINE void int8_largest_rows(
    const int8_t *restrict codes, const float *restrict scales, size_t rows, size_t columns, void *restrict out, int type)
{
    scaled_rows(codes, scales, rows, columns, out, type, 1 / 127.f);
}

INLINE void int4_rows(
    const uint8_t *restrict codes, const uint16_t *restrict scales, size_t rows, size_t columns, void *restrict out, int type)
{
    enum { MOST = 16 }; /* groups whose codes are spread to bytes at a time */
    const size_t groups = (columns + GROUP - 1) / GROUP;
    int8_t spread[MOST * GROUP];
    float values[GROUP];
    for (size_t row = 0; row < rows; row++)
        for (size_t begin = 0; begin < groups; begin += MOST) {
            const size_t count = groups - begin < MOST ? groups - begin : MOST;
            const uint8_t *mine = codes + (row * groups + begin) * (GROUP / 2);
            for (size_t group = 0; group < count; group++)
                for (size_t i = 0; i < GROUP / 2; i++)
                    spread[group * GROUP + i] = (int8_t)((mine[group * (GROUP / 2) + i] & 15) - 8);
            for (size_t group = 0; group < count; group++)
                for (size_t i = 0; i < GROUP / 2; i++)
                    spread[group * GROUP + GROUP / 2 + i] = (int8_t)((mine[group * (GROUP / 2) + i] >> 4) - 8);
            for (size_t group = 0; group < count; group++) {
                const float scale = from_bfloat16(scales[row * groups + begin + group]);
                const size_t column = (begin + group) * GROUP, left = columns - column;
                for (size_t i = 0; i < GROUP; i++)
                    values[i] = (float)spread[group * GROUP + i] * scale;
                if (left >= GROUP)
                    store(values, GROUP, out, row * columns + column, type);
                else
                    store(values, left, out, row * columns + column, type);
            }
        }
}

/* Write the values of `table` that four bytes of codes say, times `scale`. Registers of eight values, of which one half of the
   table is; where processors have none, or the compiler no name for it, one value after the other. */
#if defined(__GNUC__) && !defined(__clang__)
INLINE void look_up(const float *restrict table, const uint8_t *restrict codes, float scale, float *restrict out)
{
    const uint32_t four = (uint32_t)codes[0] | (uint32_t)codes[1] << 8 | (uint32_t)codes[2] << 16 | (uint32_t)codes[3] << 24;
    const int32_t word = (int32_t)four;
    const places shifts = {4, 0, 12, 8, 20, 16, 28, 24}, words = {word, word, word, word, word, word, word, word};
    const places at = words >> shifts & 15, upper = at > 7;
    floats low, high;
    memcpy(&low, table, sizeof low);
    memcpy(&high, table + 8, sizeof high);
    const places found = ((places)__builtin_shuffle(low, at & 7) & ~upper) | ((places)__builtin_shuffle(high, at & 7) & upper);
    const floats values = (floats)found * scale;
    memcpy(out, &values, sizeof values);
}
#else
INLINE void look_up(const float *restrict table, const uint8_t *restrict codes, float scale, float *restrict out)
{
    for (size_t i = 0; i < 4; i++) {
        out[2 * i] = table[codes[i] >> 4] * scale;
        out[2 * i + 1] = table[codes[i] & 15] * scale;
    }
}
#endif

INLINE void table4_rows(
    const uint8_t *restrict codes, const float *restrict scales, size_t rows, size_t columns, void *restrict out, int type)
{
    float values[TABLE];
    for (size_t row = 0; row < rows; row++)
        for (size_t column = 0; column < columns; column += TABLE) {
            const uint8_t *mine = codes + (row * columns + column) / 2;
            look_up(scales, mine, scales[TABLE + row], values);
            look_up(scales, mine + 4, scales[TABLE + row], values + 8);
            store(values, TABLE, out, row * columns + column, type);
        }
}

INLINE void mxfp4_rows(
    const uint8_t *restrict codes, const uint8_t *restrict scales, size_t rows, size_t columns, void *restrict out, int type)
{
    /* Twice the values, times half the scale: the largest scale is no float, its half is one. */
    static const float table[TABLE] = {0, 1, 2, 3, 4, 6, 8, 12, -0.f, -1, -2, -3, -4, -6, -8, -12};
    enum { BYTES = GROUP / 2 };
    float values[GROUP];
    for (size_t row = 0; row < rows; row++) {
        const uint8_t *mine = codes + row * BYTES;
        const uint32_t power = scales[row] > 1 ? (uint32_t)(scales[row] - 1) << 23 : scales[row] ? 1u << 22 : 1u << 21;
        uint8_t turned[BYTES];
        float scale;
        memcpy(&scale, &power, sizeof scale);
        for (size_t i = 0; i < BYTES; i++)
            turned[i] = (uint8_t)(mine[i] << 4 | mine[i] >> 4);
        for (size_t i = 0; i < BYTES; i += 4)
            look_up(table, turned + i, scale, values + 2 * i);
        store(values, GROUP, out, row * columns, type);
    }
}

/* Write the values of eight codes times `scale`. A code is a float of 8 bits: a sign, an exponent, and so many bits of mantissa; with
   3 the largest code alone is NaN, with 2 the largest exponent is infinity and NaN. No step is a subnormal float, which a process may
   have flushed to 0. In registers and without a table: a look-up of each code takes twice as long. */
INLINE void from_float8(const int32_t *restrict codes, int mantissa, float scale, float *restrict out)
{
    const int bias = (1 << (6 - mantissa)) - 1, special = mantissa == 3 ? 0x7f : 0x7c;
    const uint32_t power = (uint32_t)(127 + 1 - bias - mantissa) << 23;
    float step;
    places code;
    memcpy(&step, &power, sizeof step);
    memcpy(&code, codes, sizeof code);
    const places number = code & 0x7f, below = number < 1 << mantissa;
    const places large = (number << (23 - mantissa)) + ((127 - bias) << 23);
    const places small = (places)(__builtin_convertvector(number, floats) * step);
    const places found = (small & below) | (large & ~below) | ((number >= special) & 0x7f800000);
    const floats values = (floats)(found | (code & 0x80) << 24) * scale;
    memcpy(out, &values, sizeof values);
}

INLINE void float8_rows(
    const uint8_t *restrict codes, const float *restrict scales, size_t rows, size_t columns, void *restrict out, int type,
    size_t group, int mantissa)
{
    enum { BLOCK = 256, LANES = 8 };
    int32_t wide[BLOCK] = {0};
    float values[BLOCK], scale = 0;
    for (size_t row = 0; row < rows; row++) {
        size_t next = 0; /* the column from which on the next scale counts */
        for (size_t column = 0; column < columns; column += BLOCK) {
            const size_t left = columns - column, at = row * columns + column, count = left < BLOCK ? left : BLOCK;
            if (count == BLOCK)
                for (size_t i = 0; i < BLOCK; i++)
                    wide[i] = codes[at + i];
            else
                for (size_t i = 0; i < count; i++)
                    wide[i] = codes[at + i];
            for (size_t i = 0; i < count; i += LANES) {
                if (column + i == next) {
                    scale = *scales++;
                    next += group;
                }
                from_float8(wide + i, mantissa, scale, values + i);
            }
            if (count == BLOCK)
                store(values, BLOCK, out, at, type);
            else
                store(values, count, out, at, type);
        }
    }
}

#define VARIANT(form, type_name, type, codes_type, scales_type)                                                       \
    CLONED static void form##_##type_name(                                                                            \
        const codes_type *codes, const scales_type *scales, size_t rows, size_t columns, void *out)                   \
    {                                                                                                                 \
        form##_rows(codes, scales, rows, columns, out, type);                                                         \
    }

#define KERNEL(form, codes_type, scales_type)                                                                         \
    VARIANT(form, float32, UNPACK_FLOAT32, codes_type, scales_type)                                                   \
    VARIANT(form, bfloat16, UNPACK_BFLOAT16, codes_type, scales_type)                                                 \
    int unpack_##form(uint64_t codes, uint64_t scales, uint64_t rows, uint64_t columns, uint64_t out, int type)       \
    {                                                                                                                 \
        const codes_type *from = (const codes_type *)(uintptr_t)codes;                                                \
        const scales_type *by = (const scales_type *)(uintptr_t)scales;                                               \
        void *to = (void *)(uintptr_t)out;                                                                            \
        if (type == UNPACK_FLOAT32)                                                                                   \
            form##_float32(from, by, rows, columns, to);                                                              \
        else if (type == UNPACK_BFLOAT16)                                                                             \
            form##_bfloat16(from, by, rows, columns, to);                                                             \
        else                                                                                                          \
            return -1;                                                                                                \
        return 0;                                                                                                     \
    }

KERNEL(int8, int8_t, float)
KERNEL(int8_largest, int8_t, float)
KERNEL(int4, uint8_t, uint16_t)
KERNEL(table4, uint8_t, float)
KERNEL(mxfp4, uint8_t, uint8_t)

#define FLOAT8(form, mantissa, type_name, type)                                                                       \
    CLONED static void form##_##type_name(                                                                            \
        const uint8_t *codes, const float *scales, size_t rows, size_t columns, void *out, size_t group)              \
    {                                                                                                                 \
        float8_rows(codes, scales, rows, columns, out, type, group, mantissa);                                        \
    }

FLOAT8(e4m3, 3, float32, UNPACK_FLOAT32)
FLOAT8(e4m3, 3, bfloat16, UNPACK_BFLOAT16)
FLOAT8(e5m2, 2, float32, UNPACK_FLOAT32)
FLOAT8(e5m2, 2, bfloat16, UNPACK_BFLOAT16)

int unpack_float8(
    uint64_t codes, uint64_t scales, uint64_t rows, uint64_t columns, uint64_t out, int type, uint64_t group, int mantissa)
{
    const uint8_t *from = (const uint8_t *)(uintptr_t)codes;
    const float *by = (const float *)(uintptr_t)scales;
    void *to = (void *)(uintptr_t)out;
    if (type == UNPACK_FLOAT32)
        (mantissa == 3 ? e4m3_float32 : e5m2_float32)(from, by, rows, columns, to, group);
    else if (type == UNPACK_BFLOAT16)
        (mantissa == 3 ? e4m3_bfloat16 : e5m2_bfloat16)(from, by, rows, columns, to, group);
    else
        return -1;
    return 0;
}

/* Blocks of GGUF files. Their float16 is converted by steps that are no subnormal floats, as that of float8_e4m3fn is. */

enum { K_BLOCK = 256, Q8_0_BYTES = 34, Q4_K_BYTES = 144, Q5_K_BYTES = 176, Q6_K_BYTES = 210 };

INLINE float from_float16(const uint8_t *restrict at)
{
    const uint32_t half = (uint32_t)at[0] | (uint32_t)at[1] << 8, exponent = half >> 10 & 31, mantissa = half & 0x3ff;
    const uint32_t bits = (exponent == 31 ? 0x7f800000 : (exponent + 112) << 23) | mantissa << 13;
    float value;
    memcpy(&value, &bits, sizeof value);
    if (!exponent)
        value = (float)mantissa * 0x1p-24f;
    return half & 0x8000 ? -value : value;
}

INLINE void q8_0_blocks(const uint8_t *restrict blocks, size_t count, void *restrict out, int type)
{
    float values[GROUP];
    for (size_t block = 0; block < count; block++) {
        const uint8_t *mine = blocks + block * Q8_0_BYTES;
        const float scale = from_float16(mine);
        for (size_t i = 0; i < GROUP; i++)
            values[i] = (float)(int8_t)mine[2 + i] * scale;
        store(values, GROUP, out, block * GROUP, type);
    }
}

/* Codes of 4 bits, or of 5 of which the fifth lie together: 32 bytes with that of one group in each bit. */
INLINE void k_blocks(const uint8_t *restrict blocks, size_t count, void *restrict out, int type, int bits)
{
    enum { GROUPS = K_BLOCK / GROUP };
    float values[2 * GROUP];
    for (size_t block = 0; block < count; block++) {
        const uint8_t *mine = blocks + block * (bits == 5 ? Q5_K_BYTES : Q4_K_BYTES), *six = mine + 4, *fifth = mine + 16;
        const uint8_t *codes = bits == 5 ? fifth + GROUP : fifth;
        const float scale = from_float16(mine), minimum = from_float16(mine + 2);
        float scales[GROUPS], minimums[GROUPS];
        for (size_t i = 0; i < GROUPS / 2; i++) {
            scales[i] = (float)(six[i] & 63) * scale;
            scales[i + 4] = (float)((six[i + 8] & 15) | (six[i] >> 2 & 48)) * scale;
            minimums[i] = (float)(six[i + 4] & 63) * minimum;
            minimums[i + 4] = (float)(six[i + 8] >> 4 | (six[i + 4] >> 2 & 48)) * minimum;
        }
        for (size_t group = 0; group < GROUPS; group += 2) {
            const uint8_t *both = codes + group / 2 * GROUP;
            for (size_t i = 0; i < GROUP; i++) {
                const int high = bits == 5 ? (fifth[i] >> group & 1) << 4 : 0;
                values[i] = (float)((both[i] & 15) | high) * scales[group] - minimums[group];
            }
            for (size_t i = 0; i < GROUP; i++) {
                const int high = bits == 5 ? (fifth[i] >> (group + 1) & 1) << 4 : 0;
                values[GROUP + i] = (float)(both[i] >> 4 | high) * scales[group + 1] - minimums[group + 1];
            }
            store(values, 2 * GROUP, out, block * K_BLOCK + group * GROUP, type);
        }
    }
}

INLINE void q4_k_blocks(const uint8_t *restrict blocks, size_t count, void *restrict out, int type)
{
    k_blocks(blocks, count, out, type, 4);
}

INLINE void q5_k_blocks(const uint8_t *restrict blocks, size_t count, void *restrict out, int type)
{
    k_blocks(blocks, count, out, type, 5);
}

INLINE void q6_k_blocks(const uint8_t *restrict blocks, size_t count, void *restrict out, int type)
{
    enum { SCALED = 16, HALF = K_BLOCK / 2 };
    float values[HALF];
    for (size_t block = 0; block < count; block++) {
        const uint8_t *mine = blocks + block * Q6_K_BYTES;
        const float scale = from_float16(mine + 208);
        float scales[K_BLOCK / SCALED];
        for (size_t i = 0; i < K_BLOCK / SCALED; i++)
            scales[i] = (float)(int8_t)mine[192 + i] * scale;
        for (size_t half = 0; half < 2; half++) {
            for (size_t part = 0; part < 2; part++) {
                const uint8_t *lower = mine + half * 64 + part * SCALED, *upper = mine + 128 + half * GROUP + part * SCALED;
                const float *by = scales + half * 8 + part;
                float *to = values + part * SCALED;
                for (size_t i = 0; i < SCALED; i++) {
                    const int one = lower[i], other = lower[GROUP + i], two = upper[i];
                    to[i] = (float)(((one & 15) | (two & 3) << 4) - 32) * by[0];
                    to[GROUP + i] = (float)(((other & 15) | (two & 12) << 2) - 32) * by[2];
                    to[2 * GROUP + i] = (float)((one >> 4 | (two & 48)) - 32) * by[4];
                    to[3 * GROUP + i] = (float)((other >> 4 | (two & 192) >> 2) - 32) * by[6];
                }
            }
            for (size_t group = 0; group < HALF; group += GROUP)
                store(values + group, GROUP, out, block * K_BLOCK + half * HALF + group, type);
        }
    }
}

#define BLOCKS_VARIANT(form, type_name, type)                                                                         \
    CLONED static void form##_##type_name(const uint8_t *blocks, size_t count, void *out)                             \
    {                                                                                                                 \
        form##_blocks(blocks, count, out, type);                                                                      \
    }

#define BLOCKS_KERNEL(form)                                                                                           \
    BLOCKS_VARIANT(form, float32, UNPACK_FLOAT32)                                                                     \
    BLOCKS_VARIANT(form, bfloat16, UNPACK_BFLOAT16)                                                                   \
    int unpack_##form(uint64_t blocks, uint64_t count, uint64_t out, int type)                                        \
    {                                                                                                                 \
        const uint8_t *from = (const uint8_t *)(uintptr_t)blocks;                                                     \
        void *to = (void *)(uintptr_t)out;                                                                            \
        if (type == UNPACK_FLOAT32)                                                                                   \
            form##_float32(from, count, to);                                                                          \
        else if (type == UNPACK_BFLOAT16)                                                                             \
            form##_bfloat16(from, count, to);                                                                         \
        else                                                                                                          \
            return -1;                                                                                                \
        return 0;                                                                                                     \
    }

BLOCKS_KERNEL(q8_0)
BLOCKS_KERNEL(q4_k)
BLOCKS_KERNEL(q5_k)
BLOCKS_KERNEL(q6_k)
