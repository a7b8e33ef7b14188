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

INLINE void int8_rows(
    const int8_t *restrict codes, const float *restrict scales, size_t rows, size_t columns, void *restrict out, int type)
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
                    target[i] = (float)mine[column + i] * scale;
            } else {
                for (size_t i = 0; i < BLOCK; i++)
                    values[i] = (float)mine[column + i] * scale;
                store(values, BLOCK, out, row * columns + column, type);
            }
        }
        const size_t left = columns - column;
        for (size_t i = 0; i < left; i++)
            values[i] = (float)mine[column + i] * scale;
        store(values, left, out, row * columns + column, type);
    }
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
typedef float floats __attribute__((vector_size(32)));
typedef int32_t places __attribute__((vector_size(32)));

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

/* The value of a float8_e4m3fn: a sign, 4 bits of exponent, 3 of mantissa. No step is a subnormal float, which a process may have
   flushed to 0. */
INLINE float from_e4m3(unsigned code)
{
    const unsigned exponent = code >> 3 & 15, mantissa = (code & 7) + (exponent ? 8 : 0);
    const uint32_t power = (uint32_t)((exponent ? exponent : 1) + 117) << 23;
    float scale;
    memcpy(&scale, &power, sizeof scale);
    const float value = (code & 0x7f) == 0x7f ? __builtin_nanf("") : (float)mantissa * scale;
    return code & 0x80 ? -value : value;
}

INLINE void e4m3_rows(
    const uint8_t *restrict codes, const float *restrict scales, size_t rows, size_t columns, void *restrict out, int type)
{
    enum { SQUARE = 128, CODES = 256 };
    const size_t groups = (columns + SQUARE - 1) / SQUARE;
    float table[CODES], values[SQUARE];
    for (unsigned code = 0; code < CODES; code++)
        table[code] = from_e4m3(code);
    for (size_t row = 0; row < rows; row++)
        for (size_t group = 0; group < groups; group++) {
            const size_t column = group * SQUARE, left = columns - column, count = left < SQUARE ? left : SQUARE;
            const uint8_t *mine = codes + row * columns + column;
            const float scale = scales[row * groups + group];
            for (size_t i = 0; i < count; i++)
                values[i] = table[mine[i]] * scale;
            store(values, count, out, row * columns + column, type);
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
KERNEL(int4, uint8_t, uint16_t)
KERNEL(table4, uint8_t, float)
KERNEL(e4m3, uint8_t, float)
