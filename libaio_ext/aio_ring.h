#ifndef TIERED_AIO_RING_H
#define TIERED_AIO_RING_H

#include "requests.h"

#include "aio_ring.cdef.h"

#endif
