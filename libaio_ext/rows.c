/* See rows.cdef.h. */

#include <string.h>

#include "rows.h"

enum { AHEAD = 8 }; /* rows whose first line is asked for before they are copied: they lie anywhere */

void rows_copy(uint64_t targets, uint64_t sources, uint64_t sizes, uint64_t count)
{
    const uint64_t *to = (const uint64_t *)(uintptr_t)targets, *from = (const uint64_t *)(uintptr_t)sources;
    const uint64_t *nbytes = (const uint64_t *)(uintptr_t)sizes;
    for (uint64_t i = 0; i < count; i++)
        memcpy((void *)(uintptr_t)to[i], (const void *)(uintptr_t)from[i], nbytes[i]);
}

void rows_copy_equal(uint64_t targets, uint64_t sources, uint64_t nbytes, uint64_t count)
{
    const uint64_t *to = (const uint64_t *)(uintptr_t)targets, *from = (const uint64_t *)(uintptr_t)sources;
    for (uint64_t i = 0; i < count; i++) {
        if (i + AHEAD < count) {
            __builtin_prefetch((const void *)(uintptr_t)from[i + AHEAD]);
            __builtin_prefetch((const void *)(uintptr_t)to[i + AHEAD], 1);
        }
        memcpy((void *)(uintptr_t)to[i], (const void *)(uintptr_t)from[i], nbytes);
    }
}
