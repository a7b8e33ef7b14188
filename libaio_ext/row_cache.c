/* See row_cache.cdef.h. */

#include <string.h>

#include "row_cache.h"

enum { ALIGNMENT = 8, AHEAD = 8 }; /* bytes; keys that are asked for before they are compared */

typedef struct {
    uint64_t keys, places, slots, copies, room, used, count;
} generation;

static uint64_t first_slot(const generation *in, int64_t key)
{
    return ((uint64_t)key * 0x9E3779B97F4A7C15u >> 32) & (in->slots - 1);
}

/* The slot of `key`, or the empty one where it would be. */
static uint64_t slot_of(const generation *in, int64_t key)
{
    const int64_t *keys = (const int64_t *)(uintptr_t)in->keys;
    uint64_t slot = first_slot(in, key);
    while (keys[slot] != key && keys[slot] != -1)
        slot = (slot + 1) & (in->slots - 1);
    return slot;
}

static void ask_for(const generation *in, int64_t key)
{
    uint64_t slot = first_slot(in, key);
    __builtin_prefetch((const int64_t *)(uintptr_t)in->keys + slot);
    __builtin_prefetch((const int64_t *)(uintptr_t)in->places + slot);
}

/* The address of the copy of `key`; 0: there is none. */
static const char *copy_of(const generation *in, int64_t key)
{
    uint64_t slot = slot_of(in, key);
    if (((const int64_t *)(uintptr_t)in->keys)[slot] != key)
        return 0;
    int64_t place = ((const int64_t *)(uintptr_t)in->places)[slot];
    return place < 0 ? 0 : (const char *)(uintptr_t)in->copies + place;
}

/* Whether there is room for a copy of `key`, which is made unless there is one. */
static int keep(generation *in, int64_t key, const char *row, uint64_t nbytes)
{
    uint64_t slot = slot_of(in, key);
    int64_t *keys = (int64_t *)(uintptr_t)in->keys, *places = (int64_t *)(uintptr_t)in->places;
    if (keys[slot] == key && places[slot] >= 0)
        return 1;
    uint64_t room = (nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (in->used + room > in->room || (keys[slot] != key && 2 * (in->count + 1) > in->slots))
        return 0;
    memcpy((char *)(uintptr_t)in->copies + in->used, row, nbytes);
    in->count += keys[slot] != key;
    keys[slot] = key;
    places[slot] = (int64_t)in->used;
    in->used += room;
    return 1;
}

static void forget(generation *in, int64_t key)
{
    uint64_t slot = slot_of(in, key);
    if (((int64_t *)(uintptr_t)in->keys)[slot] == key)
        ((int64_t *)(uintptr_t)in->places)[slot] = -1;
}

uint64_t row_cache_read(uint64_t young, uint64_t old, uint64_t tag, uint64_t ids, uint64_t count, uint64_t nbytes, uint64_t target,
                        uint64_t missing)
{
    generation *first = (generation *)(uintptr_t)young, *second = (generation *)(uintptr_t)old;
    const int64_t *wanted = (const int64_t *)(uintptr_t)ids;
    int64_t *absent = (int64_t *)(uintptr_t)missing;
    char *to = (char *)(uintptr_t)target;
    uint64_t lacking = 0;
    for (uint64_t i = 0; i < count; i++) {
        if (i + AHEAD < count) {
            ask_for(first, (int64_t)tag | wanted[i + AHEAD]);
            ask_for(second, (int64_t)tag | wanted[i + AHEAD]);
        }
        int64_t key = (int64_t)tag | wanted[i];
        const char *found = copy_of(first, key);
        if (!found && (found = copy_of(second, key)))
            keep(first, key, found, nbytes);
        if (found)
            memcpy(to + i * nbytes, found, nbytes);
        else
            absent[lacking++] = (int64_t)i;
    }
    return lacking;
}

uint64_t row_cache_keep(uint64_t young, uint64_t tag, uint64_t ids, uint64_t count, uint64_t nbytes, uint64_t source)
{
    generation *first = (generation *)(uintptr_t)young;
    const int64_t *wanted = (const int64_t *)(uintptr_t)ids;
    const char *rows = (const char *)(uintptr_t)source;
    for (uint64_t i = 0; i < count; i++)
        if (!keep(first, (int64_t)tag | wanted[i], rows + i * nbytes, nbytes))
            return i;
    return count;
}

void row_cache_forget(uint64_t young, uint64_t old, uint64_t tag, uint64_t ids, uint64_t count)
{
    const int64_t *wanted = (const int64_t *)(uintptr_t)ids;
    for (uint64_t i = 0; i < count; i++) {
        forget((generation *)(uintptr_t)young, (int64_t)tag | wanted[i]);
        forget((generation *)(uintptr_t)old, (int64_t)tag | wanted[i]);
    }
}
