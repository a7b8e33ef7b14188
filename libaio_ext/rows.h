#ifndef TIERED_ROWS_H
#define TIERED_ROWS_H

#include <stdint.h>

#include "rows.cdef.h"

#endif
