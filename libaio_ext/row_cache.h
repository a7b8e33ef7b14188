#ifndef TIERED_ROW_CACHE_H
#define TIERED_ROW_CACHE_H

#include <stdint.h>

#include "row_cache.cdef.h"

#endif
