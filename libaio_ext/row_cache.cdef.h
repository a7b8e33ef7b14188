/* Copies of rows by number (tiered/tables/cache.py). Read twice, as aio_ring.cdef.h is.

   A generation of copies is an array of uint64_t, which the caller owns: the address of the keys (int64_t, -1 where there is
   none), that of the places (int64_t, bytes from the first copy on, -1 where the copy was forgotten), the number of keys that
   these have room for (a power of 2), the address of the copies, their bytes, the bytes in use, and the number of keys in use. A key is found by
   linear search from its hash on; half of the room stays empty.

   `young` and `old` are addresses of generations, `ids` and `missing` of arrays of int64_t. The key of ids[i] is tag | ids[i]. */

/* Copy the rows `ids` that a generation has, of `nbytes` bytes each, to their places in `target`, an array of `count` rows. What
   only `old` has becomes young where there is room. Return how many were not found, and put their indices into `missing`. */
uint64_t row_cache_read(uint64_t young, uint64_t old, uint64_t tag, uint64_t ids, uint64_t count, uint64_t nbytes, uint64_t target,
                        uint64_t missing);

/* Keep a copy of each of the rows `ids`, which lie one after the other from `source` on, in `young`. Return how many were kept
   before there was no room. */
uint64_t row_cache_keep(uint64_t young, uint64_t tag, uint64_t ids, uint64_t count, uint64_t nbytes, uint64_t source);

/* Forget the copies of the rows `ids`. */
void row_cache_forget(uint64_t young, uint64_t old, uint64_t tag, uint64_t ids, uint64_t count);
