#ifndef TIERED_AIO_RING_H
#define TIERED_AIO_RING_H

#include <stdint.h>

#include "aio_ring.cdef.h"

#endif
