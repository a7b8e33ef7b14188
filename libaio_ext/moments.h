#ifndef TIERED_MOMENTS_H
#define TIERED_MOMENTS_H

#include <stdint.h>

#include "moments.cdef.h"

#endif
