/* Rows of tables (tiered/tables/kernel.py). Read twice, as aio_ring.cdef.h is. Addresses are of memory that the caller has leased
   or made; nothing is kept. */

/* Copy sizes[i] bytes from sources[i] to targets[i], for each i below `count`, in this order: of two targets that are the same
   the last one stays. The three arguments are addresses of arrays of uint64_t. */
void rows_copy(uint64_t targets, uint64_t sources, uint64_t sizes, uint64_t count);

/* The same with one size for all. */
void rows_copy_equal(uint64_t targets, uint64_t sources, uint64_t nbytes, uint64_t count);
