#ifndef TIERED_UNPACK_H
#define TIERED_UNPACK_H

#include <stdint.h>

#include "unpack.cdef.h"

#endif
