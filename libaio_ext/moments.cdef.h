/* Moments of optimizers in codes of 8 and 4 bits (tiered/packing/moments.py). Read twice, as aio_ring.cdef.h is. Addresses are of
   memory that the caller has leased; nothing is kept. */

/* Write the code of each of `count` float32 `values`, and a float32 scale for each block of 256. The codes of a block are 256
   bytes, also of a last one that is not full; those of the next block begin `codes_stride` bytes after them, and its scale
   `scales_stride` bytes after the scale. `starts`: 65,536 bytes, the smallest code of the numbers with these upper 16 bits;
   `bounds`: 256 float32, the largest number of each code. */
void moments_encode8(
    uint64_t values, uint64_t count, uint64_t codes, uint64_t codes_stride, uint64_t scales, uint64_t scales_stride,
    uint64_t starts, uint64_t bounds);

/* The same of 4 bits in blocks of 128: byte j of a block's 64 has element j in its low and element j + 64 in its high half.
   `bounds`: 16 float32. */
void moments_encode4(
    uint64_t values, uint64_t count, uint64_t codes, uint64_t codes_stride, uint64_t scales, uint64_t scales_stride,
    uint64_t starts, uint64_t bounds);

/* Write map[code] * scale to `out`, `count` float32. `map`: 256 float32, of 4 bits 16. */
void moments_decode8(
    uint64_t codes, uint64_t codes_stride, uint64_t scales, uint64_t scales_stride, uint64_t count, uint64_t out, uint64_t map);
void moments_decode4(
    uint64_t codes, uint64_t codes_stride, uint64_t scales, uint64_t scales_stride, uint64_t count, uint64_t out, uint64_t map);

/* Round each of `count` float32 `values`, which are finite, to bfloat16 in `out`, up or down by chance, as near as they are. The
   chance of element i is a hash of `key` and `first` + i. */
void moments_round(uint64_t values, uint64_t count, uint64_t out, uint32_t key, uint32_t first);
