/* Values of parameters that are packed at rest (tiered/packing/form.py). Read twice, as aio_ring.cdef.h is. Addresses
   are of memory that the caller has leased; nothing is kept. */

enum {
    UNPACK_FLOAT32 = 0,
    UNPACK_BFLOAT16 = 1
};

/* Write codes[r][c] * scales[r] to out[r][c], computed in float32 and rounded once to `type`, ties to even. `codes`: int8, row
   major; `scales`: float32. 0, or -1 for another type. */
int unpack_int8(uint64_t codes, uint64_t scales, uint64_t rows, uint64_t columns, uint64_t out, int type);

/* The same with the largest value of a row in place of its scale: the product of both is rounded to float32 before it is divided by
   127, which is a product, too. */
int unpack_int8_largest(uint64_t codes, uint64_t scales, uint64_t rows, uint64_t columns, uint64_t out, int type);

/* The same of 4 bits: a row is ceil(columns / 32) groups of 16 bytes, of which byte j has element j in its low and element
   j + 16 in its high half, each with 8 added. `scales`: bfloat16, one for each group. */
int unpack_int4(uint64_t codes, uint64_t scales, uint64_t rows, uint64_t columns, uint64_t out, int type);

/* The same of values in a table: byte j of a row, of columns / 2, has the places in it of element 2 * j in its high and of
   2 * j + 1 in its low half. `scales`: float32, the 16 values of the table and then the scale of each row. `columns`: a multiple
   of 16. */
int unpack_table4(uint64_t codes, uint64_t scales, uint64_t rows, uint64_t columns, uint64_t out, int type);

/* The same of codes that are floats of 8 bits with a `mantissa` of 3 bits (float8_e4m3fn) or 2 (float8_e5m2). `scales`: float32,
   ceil(columns / group) for each row, one for each `group` of its elements. */
int unpack_float8(
    uint64_t codes, uint64_t scales, uint64_t rows, uint64_t columns, uint64_t out, int type, uint64_t group, int mantissa);

/* The same of codes that are floats of 4 bits, e2m1: a row is 32 elements, byte j of it has element 2 * j in its low and 2 * j + 1 in
   its high half. `scales`: a byte for each row, a power of two with 127 added, of which 255 is infinity. `columns`: 32. */
int unpack_mxfp4(uint64_t codes, uint64_t scales, uint64_t rows, uint64_t columns, uint64_t out, int type);

/* Values of `count` blocks of GGUF files, which follow one another: 34 bytes of 32 elements (q8_0), 144, 176 and 210 bytes of 256
   (q4_k, q5_k and q6_k). Computed in float32 in the order of ggml, and rounded once to `type`, ties to even. 0, or -1 for another type. */
int unpack_q8_0(uint64_t blocks, uint64_t count, uint64_t out, int type);
int unpack_q4_k(uint64_t blocks, uint64_t count, uint64_t out, int type);
int unpack_q5_k(uint64_t blocks, uint64_t count, uint64_t out, int type);
int unpack_q6_k(uint64_t blocks, uint64_t count, uint64_t out, int type);
